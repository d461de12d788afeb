"""What flash_attn_func computes on CPU tensors, against plain attention differentiated by torch in float64."""

import math

import pytest
import torch

from flash_attn import flash_attn_func

CASES = [  # batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim
    (2, 5, 5, 4, 4, 8),
    (1, 3, 9, 4, 2, 7),
    (2, 9, 3, 6, 1, 16),
    (1, 1, 17, 3, 3, 33),
    (1, 13, 1, 2, 1, 5),
]


def tensors(batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, heads_kv, head_dim)] * 2]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def plain_attention(q, k, v, scale, causal):
    """(out, lse) one row at a time, so that nothing is shared with the code under test."""
    batch, seqlen_q, heads, _head_dim = q.shape
    seqlen_k, group = k.shape[1], heads // k.shape[2]
    out, lse = torch.zeros_like(q), torch.full((batch, heads, seqlen_q), -math.inf, dtype=q.dtype)
    for b in range(batch):
        for h in range(heads):
            for i in range(seqlen_q):
                keys = min(seqlen_k, max(0, i + seqlen_k - seqlen_q + 1)) if causal else seqlen_k
                if keys:
                    scores = scale * (k[b, :keys, h // group] @ q[b, i, h])
                    out = out.index_put(
                        tuple(map(torch.tensor, (b, i, h))), scores.softmax(0) @ v[b, :keys, h // group]
                    )
                    lse[b, h, i] = scores.logsumexp(0).detach()
    return out, lse


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_results_and_gradients_in_float64(case, causal):
    q, k, v = tensors(*case)
    out, lse, s_dmask = flash_attn_func(q, k, v, softmax_scale=0.3, causal=causal, return_attn_probs=True)
    expected_out, expected_lse = plain_attention(q, k, v, 0.3, causal)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)
    assert out.is_contiguous()
    assert lse.is_contiguous()
    assert s_dmask.numel() == 0
    dout = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(
        torch.autograd.grad(out, (q, k, v), dout), torch.autograd.grad(expected_out, (q, k, v), dout)
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("case", [(1, 5, 3, 4, 2, 3), (2, 2, 4, 2, 1, 2)])
def test_gradcheck(case, causal):
    inputs = tensors(*case)
    assert torch.autograd.gradcheck(lambda q, k, v: flash_attn_func(q, k, v, causal=causal), inputs)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_low_precision_is_rounded_once(dtype):
    q, k, v = tensors(2, 33, 40, 4, 2, 64, dtype)
    exact = flash_attn_func(q.double(), k.double(), v.double(), causal=True)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    half_ulp = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(out.double(), exact, rtol=1.01 * half_ulp + 1e-6, atol=1e-5)


def test_the_default_scale_is_one_over_sqrt_of_the_head_dim():
    q, k, v = tensors(1, 4, 4, 2, 2, 9)
    torch.testing.assert_close(flash_attn_func(q, k, v), flash_attn_func(q, k, v, softmax_scale=1 / 3))


def test_rows_without_a_key_are_zero_with_finite_gradients():
    q, k, v = tensors(1, 5, 2, 2, 2, 8)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert torch.all(out[:, :3] == 0)
    assert torch.all(out[:, 3:] != 0)
    assert torch.all(lse[:, :, :3] == -math.inf)
    assert torch.all(lse[:, :, 3:].isfinite())
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    assert torch.all(dq[:, :3] == 0)
    assert all(g.isfinite().all() for g in (dq, dk, dv))
    assert torch.all(dv[:, 0] > 0)  # seen by the last two rows


@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0)])
def test_empty_tensors(sizes):
    batch, seqlen_q, seqlen_k = sizes
    q, k, v = tensors(batch, seqlen_q, seqlen_k, 4, 2, 8)
    out, lse, _ = flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert out.shape == q.shape
    assert torch.all(out == 0)
    assert lse.shape == (batch, 4, seqlen_q)
    assert torch.all(lse == -math.inf)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(torch.all(g == 0) and g.shape == x.shape for g, x in zip(grads, (q, k, v), strict=True))


def test_strides_do_not_matter():
    q, k, v = tensors(2, 6, 7, 4, 2, 8)
    views = [
        q.transpose(1, 2).contiguous().transpose(1, 2),
        torch.nn.functional.pad(k, (0, 3))[..., :8],
        v.transpose(2, 3).contiguous().transpose(2, 3),  # last dimension not contiguous
    ]
    out, from_views = flash_attn_func(q, k, v, causal=True), flash_attn_func(*views, causal=True)
    torch.testing.assert_close(from_views, out)
    grads = torch.autograd.grad(out.sum(), (q, k, v))  # a gradient of stride 0
    torch.testing.assert_close(torch.autograd.grad(from_views, (q, k, v), torch.ones_like(out)), grads)


def test_only_the_gradients_asked_for():
    q, k, v = tensors(1, 4, 4, 2, 2, 8)
    (dv,) = torch.autograd.grad(flash_attn_func(q.detach(), k.detach(), v).sum(), v)
    torch.testing.assert_close(dv, torch.autograd.grad(flash_attn_func(q, k, v).sum(), v)[0])


def test_the_log_sum_exp_has_no_gradient():
    _, lse, _ = flash_attn_func(*tensors(1, 4, 4, 2, 2, 8), return_attn_probs=True)
    assert not lse.requires_grad


def test_differentiating_twice_is_an_error():
    q, k, v = tensors(1, 4, 4, 2, 2, 8)
    (dq,) = torch.autograd.grad(flash_attn_func(q, k, v).pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="twice"):
        dq.sum().backward()
