"""The cross entropy loss as a module; :mod:`flash_attn.ops.triton.cross_entropy` computes it."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..errors import ArgumentError
from ..ops.triton.cross_entropy import cross_entropy_loss

__all__ = ["CrossEntropyLoss"]

_REDUCTIONS = ("mean", "sum", "none")


class CrossEntropyLoss(nn.Module):
    """Cross entropy of logits (M, N) and labels (M,): the losses of
    :func:`flash_attn.ops.triton.cross_entropy.cross_entropy_loss`, reduced.

    Args:
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        return_z_loss: also return the z-loss, which is in the loss already and has no gradient: for logs.
        ignore_index, label_smoothing, logit_scale, lse_square_scale, inplace_backward, process_group: as there.
    """

    def __init__(
        self,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        inplace_backward: bool = False,
        process_group: Any = None,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if reduction not in _REDUCTIONS:
            raise ArgumentError(f"reduction must be one of {_REDUCTIONS}, got {reduction!r}.")
        self.ignore_index = ignore_index
        self.reduction = reduction
        self.label_smoothing = label_smoothing
        self.logit_scale = logit_scale
        self.lse_square_scale = lse_square_scale
        self.inplace_backward = inplace_backward
        self.process_group = process_group
        self.return_z_loss = return_z_loss

    def forward(
        self, input: Tensor, target: Tensor, precomputed_lse: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The loss in float32, a scalar or (M,); with ``return_z_loss`` (loss, z_loss), reduced alike."""
        losses, z_losses = cross_entropy_loss(
            input,
            target,
            precomputed_lse,
            self.label_smoothing,
            self.logit_scale,
            self.lse_square_scale,
            self.ignore_index,
            self.inplace_backward,
            self.process_group,
        )

        def reduced(values: Tensor) -> Tensor:
            if self.reduction == "none":
                return values
            total = values.sum()
            return total if self.reduction == "sum" else total / (target != self.ignore_index).sum()

        return (reduced(losses), reduced(z_losses)) if self.return_z_loss else reduced(losses)
