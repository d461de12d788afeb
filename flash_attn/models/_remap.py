"""What the translations of checkpoints share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

__all__ = ["padded_vocab", "padded_words", "renamed"]


def renamed(state_dict: Mapping[str, Tensor], patterns: Iterable[tuple[str, str]]) -> dict[str, Tensor]:
    """With the first pattern, of the whole key, that fits each key; keys that none fits stay."""
    compiled = [(re.compile(pattern), replacement) for pattern, replacement in patterns]

    def name(key: str) -> str:
        for pattern, replacement in compiled:
            if match := pattern.fullmatch(key):
                return match.expand(replacement)
        return key

    return {name(key): value for key, value in state_dict.items()}


def padded_vocab(words: int, config: Any) -> int:
    """The size of a vocabulary rounded up to the multiple that the configuration asks for."""
    multiple = getattr(config, "pad_vocab_size_multiple", 1)
    return int(-(-words // multiple) * multiple)


def padded_words(weight: Tensor, config: Any) -> Tensor:
    """A word embedding (words, N) with rows of zeros up to the size that the model has."""
    return F.pad(weight, (0, 0, 0, padded_vocab(weight.shape[0], config) - weight.shape[0]))
