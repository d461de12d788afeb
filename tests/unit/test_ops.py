"""The norms and cross entropy on CPU tensors, what they refuse, and a vocabulary split between two processes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.autograd import gradcheck
from triton_cases import draw_loss, draw_norm, loss_formula, run_loss, run_norm

from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton import _kernels
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import RMSNorm, layer_norm_fn, rms_norm_fn
from flash_attn.ops.triton.rotary import apply_rotary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def double(*shape):
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("seed", range(40))
def test_norm(seed):
    case = draw_norm(seed, columns=300)
    wrong = run_norm(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("seed", range(30))
def test_loss(seed):
    case = draw_loss(seed, columns=1000)
    wrong = run_loss(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("rms", [False, True])
def test_gradient_of_a_norm(rms):
    x, residual, x1 = double(3, 6), double(3, 6), double(3, 6)
    parameters = [double(6) for _ in range(4)]

    def norm(x, residual, x1, weight, bias, weight1, bias1):
        return layer_norm_fn(x, weight, bias, residual, x1, weight1, bias1, prenorm=True, is_rms_norm=rms)

    assert gradcheck(norm, (x, residual, x1, *parameters))


def test_gradient_of_a_loss():
    logits, labels = double(5, 7), torch.tensor([0, 6, -100, 3, 3])

    def losses(logits):
        return cross_entropy_loss(logits, labels, None, 0.1, 0.7, 0.01)[0]

    assert gradcheck(losses, (logits,))


def test_memory_that_is_given():
    x, residual, weight = torch.randn(2, 3, 8), torch.randn(2, 3, 8), torch.randn(8)
    out, total = torch.full((2, 3, 8), float("nan")), torch.full((2, 3, 8), float("nan"), dtype=torch.float64)
    found = rms_norm_fn(x, weight, None, residual, prenorm=True, out=out, residual_out=total)
    wanted = rms_norm_fn(x, weight, None, residual, prenorm=True)
    for result, memory, expected in zip(found, (out, total), wanted, strict=True):
        assert result.data_ptr() == memory.data_ptr()
        assert torch.equal(memory.float(), expected)


def test_dtypes_of_results():
    x, weight = torch.randn(4, 8, dtype=torch.bfloat16), torch.ones(8)
    assert [t.dtype for t in rms_norm_fn(x, weight, None, prenorm=True)] == [torch.bfloat16] * 2
    found = rms_norm_fn(x, weight, None, prenorm=True, residual_in_fp32=True, out_dtype=torch.float16)
    assert [t.dtype for t in found] == [torch.float16, torch.float32]


def test_rms_norm_module():
    norm = RMSNorm(8, eps=1e-3, zero_centered_weight=True)
    assert torch.equal(norm.weight, torch.zeros(8))
    x, residual = torch.randn(4, 8), torch.randn(4, 8)
    out, total = norm(x, residual, prenorm=True)
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(out, torch.nn.functional.rms_norm(x + residual, (8,), torch.ones(8), 1e-3))
    dropping = RMSNorm(1000, dropout_p=0.5)
    assert torch.equal(dropping.eval()(torch.ones(1, 1000)), torch.ones(1, 1000) / (1 + 1e-5) ** 0.5)
    assert 400 < int((dropping.train()(torch.ones(1, 1000)) == 0).sum()) < 600


def norm_call(**changes):
    x = torch.randn(2, 3, 8)
    arguments = {"x": x, "weight": torch.ones(8), "bias": torch.ones(8), **changes}
    return layer_norm_fn(**arguments)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.ones(2, 8, dtype=torch.int32)}, "x must be a floating point tensor .*int32"),
        ({"x": [1.0]}, "x must be a torch.Tensor, got list"),
        ({"weight": torch.ones(7)}, r"weight must have shape \(8,\), got \(7,\)"),
        ({"bias": torch.ones(1)}, r"bias must have shape \(8,\), got \(1,\)"),
        ({"residual": torch.ones(3, 8)}, r"residual must have shape \(2, 3, 8\), got \(3, 8\)"),
        ({"x1": torch.ones(2, 3, 8, device="meta")}, "x1 must be on x's device"),
        ({"dropout_p": 1.0}, r"dropout_p must be in \[0, 1\), got 1.0"),
        ({"rowscale": torch.ones(3)}, r"rowscale must have shape \(2, 3\), got \(3,\)"),
        ({"rowscale": torch.ones(2, 3), "x1": torch.ones(2, 3, 8)}, "rowscale must be None together with x1"),
        ({"bias1": torch.ones(8)}, "bias1 must be given together with weight1"),
        ({"out": torch.ones(2, 8, 3).transpose(1, 2)}, "out must be contiguous"),
        ({"weight": None}, "weight must be a torch.Tensor, got NoneType"),
        ({"bias": torch.ones(8, dtype=torch.int32)}, "bias must be a floating point tensor .*int32"),
        (
            {"weight": torch.ones(8).to(torch.float8_e4m3fn)},
            "weight must be a floating point tensor of 16 bits or more",
        ),
        ({"residual": torch.ones(2, 3, 8, dtype=torch.int64)}, "residual must be a floating point tensor .*int64"),
        ({"rowscale": torch.ones(2, 3, dtype=torch.bool)}, "rowscale must be a floating point tensor, got torch.bool"),
        ({"out_dtype": torch.int8}, "out_dtype must be a floating point dtype or None, got torch.int8"),
        ({"dropout_p": None}, "dropout_p must be a number, got None"),
    ],
)
def test_what_a_norm_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        norm_call(**changes)


def loss_call(**changes):
    return cross_entropy_loss(**{"logits": torch.randn(3, 5), "labels": torch.zeros(3, dtype=torch.int64), **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.ones(3, 5, 1)}, r"logits must be floating point \(M, N\).*\(3, 5, 1\)"),
        ({"logits": torch.ones(3, 5, dtype=torch.int32)}, "logits must be floating point.*int32"),
        ({"labels": torch.zeros(4, dtype=torch.int64)}, r"labels must have shape \(3,\), got \(4,\)"),
        ({"labels": torch.zeros(3)}, "labels must be torch.int64 or torch.int32, got torch.float32"),
        ({"labels": torch.zeros(3, dtype=torch.int64, device="meta")}, "labels must be on logits's device"),
        ({"precomputed_lse": torch.zeros(2)}, r"precomputed_lse must have shape \(3,\), got \(2,\)"),
        ({"label_smoothing": 1.5}, r"label_smoothing must be in \[0, 1\], got 1.5"),
        ({"label_smoothing": "a"}, "label_smoothing must be a number, got 'a'"),
        ({"logit_scale": torch.ones((), requires_grad=True)}, "logit_scale must be a number, got a tensor"),
        ({"lse_square_scale": None}, "lse_square_scale must be a number, got None"),
        ({"ignore_index": None}, "ignore_index must be an integer, got None"),
    ],
)
def test_what_a_loss_refuses(changes, message):
    with pytest.raises(ValueError, match=message):
        loss_call(**changes)


def test_reductions():
    logits, labels = torch.randn(6, 9), torch.tensor([0, 8, -1, 3, -1, 2])
    options = {"ignore_index": -1, "label_smoothing": 0.2}
    for reduction in ("mean", "sum", "none"):
        wanted = torch.nn.functional.cross_entropy(logits, labels, reduction=reduction, **options)
        torch.testing.assert_close(CrossEntropyLoss(reduction=reduction, **options)(logits, labels), wanted)
    loss, z_loss = CrossEntropyLoss(ignore_index=-1, lse_square_scale=0.1, return_z_loss=True)(logits, labels)
    wanted = (0.1 * torch.logsumexp(logits, -1).square())[labels != -1].mean()
    torch.testing.assert_close(z_loss, wanted)
    torch.testing.assert_close(loss - z_loss, torch.nn.functional.cross_entropy(logits, labels, ignore_index=-1))
    with pytest.raises(ValueError, match=r"reduction must be one of .*'median'"):
        CrossEntropyLoss(reduction="median")


def test_another_default_dtype():
    """As inference engines set it: 1 - label_smoothing is not rounded to it."""
    logits, labels = torch.randn(4, 9, requires_grad=True), torch.tensor([0, 3, 8, 2])
    wanted = torch.autograd.grad(cross_entropy_loss(logits, labels, label_smoothing=0.1)[0].sum(), logits)[0]
    torch.set_default_dtype(torch.bfloat16)
    try:
        found = torch.autograd.grad(cross_entropy_loss(logits, labels, label_smoothing=0.1)[0].sum(), logits)[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(found, wanted)


def test_labels_that_are_no_class():
    losses, _ = cross_entropy_loss(torch.randn(3, 5), torch.tensor([5, -3, -100]))
    assert losses[:2].isnan().all()
    assert losses[2] == 0.0


def test_backward_in_place():
    logits = torch.randn(4, 6, requires_grad=True)
    copy = logits * 1
    loss = CrossEntropyLoss(inplace_backward=True)(copy, torch.tensor([0, 1, 2, 3]))
    loss.backward(retain_graph=True)
    wanted = (torch.softmax(logits.detach(), -1) - torch.eye(6)[:4]) / 4
    torch.testing.assert_close(logits.grad, wanted)
    torch.testing.assert_close(copy.detach(), wanted)
    with pytest.raises(RuntimeError, match="inplace_backward=True has room for one backward"):
        loss.backward()


def test_nothing_in_nothing_out():
    assert layer_norm_fn(torch.ones(0, 8), torch.ones(8), torch.ones(8)).shape == (0, 8)
    assert cross_entropy_loss(torch.ones(0, 8), torch.ones(0, dtype=torch.int64))[0].shape == (0,)


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(inplace):
    def step(x, residual, weight, labels):
        out, total = rms_norm_fn(x, weight, None, residual, prenorm=True)
        return CrossEntropyLoss(lse_square_scale=0.1, inplace_backward=inplace)(out + total, labels)

    def tensors():
        torch.manual_seed(0)
        leaves = [torch.randn(5, 16, requires_grad=True) for _ in range(2)]
        return [*leaves, torch.randn(16, requires_grad=True), torch.randint(16, (5,))]

    found, wanted = tensors(), tensors()
    torch.compile(step, fullgraph=True, backend="aot_eager")(*found).backward()
    step(*wanted).backward()
    for one, other in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_no_triton(monkeypatch):
    """The kernels are not imported before a tensor needs them, and then say what is missing."""
    for name in [name for name in sys.modules if name.startswith("flash_attn.ops.triton._")]:
        if name.endswith("_kernels") and not name.endswith("._kernels"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match="pip install triton"):
        _kernels.kernels_of("_norm_kernels")


def test_what_importing_imports():
    code = (
        "import sys, flash_attn; before = set(sys.modules)\n"
        "import flash_attn.models.gpt, flash_attn.losses.cross_entropy\n"
        "print([n for n in before if n.startswith(('flash_attn.ops', 'flash_attn.mod', 'flash_attn.utils'))])\n"
        "print([n for n in set(sys.modules) - before if n.split('.')[0] in ('triton', 'transformers', 'einops')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["[]", "[]"], done.stdout + done.stderr


# Prints what is wrong. Each process has half of the columns.
PROCESS = """
import sys, torch, torch.distributed as dist
sys.path[:0] = sys.argv[3:]
from triton_cases import LossCase, loss_formula
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
for smoothing, scale, square, inplace in ((0.0, 1.0, 0.0, False), (0.1, 0.7, 0.01, True)):
    torch.manual_seed(1)
    case = LossCase(0, 9, 10, torch.float32, torch.int64, smoothing, scale, square, 0.3, inplace, False, False)
    labels = torch.randint(20, (9,))
    labels[2] = -100
    dloss = torch.randn(9)
    whole = torch.randn(9, 20).requires_grad_()
    part = whole.detach()[:, rank * 10 : rank * 10 + 10].clone().requires_grad_()
    found = cross_entropy_loss(
        part * 1, labels, None, smoothing, scale, square, inplace_backward=inplace, process_group=dist.group.WORLD
    )
    wanted = loss_formula(whole, labels, case)
    torch.testing.assert_close(found, wanted)
    found[0].backward(dloss)
    wanted[0].backward(dloss)
    torch.testing.assert_close(part.grad, whole.grad[:, rank * 10 : rank * 10 + 10])
    losses, _ = cross_entropy_loss(part, torch.full((9,), 20), process_group=dist.group.WORLD)
    assert losses.isnan().all()
