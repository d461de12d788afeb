"""What is wrong with a call, and which argument: every check that needs no GPU, before anything is launched.

Each function returns what it checked, converted where that is harmless, or raises a class of
:mod:`flash_attn.errors` with the argument's name, what was found and what it should be.
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from .errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedFeatureError
from .problem import NO_WINDOW
from .reference import lse_dtype

__all__ = [
    "CPU_DTYPES",
    "DESCALE_ROWS",
    "FP8",
    "KERNEL_DTYPES",
    "MAX_HEAD_DIM",
    "Descales",
    "alibi_slopes_of",
    "attention_chunk_of",
    "autocast",
    "block_table_of",
    "check_dropout",
    "check_no_descales",
    "check_qkv",
    "check_qv",
    "check_softcap",
    "cu_seqlens_of",
    "descale_blocks",
    "descales_of",
    "has_numbers",
    "length_of",
    "number_of",
    "numbers_of",
    "packed_block",
    "same_device",
    "scale_of",
    "sink_of",
    "sizes",
    "sm_margin_of",
    "tensor_of",
    "window_of",
]

MAX_HEAD_DIM = 256
KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# What a CPU tensor may have besides, since the reference takes any.
CPU_DTYPES = (*KERNEL_DTYPES, torch.float32, torch.float64)
# For the functions that have an FP8 form.
FP8 = torch.float8_e4m3fn
DESCALE_ROWS = 64  # of a head, that have a factor together where factors are of blocks
Descales = tuple[Tensor | None, Tensor | None, Tensor | None]  # of q, k and v
_DESCALES = ("q_descale", "k_descale", "v_descale")
_DTYPES_WITH_FP8 = (*KERNEL_DTYPES, FP8)
_DEVICES = ("cuda", "cpu", "meta")
_NUMBERS = (float, int, torch.SymFloat, torch.SymInt, numbers.Real)
# Lengths, and so distances between a query and a key, are below this.
_FAR = 2**30
_NO_WINDOWS = (NO_WINDOW, NO_WINDOW)


def sizes(x: Tensor) -> str:
    return str(tuple(x.shape))


def tensor_of(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    return x


def has_numbers(x: Tensor) -> bool:
    """Whether what tensors beside ``x`` hold can be read without waiting: not on a GPU, and not while tracing."""
    return x.is_cpu and type(x) is Tensor and not is_compiling()


def same_device(name: str, x: Tensor, q: Tensor, owner: str = "q") -> None:
    if x.device != q.device:
        raise DeviceError(f"{name} must be on {owner}'s device: {owner} is on {q.device}, {name} is on {x.device}.")


# q, k and v.


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, packed_q: bool = False, packed_k: bool = False, fp8: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """q (B, Sq, H, D), k (B, Sk, Hk, D) and v (B, Sk, Hk, Dv), or (T, H, D) where packed; cast under autocast.

    ``fp8``: they may also be FP8.
    """
    if _fit(q, k, v, 3 if packed_q else 4, 3 if packed_k else 4, _DTYPES_WITH_FP8 if fp8 else KERNEL_DTYPES):
        return q, k, v
    for name, x in (("q", q), ("k", k), ("v", v)):
        tensor_of(name, x)
    for name, x in (("k", k), ("v", v)):
        same_device(name, x, q)
    if q.device.type not in _DEVICES:
        raise DeviceError(f"q must be on a CUDA device or on the CPU, got {q.device}.")
    q, k, v = autocast(q, k, v)
    _check_dtypes(q, k, v, fp8)
    _check_ranks(q, k, v, packed_q, packed_k)
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"v must have k's shape but for the head dim: k is {sizes(k)}, v is {sizes(v)}.")
    if not packed_q and not packed_k and q.shape[0] != k.shape[0]:
        raise ShapeError(f"k must have q's batch size: q has {q.shape[0]}, k has {k.shape[0]}.")
    if q.shape[-1] != k.shape[-1]:
        raise ShapeError(f"k must have q's head dim: q has {q.shape[-1]}, k has {k.shape[-1]}.")
    for name, x in (("q", q), ("v", v)):
        if not 0 < x.shape[-1] <= MAX_HEAD_DIM:
            raise ShapeError(f"the head dim (last size) of {name} must be 1 to {MAX_HEAD_DIM}, got {x.shape[-1]}.")
    if k.shape[-2] == 0 or q.shape[-2] % k.shape[-2] != 0:
        raise ShapeError(f"q's heads must be a multiple of k's: q has {q.shape[-2]} heads, k has {k.shape[-2]}.")
    return q, k, v


def _fit(q: Tensor, k: Tensor, v: Tensor, rank_q: int, rank_k: int, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether all is well, and nothing to cast: the answer for almost every call, in as little time as can be."""
    try:
        q_shape, k_shape, v_shape, dtype, device = q.shape, k.shape, v.shape, q.dtype, q.device
        return (
            len(q_shape) == rank_q
            and len(k_shape) == rank_k
            and k_shape[:-1] == v_shape[:-1]
            and (rank_q == 3 or rank_k == 3 or q_shape[0] == k_shape[0])
            and q_shape[-1] == k_shape[-1]
            and 0 < q_shape[-1] <= MAX_HEAD_DIM
            and 0 < v_shape[-1] <= MAX_HEAD_DIM
            and k_shape[-2] > 0
            and q_shape[-2] % k_shape[-2] == 0
            and dtype in dtypes
            and k.dtype is dtype
            and v.dtype is dtype
            and k.device == device
            and v.device == device
            and (q.is_cuda or q.is_cpu)
        )
    except AttributeError:  # not tensors
        return False


