"""Cases of the operator of rotary embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch_general_cases import halves, ints
from torch_support import ROTARY, close, raises


def tables(positions: int, half: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    angles = torch.rand(positions, half) * 6.28
    return angles.cos().to(dtype), angles.sin().to(dtype)


def turned(
    x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, conjugate: bool = False
) -> Tensor:
    """``x`` (S, H, D), each row rotated by its position where the tables have it, in float64."""
    out, half = x.double().clone(), cos.shape[1]
    for row, position in enumerate(positions.tolist()):
        if not 0 <= position < len(cos):
            continue
        c, s = cos[position].double(), sin[position].double() * (-1 if conjugate else 1)
        part = out[row, :, : 2 * half]
        a, b = (part[:, ::2], part[:, 1::2]) if interleaved else (part[:, :half], part[:, half:])
        pair = a * c - b * s, a * s + b * c
        out[row, :, : 2 * half] = torch.stack(pair, -1).flatten(1) if interleaved else torch.cat(pair, -1)
    return out


def check_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | None = None,
    offset: int = 0,
    interleaved: bool = False,
    conjugate: bool = False,
    destination: Tensor | None = None,
) -> None:
    given = torch.full(x.shape, torch.nan, dtype=x.dtype) if destination is None else destination
    positions = [torch.arange(x.shape[1]) + (offset if offsets is None else int(offsets[b])) for b in range(x.shape[0])]
    wanted = [turned(x[b], cos, sin, positions[b], interleaved, conjugate) for b in range(x.shape[0])]
    before = x.clone()
    ROTARY(x, given, cos, sin, offsets, offset, None, x.shape[1], interleaved, conjugate)
    close(given, torch.stack(wanted) if wanted else x.double(), "rotary", 4e-3, contiguous=destination is None)
    assert destination is not None or torch.equal(x, before)


def case_rotary() -> None:
    torch.manual_seed(5)
    x = halves(2, 9, 4, 64)
    for interleaved in (False, True):
        for conjugate in (False, True):
            for half in (32, 16, 10, 3, 0):  # some of them not in whole pieces of 16 bytes
                for dtype in (torch.float16, torch.float32, torch.float64):
                    check_rotary(x, *tables(12, half, dtype), interleaved=interleaved, conjugate=conjugate)


def case_rotary_positions() -> None:
    torch.manual_seed(6)
    x, table = halves(2, 9, 4, 64), tables(20, 16)
    for interleaved in (False, True):
        check_rotary(x, *table, offset=7, interleaved=interleaved)
        check_rotary(x, *table, offset=15, interleaved=interleaved)  # the last rows have no position
        check_rotary(x, *table, offset=-3, interleaved=interleaved)
        check_rotary(x, *table, offsets=ints(11, 2), interleaved=interleaved)
        check_rotary(x, *table, offsets=ints(19, 30), offset=99, interleaved=interleaved)
        check_rotary(x, *tables(0, 16), interleaved=interleaved)


def case_rotary_in_place() -> None:
    torch.manual_seed(7)
    for x in (
        halves(2, 5, 4, 64),
        halves(2, 5, 4, 36),
        halves(2, 5, 4, 70)[..., 3:67],
        halves(2, 4, 5, 64).transpose(1, 2),
    ):
        for interleaved in (False, True):
            check_rotary(x, *tables(9, 12), offset=2, interleaved=interleaved, destination=x)


def case_rotary_layouts() -> None:
    torch.manual_seed(8)
    table = tables(9, 12)
    for d in (24, 25, 31, 36, 64, 127, 256):
        check_rotary(halves(1, 5, 2, d), *table)
    x = halves(2, 5, 4, 64)
    for destination in (halves(2, 5, 4, 67)[..., 3:], halves(2, 4, 5, 64).transpose(1, 2)):
        check_rotary(x, *table, destination=destination)
    wide = halves(9, 24)
    check_rotary(x, wide[:, ::2], wide[:, 1::2])
    check_rotary(halves(1, 1, 1, 64).expand(2, 5, 4, 64), *table)
    bf16 = halves(2, 5, 4, 64).bfloat16()
    out = torch.empty_like(bf16)
    ROTARY(bf16, out, *(t.bfloat16() for t in table), None, 0, None, 5, False, False)
    wanted = [turned(y, *(t.bfloat16() for t in table), torch.arange(5), False) for y in bf16]
    close(out, torch.stack(wanted), "rotary", 4e-2)


def case_rotary_packed() -> None:
    torch.manual_seed(9)
    table, lengths = tables(20, 16), (5, 0, 7, 2)
    x, cu = halves(14, 4, 64), ints(0, 5, 5, 12, 14)
    for max_seqlen in (7, 14, 1000):
        for offsets in (None, ints(0, 1, 3, 12)):
            out = torch.full_like(x, torch.nan)
            ROTARY(x, out, *table, offsets, 4, cu, max_seqlen, True, False)
            first = [4] * 4 if offsets is None else offsets.tolist()
            positions = torch.cat([torch.arange(n) + at for n, at in zip(lengths, first, strict=True)])
            close(out, turned(x, *table, positions, True), "rotary", 4e-3)
    out = torch.full_like(x, 3.0)
    ROTARY(x, out, *table, None, 0, ints(0), 5, True, False)
    assert torch.equal(out, torch.full_like(x, 3.0))  # no sequence


def case_rotary_of_nothing() -> None:
    table = tables(9, 12)
    for shape in ((0, 5, 4, 64), (2, 0, 4, 64), (2, 5, 0, 64)):
        check_rotary(halves(*shape), *table)


def case_rotary_wrong_arguments() -> None:
    sound: dict[str, Any] = {"source": halves(2, 5, 4, 64), "destination": halves(2, 5, 4, 64)}
    sound["cos"], sound["sin"] = tables(9, 12)
    sound.update(offsets=None, offset=0, cu_seqlens=None, max_seqlen=5, interleaved=False, conjugate=False)
    source = sound["source"]

    def call(**changes: Any) -> Callable[[], object]:
        return lambda: ROTARY(*{**sound, **changes}.values())

    raises(call(source=source[0]), "source has 3 dimensions, not 4")
    raises(call(destination=source[:1]), "destination has shape (1, 5, 4, 64), expected (2, 5, 4, 64)")
    raises(call(destination=source.bfloat16()), "destination and source have different dtypes")
    raises(call(source=source.float(), destination=source.float()), "source is float32", "float16 and bfloat16")
    raises(call(source=source.repeat(1, 1, 1, 5), destination=source.repeat(1, 1, 1, 5)), "source has head_dim 320")
    raises(call(cos=sound["cos"][0]), "cos has 1 dimensions, not 2")
    raises(call(sin=sound["sin"][:-1]), "sin has shape (8, 12), expected (9, 12)")
    raises(call(sin=sound["sin"].float()), "sin and cos have different dtypes: sin is float32, cos is float16")
    cos, sin = tables(9, 33)
    raises(call(cos=cos, sin=sin), "cos has shape (9, 33), which rotates 66 columns; the head_dim is 64")
    raises(call(offsets=ints(1)), "offsets has shape (1), expected (2)")
    raises(call(offsets=torch.ones(2)), "offsets is float32, expected int32")
    raises(call(offset=1 << 40), "offset is 1099511627776")
    raises(call(offset=-(1 << 40)), "offset is -1099511627776")
    packed = {"source": source.view(10, 4, 64), "destination": source.view(10, 4, 64), "cu_seqlens": ints(0, 10)}
    raises(call(cu_seqlens=ints(0, 10)), "source has 4 dimensions, not 3")
    raises(call(**{**packed, "cu_seqlens": ints()}), "cu_seqlens has shape (0), expected (batch + 1)")
    raises(call(**{**packed, "cu_seqlens": ints(0, 10).long()}), "cu_seqlens is int64, expected int32")
    raises(call(**packed, offsets=ints(1, 2)), "offsets has shape (2), expected (1)")
    raises(call(**packed, max_seqlen=-1), "max_seqlen is -1")
    narrow = torch.zeros(2, 5, 1, 64).half().expand(source.shape)
    raises(call(destination=narrow), "torch could not copy a tensor")
