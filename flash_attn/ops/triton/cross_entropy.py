"""Cross entropy with label smoothing and z-loss, over a vocabulary that may be split between processes.

    lse   = logsumexp(logit_scale * logits)
    loss  = lse - (1 - s) * logit_scale * logits[label] - s * mean(logit_scale * logits) + z_loss
    z_loss = lse_square_scale * lse ** 2

float16, bfloat16 and float32 logits on a GPU run Triton kernels that read each logit once, and hold no copy of them in
float32. Others run operations of torch; so does torch.compile, which makes kernels of them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from ... import checks
from ...errors import ArgumentError, DtypeError, ShapeError
from ._kernels import kernels_of, runs_kernel

__all__ = ["CrossEntropyLoss", "cross_entropy_loss"]


def _forward_in_torch(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor | None,
    first_class: int,
    class_count: int,
    ignore_index: int,
    smoothing: float,
    logit_scale: float,
) -> tuple[Tensor, Tensor]:
    """What the kernel computes: the log-sum-exp of the columns that are here, and their part of the score."""
    scaled = logits.to(_dtype_of(logits)) * logit_scale
    if lse is None:
        lse = torch.logsumexp(scaled, dim=-1)
    place = labels - first_class
    here = (place >= 0) & (place < logits.shape[1])
    score = scaled.gather(1, place.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    score = torch.where(here, (1.0 - smoothing) * score, 0.0)
    if smoothing > 0.0:
        score = score + smoothing * scaled.sum(dim=-1) / class_count
    score = score.masked_fill((labels < 0) | (labels >= class_count), float("nan"))
    return lse, score.masked_fill(labels == ignore_index, 0.0)


def _backward_in_torch(
    logits: Tensor,
    labels: Tensor,
    lse: Tensor,
    dloss: Tensor,
    first_class: int,
    class_count: int,
    ignore_index: int,
    smoothing: float,
    logit_scale: float,
    lse_square_scale: float,
) -> Tensor:
    dlogits = torch.exp(logits.to(lse.dtype) * logit_scale - lse[:, None])
    dlogits = dlogits * (1.0 + 2.0 * lse_square_scale * lse)[:, None]
    classes = torch.arange(first_class, first_class + logits.shape[1], device=logits.device)
    dlogits = dlogits - (classes == labels[:, None]).to(lse.dtype) * (1.0 - smoothing) - smoothing / class_count
    dlogits = dlogits * (dloss * logit_scale)[:, None]
    return dlogits.masked_fill((labels == ignore_index)[:, None], 0.0).to(logits.dtype)


def _dtype_of(logits: Tensor) -> torch.dtype:
    """Of the arithmetic and the losses."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


