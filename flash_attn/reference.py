"""Exact attention in plain PyTorch: the implementation for CPU tensors.

It is slow and holds the whole (Sq, Sk) score matrix: it exists so that models and their tests run on a machine without
a GPU, and as a readable statement of what the kernels compute. The arithmetic is in float32, or in float64 for float64
tensors, whatever the tensors' dtype.

Semantics, the same as the kernels':

- scores are ``softmax_scale * q @ k.T``; query head h attends with KV head ``h // (H // Hk)``;
- ``causal`` is aligned to the bottom right: query i sees the keys ``j <= i + Sk - Sq``;
- a query that sees no key gets output 0 and log-sum-exp -inf, and takes no part in any gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["attention_backward", "attention_forward", "lse_dtype"]


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of the log-sum-exp, which is also that of the arithmetic: float32, but float64 for float64 tensors."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _grouped(x: Tensor, heads_kv: int) -> Tensor:
    """(B, S, H, D) -> (B, Hk, H/Hk, S, D), in the dtype of the arithmetic."""
    batch, seqlen, heads, head_dim = x.shape
    x = x.to(lse_dtype(x.dtype)).reshape(batch, seqlen, heads_kv, heads // heads_kv, head_dim)
    return x.permute(0, 2, 3, 1, 4)


def _ungrouped(x: Tensor, dtype: torch.dtype) -> Tensor:
    """(B, Hk, G, S, D) -> contiguous (B, S, H, D) in ``dtype``."""
    batch, heads_kv, group, seqlen, head_dim = x.shape
    x = x.permute(0, 3, 1, 2, 4).reshape(batch, seqlen, heads_kv * group, head_dim)
    return x.to(dtype).contiguous()


def _scores(q: Tensor, k: Tensor, softmax_scale: float, causal: bool) -> Tensor:
    """Scaled and masked scores (B, Hk, G, Sq, Sk) of grouped ``q`` and ``k``."""
    scores = torch.matmul(q, k.transpose(-2, -1)) * softmax_scale
    if causal:
        seqlen_q, seqlen_k = scores.shape[-2:]
        last_key = torch.arange(seqlen_q, device=scores.device) + (seqlen_k - seqlen_q)
        hidden = torch.arange(seqlen_k, device=scores.device) > last_key[:, None]
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 rather than NaN in a row that sees no key (its scores and its lse are all -inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def attention_forward(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) over k and v (B, Sk, Hk, D).

    Returns the output, contiguous (B, Sq, H, D) in q's dtype, and the natural log-sum-exp of every row of scores,
    contiguous (B, H, Sq) in :func:`lse_dtype`.
    """
    batch, seqlen_q, heads, _ = q.shape
    heads_kv = k.shape[2]
    scores = _scores(_grouped(q, heads_kv), _grouped(k, heads_kv), softmax_scale, causal)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.matmul(_probabilities(scores, lse), _grouped(v, heads_kv))
    return _ungrouped(out, q.dtype), lse.reshape(batch, heads, seqlen_q).contiguous()


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients (dq, dk, dv) of :func:`attention_forward`, contiguous and in the inputs' shapes and dtype.

    ``out`` (B, Sq, H, D) and ``lse`` (B, H, Sq) are the forward's results, ``dout`` is the gradient of ``out``.
    ``deterministic`` changes nothing here: this implementation always is.
    """
    heads_kv = k.shape[2]
    q_g, k_g, v_g, out_g, dout_g = (_grouped(x, heads_kv) for x in (q, k, v, out, dout))
    p = _probabilities(_scores(q_g, k_g, softmax_scale, causal), lse.reshape(q_g.shape[:-1]))
    delta = (dout_g * out_g).sum(dim=-1, keepdim=True)
    ds = p * (torch.matmul(dout_g, v_g.transpose(-2, -1)) - delta) * softmax_scale
    dq = torch.matmul(ds, k_g)
    dk = torch.matmul(ds.transpose(-2, -1), q_g).sum(dim=2, keepdim=True)
    dv = torch.matmul(p.transpose(-2, -1), dout_g).sum(dim=2, keepdim=True)
    return _ungrouped(dq, q.dtype), _ungrouped(dk, k.dtype), _ungrouped(dv, v.dtype)
