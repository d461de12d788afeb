"""Every key of the installed kernel set, at the shapes where tiles end: one test for each key."""

import pytest
import torch
from kernel_set import KERNELS
from layouts import LAYOUTS, contiguous
from memory import poison
from oracle import expected, mismatches, results

from flash_attn import flash_attn_func

# (seqlen_q, seqlen_k): inside one tile, tails of one row, whole tiles, more keys than queries and the other way round.
SHAPES = [(1, 1), (5, 2), (17, 300), (64, 64), (128, 128), (129, 257), (256, 127), (333, 64)]


def check(kernel, head_dim, shape, layout=contiguous, **arguments):
    seqlen_q, seqlen_k = shape
    q, dout = (torch.randn(2, seqlen_q, 4, head_dim, device="cuda").to(kernel.dtype) for _ in range(2))
    k, v = (torch.randn(2, seqlen_k, 2, head_dim, device="cuda").to(kernel.dtype) for _ in range(2))
    q, k, v, dout = map(layout, (q, k, v, dout))
    dout = dout if kernel.op == "bwd" else None
    exact, allowed = expected(q, k, v, head_dim**-0.5, kernel.causal, dout)

    def function(q, k, v):
        poison()
        out, lse, _ = flash_attn_func(q, k, v, causal=kernel.causal, return_attn_probs=True, **arguments)
        poison()
        return out, lse

    wrong = mismatches(results(function, q, k, v, dout), exact, allowed)
    assert not wrong, "\n".join([f"{kernel.key}, head dim {head_dim}, Sq, Sk = {shape}, {layout.__name__}", *wrong])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.key)
def test_shapes(kernel, shape):
    check(kernel, kernel.head_dim, shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.key)
def test_layouts(kernel, layout):
    check(kernel, kernel.head_dim, (130, 200), layout)


@pytest.mark.parametrize("less", [1, 3, 8, 16, 24])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.key)
def test_smaller_head_dims(kernel, less):
    check(kernel, kernel.head_dim - less, (65, 129))


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if kernel.op == "bwd"], ids=lambda kernel: kernel.key)
def test_deterministic_backward(kernel):
    check(kernel, kernel.head_dim, (300, 500), deterministic=True)


def test_the_kernel_set_is_not_empty():
    assert KERNELS
