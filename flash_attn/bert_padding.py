"""Padded batches into packed ones and back, for the functions of sequences of different lengths."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from .errors import ShapeError

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(input: Tensor, indices: Tensor) -> Tensor:
    """Rows ``indices`` (n,) of ``input`` (rows, ...): (n, ...). Differentiable."""
    return input.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """``values`` (n, ...) as rows ``indices`` (n,) of a tensor (first_axis_dim, ...) of zeros. Differentiable."""
    zeros = values.new_zeros((first_axis_dim, *values.shape[1:]))
    return zeros.index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch, packed.

    Args:
        hidden_states: (B, S, ...).
        attention_mask: (B, S), bool or int, 1 for tokens.
        unused_mask: (B, S), bool or int, 1 for rows that are packed too and do not count.

    Returns:
        hidden_states (T, ...), T being the rows of either mask; indices int64 (T,), their numbers among the B * S rows;
        cu_seqlens int32 (B + 1,); max_seqlen, the longest of them; seqused int32 (B,), the tokens of each sequence.

    Waits for the GPU: the number of tokens is a size.
    """
    _check_mask("attention_mask", attention_mask, hidden_states)
    packed_mask = attention_mask
    if unused_mask is not None:
        _check_mask("unused_mask", unused_mask, hidden_states)
        packed_mask = attention_mask + unused_mask
    lengths = packed_mask.sum(dim=-1, dtype=torch.int32)
    seqused = attention_mask.sum(dim=-1, dtype=torch.int32)
    indices = torch.nonzero(packed_mask.flatten()).flatten()
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_cu_seqlens(lengths), seqused)


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of a padded batch whose rows hold several sequences one after the other, packed.

    Args:
        hidden_states: (B, S, ...).
        attention_mask_in_length: (B, S), int: row b begins with the lengths of its sequences, the rest is 0.
            ``[[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]]`` are sequences of 2, 3 and 6 tokens, and one row of padding.

    Returns:
        hidden_states (T, ...), indices int64 (T,), cu_seqlens int32 (sequences + 1,) and max_seqlen.

    Waits for the GPU.
    """
    _check_mask("attention_mask_in_length", attention_mask_in_length, hidden_states)
    tokens = attention_mask_in_length.sum(dim=-1, keepdim=True)
    mask = torch.arange(attention_mask_in_length.shape[1], device=tokens.device) < tokens
    lengths = attention_mask_in_length.flatten()
    lengths = lengths[torch.nonzero(lengths).flatten()].to(torch.int32)
    indices = torch.nonzero(mask.flatten()).flatten()
    return (index_first_axis(hidden_states.flatten(0, 1), indices), indices, *_cu_seqlens(lengths))


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) whose rows ``indices`` (T,) are ``hidden_states`` (T, ...), the others
    0."""
    rows = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return rows.reshape(batch, seqlen, *rows.shape[1:])


def _cu_seqlens(lengths: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens int32 and the longest length."""
    longest = int(lengths.max()) if lengths.numel() > 0 else 0
    return pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)), longest


def _check_mask(name: str, mask: Tensor, hidden_states: Tensor) -> None:
    if mask.dim() != 2 or hidden_states.dim() < 2 or mask.shape != hidden_states.shape[:2]:
        raise ShapeError(
            f"{name} must have hidden_states' first two sizes, {tuple(hidden_states.shape[:2])}, "
            f"got {tuple(mask.shape)}."
        )
