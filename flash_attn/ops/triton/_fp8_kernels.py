"""Rotating and rounding to FP8, in one pass over memory each for means, the largest magnitudes and the rounded numbers.

A program works on BLOCK_M rows of one head, padded with zeros to OUT columns. The rotation is a sign for each column
and a fast Walsh-Hadamard transform, in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...fp8 import factors_of

__all__ = ["means", "rounded"]

_LARGEST = tl.constexpr(448.0)
_PARTS = 16  # of a sequence's rows, for its mean, at most; fewer where it has not so many tiles


@triton.jit
def _load_rows(
    x_pointer, mean_pointer, sequence_pointer, rows, columns, batch, head, row_count, column_count, heads,
    stride_batch, stride_row, stride_head, stride_column,
):  # fmt: skip
    """A tile in float32, less the means of its sequences."""
    mask = (rows < row_count)[:, None] & (columns < column_count)[None, :]
    place = rows.to(tl.int64)[:, None] * stride_row + columns[None, :] * stride_column
    x_pointer += batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    x = tl.load(x_pointer + place, mask=mask, other=0.0).to(tl.float32)
    if mean_pointer is not None:
        mean_pointer += head * column_count
        if sequence_pointer is not None:
            sequence = tl.load(sequence_pointer + rows, mask=rows < row_count, other=0)
            place = sequence[:, None] * (heads * column_count) + columns[None, :]
            mean = tl.load(mean_pointer + place, mask=mask, other=0.0)
        else:
            place = batch.to(tl.int64) * (heads * column_count) + columns
            mean = tl.load(mean_pointer + place, mask=columns < column_count, other=0.0)[None, :]
        x = tl.where(mask, x - mean, 0.0)
    return x


@triton.jit
def _sums_kernel(
    x_pointer, used_pointer, bounds_pointer, sums_pointer, counts_pointer,
    stride_batch, stride_row, stride_head, stride_column,
    row_count, column_count, heads, parts, PARTS: tl.constexpr, BLOCK_M: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    sequence, part, head = tl.program_id(0) // parts, tl.program_id(0) % parts, tl.program_id(1)
    columns = tl.arange(0, OUT)
    if bounds_pointer is not None:
        slab = sequence * 0
        first = tl.load(bounds_pointer + sequence)
        last = tl.minimum(tl.load(bounds_pointer + sequence + 1), row_count)
    else:
        slab = sequence
        first = sequence * 0
        last = first + row_count
    of_part = tl.maximum(tl.cdiv(tl.maximum(last - first, 0), PARTS), BLOCK_M)
    begin = first + part * of_part
    end = tl.minimum(begin + of_part, last)
    total = tl.zeros((BLOCK_M, OUT), dtype=tl.float32)
    count = tl.zeros((BLOCK_M,), dtype=tl.int32)
    for start in range(begin, end, BLOCK_M):
        rows = start + tl.arange(0, BLOCK_M)
        counted = rows < end
        if used_pointer is not None:
            used = tl.load(used_pointer + slab.to(tl.int64) * row_count + rows, mask=counted, other=0)
            counted = counted & (used != 0)
        mask = counted[:, None] & (columns < column_count)[None, :]
        place = rows.to(tl.int64)[:, None] * stride_row + columns[None, :] * stride_column
        place += slab.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
        total += tl.load(x_pointer + place, mask=mask, other=0.0).to(tl.float32)
        count += counted.to(tl.int32)
    number = tl.program_id(0).to(tl.int64) * heads + head
    tl.store(sums_pointer + number * column_count + columns, tl.sum(total, 0), mask=columns < column_count)
    tl.store(counts_pointer + number, tl.sum(count, 0))


@triton.jit
def _means_kernel(
    sums_pointer, counts_pointer, mean_pointer, column_count, heads, parts, PARTS: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, OUT)
    mask = columns < column_count
    # PARTS of them, however many there are: so the order of the sum is that of the sequence alone.
    part = tl.arange(0, PARTS)
    number = (sequence * parts + part) * heads + head
    there = (part < parts)[:, None] & mask[None, :]
    sums = tl.load(sums_pointer + number[:, None] * column_count + columns[None, :], mask=there, other=0.0)
    count = tl.maximum(tl.sum(tl.load(counts_pointer + number, mask=part < parts, other=0), 0), 1)
    mean = tl.sum(sums, 0) / count.to(tl.float32)
    tl.store(mean_pointer + (sequence * heads + head) * column_count + columns, mean, mask=mask)


@triton.jit
def _hadamard(x, BLOCK_M: tl.constexpr, OUT: tl.constexpr):
    """Each row times the Hadamard matrix. A step treats the lowest bit of the columns, which becomes the highest."""
    steps: tl.constexpr = 6 + (OUT > 64) + (OUT > 128)
    for _ in tl.static_range(steps):
        even, odd = tl.split(tl.reshape(x, (BLOCK_M, OUT // 2, 2)))
        x = tl.reshape(tl.permute(tl.join(even + odd, even - odd), (0, 2, 1)), (BLOCK_M, OUT))
    return x


@triton.jit
def _signs(columns, key, column_count):
    """1 or -1 by flash_attn.dropout's hash of the column's number and the key; 0 for columns of padding."""
    x = (columns ^ key).to(tl.uint32)
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return tl.where(columns < column_count, 1.0 - 2.0 * (x & 1).to(tl.float32), 0.0)[None, :]


@triton.jit
def _nearest(x):
    """The nearest number of e4m3, ties to even, in float32: three bits of mantissa, or multiples of 2^-9; NaN stays."""
    x = tl.maximum(x, -_LARGEST, propagate_nan=tl.PropagateNan.ALL)
    x = tl.minimum(x, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000).to(tl.float32, bitcast=True)
    # The sum is for NaN too, whose bits are no number to round.
    return tl.where(tl.abs(x) >= 0.015625, normal, (x + 24576.0) - 24576.0)


@triton.jit
def _largest_kernel(
    x_pointer, mean_pointer, sequence_pointer, used_pointer, number_pointer, largest_pointer,
    stride_batch, stride_row, stride_head, stride_column,
    tiles, row_count, column_count, heads, numbers, descale_rows, factor_heads, group, key, scale,
    ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0) // tiles, tl.program_id(1)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, OUT)
    counted = rows < row_count
    if used_pointer is not None:
        used = tl.load(used_pointer + batch.to(tl.int64) * row_count + rows, mask=counted, other=0)
        counted = counted & (used != 0)
    x = _load_rows(
        x_pointer, mean_pointer, sequence_pointer, rows, columns, batch, head, row_count, column_count, heads,
        stride_batch, stride_row, stride_head, stride_column,
    )  # fmt: skip
    if ROTATE:
        x = _hadamard(x * _signs(columns, key, column_count), BLOCK_M, OUT) * scale
    of_row = tl.where(counted, tl.max(tl.abs(x), 1), 0.0)
    largest_pointer += batch.to(tl.int64) * numbers * factor_heads + head // group
    if number_pointer is not None:
        number = tl.load(number_pointer + rows, mask=counted, other=0)
        tl.atomic_max(largest_pointer + number * factor_heads, of_row, mask=counted)
    else:
        number = tl.program_id(0) % tiles * BLOCK_M // descale_rows
        tl.atomic_max(largest_pointer + number * factor_heads, tl.max(of_row, 0))


@triton.jit
def _round_kernel(
    x_pointer, mean_pointer, sequence_pointer, number_pointer, descale_pointer, out_pointer,
    stride_batch, stride_row, stride_head, stride_column,
    tiles, row_count, column_count, heads, numbers, descale_rows, factor_heads, group, key, scale, outlier, share,
    ROTATE: tl.constexpr, BLOCK_M: tl.constexpr, OUT: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(0) // tiles, tl.program_id(1)
    rows = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.arange(0, OUT)
    x = _load_rows(
        x_pointer, mean_pointer, sequence_pointer, rows, columns, batch, head, row_count, column_count, heads,
        stride_batch, stride_row, stride_head, stride_column,
    )  # fmt: skip
    descale_pointer += batch.to(tl.int64) * numbers * factor_heads + head // group
    if number_pointer is not None:
        number = tl.load(number_pointer + rows, mask=rows < row_count, other=0)  # one beyond all for rows of none
        descale = tl.load(descale_pointer + number * factor_heads)[:, None]
    else:
        number = tl.program_id(0) % tiles * BLOCK_M // descale_rows
        descale = tl.load(descale_pointer + number * factor_heads)
    width = column_count
    if ROTATE:
        width = OUT
        signs = _signs(columns, key, column_count)
        squares = x * x
        is_outlier = squares > outlier * (tl.sum(squares, 1) / column_count)[:, None]
        target = x
        rounded = _nearest(_hadamard(x * signs, BLOCK_M, OUT) * scale / descale)
        for _ in tl.static_range(2):
            # Zero signs keep the error out of the columns of padding.
            error = x - _hadamard(rounded, BLOCK_M, OUT) * signs * (descale * scale)
            target = tl.where(is_outlier, target + share * error, target)
            rounded = _nearest(_hadamard(target * signs, BLOCK_M, OUT) * scale / descale)
    else:
        rounded = _nearest(x / descale)
    row = (batch.to(tl.int64) * row_count + rows.to(tl.int64)) * heads + head
    mask = (rows < row_count)[:, None] & (columns < width)[None, :]
    tl.store(out_pointer + row[:, None] * width + columns[None, :], rounded.to(tl.float8e4nv), mask=mask)


def means(x: Tensor, used: Tensor | None, cu_seqlens: Tensor | None, longest: int) -> Tensor:
    """float32 (B, H, D): the mean of each sequence's rows of ``x`` (B, S, H, D), or packed (1, T, H, D).

    ``used``: bool (B, S) or (T), rows that count; ``longest``: rows of a sequence, at most. Sums are in an order that
    is a sequence's own.
    """
    batch = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    rows, heads, head_dim = x.shape[1:]
    columns = triton.next_power_of_2(head_dim)
    block_m = max(1, 8192 // columns)
    parts = max(1, min(_PARTS, triton.cdiv(longest, block_m)))
    sums = torch.empty(batch, parts, heads, head_dim, dtype=torch.float32, device=x.device)
    counts = torch.empty(batch, parts, heads, dtype=torch.int32, device=x.device)
    found = torch.empty(batch, heads, head_dim, dtype=torch.float32, device=x.device)
    bounds = None if cu_seqlens is None else cu_seqlens.contiguous()
    if batch > 0:
        _sums_kernel[(batch * parts, heads)](
            x, used, bounds, sums, counts, *x.stride(), rows, head_dim, heads, parts,
            PARTS=_PARTS, BLOCK_M=block_m, OUT=columns, num_warps=8,
        )  # fmt: skip
        _means_kernel[(batch, heads)](sums, counts, found, head_dim, heads, parts, PARTS=_PARTS, OUT=columns)
    return found


def rounded(
    x: Tensor,
    mean: Tensor | None,
    sequence: Tensor | None,
    key: int | None,
    used: Tensor | None,
    of_row: Tensor | None,
    numbers: int,
    descale_rows: int,
    factor_heads: int,
    outlier: float,
    share: float,
) -> tuple[Tensor, Tensor]:
    """(x in FP8, factors (B, numbers, factor_heads)) of ``x`` (B, S, H, D), packed with a batch of 1.

    ``mean`` (sequences, H, D) is taken off first, then ``key``'s signs and Hadamard's matrix rotate; ``sequence``: of
    packed rows, int64 (S), ``of_row``: likewise, the number of each one's factor, both one beyond all for rows of no
    sequence; of others, each ``descale_rows`` rows have a factor or, if that is 0, all; ``used``: bool (B, S), rows
    that count; ``outlier``: the square of how many times the root mean square of its row an outlier has; ``share``: of
    its error, what each of two further roundings makes up for.
    """
    batch, rows, heads, head_dim = x.shape
    columns = triton.next_power_of_2(head_dim) if key is None else max(64, triton.next_power_of_2(head_dim))
    out_dim = head_dim if key is None else columns
    out = torch.empty((batch, rows, heads, out_dim), dtype=torch.float8_e4m3fn, device=x.device)
    # One number more, for rows of none; a batch of several has none of those.
    places = numbers + 1 if batch == 1 else numbers
    largest = torch.zeros(batch, places, factor_heads, dtype=torch.float32, device=x.device)
    block_m = max(1, 8192 // columns)
    if descale_rows > 0:  # a power of two: a tile is of one block
        block_m = min(block_m, descale_rows)
    else:
        descale_rows = rows + block_m
    tiles = triton.cdiv(rows, block_m)
    constants = {"ROTATE": key is not None, "BLOCK_M": block_m, "OUT": columns, "num_warps": 8}
    key = 0 if key is None else key
    scale = out_dim**-0.5
    if mean is not None and sequence is not None:
        mean = torch.cat((mean, mean.new_zeros(1, heads, head_dim)))  # of rows of no sequence
    grid = (batch * tiles, heads)
    place = (places, descale_rows, factor_heads, heads // factor_heads)
    if x.numel() > 0:
        _largest_kernel[grid](
            x, mean, sequence, used, of_row, largest, *x.stride(), tiles, rows, head_dim, heads, *place, key, scale,
            **constants,
        )  # fmt: skip
    factors = factors_of(largest)
    if x.numel() > 0 and numbers > 0:
        _round_kernel[grid](
            x, mean, sequence, of_row, factors, out, *x.stride(), tiles, rows, head_dim, heads, *place, key, scale,
            outlier, share, **constants,
        )  # fmt: skip
    return out, factors[:, :numbers]
