"""Layer and RMS norm of the sum of a residual stream and its new part, in one pass over memory each way.

A program works on BLOCK_M whole rows at once, BLOCK_N columns being the row's length rounded up to a power of two, so
that each element is read once. The arithmetic is in float32. A pointer that is None is a feature that is not used:
Triton compiles a variant for each combination.

Dropout's random bits are Philox's, of (seed; column, row, which of x and x1): the backward computes them again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["Sums", "backward", "forward"]

# Elements of a program's tile, if rows are short, and of each of its warps.
FORWARD_TILE = 2048
BACKWARD_TILE = 4096
WARP = 512
# Programs of the backward for each multiprocessor. More of them hide more latency and write more partial sums.
PROGRAMS = 4
# Iterations of the backward's loop whose loads are under way at once.
STAGES = 2


@triton.jit
def _load(pointer, stride, rows, columns, mask):
    """A tile in float32."""
    tile = pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(tile, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, stride, rows, columns, mask, value):
    tl.store(pointer + rows.to(tl.int64)[:, None] * stride + columns[None, :], value, mask=mask)


@triton.jit
def _load_weight(pointer, columns, limit, ZERO_CENTERED: tl.constexpr):
    weight = tl.load(pointer + columns, mask=columns < limit, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        weight += 1.0
    return weight[None, :]


@triton.jit
def _keeps(seed, rows, columns, which, dropout_p):
    """Whether dropout keeps an element: 24 random bits make a number in [0, 1)."""
    zero = rows[:, None] * 0 + columns[None, :] * 0
    bits, _, _, _ = tl.philox(seed, zero + columns[None, :], zero + rows[:, None], zero + which, zero, 7)
    return (bits >> 8).to(tl.float32) * (1.0 / 16777216.0) >= dropout_p


@triton.jit
def _forward_kernel(
    x_pointer, residual_pointer, x1_pointer, rowscale_pointer, seed_pointer,
    weight_pointer, bias_pointer, weight1_pointer, bias1_pointer,
    y_pointer, y1_pointer, sum_pointer, mean_pointer, rstd_pointer, kept_pointer, kept1_pointer,
    stride_x, stride_residual, stride_x1, stride_y, stride_y1, stride_sum,
    row_count, column_count, eps, dropout_p,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_N)
    in_rows = rows < row_count
    mask = in_rows[:, None] & (columns < column_count)[None, :]

    x = _load(x_pointer, stride_x, rows, columns, mask)
    if rowscale_pointer is not None:
        x *= tl.load(rowscale_pointer + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
        keeps = _keeps(seed, rows, columns, 0, dropout_p)
        x = tl.where(keeps, x / (1.0 - dropout_p), 0.0)
        if kept_pointer is not None:
            _store(kept_pointer, column_count, rows, columns, mask, keeps)
    if x1_pointer is not None:
        x1 = _load(x1_pointer, stride_x1, rows, columns, mask)
        if seed_pointer is not None:
            keeps = _keeps(seed, rows, columns, 1, dropout_p)
            x1 = tl.where(keeps, x1 / (1.0 - dropout_p), 0.0)
            if kept1_pointer is not None:
                _store(kept1_pointer, column_count, rows, columns, mask, keeps)
        x += x1
    if residual_pointer is not None:
        x += _load(residual_pointer, stride_residual, rows, columns, mask)
    if sum_pointer is not None:
        _store(sum_pointer, stride_sum, rows, columns, mask, x)

    if RMS:
        centered = x
    else:
        mean = tl.sum(x, axis=1) / column_count
        tl.store(mean_pointer + rows, mean, mask=in_rows)
        centered = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(centered * centered, axis=1) / column_count + eps)
    tl.store(rstd_pointer + rows, rstd, mask=in_rows)
    normal = centered * rstd[:, None]

    y = normal * _load_weight(weight_pointer, columns, column_count, ZERO_CENTERED)
    if bias_pointer is not None:
        y += _load_weight(bias_pointer, columns, column_count, False)
    _store(y_pointer, stride_y, rows, columns, mask, y)
    if weight1_pointer is not None:
        y1 = normal * _load_weight(weight1_pointer, columns, column_count, ZERO_CENTERED)
        if bias1_pointer is not None:
            y1 += _load_weight(bias1_pointer, columns, column_count, False)
        _store(y1_pointer, stride_y1, rows, columns, mask, y1)


@triton.jit
def _backward_kernel(
    sum_pointer, mean_pointer, rstd_pointer, dy_pointer, dy1_pointer, dsum_pointer, rowscale_pointer, seed_pointer,
    weight_pointer, weight1_pointer,
    dx_pointer, dx1_pointer, dresidual_pointer, dweight_pointer, dbias_pointer, dweight1_pointer, dbias1_pointer,
    stride_sum, stride_dy, stride_dy1, stride_dsum, stride_dx, stride_dx1, stride_dresidual,
    row_count, column_count, dropout_p,
    RMS: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Each program takes every n-th block of rows, and writes its own sum of the weights' gradients."""
    columns = tl.arange(0, BLOCK_N)
    weight = _load_weight(weight_pointer, columns, column_count, ZERO_CENTERED)
    dweight = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if dbias_pointer is not None:
        dbias = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if dy1_pointer is not None:
        weight1 = _load_weight(weight1_pointer, columns, column_count, ZERO_CENTERED)
        dweight1 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        if dbias1_pointer is not None:
            dbias1 = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)

    for block in tl.range(tl.program_id(0), tl.cdiv(row_count, BLOCK_M), tl.num_programs(0), num_stages=STAGES):
        rows = block * BLOCK_M + tl.arange(0, BLOCK_M)
        in_rows = rows < row_count
        mask = in_rows[:, None] & (columns < column_count)[None, :]
        x = _load(sum_pointer, stride_sum, rows, columns, mask)
        dy = _load(dy_pointer, stride_dy, rows, columns, mask)
        rstd = tl.load(rstd_pointer + rows, mask=in_rows, other=0.0)[:, None]
        if RMS:
            normal = x * rstd
        else:
            mean = tl.load(mean_pointer + rows, mask=in_rows, other=0.0)[:, None]
            normal = tl.where(mask, (x - mean) * rstd, 0.0)

        dnormal = dy * weight
        dweight += dy * normal
        if dbias_pointer is not None:
            dbias += dy
        if dy1_pointer is not None:
            dy1 = _load(dy1_pointer, stride_dy1, rows, columns, mask)
            dnormal += dy1 * weight1
            dweight1 += dy1 * normal
            if dbias1_pointer is not None:
                dbias1 += dy1

        # The part of the gradient along the normalized row, and along (1, ..., 1), is what dividing and centring take.
        along = tl.sum(dnormal * normal, axis=1)[:, None] / column_count
        dx = dnormal - normal * along
        if not RMS:
            dx -= tl.sum(dnormal, axis=1)[:, None] / column_count
        dx *= rstd
        if dsum_pointer is not None:
            dx += _load(dsum_pointer, stride_dsum, rows, columns, mask)
        if dresidual_pointer is not None:
            _store(dresidual_pointer, stride_dresidual, rows, columns, mask, dx)
        if dx1_pointer is not None:
            dx1 = dx
            if seed_pointer is not None:
                dx1 = tl.where(_keeps(seed, rows, columns, 1, dropout_p), dx / (1.0 - dropout_p), 0.0)
            _store(dx1_pointer, stride_dx1, rows, columns, mask, dx1)
        if seed_pointer is not None:
            dx = tl.where(_keeps(seed, rows, columns, 0, dropout_p), dx / (1.0 - dropout_p), 0.0)
        if rowscale_pointer is not None:
            dx *= tl.load(rowscale_pointer + rows, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        _store(dx_pointer, stride_dx, rows, columns, mask, dx)

    offset = tl.program_id(0) * column_count + columns
    tl.store(dweight_pointer + offset, tl.sum(dweight, axis=0), mask=columns < column_count)
    if dbias_pointer is not None:
        tl.store(dbias_pointer + offset, tl.sum(dbias, axis=0), mask=columns < column_count)
    if dy1_pointer is not None:
        tl.store(dweight1_pointer + offset, tl.sum(dweight1, axis=0), mask=columns < column_count)
        if dbias1_pointer is not None:
            tl.store(dbias1_pointer + offset, tl.sum(dbias1, axis=0), mask=columns < column_count)


@dataclass(frozen=True)
class Sums:
    """What the forward leaves for the backward: of each row, in float32."""

    mean: Tensor | None
    rstd: Tensor
    seed: Tensor | None


def _tile(columns: int, elements: int) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_N and warps."""
    width = triton.next_power_of_2(columns)
    height = max(1, elements // width)
    return height, width, min(32, max(4, height * width // WARP))


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)


def forward(
    x: Tensor, residual: Tensor | None, x1: Tensor | None, rowscale: Tensor | None,
    weight: Tensor, bias: Tensor | None, weight1: Tensor | None, bias1: Tensor | None,
    y: Tensor, y1: Tensor | None, total: Tensor | None, kept: Tensor | None, kept1: Tensor | None,
    eps: float, dropout_p: float, rms: bool, zero_centered: bool,
) -> Sums:  # fmt: skip
    """Write y, y1, the sum and the masks, of which all but y may be None.

    Tensors of elements are (M, N) with a contiguous last dimension, the masks contiguous; rowscale is contiguous (M,),
    weights and biases contiguous (N,).
    """
    rows, columns = x.shape
    mean = None if rms else torch.empty(rows, dtype=torch.float32, device=x.device)
    rstd = torch.empty(rows, dtype=torch.float32, device=x.device)
    # Of torch's generator of the device, and read by the kernel: this holds under graph capture too.
    seed = torch.randint(2**62, (1,), device=x.device) if dropout_p > 0.0 else None
    height, width, warps = _tile(columns, FORWARD_TILE)
    with torch.cuda.device_of(x):
        _forward_kernel[(triton.cdiv(rows, height),)](
            x, residual, x1, rowscale, seed, weight, bias, weight1, bias1, y, y1, total, mean, rstd, kept, kept1,
            x.stride(0), _stride(residual), _stride(x1), y.stride(0), _stride(y1), _stride(total),
            rows, columns, eps, dropout_p,
            RMS=rms, ZERO_CENTERED=zero_centered, BLOCK_M=height, BLOCK_N=width, num_warps=warps,
        )  # fmt: skip
    return Sums(mean, rstd, seed)


def backward(
    total: Tensor, sums: Sums, dy: Tensor, dy1: Tensor | None, dtotal: Tensor | None, rowscale: Tensor | None,
    weight: Tensor, weight1: Tensor | None, bias: Tensor | None, bias1: Tensor | None,
    dx: Tensor, dx1: Tensor | None, dresidual: Tensor | None,
    dropout_p: float, rms: bool, zero_centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """Write dx, dx1 and dresidual, and return the gradients of weight, bias, weight1 and bias1, in their dtypes."""
    rows, columns = total.shape
    height, width, warps = _tile(columns, BACKWARD_TILE)
    cores = torch.cuda.get_device_properties(total.device).multi_processor_count if total.is_cuda else 1
    programs = min(PROGRAMS * cores, triton.cdiv(rows, height))

    def partial(parameter: Tensor | None) -> Tensor | None:
        return None if parameter is None else total.new_empty((programs, columns), dtype=torch.float32)

    parameters = (weight, bias, weight1, bias1)
    dweight, dbias, dweight1, dbias1 = partials = tuple(map(partial, parameters))
    with torch.cuda.device_of(total):
        _backward_kernel[(programs,)](
            total, sums.mean, sums.rstd, dy, dy1, dtotal, rowscale, sums.seed, weight, weight1,
            dx, dx1, dresidual, dweight, dbias, dweight1, dbias1,
            total.stride(0), dy.stride(0), _stride(dy1), _stride(dtotal),
            dx.stride(0), _stride(dx1), _stride(dresidual),
            rows, columns, dropout_p,
            RMS=rms, ZERO_CENTERED=zero_centered, BLOCK_M=height, BLOCK_N=width, STAGES=STAGES, num_warps=warps,
        )  # fmt: skip
    return tuple(  # type: ignore[return-value]
        None if parameter is None or part is None else part.sum(0).to(parameter.dtype)
        for parameter, part in zip(parameters, partials, strict=True)
    )
