"""Embeddings of tokens and of their positions."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ShapeError

__all__ = ["GPT2Embeddings"]


class GPT2Embeddings(nn.Module):
    """Word and position embeddings, added: (B, S) -> (B, S, embed_dim).

    Args:
        vocab_size: words.
        max_position_embeddings: positions; none at all if it is 0 or less.
        padding_idx: a word whose embedding is not trained.
        word_embed_proj_dim: words have embeddings of this size, and a projection to embed_dim (OPT-350m).
    """

    def __init__(
        self,
        embed_dim: int,
        vocab_size: int,
        max_position_embeddings: int,
        padding_idx: int | None = None,
        word_embed_proj_dim: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        size = embed_dim if word_embed_proj_dim is None else word_embed_proj_dim
        self.word_embeddings = nn.Embedding(vocab_size, size, padding_idx=padding_idx, device=device, dtype=dtype)
        self.project_in = (
            None if word_embed_proj_dim is None else nn.Linear(size, embed_dim, bias=False, device=device, dtype=dtype)
        )
        self.max_position_embeddings = max_position_embeddings
        if max_position_embeddings > 0:
            self.position_embeddings = nn.Embedding(max_position_embeddings, embed_dim, device=device, dtype=dtype)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """``position_ids`` (B, S) or (S,); 0, 1, ... if None."""
        embeddings: Tensor = self.word_embeddings(input_ids)
        if self.project_in is not None:
            embeddings = self.project_in(embeddings)
        if self.max_position_embeddings > 0:
            if position_ids is None:
                if input_ids.shape[1] > self.max_position_embeddings:
                    raise ShapeError(
                        f"input_ids must have at most max_position_embeddings tokens, {self.max_position_embeddings}, "
                        f"got {input_ids.shape[1]}."
                    )
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
            embeddings = embeddings + self.position_embeddings(position_ids)
        return embeddings
