"""Every feature of attention in plain PyTorch: the implementation of the general operators for CPU tensors.

As :mod:`flash_attn.reference`: slow, the whole score matrix of a sequence at a time, in float32 or float64. One
sequence after the other, so that packed, padded and partly used batches are all the same thing. In the order of the
steps:

- a sequence is its rows of q, and of k and v, after ``seqused`` cut its end and ``leftpad`` its beginning off;
- the query i stands at position ``i + Sk - Sq`` among the keys;
- ``softcap`` c turns a scaled score s into c tanh(s / c); ALiBi then takes slope |position - j| away;
- hidden are the keys outside of the window around the position, and those of another chunk;
- the sink joins the softmax as one more score, and its weight is then thrown away;
- dropout zeroes weights and scales the others by 1 / (1 - p); the log-sum-exp knows nothing of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .dropout import keep_mask
from .errors import ShapeError
from .problem import Problem
from .reference import lse_dtype

__all__ = ["backward", "boundaries", "forward", "masked_scores", "sequences", "softmax_weights", "visible_keys"]


class _Sequence(NamedTuple):
    """One sequence of the batch: its number, and its rows; ``batch`` is None where the rows are packed."""

    number: int
    q_batch: int | None
    q_rows: slice
    k_batch: int | None
    k_rows: slice

    def queries(self, x: Tensor) -> Tensor:
        return (x if self.q_batch is None else x[self.q_batch])[self.q_rows]

    def keys(self, x: Tensor) -> Tensor:
        return (x if self.k_batch is None else x[self.k_batch])[self.k_rows]

    def lse(self, x: Tensor) -> Tensor:
        return (x if self.q_batch is None else x[self.q_batch])[:, self.q_rows]


def boundaries(name: str, x: Tensor, cu_seqlens: Tensor) -> list[int]:
    """cu_seqlens as numbers. On the CPU, what is wrong with them can be seen."""
    values: list[int] = cu_seqlens.tolist()
    ascending = all(a <= b for a, b in itertools.pairwise(values))
    if values[0] != 0 or not ascending or values[-1] > x.shape[0]:
        raise ShapeError(f"{name} must ascend from 0 to at most the number of tokens, {x.shape[0]}, got {values}.")
    return values


def sequences(q: Tensor, k: Tensor, p: Problem) -> Iterator[_Sequence]:
    """Of the whole batch; rows that do not count are in none of them."""
    q_bounds = None if p.cu_seqlens_q is None else boundaries("cu_seqlens_q", q, p.cu_seqlens_q)
    k_bounds = None if p.cu_seqlens_k is None else boundaries("cu_seqlens_k", k, p.cu_seqlens_k)
    used_q, used_k, leftpad = (None if x is None else x.tolist() for x in (p.seqused_q, p.seqused_k, p.leftpad_k))
    for number in range(p.batch(q)):
        q_first, q_last = (0, q.shape[1]) if q_bounds is None else q_bounds[number : number + 2]
        k_first, k_last = (0, k.shape[1]) if k_bounds is None else k_bounds[number : number + 2]
        if used_q is not None:
            q_last = min(q_last, q_first + max(0, used_q[number]))
        if used_k is not None:
            k_last = min(k_last, k_first + max(0, used_k[number]))
        if leftpad is not None:
            k_first = min(k_last, k_first + max(0, leftpad[number]))
        yield _Sequence(
            number,
            None if q_bounds is not None else number,
            slice(q_first, q_last),
            None if k_bounds is not None else number,
            slice(k_first, k_last),
        )


def visible_keys(position: Tensor, key: Tensor, p: Problem) -> Tensor:
    """bool, in the shape of both: whether a query at ``position``, counted in keys, sees ``key``."""
    visible = torch.ones_like(position + key, dtype=torch.bool)
    if p.causal:
        visible &= key <= position
    elif p.window_right >= 0:
        visible &= key <= position + p.window_right
    if p.window_left >= 0:
        visible &= key >= position - p.window_left
    if p.attention_chunk > 0:
        chunk = torch.div(position, p.attention_chunk, rounding_mode="floor")
        visible &= chunk == torch.div(key, p.attention_chunk, rounding_mode="floor")
    return visible


class _Scores(NamedTuple):
    """Of one sequence, each (H, Sq, Sk): masked scores; softcap's slope and dropout's factors, None without them."""

    scores: Tensor
    softcap_slope: Tensor | None
    keep: Tensor | None


def masked_scores(q: Tensor, k: Tensor, number: int, p: Problem) -> _Scores:
    """``q`` (H, Sq, D) and ``k`` (H, Sk, D) are those of sequence ``number`` in the dtype of the arithmetic."""
    heads, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
    scores = torch.matmul(q, k.transpose(-2, -1)) * p.softmax_scale
    slope = keep = None
    if p.softcap > 0.0:
        bounded = torch.tanh(scores / p.softcap)
        scores, slope = p.softcap * bounded, 1.0 - bounded.square()
    position = torch.arange(seqlen_q, device=q.device)[:, None] + (seqlen_k - seqlen_q)
    key = torch.arange(seqlen_k, device=q.device)
    if p.alibi_slopes is not None:
        slopes = p.alibi_slopes if p.alibi_slopes.dim() == 1 else p.alibi_slopes[number]
        scores = scores - slopes.to(scores.dtype)[:, None, None] * (position - key).abs()
    scores = scores.masked_fill(~visible_keys(position, key, p), float("-inf"))
    if p.rng_state is not None:
        head_index = number * heads + torch.arange(heads, device=q.device)
        kept = keep_mask(p.rng_state, head_index, seqlen_q, seqlen_k, p.dropout_p)
        keep = kept.to(scores.dtype) / (1.0 - p.dropout_p)
    return _Scores(scores, slope, keep)


def softmax_weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores - lse), and 0 rather than NaN in a row that sees no key (its scores and its lse are all -inf)."""
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def _by_head(x: Tensor, heads: int) -> Tensor:
    """(S, Hx, D) -> (heads, S, D) in the dtype of the arithmetic, each of the Hx heads repeated for its group."""
    return x.to(lse_dtype(x.dtype)).transpose(0, 1).repeat_interleave(heads // max(1, x.shape[1]), dim=0)


def _by_group(x: Tensor, heads_kv: int) -> Tensor:
    """(H, S, D) -> (S, Hk, D), the sum over each group."""
    return x.reshape(heads_kv, x.shape[0] // heads_kv, *x.shape[1:]).sum(1).transpose(0, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) over k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), or of packed ones without batch.

    Returns the output, contiguous, in q's dtype, and the natural log-sum-exp, contiguous (B, H, Sq) or packed (H, T).
    Rows that do not count have output 0 and log-sum-exp -inf.
    """
    heads = q.shape[-2]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full(tuple(p.lse_shape(q)), float("-inf"), dtype=lse_dtype(q.dtype))
    for s in sequences(q, k, p):
        scores, _, keep = masked_scores(_by_head(s.queries(q), heads), _by_head(s.keys(k), heads), s.number, p)
        row_lse = torch.logsumexp(scores, dim=-1)
        if p.sink is not None:
            row_lse = torch.logaddexp(row_lse, p.sink.to(row_lse.dtype)[:, None])
        used = softmax_weights(scores, row_lse)
        if keep is not None:
            used = used * keep
        s.queries(out).copy_(torch.matmul(used, _by_head(s.keys(v), heads)).transpose(0, 1))
        s.lse(lse).copy_(row_lse)
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    p: Problem,
) -> None:
    """Write the gradients of :func:`forward` into ``dq``, ``dk`` and ``dv``, which have the inputs' shapes.

    ``out`` and ``lse`` need not be those of these keys alone: a caller who merged the results of several sets of keys
    gives the merged ones, and gets each set's part of the gradients.
    """
    heads, heads_kv = q.shape[-2], k.shape[-2]
    for gradient in (dq, dk, dv):
        gradient.zero_()
    for s in sequences(q, k, p):
        q_h, k_h, v_h = _by_head(s.queries(q), heads), _by_head(s.keys(k), heads), _by_head(s.keys(v), heads)
        dout_h, out_h = _by_head(s.queries(dout), heads), _by_head(s.queries(out), heads)
        scores, slope, keep = masked_scores(q_h, k_h, s.number, p)
        used = softmax = softmax_weights(scores, s.lse(lse).to(scores.dtype))
        delta = (dout_h * out_h).sum(-1)
        if dlse is not None:
            delta = delta - s.lse(dlse).to(delta.dtype)
        dweights = torch.matmul(dout_h, v_h.transpose(-2, -1))
        if keep is not None:
            used, dweights = used * keep, dweights * keep
        dscores = softmax * (dweights - delta[..., None]) * p.softmax_scale
        if slope is not None:
            dscores = dscores * slope
        s.queries(dq).copy_(torch.matmul(dscores, k_h).transpose(0, 1))
        s.keys(dk).copy_(_by_group(torch.matmul(dscores.transpose(-2, -1), q_h), heads_kv))
        s.keys(dv).copy_(_by_group(torch.matmul(used.transpose(-2, -1), dout_h), heads_kv))
