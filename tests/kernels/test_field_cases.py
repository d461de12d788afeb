"""Cases from the field: what people ran into with attention kernels, each as a test."""

import math

import pytest
import torch
from kernel_set import DTYPES, FORCED_FAMILY, largest_head_dim, variants
from layouts import LAYOUTS
from oracle import expected, mismatches, results

from flash_attn import flash_attn_func

BACKWARD = variants("bwd")


def tensors(dtype, head_dim, batch=2, seqlen_q=193, seqlen_k=257, heads=4, heads_kv=2, device="cuda"):
    shapes = [(batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, heads_kv, head_dim)] * 2]
    return [torch.randn(shape, device=device).to(dtype).requires_grad_() for shape in shapes]


def assert_same_bits(found, wanted):
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"result {index} differs by up to {(a - b).abs().max().item():.3g}"


@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_gradient_of_a_sum_has_stride_0(dtype, causal):
    """Field case 28."""
    inputs = tensors(dtype, largest_head_dim("bwd", dtype, causal))
    out = flash_attn_func(*inputs, causal=causal, deterministic=True)
    wanted = torch.autograd.grad(out, inputs, torch.ones_like(out), retain_graph=True)
    assert_same_bits(torch.autograd.grad(out.sum(), inputs), wanted)


def assert_same_gradients(found, wanted):
    """The same bits; or, where a family is forced that may leave some layouts to another one, but for roundings."""
    if FORCED_FAMILY is None:
        assert_same_bits(found, wanted)
        return
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        limit = 4 * torch.finfo(b.dtype).eps * b.abs().max().item()
        worst = (a.double() - b.double()).abs().max().item()
        assert worst <= limit, f"result {index} differs by up to {worst:.3g}, allowed is {limit:.3g}"


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_gradients_of_any_layout(layout):
    """Field case 28: expanded or sliced gradients give what contiguous ones do."""
    dtype, causal = BACKWARD[0]
    inputs = tensors(dtype, largest_head_dim("bwd", dtype, causal))
    out = flash_attn_func(*inputs, causal=causal, deterministic=True)
    dout = torch.randn_like(out)
    wanted = torch.autograd.grad(out, inputs, dout, retain_graph=True)
    assert_same_gradients(torch.autograd.grad(out, inputs, layout(dout), retain_graph=True), wanted)
    for sizes in ((1, *out.shape[1:]), (out.shape[0], 1, *out.shape[2:]), (*out.shape[:3], 1)):
        narrow = torch.randn(sizes, device="cuda").to(dtype)
        wanted = torch.autograd.grad(out, inputs, narrow.expand(out.shape).contiguous(), retain_graph=True)
        assert_same_gradients(torch.autograd.grad(out, inputs, narrow.expand(out.shape), retain_graph=True), wanted)


@pytest.mark.parametrize("dtype", [dtype for dtype, causal in BACKWARD if causal], ids=str)
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(5, 2), (300, 2), (300, 129)])
def test_rows_that_see_no_key(dtype, seqlen_q, seqlen_k):
    """Field case 29."""
    q, k, v = tensors(dtype, largest_head_dim("bwd", dtype, True), seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    unseen = seqlen_q - seqlen_k
    assert torch.all(out[:, :unseen] == 0)
    assert torch.all(lse[:, :, :unseen] == -math.inf)
    assert torch.all(lse[:, :, unseen:].isfinite())
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(torch.all(grad.isfinite()) for grad in grads)
    assert torch.all(grads[0][:, :unseen] == 0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="this machine has one GPU; the case needs two")
def test_tensors_of_another_device():
    """Field case 34."""
    assert torch.cuda.current_device() == 0
    dtype, causal = BACKWARD[0]
    here = tensors(dtype, largest_head_dim("bwd", dtype, causal))
    there = [x.detach().to("cuda:1").requires_grad_() for x in here]
    found = []
    for inputs in (here, there):
        out, lse, _ = flash_attn_func(*inputs, causal=causal, deterministic=True, return_attn_probs=True)
        grads = torch.autograd.grad(out, inputs, torch.ones_like(out))
        assert {x.device for x in (out, lse, *grads)} == {inputs[0].device}
        assert torch.cuda.current_device() == 0
        found.append([x.cpu() for x in (out, lse, *grads)])
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_opcheck_and_fullgraph(dtype, causal):
    """Field case 37."""
    inputs = tensors(dtype, 64, seqlen_q=193, seqlen_k=193)
    torch.library.opcheck(torch.ops.flash_attn.attention.default, (*inputs, 0.125, causal, True))
    detached = [x.detach() for x in inputs]
    torch.library.opcheck(torch.ops.flash_attn.fwd.default, (*detached, 0.125, causal))
    out, lse = torch.ops.flash_attn.fwd(*detached, 0.125, causal)
    torch.library.opcheck(
        torch.ops.flash_attn.bwd.default, (torch.randn_like(out), *detached, out, lse, 0.125, causal, True)
    )

    def model(q, k, v):
        return flash_attn_func(q * 2, k, v, causal=causal, deterministic=True) * 3

    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        found = torch.compile(model, fullgraph=True, backend=backend)(*inputs)
        wanted = model(*inputs)
        assert_same_bits(
            [found, *torch.autograd.grad(found.sum(), inputs)], [wanted, *torch.autograd.grad(wanted.sum(), inputs)]
        )


@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
@pytest.mark.parametrize("softmax_scale", [1.0, 20.0])
def test_saturated_softmax(dtype, causal, softmax_scale):
    """Scores in the thousands: one key takes all the weight, nothing overflows."""
    q, k, v = (x.detach() for x in tensors(dtype, 64))
    dout = torch.randn_like(q)
    exact, allowed = expected(q, k, v, softmax_scale, causal, dout)

    def function(q, k, v):
        return flash_attn_func(q, k, v, softmax_scale=softmax_scale, causal=causal, return_attn_probs=True)[:2]

    assert not mismatches(results(function, q, k, v, dout), exact, allowed)


@pytest.mark.parametrize("dtype", sorted(DTYPES.values(), key=str), ids=str)
def test_autocast_on_the_gpu(dtype):
    inputs = [x.detach().float().requires_grad_() for x in tensors(dtype, 64)]
    with torch.autocast("cuda", dtype=dtype):
        out = flash_attn_func(*inputs)
    assert out.dtype == dtype
    assert all(grad.dtype == torch.float32 for grad in torch.autograd.grad(out.sum(), inputs))
