"""FP8 attention in plain PyTorch: the implementation for CPU tensors, and what the kernels are held to.

The inputs are float8_e4m3fn with a factor for each sequence and KV head. As in the kernels, the weights of the softmax
are rounded to float8_e4m3fn too, before they meet the values; the softmax's sum is of the weights before rounding.
Everything else is in float32, or in float64 for a test, and as :mod:`flash_attn.reference_general` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .problem import Problem
from .reference_general import masked_scores, sequences

__all__ = ["forward"]

# The largest weight of a row, 1, is rounded as this, so that weights down to 2^-14 keep all their bits. A power of two,
# so that 1 is exact.
_LARGEST_WEIGHT = 256.0


def _by_head(x: Tensor, descale: Tensor | None, number: int, heads_kv: int, heads: int, dtype: torch.dtype) -> Tensor:
    """(S, Hx, D) of sequence ``number`` -> (heads, S, D) in ``dtype``, multiplied by the factor of its KV head."""
    by_head = x.to(dtype).transpose(0, 1).repeat_interleave(heads // max(1, x.shape[1]), dim=0)
    if descale is None:
        return by_head
    return by_head * descale[number].to(dtype).repeat_interleave(heads // heads_kv)[:, None, None]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    p: Problem,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) over k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), or of packed ones without batch.

    Returns the output, contiguous, in bfloat16, or in ``dtype`` if that is float64; and the natural log-sum-exp,
    contiguous (B, H, Sq) or packed (H, T). Rows that do not count have output 0 and log-sum-exp -inf.
    """
    heads, heads_kv = q.shape[-2], k.shape[-2]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64 if dtype is torch.float64 else torch.bfloat16)
    lse = q.new_full(tuple(p.lse_shape(q)), float("-inf"), dtype=dtype)
    for s in sequences(q, k, p):
        queries = _by_head(s.queries(q), q_descale, s.number, heads_kv, heads, dtype)
        keys = _by_head(s.keys(k), k_descale, s.number, heads_kv, heads, dtype)
        values = _by_head(s.keys(v), v_descale, s.number, heads_kv, heads, dtype)
        scores = masked_scores(queries, keys, s.number, p).scores
        row_lse = torch.logsumexp(scores, dim=-1)
        if p.sink is not None:
            row_lse = torch.logaddexp(row_lse, p.sink.to(dtype)[:, None])
        if scores.shape[-1] > 0:
            largest = scores.amax(dim=-1, keepdim=True)
            largest = largest.masked_fill(largest == float("-inf"), 0.0)
            weights = (torch.exp(scores - largest) * _LARGEST_WEIGHT).to(q.dtype).to(dtype) / _LARGEST_WEIGHT
            seen = row_lse.masked_fill(row_lse == float("-inf"), 0.0)[..., None]
            s.queries(out).copy_((torch.matmul(weights, values) * torch.exp(largest - seen)).transpose(0, 1))
        s.lse(lse).copy_(row_lse)
    return out, lse
