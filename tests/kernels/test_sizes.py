"""Sizes at the ends: nothing at all, more than a grid dimension holds, more elements than 32 bits count."""

import math

import pytest
import torch
from kernel_set import largest_head_dim, variants
from oracle import expected, mismatches

from flash_attn import flash_attn_func

BACKWARD = variants("bwd")
GIB = 2**30


def needs_memory(gib):
    have = torch.cuda.mem_get_info()[1] / GIB
    return pytest.mark.skipif(have < gib, reason=f"needs a GPU with {gib} GiB of memory, this one has {have:.0f}")


def run(q, k, v, dout, causal):
    """(out, lse, dq, dk, dv) of the deterministic kernels: parts of the batch or heads give the bits of the whole."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse, _ = flash_attn_func(q, k, v, causal=causal, deterministic=True, return_attn_probs=True)
    return (out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout))


@pytest.mark.parametrize("sizes", [(0, 4, 5), (2, 0, 5), (2, 4, 0), (2, 200, 0), (2, 0, 200), (2, 0, 0)], ids=str)
@pytest.mark.parametrize("head_dim", [64, 33])
@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_empty(dtype, causal, head_dim, sizes):
    batch, seqlen_q, seqlen_k = sizes
    q = torch.randn(batch, seqlen_q, 4, head_dim, device="cuda").to(dtype)
    k, v = (torch.randn(batch, seqlen_k, 2, head_dim, device="cuda").to(dtype) for _ in range(2))
    out, lse, *grads = run(q, k, v, torch.ones_like(q), causal)
    torch.cuda.synchronize()
    assert out.shape == q.shape
    assert torch.all(out == 0)
    assert lse.shape == (batch, 4, seqlen_q)
    assert torch.all(lse == -math.inf)
    for grad, x in zip(grads, (q, k, v), strict=True):
        assert grad.shape == x.shape
        assert torch.all(grad == 0)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), (1, 70_000)], ids=["batch", "heads"])
@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_more_than_65535(dtype, causal, batch, heads):
    """Equal to the same computed in two parts, and the last of it to the reference."""
    q, k, v, dout = (torch.randn(batch, 16, heads, 64, device="cuda", dtype=dtype) for _ in range(4))
    whole = run(q, k, v, dout, causal)
    many = 0 if batch > 1 else 2
    for start, length in ((0, 40_000), (40_000, 30_000)):
        part = run(*(x.narrow(many, start, length) for x in (q, k, v, dout)), causal)
        for name, found, wanted in zip(("out", "lse", "dq", "dk", "dv"), whole, part, strict=True):
            dim = 1 if name == "lse" and many else many
            assert torch.equal(found.narrow(dim, start, length), wanted), f"{name} from {start} on"
    last = [x.narrow(many, 69_990, 10) for x in (q, k, v, dout)]
    exact, allowed = expected(*last[:3], 64**-0.5, causal, last[3])
    names = ("out", "lse", "dq", "dk", "dv")
    found = {n: x.narrow(1 if n == "lse" and many else many, 69_990, 10) for n, x in zip(names, whole, strict=True)}
    assert not mismatches(found, exact, allowed)


@needs_memory(48)
@pytest.mark.parametrize(("dtype", "causal"), BACKWARD[:1], ids=str)
def test_more_than_2_to_the_31_elements(dtype, causal):
    """The last rows of a q of 2^31 + 2^21 elements, forward and backward."""
    head_dim = min(128, largest_head_dim("bwd", dtype, causal))
    heads, seqlen_k, last = 128, 64, 32
    seqlen_q = (2**31 + 2**21) // (heads * head_dim)
    q = torch.randn(1, seqlen_q, heads, head_dim, device="cuda", dtype=dtype)
    k, v = (torch.randn(1, seqlen_k, 1, head_dim, device="cuda", dtype=dtype) for _ in range(2))
    dout = torch.zeros((), device="cuda", dtype=dtype).expand(q.shape).clone()
    dout[:, -last:] = torch.randn(1, last, heads, head_dim, device="cuda", dtype=dtype)
    assert q.numel() > 2**31
    out, lse, dq, dk, dv = run(q, k, v, dout, causal)
    # Bottom-right alignment: the last rows alone see the same keys, and the other rows have no gradient.
    exact, allowed = expected(q[:, -last:], k, v, head_dim**-0.5, causal, dout[:, -last:])
    found = {"out": out[:, -last:], "lse": lse[:, :, -last:], "dq": dq[:, -last:], "dk": dk, "dv": dv}
    assert not mismatches(found, exact, allowed)
    assert torch.all(dq[:, :-last] == 0)


@needs_memory(48)
@pytest.mark.parametrize("dimension", [0, 1, 2])
@pytest.mark.parametrize(("dtype", "causal"), BACKWARD[:1], ids=str)
def test_strides_beyond_2_to_the_31(dtype, causal, dimension):
    """K and V whose last row, head or batch entry is more than 2^31 elements away from the first."""
    sizes = (2, 40, 2, 64)
    stride = (2**31 + 2**20) // (sizes[dimension] - 1) // 64 * 64
    inner = [s for i, s in enumerate(sizes) if i != dimension]
    within = [inner[1] * inner[2], inner[2], 1]
    strides = [*within[:dimension], stride, *within[dimension:]]
    storage = torch.empty(stride * (sizes[dimension] - 1) + math.prod(inner), device="cuda", dtype=dtype)
    far = storage.as_strided(sizes, strides)
    far.copy_(torch.randn(sizes, device="cuda"))
    near = far.clone(memory_format=torch.contiguous_format)
    q, dout = (torch.randn(2, 50, 4, 64, device="cuda", dtype=dtype) for _ in range(2))
    for found, wanted in zip(run(q, far, far, dout, causal), run(q, near, near, dout, causal), strict=True):
        assert torch.equal(found, wanted)
