"""What one call of attention asks for besides q, k and v: the arguments that all of the general operators share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NO_WINDOW", "Problem", "sink_gradient"]

NO_WINDOW = -1  # either side of a window without a bound


class Problem(NamedTuple):
    """In the order of the operators' schemas.

    cu_seqlens_q, cu_seqlens_k: int32 (B + 1), first row of each sequence where q, or k and v, are packed; else None.
    seqused_q, seqused_k: int32 (B), how many rows of each sequence count, from its first on; None: all.
    leftpad_k: int32 (B), how many keys at the beginning of each sequence do not count; None or negative: none.
    alibi_slopes: fp32 (H) or (B, H), or None.
    sink: (H), or None: a further logit of every row, without a value.
    rng_state: int64 (2), seed and offset of dropout, or None.
    max_seqlen_q, max_seqlen_k: the longest sequences.
    softmax_scale: positive.
    window_left, window_right: NO_WINDOW or a number of keys; causal makes the right one 0 at most.
    attention_chunk: 0, or the size of the chunks that positions are cut into.
    softcap: 0.0 or positive.
    sm_margin: multiprocessors that a forward kernel that fills the GPU by one block each leaves free.
    """

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    rng_state: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    softmax_scale: float = 1.0
    causal: bool = False
    window_left: int = NO_WINDOW
    window_right: int = NO_WINDOW
    attention_chunk: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    sm_margin: int = 0

    def batch(self, q: Tensor) -> int:
        return q.shape[0] if self.cu_seqlens_q is None else self.cu_seqlens_q.shape[0] - 1

    def lse_shape(self, q: Tensor) -> Sequence[int]:
        """(B, H, Sq), or packed (H, T)."""
        if self.cu_seqlens_q is None:
            return (q.shape[0], q.shape[2], q.shape[1])
        return (q.shape[1], q.shape[0])


def sink_gradient(
    dout: Tensor | None, out: Tensor, lse: Tensor, dlse: Tensor | None, sink: Tensor, cu_seqlens_q: Tensor | None
) -> Tensor:
    """Gradient of the sink (H): its weight in each row, exp(sink - lse), times what that weight took from the row."""
    taken = torch.zeros_like(lse) if dout is None else (dout * out).sum(-1, dtype=lse.dtype).transpose(-1, -2)
    if dlse is not None:
        taken = taken - dlse
    # A row without a log-sum-exp is one that does not count, or whose sink is -inf.
    weight = torch.exp(sink[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
    per_row = -(weight * taken)
    if cu_seqlens_q is not None:
        # Packed rows after the last sequence hold anything.
        used = torch.arange(lse.shape[-1], device=lse.device) < cu_seqlens_q[-1]
        per_row = torch.where(used, per_row, 0.0)
    return per_row.sum(dim=[d for d in range(lse.dim()) if d != lse.dim() - 2]).to(sink.dtype)
