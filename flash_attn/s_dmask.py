"""The attention weights with their dropout pattern, as ``return_attn_probs`` gives them: for tests, made by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from .dropout import keep_mask
from .problem import Problem
from .reference import lse_dtype
from .reference_general import visible_keys

__all__ = ["s_dmask"]

_MULTIPLE = 128


def s_dmask(q: Tensor, k: Tensor, lse: Tensor, p: Problem) -> Tensor:
    """(B, H, Sq, Sk) in q's dtype, Sq and Sk rounded up to multiples of 128: the softmax, negative where dropped.

    Zero where nothing is seen. The whole matrix, in float32 too while it is made.
    """
    batch, heads = p.batch(q), q.shape[-2]
    rows, columns = (-(-n // _MULTIPLE) * _MULTIPLE for n in (p.max_seqlen_q, p.max_seqlen_k))
    first_q, length_q = _extent(q, batch, p.cu_seqlens_q, p.seqused_q, None)
    first_k, length_k = _extent(k, batch, p.cu_seqlens_k, p.seqused_k, p.leftpad_k)
    dtype = lse_dtype(q.dtype)
    q_padded = _padded(q.detach(), first_q, rows, p.cu_seqlens_q is not None).to(dtype)
    k_padded = _padded(k.detach(), first_k, columns, p.cu_seqlens_k is not None).to(dtype)
    scores = torch.einsum("bihd,bjhd->bhij", q_padded, k_padded.repeat_interleave(heads // k.shape[-2], dim=2))
    scores = scores * p.softmax_scale
    query, key = torch.arange(rows, device=q.device)[:, None], torch.arange(columns, device=q.device)
    position = query + (length_k - length_q)[:, None, None]
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes if p.alibi_slopes.dim() == 2 else p.alibi_slopes[None]
        scores = scores - slopes.to(dtype)[..., None, None] * (position - key).abs()[:, None]
    visible = (query < length_q[:, None, None]) & (key < length_k[:, None, None]) & visible_keys(position, key, p)
    by_row = lse.detach().transpose(-1, -2)  # (B, Sq, H) or (T, H)
    lse_padded = _padded(by_row, first_q, rows, p.cu_seqlens_q is not None).transpose(1, 2)
    weights = torch.exp(scores - lse_padded[..., None]).masked_fill(~visible[:, None], 0.0)
    if p.rng_state is not None:
        head_index = torch.arange(batch * heads, device=q.device).view(batch, heads)
        weights = torch.where(keep_mask(p.rng_state, head_index, rows, columns, p.dropout_p), weights, -weights)
    return weights.to(q.dtype)


def _extent(
    x: Tensor, batch: int, cu_seqlens: Tensor | None, seqused: Tensor | None, leftpad: Tensor | None
) -> tuple[Tensor, Tensor]:
    """First row and number of rows of each sequence, int64 (B)."""
    if cu_seqlens is None:
        first = torch.zeros(batch, dtype=torch.int64, device=x.device)
        length = torch.full((batch,), x.shape[1], dtype=torch.int64, device=x.device)
    else:
        first = cu_seqlens[:-1].to(torch.int64)
        length = cu_seqlens.diff().to(torch.int64)
    if seqused is not None:
        length = torch.minimum(length, seqused)
    if leftpad is not None:
        padding = leftpad.clamp(min=0)
        first, length = first + padding, (length - padding).clamp(min=0)
    return first, length


def _padded(x: Tensor, first: Tensor, rows: int, packed: bool) -> Tensor:
    """(B, rows, ...): the rows of each sequence from its first on, with any values past its end."""
    total = x.shape[0 if packed else 1]
    if total == 0:
        return x.new_zeros((first.shape[0], rows, *x.shape[1 if packed else 2 :]))
    index = (first[:, None] + torch.arange(rows, device=x.device)).clamp(max=total - 1)
    return x[index] if packed else x[torch.arange(x.shape[0], device=x.device)[:, None], index]
