"""How the operators behave inside torch's machinery: opcheck, compile, fake tensors, autocast, checkpointing."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import _ops, flash_attn_func


def tensors(dtype=torch.float32, requires_grad=True, seqlen=193):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, seqlen, 4, 16), (2, seqlen, 2, 16), (2, seqlen, 2, 16)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(dtype, causal):
    torch.library.opcheck(_ops.ATTENTION, (*tensors(dtype), 0.25, causal, False))
    q, k, v = tensors(dtype, requires_grad=False)
    torch.library.opcheck(_ops.FWD, (q, k, v, 0.25, causal))
    out, lse = _ops.FWD(q, k, v, 0.25, causal)
    torch.library.opcheck(_ops.BWD, (torch.ones_like(out), q, k, v, out, lse, 0.25, causal, True))


def loss_and_gradients(function, inputs, **arguments):
    out = function(*inputs, **arguments)
    loss = (out * torch.arange(out.shape[-1])).sum()
    return out.detach(), torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=backend)
    inputs = tensors()
    expected = loss_and_gradients(flash_attn_func, inputs, causal=True)
    torch.testing.assert_close(loss_and_gradients(compiled, inputs, causal=True), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs, causal=True), expected[0])
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs, causal=True), expected[0])


def test_one_compiled_graph_serves_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for seqlen in (193, 64, 77):
        inputs = tensors(seqlen=seqlen)
        torch.testing.assert_close(loss_and_gradients(compiled, inputs), loss_and_gradients(flash_attn_func, inputs))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


def test_a_wrong_call_is_refused_while_compiling():
    torch._dynamo.reset()
    q, k, v = tensors()
    with pytest.raises(Exception, match="k must have q's dtype"):
        torch.compile(flash_attn_func, fullgraph=True, backend="eager")(q, k.half(), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_fake_results_match_real_ones(dtype):
    inputs = tensors(dtype)
    real = flash_attn_func(*inputs, return_attn_probs=True)
    meta = flash_attn_func(*[x.detach().to("meta") for x in inputs], return_attn_probs=True)
    for a, b in zip(real, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_float32(compiled):
    function = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager") if compiled else flash_attn_func
    inputs = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads = loss_and_gradients(function, inputs)
        mixed = function(inputs[0].bfloat16(), *inputs[1:])
    assert out.dtype == mixed.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in grads)
    torch.testing.assert_close(out, flash_attn_func(*[x.bfloat16() for x in inputs]))
    assert function(*inputs).dtype == torch.float32


def test_autocast_leaves_half_and_double_precision_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attn_func(*tensors(torch.float16)).dtype == torch.float16
        assert flash_attn_func(*tensors(torch.float64)).dtype == torch.float64


def test_activation_checkpointing():
    inputs = tensors()
    torch.testing.assert_close(
        loss_and_gradients(lambda *x: checkpoint(flash_attn_func, *x, use_reentrant=False), inputs),
        loss_and_gradients(flash_attn_func, inputs),
    )


def test_eager_and_operator_share_one_formula():
    inputs = tensors()
    torch.testing.assert_close(
        loss_and_gradients(lambda *x: _ops.ATTENTION(*x, 0.25, True, True)[0], inputs),
        loss_and_gradients(flash_attn_func, inputs, causal=True, deterministic=True),
        rtol=0,
        atol=0,
    )


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    inputs = tuple(tensors(requires_grad=False))
    program = torch.export.export(Model(), inputs)
    torch.testing.assert_close(program.module()(*inputs), flash_attn_func(*inputs, causal=True))


def test_no_work_for_gradients_nobody_wants():
    inputs = tensors()
    with torch.no_grad():
        assert flash_attn_func(*inputs).grad_fn is None
    assert flash_attn_func(*tensors(requires_grad=False)).grad_fn is None
    assert flash_attn_func(*inputs).grad_fn is not None


def test_public_names():
    assert set(flash_attn.__all__) >= {"__version__", "flash_attn_func", "supported"}
    assert all(hasattr(flash_attn, name) for name in flash_attn.__all__)
