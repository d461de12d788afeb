"""The cross entropy of each row of logits: one pass for the loss, one for the gradient, which may overwrite the logits.

A program of the forward has a row and keeps the maximum and the sum of exponentials of what it has read so far. The
gradient needs no reduction: a program has a piece of a row. The arithmetic is in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["backward", "forward"]

# Columns of a program at once, and of each of its warps.
FORWARD_BLOCK, FORWARD_WARP = 8192, 1024
BACKWARD_BLOCK, BACKWARD_WARP = 2048, 512


@triton.jit
def _forward_kernel(
    logits_pointer, labels_pointer, lse_pointer, score_pointer,
    stride, column_count, first_class, class_count, ignore_index, smoothing, logit_scale,
    HAS_LSE: tl.constexpr, SMOOTHS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The log-sum-exp of a row, and the score that the loss subtracts from it."""
    row = tl.program_id(0).to(tl.int64)
    logits_pointer += row * stride
    label = tl.load(labels_pointer + row)
    if not HAS_LSE:
        maximum = -float("inf")
        total = 0.0
        logits_sum = 0.0
        for start in range(0, column_count, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns < column_count
            logits = tl.load(logits_pointer + columns, mask=mask, other=-float("inf")).to(tl.float32) * logit_scale
            if SMOOTHS:
                logits_sum += tl.sum(tl.where(mask, logits, 0.0), axis=0)
            larger = tl.maximum(maximum, tl.max(logits, axis=0))
            # A row may begin with -inf, of which a difference is NaN.
            origin = tl.where(larger == -float("inf"), 0.0, larger)
            total = total * tl.exp(maximum - origin) + tl.sum(tl.exp(logits - origin), axis=0)
            maximum = larger
        tl.store(lse_pointer + row, maximum + tl.log(total))

    score = 0.0
    if label != ignore_index:
        place = label - first_class
        if (place >= 0) & (place < column_count):
            score = (1.0 - smoothing) * tl.load(logits_pointer + place).to(tl.float32) * logit_scale
        if SMOOTHS:
            score += smoothing * logits_sum / class_count
        if (label < 0) | (label >= class_count):
            score = float("nan")
    tl.store(score_pointer + row, score)


@triton.jit
def _backward_kernel(
    logits_pointer, labels_pointer, lse_pointer, dloss_pointer, dlogits_pointer,
    stride, stride_dloss, stride_dlogits, column_count, first_class, class_count, ignore_index,
    smoothing, logit_scale, lse_square_scale,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < column_count
    label = tl.load(labels_pointer + row)
    if label == ignore_index:
        tl.store(dlogits_pointer + row * stride_dlogits + columns, tl.zeros([BLOCK], tl.float32), mask=mask)
    else:
        logits = tl.load(logits_pointer + row * stride + columns, mask=mask, other=-float("inf")).to(tl.float32)
        lse = tl.load(lse_pointer + row)
        dloss = tl.load(dloss_pointer + row * stride_dloss) * logit_scale
        dlogits = tl.exp(logits * logit_scale - lse) * (1.0 + 2.0 * lse_square_scale * lse)
        dlogits -= tl.where(columns == label - first_class, 1.0 - smoothing, 0.0) + smoothing / class_count
        tl.store(dlogits_pointer + row * stride_dlogits + columns, dlogits * dloss, mask=mask)


def _block(columns: int, most: int, of_warp: int) -> tuple[int, int]:
    """Columns of a block, and warps for them."""
    block = min(triton.next_power_of_2(columns), most)
    return block, max(4, block // of_warp)


def forward(
    logits: Tensor, labels: Tensor, lse: Tensor | None, first_class: int, class_count: int, ignore_index: int,
    smoothing: float, logit_scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(lse, score), float32 (M,); the lse that is given is taken as it is.

    logits is (M, N) with a contiguous last dimension, the columns from ``first_class`` on of ``class_count`` classes.
    """
    rows, columns = logits.shape
    score = logits.new_empty(rows, dtype=torch.float32)
    block, warps = _block(columns, FORWARD_BLOCK, FORWARD_WARP)
    result = torch.empty_like(score) if lse is None else lse
    with torch.cuda.device_of(logits):
        _forward_kernel[(rows,)](
            logits, labels, result, score, logits.stride(0), columns, first_class, class_count, ignore_index,
            smoothing, logit_scale, HAS_LSE=lse is not None, SMOOTHS=smoothing > 0.0, BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return result, score


def backward(
    logits: Tensor, labels: Tensor, lse: Tensor, dloss: Tensor, dlogits: Tensor, first_class: int, class_count: int,
    ignore_index: int, smoothing: float, logit_scale: float, lse_square_scale: float,
) -> None:  # fmt: skip
    """Write dlogits, which may be the logits."""
    rows, columns = logits.shape
    block, warps = _block(columns, BACKWARD_BLOCK, BACKWARD_WARP)
    with torch.cuda.device_of(logits):
        _backward_kernel[(rows, triton.cdiv(columns, block))](
            logits, labels, lse, dloss, dlogits, logits.stride(0), dloss.stride(0), dlogits.stride(0), columns,
            first_class, class_count, ignore_index, smoothing, logit_scale, lse_square_scale,
            BLOCK=block, num_warps=warps,
        )  # fmt: skip
