"""FP8 attention of tensors in other dtypes: one call, or the steps of it.

    from flash_attn.fp8 import flash_attn_fp8_func
    out = flash_attn_fp8_func(q, k, v, causal=True)

The FP8 kernels (compute capability 9.0; emulated on the CPU) take float8_e4m3fn with one factor for each sequence and
KV head, or for each 64 rows of a head. Three bits of mantissa make an error of 2.7 % in every element whatever the
factor is, so that what can be won lies in how the errors of a row's elements add up in a score:

- *Incoherent processing* (QuIP, arXiv:2307.13304; FlashAttention-3, arXiv:2407.08608, section 3.3): q and k are
  multiplied by one orthogonal matrix, a Hadamard matrix with random signs, which leaves every score as it is and
  spreads an outlier over all columns. :func:`rotate`.
- *Outliers are rounded again*: where the query and the key that matter to each other have their outliers in the same
  column, it is that column's error that counts. After a rounding, what it did to the columns of outliers is taken off
  the row before the next; twice. :func:`rotate_and_quantize`.
- *Smoothing* (SageAttention, arXiv:2410.02367): a vector taken off all keys takes the same off all scores of a row,
  which a softmax does not see. Taking their mean off makes keys with a bias, as of most models, small. A vector taken
  off all values (SageAttention2, arXiv:2411.10958) is what each row's output then lacks, and is added to it, by the
  usual call's kernel in float32: values with a bias lose less precision to it, and so do the tensor core's sums, which
  have 14 bits. Means are of a sequence and head, so that no sequence has to do with the others of its batch.

On a GPU the usual call's tensors are rounded by three kernels, all at once, in bf16 and with rows of more than 128
columns rotated in two halves; others by Triton kernels, in a pass over a tensor each for its mean, its largest
magnitudes and its rounding; elsewhere, operations of torch do it.

RMSE on N(0, 1) with 0.1 % outliers of N(0, 100), head dim 128, over 16 seeds, by the emulation; the last two rows are
:func:`flash_attn_fp8_func`, with values less their mean:

======================  ==========  ==========
way                     4,096 keys  8,192 keys
======================  ==========  ==========
one factor a tensor     1.8e-2      2.4e-2
rotated                 8.6e-3      9.4e-3
outliers rounded again  8.5e-3      8.5e-3
and factors of blocks   8.1e-3      8.7e-3
======================  ==========  ==========

FlashAttention-3's table has 2.4e-2, and 9.1e-3 at best. Nearly half of the square of what is left is the rounding of
the values.

Factors are for heads, or for blocks of 64 rows of a head (``granularity``). Above, blocks gain next to nothing: a
floating point format has its precision at every magnitude. They do where the magnitudes of a head's rows differ by more
than the format's range: of values of blocks that differ by up to e^12, the worst row of a window of 100 keys has an
error of a tenth of itself rather than a fifth (with ``smooth_v=False``). And a block can be quantised before the next
is known.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from ._ops import direct
from ._ops_fp8 import FWD_ROUNDED
from .attend import Request, check_no_gradient, forward_fp8, problem_of
from .dropout import mix
from .errors import ArgumentError, DtypeError, ShapeError
from .ops.triton._kernels import kernels_of, runs_kernel
from .problem import Problem

__all__ = ["flash_attn_fp8_func", "flash_attn_varlen_fp8_func", "quantize", "rotate", "rotate_and_quantize"]

_LARGEST = 448.0  # of float8_e4m3fn
# The host library has these two as well.
_OUTLIER = 3.0  # an element beyond so many times the root mean square of its row
_SHARE = 0.6  # of an outlier's error that each further rounding makes up for: all of it at once would overshoot
_NO_WINDOW = (-1, -1)
_FWD_ROUNDED: Callable[..., Tensor] = direct(FWD_ROUNDED)

Result = Tensor | tuple[Tensor, Tensor]


# Quantising.


def quantize(
    x: Tensor,
    heads_kv: int | None = None,
    cu_seqlens: Tensor | None = None,
    used: Tensor | None = None,
    *,
    granularity: str = "head",
) -> tuple[Tensor, Tensor]:
    """``x`` in float8_e4m3fn, with a factor for each sequence and KV head, or for each 64 rows of a head.

    Args:
        x: (B, S, H, D), or packed (T, H, D), in any floating point dtype. D <= 256.
        heads_kv: Hk, a divisor of H; for queries, the heads of keys. H if None. Of no account to blocks.
        cu_seqlens: int32 (B + 1,), the sequences of a packed ``x``.
        used: bool (B, S), or packed (T,): rows that count for the factors. None: all. Packed rows after the last
            sequence never do.
        granularity: ``"head"`` or ``"block"``: what has a factor of its own.

    Returns:
        (x_fp8, descale): x is about ``x_fp8 * descale``. descale is fp32, the largest magnitude of its rows over 448,
        which is the largest number of the format; 1 where all are 0 (below 1e-35). Of heads it is (B, Hk); of blocks
        (B, H, ceil(S / 64)), where block i of a sequence is rows 64 i to 64 i + 63; packed (1, H, T // 64 + B), where
        block i of sequence b has the number ``cu_seqlens[b] // 64 + b + i``, and numbers that are no block's hold 1.

    Raises:
        ShapeError, DtypeError, ArgumentError: a ``ValueError`` naming the argument and what was found.
    """
    heads_kv = _check(x, heads_kv, cu_seqlens)
    return _rounded(x, _Rows(x, cu_seqlens, _check_used(x, used), _is_block(granularity)), heads_kv)


def rotate(x: Tensor, seed: int = 0) -> Tensor:
    """``x`` (..., D) times a D x D' orthogonal matrix (its rows are orthonormal): (..., D') in float32.

    D' is the next power of two, at least 64. The matrix is Hadamard's, with its rows' signs drawn by ``seed``: q and k
    that were rotated with the same seed have the scores of q and k.
    """
    if checks.tensor_of("x", x).dim() == 0 or not x.dtype.is_floating_point:
        raise DtypeError(f"x must be a floating point tensor (..., D), got {x.dtype} of shape {checks.sizes(x)}.")
    matrix = _rotation(x.shape[-1], _key(seed), x.device)
    rotated: Tensor = _product(x.to(torch.float32), matrix) * matrix.shape[1] ** -0.5
    return rotated


def rotate_and_quantize(
    x: Tensor,
    heads_kv: int | None = None,
    cu_seqlens: Tensor | None = None,
    used: Tensor | None = None,
    seed: int = 0,
    *,
    granularity: str = "head",
) -> tuple[Tensor, Tensor]:
    """:func:`quantize` of the rotated ``x``, where columns of ``x`` with outliers have less of the error.

    The arguments and results are those of :func:`quantize` and :func:`rotate`; x_fp8 has the head dim D'.
    """
    heads_kv = _check(x, heads_kv, cu_seqlens)
    rows = _Rows(x, cu_seqlens, _check_used(x, used), _is_block(granularity))
    return _rounded(x, rows, heads_kv, key=_key(seed))


def _is_block(granularity: str) -> bool:
    if granularity not in ("head", "block"):
        raise ArgumentError(f'granularity must be "head" or "block", got {granularity!r}.')
    return granularity == "block"


def _check(x: Tensor, heads_kv: int | None, cu_seqlens: Tensor | None) -> int:
    rank = 4 if cu_seqlens is None else 3
    if checks.tensor_of("x", x).dim() != rank:
        layout = "(B, S, H, D)" if cu_seqlens is None else "(T, H, D)"
        raise ShapeError(f"x must have {rank} dimensions, {layout}, got {x.dim()}: {checks.sizes(x)}.")
    if not x.dtype.is_floating_point:
        raise DtypeError(f"x must be a floating point tensor, got {x.dtype}.")
    if cu_seqlens is not None:
        checks.cu_seqlens_of("cu_seqlens", cu_seqlens, x)
    heads, head_dim = x.shape[-2:]
    if not 0 < head_dim <= checks.MAX_HEAD_DIM:
        raise ShapeError(f"the head dim (last size) of x must be 1 to {checks.MAX_HEAD_DIM}, got {head_dim}.")
    if heads_kv is None:
        return heads
    heads_kv = checks.length_of("heads_kv", heads_kv)
    if heads_kv < 1 or heads % heads_kv != 0:
        raise ArgumentError(f"heads_kv must be a divisor of x's heads, {heads}, got {heads_kv}.")
    return heads_kv


def _check_used(x: Tensor, used: Tensor | None) -> Tensor | None:
    if used is None:
        return None
    checks.same_device("used", checks.tensor_of("used", used), x, "x")
    if used.dtype != torch.bool:
        raise DtypeError(f"used must be torch.bool, got {used.dtype}.")
    if used.shape != x.shape[:-2]:
        raise ShapeError(f"used must have shape {tuple(x.shape[:-2])} here, got {checks.sizes(used)}.")
    return used.contiguous()


class _Rows:
    """What the rows of a tensor have factors with, and which of them count.

    Rows have numbers: those of the same number and head have a factor together. There are ``numbers`` of a slab's rows,
    or of all packed rows; ``of_packed`` is int64 (T), with ``numbers`` for rows of no sequence, and None if not packed.
    ``sequence`` likewise: that of each packed row, B for rows of none. ``longest``: rows of a sequence, at most.
    """

    def __init__(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        used: Tensor | None,
        by_block: bool = False,
        longest: int | None = None,
    ) -> None:
        self.used, self.by_block, self.cu_seqlens = used, by_block, cu_seqlens
        self.longest = x.shape[-3] if longest is None or cu_seqlens is None else longest
        self.packed = cu_seqlens is not None
        self.numbers = 1
        self.of_packed: Tensor | None = None
        self.sequence: Tensor | None = None
        rows = x.shape[-3]
        if cu_seqlens is not None:
            batch = cu_seqlens.shape[0] - 1
            self.of_packed = self.sequence = sequence_of_rows(cu_seqlens, rows)
            self.numbers = batch
            if by_block:
                self.numbers = checks.descale_blocks(rows, batch)
                self.of_packed = _packed_blocks(cu_seqlens, self.sequence)
        elif by_block:
            self.numbers = checks.descale_blocks(rows)

    def of_row(self, rows: int, device: torch.device) -> Tensor | None:
        """int64 (S) or (T): the number of each of a slab's rows; None where all have the same."""
        if self.packed or not self.by_block:
            return self.of_packed
        return torch.arange(rows, device=device) // checks.DESCALE_ROWS

    def heads(self, heads: int, heads_kv: int) -> int:
        """Heads that have factors of their own."""
        return heads if self.by_block else heads_kv

    def given(self, factors: Tensor) -> Tensor:
        """Factors (slabs, numbers, heads) as they are given out."""
        if self.by_block:
            return factors.transpose(1, 2).contiguous()
        return factors[0] if self.packed else factors[:, 0]

    def largest(self, values: Tensor) -> Tensor:
        """The largest of ``values`` (B, S, heads) or (T, heads), not negative: (slabs, numbers, heads)."""
        if self.used is not None:
            values = torch.where(self.used[..., None], values, 0.0)
        if self.packed:
            values = values[None]
        slabs, rows, heads = values.shape
        of_row = self.of_row(rows, values.device)
        if of_row is None:
            return values.amax(1, keepdim=True) if rows > 0 else values.new_zeros(slabs, 1, heads)
        zeros = values.new_zeros(slabs, self.numbers + 1, heads)
        index = of_row[None, :, None].expand_as(values)
        return zeros.scatter_reduce(1, index, values, "amax")[:, : self.numbers]

    def by_row(self, factors: Tensor, rows: int, heads: int) -> Tensor:
        """(slabs, numbers, heads) for each row and head: (B, S or 1, H, 1) or (T, H, 1)."""
        per_head = factors.repeat_interleave(heads // factors.shape[2], 2)
        of_row = self.of_row(rows, factors.device)
        if of_row is not None:
            if self.numbers == 0:
                return per_head.new_ones(())
            # Rows of no sequence are rounded with any factor.
            per_head = per_head[:, of_row.clamp(max=self.numbers - 1)]
        return (per_head[0] if self.packed else per_head)[..., None]

    def mean(self, x: Tensor) -> Tensor:
        """float32 (B, H, D): of each sequence of ``x`` (B, S, H, D) or (T, H, D), the mean of its rows that count.

        No sequence's has anything of another's, be it NaN or, by the kernels, the last bit.
        """
        if x.numel() > 0 and _runs_kernels(x):
            means = kernels_of("_fp8_kernels").means
            found: Tensor = means(x[None] if self.packed else x, self.used, self.cu_seqlens, self.longest)
            return found
        return self.mean_in_torch(x)

    def mean_in_torch(self, x: Tensor) -> Tensor:
        counted = x if self.used is None else torch.where(self.used[..., None, None], x, 0.0)
        if self.sequence is None or self.cu_seqlens is None:
            count = x.shape[1] if self.used is None else self.used.sum(1).clamp(min=1)[:, None, None]
            return counted.sum(1, dtype=torch.float32) / (count if x.shape[1] > 0 else 1)
        batch = self.cu_seqlens.shape[0] - 1
        total = x.new_zeros((batch + 1, *x.shape[-2:]), dtype=torch.float32)  # the last: of rows of no sequence
        total.index_add_(0, self.sequence, counted.to(torch.float32))
        ones = torch.ones_like(self.sequence) if self.used is None else self.used.to(torch.int64)
        count = self.sequence.new_zeros(batch + 1).index_add_(0, self.sequence, ones)
        return (total / count.clamp(min=1)[:, None, None])[:batch]

    def by_sequence(self, means: Tensor) -> Tensor:
        """``means`` (B, H, D), of sequences, for each row: (B, 1, H, D) or (T, H, D), 0 for rows of no sequence."""
        if self.sequence is None:
            return means[:, None]
        return torch.cat((means, means.new_zeros(1, *means.shape[1:])))[self.sequence]


def sequence_of_rows(cu_seqlens: Tensor, rows: int) -> Tensor:
    """int64 (T): the sequence of each packed row, or B for rows after the last one."""
    return torch.searchsorted(cu_seqlens[1:].contiguous(), torch.arange(rows, device=cu_seqlens.device), right=True)


def _packed_blocks(cu_seqlens: Tensor, sequence: Tensor) -> Tensor:
    """int64 (T): the number of the block that each packed row is in, by checks.descale_blocks; in none, their count."""
    rows, batch = sequence.shape[0], cu_seqlens.shape[0] - 1
    row = torch.arange(rows, device=cu_seqlens.device)
    block = checks.packed_block(cu_seqlens[sequence], sequence, row)
    return torch.where(sequence < batch, block, checks.descale_blocks(rows, batch))


def _rounded(
    x: Tensor, rows: _Rows, heads_kv: int, mean: Tensor | None = None, key: int | None = None
) -> tuple[Tensor, Tensor]:
    """``x``, less ``mean`` (B, H, D), rotated by the signs of a ``key``, in FP8, and its factors."""
    heads = rows.heads(x.shape[-2], heads_kv)
    if x.numel() == 0:
        columns = x.shape[-1] if key is None else _columns(x.shape[-1])
        factors = x.new_ones((1 if rows.packed else x.shape[0], rows.numbers, heads), dtype=torch.float32)
        return x.new_empty((*x.shape[:-1], columns), dtype=checks.FP8), rows.given(factors)
    if _runs_kernels(x):
        kernels = kernels_of("_fp8_kernels")
        result, factors = kernels.rounded(
            x[None] if rows.packed else x, mean, rows.sequence, key, rows.used, rows.of_packed, rows.numbers,
            checks.DESCALE_ROWS if rows.by_block and not rows.packed else 0, heads, _OUTLIER**2, _SHARE,
        )  # fmt: skip
        return result[0] if rows.packed else result, rows.given(factors)
    result, factors = _rounded_in_torch(x, rows, heads, mean, key)
    return result, rows.given(factors)


def _runs_kernels(x: Tensor) -> bool:
    return runs_kernel(x) and not is_compiling() and _converts_to_fp8(x.device)


@functools.cache
def _converts_to_fp8(device: torch.device) -> bool:
    """Whether Triton can, on this GPU."""
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _rounded_in_torch(
    x: Tensor, rows: _Rows, factor_heads: int, mean: Tensor | None, key: int | None
) -> tuple[Tensor, Tensor]:
    """:func:`_rounded` in operations of torch, which are the statement of what the kernels do.

    Factors are (slabs, numbers, factor_heads); :class:`_Rows` says what that is.
    """
    x = x.to(torch.float32)
    if mean is not None:
        x = x - rows.by_sequence(mean)
    if key is None:
        y = x
    else:
        matrix = _rotation(x.shape[-1], key, x.device)
        scale = matrix.shape[1] ** -0.5
        y = _product(x, matrix) * scale
    of_row = y.abs().amax(-1) if y.shape[-1] > 0 else y.new_zeros(y.shape[:-1])
    heads = y.shape[-2]
    largest = rows.largest(of_row.reshape(*of_row.shape[:-1], factor_heads, heads // factor_heads).amax(-1))
    descale = factors_of(largest)
    by_row = rows.by_row(descale, y.shape[-3], heads)
    rounded = _to_fp8(y / by_row)
    if key is not None:
        squares, target = x.square(), x
        outlier = squares > _OUTLIER**2 * squares.mean(-1, keepdim=True)
        for _ in range(2):
            # The error in the columns of x: rotated back, rounded numbers and signs are exact.
            error = x - _product(rounded.to(torch.float32), matrix.t()) * (by_row * scale)
            target = torch.where(outlier, target + _SHARE * error, target)
            rounded = _to_fp8(_product(target, matrix) * scale / by_row)
    return rounded, descale


def _product(x: Tensor, matrix: Tensor) -> Tensor:
    """``x @ matrix`` in float32, also under ``torch.autocast``, which would take the factors' dtype along."""
    kind = x.device.type
    if not torch.amp.is_autocast_available(kind):  # meta
        return torch.matmul(x, matrix)
    with torch.autocast(kind, enabled=False):
        return torch.matmul(x, matrix)


def factors_of(largest: Tensor) -> Tensor:
    """The factors of rows with these largest magnitudes; 1 where they are 0, or so small that a factor would be."""
    factors = largest / _LARGEST
    return torch.where(factors >= torch.finfo(torch.float32).tiny, factors, 1.0)


def _to_fp8(x: Tensor) -> Tensor:
    return x.clamp(-_LARGEST, _LARGEST).to(checks.FP8)


def _key(seed: int) -> int:
    """What the columns' numbers are hashed with, below 2^31."""
    try:
        number = operator.index(seed)
    except TypeError:
        raise ArgumentError(f"seed must be an integer, got {seed!r}.") from None
    key: int = mix(number & 0xFFFFFFFF) >> 1
    return key


_cached_key = functools.lru_cache(maxsize=64, typed=True)(_key)  # 1.0 is refused also where 1 was given before


def _columns(head_dim: int) -> int:
    """D' of a rotation: the next power of two, at least 64."""
    columns = 64
    while columns < head_dim:
        columns *= 2
    return columns


def _rotation(head_dim: int, key: int, device: torch.device) -> Tensor:
    """float32 (D, D') of 1 and -1: the first D rows of a Hadamard matrix, each with a random sign."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device=device)
    while matrix.shape[0] < _columns(head_dim):
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)), 0)
    signs: Tensor = 1.0 - 2.0 * (mix(torch.arange(head_dim, device=device) ^ key) & 1).to(torch.float32)
    return matrix[:head_dim] * signs[:, None]


# Attention.


def flash_attn_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    hadamard: bool = True,
    smooth_k: bool = True,
    smooth_v: bool = True,
    seed: int = 0,
    granularity: str = "head",
) -> Result:
    """:func:`flash_attn.flash_attn_func` by FP8 kernels: q, k and v are turned into FP8 first. There is no gradient.

    Args:
        q: (B, Sq, H, D), float16, bfloat16 or (on the CPU) float32.
        k: (B, Sk, Hk, D).
        v: (B, Sk, Hk, Dv).
        hadamard: rotate q and k, so that outliers cost less precision.
        smooth_k: take the mean of a sequence's keys off each of them. Not done with a softcap or a sink, to which it
            matters.
        smooth_v: take the mean of a sequence's values off each of them, and add it to the output. Not done with a sink,
            which has a share of the sum of a row's probabilities.
        seed: of the rotation.
        granularity: ``"head"``, a factor for each sequence and KV head; or ``"block"``, one for each 64 rows of a head,
            which costs some speed and gains precision only where blocks of values differ much in their magnitude, and
            with ``smooth_v=False``: less a common mean, such blocks are alike.

    The other arguments are those of :func:`flash_attn.flash_attn_func`.

    Returns:
        out (B, Sq, H, Dv) in q's dtype, with the precision of FP8; or with ``return_lse`` (out, softmax_lse), the
        latter fp32 (B, H, Sq).

    Raises:
        What :func:`flash_attn.flash_attn_func` raises; an ``ArgumentError`` where a tensor requires grad, and for
        another granularity.
    """
    # The usual call at once, as in flash_attn_func: kernels round all three tensors. What they cannot goes in steps.
    if (
        type(q) is Tensor
        and k is not None
        and v is not None
        and q.is_cuda
        and softcap == 0.0
        and window_size == _NO_WINDOW
        and learnable_sink is seqused_q is seqused_k is leftpad_k is None
        and attention_chunk == 0
        and not return_lse
        and granularity == "head"
        and (softmax_scale is None or (type(softmax_scale) is float and softmax_scale > 0.0))
        and not is_compiling()
    ):
        try:
            if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
                key = _cached_key(seed) if hadamard else -1
                out = _FWD_ROUNDED(q, k, v, causal, key, bool(smooth_k), bool(smooth_v), softmax_scale)
                dtype = q.dtype
                return out if dtype is torch.bfloat16 else out.to(dtype)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass
    request = Request(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
    )
    return _attend(q, k, v, request, hadamard, smooth_k, smooth_v, seed, granularity)


def flash_attn_varlen_fp8_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    hadamard: bool = True,
    smooth_k: bool = True,
    smooth_v: bool = True,
    seed: int = 0,
    granularity: str = "head",
) -> Result:
    """:func:`flash_attn_fp8_func` of packed sequences, as :func:`flash_attn.flash_attn_varlen_func` has them.

    Args:
        q: (Tq, H, D).
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).

    The other arguments, and what is raised, are those of :func:`flash_attn_fp8_func`.

    Returns:
        out (Tq, H, Dv) in q's dtype, or (out, softmax_lse), the latter fp32 (H, Tq).
    """
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        checks.tensor_of(name, x)
    request = Request(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
    )
    return _attend(q, k, v, request, hadamard, smooth_k, smooth_v, seed, granularity)


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Request,
    hadamard: bool,
    smooth_k: bool,
    smooth_v: bool,
    seed: int,
    granularity: str,
) -> Result:
    by_block = _is_block(granularity)
    q, k, v = checks.check_qkv(q, k, v, r.cu_seqlens_q is not None, r.cu_seqlens_k is not None)
    check_no_gradient(q=q, k=k, v=v, learnable_sink=r.learnable_sink)
    p = problem_of(q, k.shape, r)
    smooth_k = smooth_k and p.softcap == 0.0 and p.sink is None
    smooth_v = smooth_v and p.sink is None
    key = _key(seed) if hadamard else None
    out, lse = attend_in_steps(q, k, v, p, key, smooth_k, smooth_v, by_block, bool(r.return_lse))
    out = out.to(q.dtype)
    return (out, lse) if r.return_lse else out


def attend_in_steps(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    p: Problem,
    key: int | None,
    smooth_k: bool,
    smooth_v: bool,
    by_block: bool = False,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """FP8 attention of tensors that are rounded one after the other: (out in bfloat16, log-sum-exp).

    Without ``with_lse``, the log-sum-exp is that of keys less their mean.
    """
    heads_kv = k.shape[-2]
    used_q = _used_rows(q, p.cu_seqlens_q, p.seqused_q, None)
    used_k = _used_rows(k, p.cu_seqlens_k, p.seqused_k, p.leftpad_k)
    rows_q = _Rows(q, p.cu_seqlens_q, used_q, by_block)
    rows_k = _Rows(k, p.cu_seqlens_k, used_k, by_block, p.max_seqlen_k)
    mean_k = rows_k.mean(k) if smooth_k else None
    mean_v = rows_k.mean(v) if smooth_v else None
    q_fp8, q_descale = _rounded(q, rows_q, heads_kv, key=key)
    k_fp8, k_descale = _rounded(k, rows_k, heads_kv, mean_k, key)
    v_fp8, v_descale = _rounded(v, rows_k, heads_kv, mean_v)
    out, lse = forward_fp8(q_fp8, k_fp8, v_fp8, p, (q_descale, k_descale, v_descale))
    group = q.shape[-2] // heads_kv
    if mean_v is not None:
        sees_no_key = lse.transpose(-1, -2)[..., None] == float("-inf")
        of_query = rows_q.by_sequence(mean_v.repeat_interleave(group, 1))
        out = (out + of_query).masked_fill(sees_no_key, 0.0).to(out.dtype)
    if with_lse and mean_k is not None:  # what the scores of a row have lost
        lost = (q.to(torch.float32) * rows_q.by_sequence(mean_k.repeat_interleave(group, 1))).sum(-1)
        lse = lse + p.softmax_scale * lost.transpose(-1, -2)
    return out, lse


def _used_rows(x: Tensor, cu_seqlens: Tensor | None, seqused: Tensor | None, leftpad: Tensor | None) -> Tensor | None:
    """bool (B, S) or (T): rows that seqused and leftpad leave. None: all of them."""
    if seqused is None and leftpad is None:
        return None
    row = torch.arange(x.shape[0 if cu_seqlens is not None else 1], device=x.device)
    used = torch.ones_like(row, dtype=torch.bool)
    if cu_seqlens is None:
        first, last = (None if n is None else n[:, None] for n in (leftpad, seqused))
    else:
        if cu_seqlens.shape[0] == 1:  # no sequences
            return torch.zeros_like(used)
        sequence = sequence_of_rows(cu_seqlens, x.shape[0]).clamp(max=cu_seqlens.shape[0] - 2)
        row = row - cu_seqlens[sequence]
        first, last = (None if n is None else n[sequence] for n in (leftpad, seqused))
    if first is not None:
        used = used & (row >= first)
    if last is not None:
        used = used & (row < last)
    return used
