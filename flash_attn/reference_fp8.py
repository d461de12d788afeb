"""FP8 attention in plain PyTorch: the implementation for CPU tensors, and what the kernels are held to.

The inputs are float8_e4m3fn with a factor for each sequence and KV head, or for each block of rows of a head. As in the
kernels, the weights of the softmax are rounded to float8_e4m3fn too, before they meet the values; the softmax's sum is
of the weights before rounding. Factors for blocks of values are part of the weights that are rounded, so that a weight
has the precision of what it adds to the output.
Everything else is in float32, or in float64 for a test, and as :mod:`flash_attn.reference_general` says.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from .errors import ArgumentError
from .problem import Problem
from .reference_general import masked_scores, sequences

__all__ = ["forward"]

# The largest weight of a row, 1, is rounded as this, so that weights down to 2^-14 keep all their bits. A power of two,
# so that 1 is exact.
_LARGEST_WEIGHT = 256.0


def _by_head(x: Tensor, heads: int, dtype: torch.dtype) -> Tensor:
    """(S, Hx, D) or (S, Hx) -> (heads, S, D) or (heads, S) in ``dtype``, each head repeated for its group."""
    return x.to(dtype).transpose(0, 1).repeat_interleave(heads // max(1, x.shape[1]), dim=0)


def _factors(
    name: str,
    descale: Tensor | None,
    number: int,
    rows: slice,
    cu_seqlens: Tensor | None,
    heads: int,
    dtype: torch.dtype,
) -> Tensor | None:
    """Of ``rows`` of sequence ``number``: (heads, S or 1)."""
    if descale is None:
        return None
    if descale.dim() == 2:
        found = descale[number, None]
    else:
        row = torch.arange(rows.start, rows.stop, device=descale.device)
        slab, block = number, row // checks.DESCALE_ROWS
        if cu_seqlens is not None:
            slab, block = 0, checks.packed_block(cu_seqlens[number], number, row)
        found = descale[slab, :, block].transpose(0, 1)
    if descale.is_cpu and (found < 0.0).any():  # kernels do not look
        raise ArgumentError(f"{name} must not be negative, got {found.min().item()} for sequence {number}.")
    return _by_head(found, heads, dtype)


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
    heads = q.shape[-2]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=torch.float64 if dtype is torch.float64 else torch.bfloat16)
    lse = q.new_full(tuple(p.lse_shape(q)), float("-inf"), dtype=dtype)
    for s in sequences(q, k, p):
        queries, keys, values = (_by_head(x, heads, dtype) for x in (s.queries(q), s.keys(k), s.keys(v)))
        of_q = _factors("q_descale", q_descale, s.number, s.q_rows, p.cu_seqlens_q, heads, dtype)
        of_k, of_v = (
            _factors(name, x, s.number, s.k_rows, p.cu_seqlens_k, heads, dtype)
            for name, x in (("k_descale", k_descale), ("v_descale", v_descale))
        )
        queries = queries if of_q is None else queries * of_q[..., None]
        keys = keys if of_k is None else keys * of_k[..., None]
        in_weights = of_v is not None and v_descale is not None and v_descale.dim() == 3
        values = values if of_v is None or in_weights else values * of_v[..., None]
        scores = masked_scores(queries, keys, s.number, p).scores
        row_lse = torch.logsumexp(scores, dim=-1)
        if p.sink is not None:
            row_lse = torch.logaddexp(row_lse, p.sink.to(dtype)[:, None])
        if scores.shape[-1] > 0:
            if of_v is not None and in_weights:
                scores = scores + of_v.log()[:, None]
            largest = scores.amax(dim=-1, keepdim=True)
            largest = largest.masked_fill(largest == float("-inf"), 0.0)
            weights = (torch.exp(scores - largest) * _LARGEST_WEIGHT).to(q.dtype).to(dtype) / _LARGEST_WEIGHT
            seen = row_lse.masked_fill(row_lse == float("-inf"), 0.0)[..., None]
            s.queries(out).copy_((torch.matmul(weights, values) * torch.exp(largest - seen)).transpose(0, 1))
        s.lse(lse).copy_(row_lse)
    return out, lse
