"""Which attention weights dropout drops: the hash of the kernels, in torch.

A weight's fate is a function of (seed, offset, batch, head, query, key) alone, each counted inside of its sequence, so
that the forward, the backward and this file agree whatever the order of their work. The mixer is lowbias32 (Wellons
2018, "Prospecting for Hash Functions"). Integers are held in int64 and masked to 32 bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["draw_rng_state", "keep_mask", "mix"]

_M32 = 0xFFFFFFFF
_LARGEST_SEED = 2**63 - 1


def draw_rng_state(device: torch.device) -> Tensor:
    """int64 (2,), [seed, offset], from torch's generator of ``device``: no host synchronisation, and inside a CUDA
    graph a new one with every replay."""
    return torch.randint(0, _LARGEST_SEED, (2,), dtype=torch.int64, device=device)


def mix(x: Any) -> Any:
    """The hash of a number below 2^32, or of an int64 tensor of such numbers."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _M32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _M32
    return x ^ (x >> 16)


def keep_mask(rng_state: Tensor, head_index: Tensor, seqlen_q: int, seqlen_k: int, dropout_p: float) -> Tensor:
    """Where weights are kept, bool (*head_index.shape, seqlen_q, seqlen_k).

    ``head_index`` is int64, ``batch * H + head`` of each matrix of weights; ``rng_state`` is on its device.
    """
    seed, offset = rng_state[0], rng_state[1]
    state = mix(seed & _M32)
    for word in (seed >> 32, offset, offset >> 32, head_index):
        state = mix(state ^ (word & _M32))
    row_key = mix(state ^ ((head_index >> 32) & _M32))
    column_key = mix(row_key ^ 0x9E3779B9)
    rows = mix(torch.arange(seqlen_q, device=head_index.device) ^ row_key[..., None])
    columns = mix(torch.arange(seqlen_k, device=head_index.device) ^ column_key[..., None])
    kept: Tensor = mix(rows[..., :, None] ^ columns[..., None, :]) >= int(dropout_p * 2**32)
    return kept