print("right")
dist.destroy_process_group()
"""


def test_vocabulary_of_two_processes(tmp_path):
    paths = [str(ROOT), str(ROOT / "tests" / "kernels")]
    command = [sys.executable, "-c", PROCESS]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), *paths], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    for process in processes:
        try:
            out, error = process.communicate(timeout=120)
        finally:
            process.kill()
        assert out.decode().split() == ["right"], error.decode()


def test_the_oracle_of_the_losses():
    """The formula that the cases are compared with, by hand."""
    case = draw_loss(0)
    logits = torch.tensor([[0.0, 1.0]], dtype=torch.float64) / case.logit_scale
    losses, _ = loss_formula(logits, torch.tensor([1]), case)
    lse = torch.log(torch.tensor(1.0 + torch.e, dtype=torch.float64))
    expected = lse - (1 - case.smoothing) * 1.0 - case.smoothing * 0.5 + case.lse_square_scale * lse**2
    torch.testing.assert_close(losses[0], expected)


def test_rotary_by_the_kernels_name():
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(9, 4)
    cos, sin = angles.cos(), angles.sin()
    wanted = apply_rotary_emb(x, cos, sin, True, seqlen_offsets=2)
    assert torch.equal(apply_rotary(x, cos, sin, 2, interleaved=True), wanted)
    torch.testing.assert_close(apply_rotary(wanted, cos, sin, 2, interleaved=True, conjugate=True), x)
    bounds = torch.tensor([0, 2, 10], dtype=torch.int32)
    packed = x.flatten(0, 1)
    wanted = apply_rotary_emb(packed, cos, sin, cu_seqlens=bounds, max_seqlen=8)
    assert apply_rotary(packed, cos, sin, cu_seqlens=bounds, max_seqlen=8, inplace=True) is packed
    assert torch.equal(packed, wanted)
