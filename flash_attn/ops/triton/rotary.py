"""Rotary embedding without a gradient, by the name that callers of the kernel itself import.

:mod:`flash_attn.layers.rotary` has it with one. The kernel is CUDA C++ here, in spite of this module's name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ... import checks
from ...layers.rotary import Offsets, Rotation

__all__ = ["apply_rotary"]


@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """Rotate the first rotary_dim columns of ``x``; the other way round with ``conjugate``, which is the gradient.

    Args:
        x: (B, S, H, D), or packed (T, H, D) with cu_seqlens.
        cos, sin, seqlen_offsets, cu_seqlens, max_seqlen, interleaved, inplace: as in
            :func:`flash_attn.layers.rotary.apply_rotary_emb`.

    Returns:
        A tensor like ``x``, or ``x`` with ``inplace``.
    """
    checks.tensor_of("x", x)
    rotation = Rotation(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
    rotation.to(x, out, conjugate)
    return out