def autocast(*tensors: Tensor) -> tuple[Any, ...]:
    """Under ``torch.autocast``, tensors of which any is float32 are all cast to the autocast dtype."""
    kind = tensors[0].device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return tensors
    dtypes = [x.dtype for x in tensors]
    if torch.float32 not in dtypes or not all(d in (*KERNEL_DTYPES, torch.float32) for d in dtypes):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(x.to(dtype) for x in tensors)


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor, fp8: bool) -> None:
    accepted = (*(KERNEL_DTYPES if q.is_cuda else CPU_DTYPES), *((FP8,) if fp8 else ()))
    if q.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        if q.dtype is FP8:
            raise UnsupportedFeatureError(
                f"q is {q.dtype}: this function has no FP8 form, q must be one of {names}. Cast q, k and v."
            )
        hint = " Cast it, or use torch.autocast." if q.dtype in (torch.float32, torch.float64) else ""
        raise DtypeError(f"q must be one of {names} on {q.device.type}, got {q.dtype}.{hint}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise DtypeError(f"{name} must have q's dtype: q is {q.dtype}, {name} is {x.dtype}.")


def _check_ranks(q: Tensor, k: Tensor, v: Tensor, packed_q: bool, packed_k: bool) -> None:
    q_layout = "(T, H, D)" if packed_q else "(B, Sq, H, D)"
    k_layout = "(T, Hk, {})" if packed_k else "(B, Sk, Hk, {})"
    layouts = (("q", q, q_layout), ("k", k, k_layout.format("D")), ("v", v, k_layout.format("Dv")))
    for name, x, layout in layouts:
        rank = layout.count(",") + 1
        if x.dim() != rank:
            raise ShapeError(f"{name} must have {rank} dimensions, {layout}, got {x.dim()}: {sizes(x)}.")


def check_no_descales(q: Tensor, descales: Descales) -> None:
    for name, x in zip(_DESCALES, descales, strict=True):
        if x is not None:
            raise ArgumentError(f"{name} is for FP8 inputs and must be None here: q is {q.dtype}.")


def descale_blocks(rows: int, sequences: int | None = None) -> int:
    """Blocks of a head that have factors: of the rows of one sequence, or of all rows of packed ``sequences``.

    A block is DESCALE_ROWS rows from a multiple of as many on, counted from the sequence's first row. Packed, block i
    of sequence b is number ``cu_seqlens[b] // DESCALE_ROWS + b + i``: so all have room, and a few numbers are no
    block's.
    """
    return -(-rows // DESCALE_ROWS) if sequences is None else rows // DESCALE_ROWS + sequences


def packed_block(first: Tensor, sequence: Tensor | int, row: Tensor) -> Tensor:
    """The number, by descale_blocks, of the block of packed rows ``row`` of a sequence that begins at row ``first``."""
    return first // DESCALE_ROWS + sequence + (row - first) // DESCALE_ROWS


def descales_of(
    descales: Descales, batch: int, q: Tensor, heads_kv: int, rows_k: int, packed_q: bool, packed_k: bool
) -> Descales:
    """The factors of q and of keys and values that have ``rows_k`` rows, each as it is read."""
    of_q, of_k, of_v = descales
    return (
        _descale_of("q_descale", of_q, batch, heads_kv, q, q.shape[-2], q.shape[-3], packed_q),
        _descale_of("k_descale", of_k, batch, heads_kv, q, heads_kv, rows_k, packed_k),
        _descale_of("v_descale", of_v, batch, heads_kv, q, heads_kv, rows_k, packed_k),
    )


def _descale_of(
    name: str, x: Any, batch: int, heads_kv: int, q: Tensor, heads: int, rows: int, packed: bool
) -> Tensor | None:
    """An optional fp32 (B, Hk), or (B, heads, blocks of rows), or (1, heads, blocks) if packed, with any strides.

    ``heads`` and ``rows`` are those of the tensor that the factors are of.
    """
    if x is None:
        return None
    descale = tensor_of(name, x)
    same_device(name, descale, q)
    if descale.dtype != torch.float32:
        raise DtypeError(f"{name} must be torch.float32, got {descale.dtype}.")
    blocks = (1 if packed else batch, heads, descale_blocks(rows, batch if packed else None))
    if tuple(descale.shape) not in ((batch, heads_kv), blocks):
        raise ShapeError(
            f"{name} must have shape (B, Hk), ({batch}, {heads_kv}) here, or that of factors for {DESCALE_ROWS} rows, "
            f"{blocks} here, got {sizes(descale)}."
        )
    return descale


# Numbers.


def check_qv(q: Tensor, qv: Tensor, head_dim_v: int) -> None:
    """Scores q k^T + qv v^T are those of one wider head dim."""
    same_device("qv", tensor_of("qv", qv), q)
    wanted = (*q.shape[:-1], head_dim_v)
    if tuple(qv.shape) != wanted:
        raise ShapeError(f"qv must have q's shape and the values' head dim, {wanted}, got {sizes(qv)}.")
    together = q.shape[-1] + head_dim_v
    if together > MAX_HEAD_DIM:
        raise UnsupportedFeatureError(
            f"qv needs head dims of q and v of {MAX_HEAD_DIM} together at most, "
            f"got {q.shape[-1]} + {head_dim_v} = {together}."
        )


def scale_of(softmax_scale: float | None, head_dim: int) -> float:
    if softmax_scale is None:
        return float(head_dim**-0.5)
    if isinstance(softmax_scale, Tensor):
        raise ArgumentError("softmax_scale must be a number or None, got a tensor: reading it would stall the GPU.")
    if not isinstance(softmax_scale, _NUMBERS):
        raise ArgumentError(f"softmax_scale must be a number or None, got {softmax_scale!r}.")
    return softmax_scale


def number_of(name: str, x: Any) -> Any:
    """A number; a tensor of one on the CPU passes for it."""
    if not isinstance(x, _NUMBERS) and not (isinstance(x, Tensor) and x.device.type == "cpu" and x.numel() == 1):
        raise ArgumentError(f"{name} must be a number, got {x!r}.")
    return x


def check_dropout(dropout_p: float, softcap: float = 0.0) -> None:
    if not 0.0 <= number_of("dropout_p", dropout_p) < 1.0:
        raise ArgumentError(f"dropout_p must be in [0, 1), got {dropout_p}.")
    if dropout_p > 0.0 and softcap > 0.0:
        raise ArgumentError(f"softcap does not go together with dropout: softcap={softcap}, dropout_p={dropout_p}.")


def check_softcap(softcap: float) -> None:
    if not 0.0 <= number_of("softcap", softcap) < math.inf:
        raise ArgumentError(f"softcap must be 0.0 (none) or positive and finite, got {softcap}.")


def window_of(window_size: Sequence[int | None], causal: bool) -> tuple[bool, int, int]:
    """(causal, left, right), each side NO_WINDOW or what it adds to the causal mask."""
    if window_size == _NO_WINDOWS:
        return bool(causal), NO_WINDOW, NO_WINDOW
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(f"window_size must be two integers (left, right), got {window_size}.")
    sides: list[Any] = []
    for side in window_size:
        if side is not None and (isinstance(side, bool) or not isinstance(side, (int, torch.SymInt, numbers.Integral))):
            raise ArgumentError(f"window_size must be two integers (left, right), got {window_size}.")
        number = side if side is None or isinstance(side, (int, torch.SymInt)) else int(side)  # numpy's
        sides.append(NO_WINDOW if number is None or number < 0 or number >= _FAR else number)
    left, right = sides
    causal = bool(causal) or right == 0
    return causal, left, NO_WINDOW if causal else right


def attention_chunk_of(attention_chunk: int | None) -> int:
    if attention_chunk is None:
        return 0
    if not isinstance(attention_chunk, (int, torch.SymInt)) or attention_chunk < 0:
        raise ArgumentError(f"attention_chunk must be 0 (none) or a positive integer, got {attention_chunk}.")
    return 0 if attention_chunk >= _FAR else attention_chunk


def sm_margin_of(sm_margin: int) -> int:
    if isinstance(sm_margin, bool) or not isinstance(sm_margin, int) or not 0 <= sm_margin < _FAR:
        raise ArgumentError(f"sm_margin must be a number of multiprocessors to leave free, got {sm_margin!r}.")
    return sm_margin


def length_of(name: str, x: Any) -> int:
    """A length as an int (or a SymInt, while compiling)."""
    if type(x) is int and x >= 0:
        return x
    if isinstance(x, Tensor):
        if x.device.type != "cpu" or x.numel() != 1:
            raise ArgumentError(
                f"{name} must be an integer, got a tensor on {x.device}: reading it would stall the GPU."
            )
        x = x.item()
    if not isinstance(x, torch.SymInt):
        try:
            x = operator.index(x)
        except TypeError:
            raise ArgumentError(f"{name} must be an integer, got {x!r}.") from None
    if x < 0:
        raise ArgumentError(f"{name} must not be negative, got {x}.")
    length: int = x
    return length


# Tensors of numbers.


def _int32(name: str, x: Tensor, q: Tensor) -> Tensor:
    same_device(name, x, q)
    if x.dtype != torch.int32:
        raise DtypeError(f"{name} must be torch.int32, got {x.dtype}.")
    return x if x.is_contiguous() else x.contiguous()


def cu_seqlens_of(name: str, x: Any, q: Tensor) -> Tensor:
    """int32 (B + 1)."""
    x = tensor_of(name, x)
    if x.dim() != 1 or x.shape[0] < 1:
        raise ShapeError(f"{name} must have shape (B + 1,), got {sizes(x)}.")
    return _int32(name, x, q)


def numbers_of(name: str, x: Any, batch: int, q: Tensor) -> Tensor | None:
    """An optional int32 (B)."""
    if x is None:
        return None
    tensor_of(name, x)
    if x.dim() != 1 or x.shape[0] != batch:
        raise ShapeError(f"{name} must have shape (B,), ({batch},) here, got {sizes(x)}.")
    return _int32(name, x, q)


def block_table_of(x: Any, batch: int, q: Tensor) -> Tensor:
    """int32 (B, pages of a sequence)."""
    x = tensor_of("block_table", x)
    if x.dim() != 2 or x.shape[0] != batch:
        raise ShapeError(f"block_table must have shape (B, pages), ({batch}, pages) here, got {sizes(x)}.")
    return _int32("block_table", x, q)


def alibi_slopes_of(x: Any, batch: int, heads: int, q: Tensor) -> Tensor | None:
    """An optional fp32 (H) or (B, H)."""
    if x is None:
        return None
    x = tensor_of("alibi_slopes", x)
    same_device("alibi_slopes", x, q)
    if x.dtype != torch.float32:
        raise DtypeError(f"alibi_slopes must be torch.float32, got {x.dtype}.")
    if tuple(x.shape) not in ((heads,), (batch, heads)):
        raise ShapeError(
            f"alibi_slopes must have shape (H,) or (B, H), ({heads},) or ({batch}, {heads}) here, got {sizes(x)}."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(
            "alibi_slopes must not require grad, got a tensor that does: there is no gradient for slopes. "
            "Pass alibi_slopes.detach()."
        )
    slopes: Tensor = x if x.is_contiguous() else x.contiguous()
    return slopes


def sink_of(x: Any, heads: int, q: Tensor) -> Tensor | None:
    """An optional (H), as fp32 (fp64 with fp64 queries)."""
    if x is None:
        return None
    x = tensor_of("learnable_sink", x)
    same_device("learnable_sink", x, q)
    if x.dtype not in CPU_DTYPES:
        raise DtypeError(f"learnable_sink must be a floating point tensor, got {x.dtype}.")
    if tuple(x.shape) != (heads,):
        raise ShapeError(f"learnable_sink must have shape (H,), ({heads},) here, got {sizes(x)}.")
    sink: Tensor = x.to(lse_dtype(q.dtype))
    return sink