class CrossEntropyLoss(torch.autograd.Function):
    """``apply(logits, labels, precomputed_lse, smoothing, logit_scale, lse_square_scale, ignore_index,
    inplace_backward, process_group)`` gives what :func:`cross_entropy_loss` gives."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        labels: Tensor,
        precomputed_lse: Tensor | None = None,
        smoothing: float = 0.0,
        logit_scale: float = 1.0,
        lse_square_scale: float = 0.0,
        ignore_index: int = -100,
        inplace_backward: bool = False,
        process_group: Any = None,
    ) -> tuple[Tensor, Tensor]:
        if logits.stride(-1) != 1:
            logits = logits.contiguous()
        labels = labels.contiguous()
        ranks = 1 if process_group is None else dist.get_world_size(process_group)
        rank = 0 if process_group is None else dist.get_rank(process_group)
        columns = logits.shape[1]
        place = (rank * columns, ranks * columns, ignore_index, smoothing, logit_scale)
        # Only the plain score can do without the logits' sum and scale.
        usable = precomputed_lse is not None and logit_scale == 1.0 and smoothing == 0.0
        lse = precomputed_lse.to(_dtype_of(logits)).contiguous() if usable and precomputed_lse is not None else None
        ctx.in_triton = runs_kernel(logits) and logits.numel() > 0 and not is_compiling()
        if ctx.in_triton:
            lse, score = kernels_of("_cross_entropy_kernels").forward(logits, labels, lse, *place)
        else:
            lse, score = _forward_in_torch(logits, labels, lse, *place)
        if ranks > 1:
            # Each process has the scores of its own classes, and 0 for the label's elsewhere.
            parts = [torch.empty_like(lse) for _ in range(ranks)]
            dist.all_gather(parts, lse, group=process_group)
            dist.all_reduce(score, group=process_group)
            lse = torch.logsumexp(torch.stack(parts), dim=0)
        ignored = labels == ignore_index
        z_losses = (lse_square_scale * lse.square()).masked_fill(ignored, 0.0)
        losses = (lse - score).masked_fill(ignored, 0.0) + z_losses

        ctx.save_for_backward(logits, labels, lse)
        ctx.mark_non_differentiable(z_losses)
        ctx.place = (*place, lse_square_scale)
        ctx.inplace = inplace_backward and not is_compiling()
        ctx.overwritten = False
        return losses, z_losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        if ctx.overwritten:
            raise RuntimeError("The logits are gone: inplace_backward=True has room for one backward.")
        logits, labels, lse = ctx.saved_tensors
        dlosses = grads[0]
        ctx.overwritten = ctx.inplace
        if ctx.in_triton:
            dlogits = logits if ctx.inplace else torch.empty_like(logits)
            kernels_of("_cross_entropy_kernels").backward(logits, labels, lse, dlosses, dlogits, *ctx.place)
        else:
            dlogits = _backward_in_torch(logits, labels, lse, dlosses, *ctx.place)
            if ctx.inplace:
                dlogits = logits.copy_(dlogits)
        return dlogits, None, None, None, None, None, None, None, None


def cross_entropy_loss(
    logits: Tensor,
    labels: Tensor,
    precomputed_lse: Tensor | None = None,
    label_smoothing: float = 0.0,
    logit_scale: float = 1.0,
    lse_square_scale: float = 0.0,
    ignore_index: int = -100,
    inplace_backward: bool = False,
    process_group: Any = None,
) -> tuple[Tensor, Tensor]:
    """The loss of each row.

    Args:
        logits: (M, N), floating point.
        labels: (M,), int64 or int32, classes in [0, N) or ``ignore_index``; others give NaN.
        precomputed_lse: float32 (M,), the log-sum-exp of the rows, if it is known; not used with ``label_smoothing`` or
            ``logit_scale``.
        label_smoothing: s above: this share of the label's weight goes to all classes alike.
        logit_scale: a factor of the logits.
        lse_square_scale: that of the z-loss (PaLM, Chowdhery et al. 2022), which is part of the loss.
        ignore_index: rows of this label have loss 0, and no gradient.
        inplace_backward: the backward writes the gradient to the logits' memory; nothing else may need them then, and
            there can be only one. Where the logits are copied, for their strides or by torch.compile, to the copy.
        process_group: of torch.distributed: each of its processes has the N columns ``rank * N`` and up of a larger
            vocabulary, and the same labels. The results are those of all columns, in every process; each gets the
            gradient of its own.

    Returns:
        losses and the z-losses in them, which have no gradient of their own; both float32 (M,) (float64 for float64).

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: a ``ValueError`` naming the argument and what was found.
        ImportError: on a GPU, where Triton is not installed.
    """
    checks.tensor_of("logits", logits)
    if logits.dim() != 2 or logits.shape[1] == 0 or not logits.dtype.is_floating_point:
        raise ShapeError(
            f"logits must be floating point (M, N) with N > 0, got {logits.dtype} of shape {checks.sizes(logits)}."
        )
    for name, x in (("labels", labels), ("precomputed_lse", precomputed_lse)):
        if x is None and name != "labels":
            continue
        checks.same_device(name, checks.tensor_of(name, x), logits, "logits")
        if x is not None and x.shape != logits.shape[:1]:
            raise ShapeError(f"{name} must have shape {tuple(logits.shape[:1])}, got {checks.sizes(x)}.")
    if labels.dtype not in (torch.int64, torch.int32):
        raise DtypeError(f"labels must be torch.int64 or torch.int32, got {labels.dtype}.")
    for name, number in (("logit_scale", logit_scale), ("lse_square_scale", lse_square_scale)):
        if isinstance(number, Tensor):
            raise ArgumentError(f"{name} must be a number, got a tensor, to which no gradient would flow.")
        checks.number_of(name, number)
    if not isinstance(ignore_index, (int, torch.SymInt)):
        raise ArgumentError(f"ignore_index must be an integer, got {ignore_index!r}.")
    if not 0.0 <= checks.number_of("label_smoothing", label_smoothing) <= 1.0:
        raise ArgumentError(f"label_smoothing must be in [0, 1], got {label_smoothing}.")
    results: tuple[Tensor, Tensor] = CrossEntropyLoss.apply(  # type: ignore[no-untyped-call]
        logits,
        labels,
        precomputed_lse,
        label_smoothing,
        logit_scale,
        lse_square_scale,
        ignore_index,
        inplace_backward,
        process_group,
    )
    return results
