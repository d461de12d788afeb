"""Attention with a KV cache, for inference: new keys and values are written into the cache, then attended with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from ._ops import direct
from ._ops_cache import APPEND, DECODE, DECODE_OUTPUT, KVCACHE, KVCACHE_OUTPUT, ROTARY
from .attend import ROWS_OF_SLABS, decoding_is_faster, forward_fp8, forward_without_gradient
from .errors import ArgumentError, DtypeError, ShapeError, UnsupportedFeatureError
from .problem import Problem
from .reference_cache import check_places, gather_pages, rotate, select
from .reference_general import boundaries

__all__ = ["flash_attn_combine", "flash_attn_with_kvcache"]

_NO_WINDOWS = (-1, -1)
_DECODE_OUTPUT: Callable[..., Tensor] = direct(DECODE_OUTPUT)
_KVCACHE_OUTPUT: Callable[..., Tensor] = direct(KVCACHE_OUTPUT)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    rotary_seqlens: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries with a cache of keys and values, after new keys and values were appended to it.

    The new rows are written in place, and nothing else of the cache changes. Nothing waits for the GPU. There is no
    gradient.

    Args:
        q: (B, Sq, H, D).
        k_cache: (Bc, capacity, Hk, D), one slab a sequence; with ``block_table`` pages, (pages, page_size, Hk, D).
        v_cache: the same with head dim Dv.
        k, v: (B, Sn, Hk, D) and (B, Sn, Hk, Dv), written to rows ``cache_seqlens`` and up of each cache. Rows past the
            capacity are dropped; where that can be known, with an int, it is an error.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2), in q's dtype or fp32: rotary embedding of k, and of q, in
            their first rotary_dim columns. Row i of k has position ``cache_seqlens + i``, without the padding of
            ``cache_leftpad``; so has row i of q if the mask is causal or a window; else all of q has ``cache_seqlens``.
            There must be as many positions as rows in a cache (with an int, as the new rows reach). k is needed.
        cache_seqlens: how many keys each cache holds before the call: an int, or int32 (B,). None: it is full (there is
            then no room for k).
        cache_batch_idx: int32 (B,), the slab of each sequence. None: its own number. The slabs of sequences that get
            new keys must differ.
        cache_leftpad: int32 (B,), rows at the beginning of each cache that do not count; a negative number is 0.
        block_table: int32 (B, n): ``block_table[b, i]`` is the page of sequence b's keys ``i * page_size`` and up; its
            capacity is n * page_size. Pages of any size. With many queries a sequence they are gathered first.
        softmax_scale, causal, window_size, softcap, alibi_slopes, learnable_sink, attention_chunk: as in
            :func:`flash_attn.flash_attn_func`, with the length of each cache, new keys included, as Sk.
        qv: (B, Sq, H, Dv): scores are those of q and k and of qv and v together. D + Dv <= 256; copies the cache.
        rotary_interleaved: pairs of neighbouring columns are rotated, rather than halves.
        num_splits: into how many parts the keys of a sequence are cut, to be worked on side by side; 0 chooses.
        return_softmax_lse: also return the log-sum-exp, fp32 (B, H, Sq).
        rotary_seqlens: int32 (B,), the positions' start where it is not ``cache_seqlens``.
        cu_seqlens_q, max_seqlen_q: q is packed, (T, H, D); so are the results, (T, H, Dv) and (H, T).
        cu_seqlens_k_new: k and v are packed, (T, Hk, D) and (T, Hk, Dv).
        q_descale, k_descale, v_descale: fp32 (B, Hk), for FP8 inputs alone, as in :func:`flash_attn.flash_attn_func`;
            or for each 64 rows, which of the cache is (B, Hk, ceil(capacity / 64)).
            q, k_cache, v_cache, k and v may all be float8_e4m3fn, on GPUs of compute capability 9.0, without
            rotary_cos, alibi_slopes and qv. There is no decode kernel for FP8: the forward's serve, which is slow for
            few queries, and pages and cache_batch_idx are gathered first.
        pack_gqa, sm_margin: hints of other implementations: accepted, and without any effect.

    Returns:
        out (B, Sq, H, Dv) in q's dtype (bfloat16 for FP8), or (out, softmax_lse).

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: a ``ValueError`` naming the argument and what was found.
        UnsupportedFeatureError: a ``NotImplementedError`` naming the argument that this version does not have.
    """
    if torch.is_grad_enabled():  # an operator without a gradient must not be given what wants one
        q, k_cache, v_cache = _detached(q), _detached(k_cache), _detached(v_cache)
        k, v, qv, learnable_sink, alibi_slopes = map(_detached, (k, v, qv, learnable_sink, alibi_slopes))
    if sm_margin != 0:
        checks.sm_margin_of(sm_margin)
    usual = qv is rotary_seqlens is cu_seqlens_q is cu_seqlens_k_new is q_descale is k_descale is v_descale is None

    # The usual call at once: the host library checks the tensors while it reads them. What it refuses goes the long way
    # below, which converts what can be, or says what is wrong and with which argument.
    # (None is looked for here: torch writes its own exception about a tensor that is none to stderr.)
    caches = k_cache is not None and v_cache is not None
    if usual and caches and type(q) is Tensor and q.is_cuda and q.dtype is not checks.FP8 and not is_compiling():
        try:
            batch, seqlen_q, heads, head_dim = q.shape
            lengths, length = cache_seqlens, -1
            if not (lengths is None or isinstance(lengths, Tensor)):
                lengths, length = None, checks.length_of("cache_seqlens", lengths)
            decodes = seqlen_q * heads <= ROWS_OF_SLABS or decoding_is_faster(
                seqlen_q, heads, 1, k_cache.shape[2], block_table is not None
            )
            appends = k is not None and v is not None
            # The kernels need no heads, and Python wants them.
            fits = decodes and heads > 0 and (appends or k is v is rotary_cos is rotary_sin is None)
            if not fits:
                pass
            elif (
                cache_leftpad is cache_batch_idx is alibi_slopes is learnable_sink is None
                and window_size == _NO_WINDOWS
                and softcap == 0.0
                and num_splits == 0
                and attention_chunk == 0
                and not return_softmax_lse
                and (softmax_scale is None or (type(softmax_scale) is float and softmax_scale > 0.0))
            ):
                if appends:
                    return _KVCACHE_OUTPUT(
                        q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, rotary_interleaved, causal, lengths, length,
                        block_table, softmax_scale,
                    )  # fmt: skip
                return _DECODE_OUTPUT(q, k_cache, v_cache, causal, lengths, length, block_table, softmax_scale)
            else:
                causal, left, right = checks.window_of(window_size, causal)
                checks.check_softcap(softcap)
                seldom: tuple[Any, ...] = (
                    checks.length_of("num_splits", num_splits), left, right, cache_leftpad, cache_batch_idx,
                    checks.alibi_slopes_of(alibi_slopes, batch, heads, q), checks.sink_of(learnable_sink, heads, q),
                    checks.attention_chunk_of(attention_chunk), softcap,
                )  # fmt: skip
                scale = checks.scale_of(softmax_scale, head_dim)
                if scale > 0.0:
                    place = (scale, causal, lengths, length, block_table, *seldom)
                    if appends:
                        rotary = _detached(rotary_cos), _detached(rotary_sin), rotary_interleaved
                        out, lse = KVCACHE(q, k_cache, v_cache, k, v, *rotary, *place)
                    else:
                        out, lse = DECODE(q, k_cache, v_cache, *place)
                    return (out, lse) if return_softmax_lse else out
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            pass

    causal, left, right = checks.window_of(window_size, causal)
    chunk = checks.attention_chunk_of(attention_chunk)
    checks.check_softcap(softcap)
    splits = checks.length_of("num_splits", num_splits)
    cache = _cache_of(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cache_leftpad, block_table, cu_seqlens_q)
    fp8 = q.dtype is checks.FP8
    descales = (q_descale, k_descale, v_descale)
    if fp8:
        _check_fp8(cache, k, rotary_cos=rotary_cos, rotary_sin=rotary_sin, alibi_slopes=alibi_slopes, qv=qv)
        descales = (_detached(q_descale), _detached(k_descale), _detached(v_descale))
        # As forward_fp8 is going to, before the cache is written.
        packed = cu_seqlens_q is not None
        checks.descales_of(descales, cache.batch, q, cache.k.shape[2], cache.capacity, packed, False)
    else:
        checks.check_no_descales(q, descales)
    heads = q.shape[-2]
    alibi = checks.alibi_slopes_of(alibi_slopes, cache.batch, heads, q)
    sink = checks.sink_of(learnable_sink, heads, q)
    scale = checks.scale_of(softmax_scale, q.shape[-1] + (0 if qv is None else v_cache.shape[-1]))
    if qv is not None:
        checks.check_qv(q, qv, cache.v.shape[-1])
    if cu_seqlens_q is not None:
        cu_seqlens_q = checks.cu_seqlens_of("cu_seqlens_q", cu_seqlens_q, q)
        max_seqlen_q = checks.length_of("max_seqlen_q", max_seqlen_q)
    else:
        max_seqlen_q = q.shape[1]
    seldom = (splits, left, right, cache.leftpad, cache.batch_idx, alibi, sink, chunk, softcap)
    tokens = q.shape[0] if cu_seqlens_q is not None else q.shape[0] * q.shape[1]
    decodes = not fp8 and decoding_is_faster(tokens, heads, cache.batch, cache.k.shape[2], block_table is not None)
    if k is None:
        given = {"v": v, "rotary_cos": rotary_cos, "rotary_sin": rotary_sin, "cu_seqlens_k_new": cu_seqlens_k_new}
        for name, x in given.items():
            if x is not None:
                raise ArgumentError(f"k must be given together with {name}: k is None, {name} is not.")
        _check_contents(q, 0, cache, cu_seqlens_q)
    else:
        v = _check_new_rows(q, k, v, cache, cu_seqlens_k_new is not None)
        same_position = not causal and left < 0 and right < 0
        rotation = _rotation_of(rotary_cos, rotary_sin, rotary_interleaved, rotary_seqlens, same_position, q, cache)
        new: int | Tensor
        if cu_seqlens_k_new is None:
            new = k.shape[1]
            rows = 1 if same_position or cu_seqlens_q is not None else q.shape[1]
            _check_room(rows, new, cache, rotation)
        else:
            cu_seqlens_k_new = _starts_of_new_rows(k, cu_seqlens_k_new, cache)
            new = cu_seqlens_k_new.diff()
        # The last of the checks: from here on the cache is written.
        _check_contents(q, new, cache, cu_seqlens_q)
        if usual and decodes and scale > 0.0:
            out, lse = KVCACHE(
                q, cache.k, cache.v, k, v, rotation.cos, rotation.sin, rotation.interleaved, scale, causal,
                *cache.place(), *seldom,
            )  # fmt: skip
            return (out, lse) if return_softmax_lse else out
        q, cache = _append(q, k, v, cache, rotation, cu_seqlens_q, cu_seqlens_k_new)

    if qv is not None:
        q, cache = torch.cat((q, qv.to(q.dtype)), dim=-1), cache._replace(k=torch.cat((cache.k, cache.v), dim=-1))
    if scale <= 0.0 and not fp8:  # as in flash_attn_func
        q, scale = (-q, -scale) if scale < 0.0 else (q * 0, 1.0)
    if decodes:
        out, lse = DECODE(
            q, cache.k, cache.v, scale, causal, *cache.place(), *seldom, cu_seqlens_q, max_seqlen_q
        )  # fmt: skip
    else:
        keys, values = cache.slabs()
        p = Problem(
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=None if cache.is_full() else cache.starts(),
            leftpad_k=cache.leftpad,
            alibi_slopes=alibi,
            sink=sink,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=keys.shape[1],
            softmax_scale=scale,
            causal=causal,
            window_left=left,
            window_right=right,
            attention_chunk=chunk,
            softcap=float(softcap),
        )
        if fp8:
            out, lse = forward_fp8(q, keys, values, p, descales)
        else:
            out, lse = forward_without_gradient(q, keys, values, p)
    return (out, lse) if return_softmax_lse else out


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) and x.requires_grad else x


class _Cache(NamedTuple):
    """A checked cache. Its lengths are ``lengths``, or all ``length``; neither where it is full."""

    k: Tensor
    v: Tensor
    batch: int
    capacity: int
    length: int | None
    lengths: Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None

    def place(self) -> tuple[Tensor | None, int, Tensor | None]:
        """As the operators take it."""
        return self.lengths, -1 if self.length is None else self.length, self.block_table

    def is_full(self) -> bool:
        return self.lengths is None and (self.length is None or self.length == self.capacity)

    def starts(self) -> Tensor:
        """int32 (B): the lengths."""
        if self.lengths is not None:
            return self.lengths
        length = self.capacity if self.length is None else self.length
        return torch.full((self.batch,), length, dtype=torch.int32, device=self.k.device)

    def slabs(self) -> tuple[Tensor, Tensor]:
        """k and v with one slab for each sequence, in their order."""
        if self.block_table is not None:
            return gather_pages(self.k, self.block_table), gather_pages(self.v, self.block_table)
        if self.batch_idx is not None:
            return select(self.k, self.batch_idx), select(self.v, self.batch_idx)
        return self.k[: self.batch], self.v[: self.batch]


def _cache_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: int | Tensor | None,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> _Cache:
    """Checks q and everything about the cache."""
    if cu_seqlens_q is not None or not _cache_fits(q, k_cache, v_cache):
        for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
            checks.tensor_of(name, x)
        _check_cache_tensors(q, k_cache, v_cache, cu_seqlens_q is not None, block_table is not None)
    if cu_seqlens_q is not None:
        batch = checks.cu_seqlens_of("cu_seqlens_q", cu_seqlens_q, q).shape[0] - 1
    else:
        batch = q.shape[0]
    capacity = k_cache.shape[1]
    if block_table is not None:
        block_table = checks.block_table_of(block_table, batch, q)
        capacity *= block_table.shape[1]
        if cache_batch_idx is not None:
            raise ArgumentError("cache_batch_idx must be None with a block_table: its rows are the sequences' own.")
    batch_idx = checks.numbers_of("cache_batch_idx", cache_batch_idx, batch, q)
    if block_table is None and batch_idx is None and k_cache.shape[0] < batch:
        raise ShapeError(
            f"k_cache must have a slab for each sequence without a cache_batch_idx: {batch}, got {k_cache.shape[0]}."
        )
    length, lengths = None, None
    if isinstance(cache_seqlens, Tensor):
        lengths = checks.numbers_of("cache_seqlens", cache_seqlens, batch, q)
    elif cache_seqlens is not None:
        length = checks.length_of("cache_seqlens", cache_seqlens)
        if length > capacity:
            raise ArgumentError(f"cache_seqlens must be at most the cache's capacity, {capacity}, got {length}.")
    leftpad = checks.numbers_of("cache_leftpad", cache_leftpad, batch, q)
    return _Cache(k_cache, v_cache, batch, capacity, length, lengths, batch_idx, leftpad, block_table)


def _cache_fits(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether all is well with the tensors of a batch, in as little time as can be."""
    try:
        q_shape, k_shape, v_shape, dtype, device = q.shape, k_cache.shape, v_cache.shape, q.dtype, q.device
        return (
            len(q_shape) == 4
            and len(k_shape) == 4
            and k_shape[:3] == v_shape[:3]
            and q_shape[3] == k_shape[3]
            and 0 < q_shape[3] <= checks.MAX_HEAD_DIM
            and 0 < v_shape[3] <= checks.MAX_HEAD_DIM
            and k_shape[2] > 0
            and k_shape[1] > 0
            and q_shape[2] % k_shape[2] == 0
            and dtype in checks.KERNEL_DTYPES
            and k_cache.dtype is dtype
            and v_cache.dtype is dtype
            and k_cache.device == device
            and v_cache.device == device
            and (q.is_cuda or q.is_cpu)
        )
    except AttributeError:  # not tensors
        return False


def _check_cache_tensors(q: Tensor, k_cache: Tensor, v_cache: Tensor, packed_q: bool, paged: bool) -> None:
    # Before check_qkv, whose texts would call the cache k and v.
    layout = "(pages, page_size, Hk, {})" if paged else "(Bc, capacity, Hk, {})"
    for name, x, dim in (("k_cache", k_cache, "D"), ("v_cache", v_cache, "Dv")):
        checks.same_device(name, x, q)
        if x.dim() != 4:
            raise ShapeError(f"{name} must have 4 dimensions, {layout.format(dim)}, got {x.dim()}: {checks.sizes(x)}.")
        if x.dtype != q.dtype:
            raise DtypeError(f"{name} must have q's dtype: q is {q.dtype}, {name} is {x.dtype}.")
    if k_cache.shape[:-1] != v_cache.shape[:-1]:
        raise ShapeError(
            f"v_cache must have k_cache's shape but for the head dim: k_cache is {checks.sizes(k_cache)}, "
            f"v_cache is {checks.sizes(v_cache)}."
        )
    if q.dim() != (3 if packed_q else 4):
        wanted = "3 dimensions, (T, H, D)" if packed_q else "4 dimensions, (B, Sq, H, D)"
        raise ShapeError(f"q must have {wanted}, got {q.dim()}: {checks.sizes(q)}.")
    if k_cache.shape[-1] != q.shape[-1]:
        raise ShapeError(f"k_cache must have q's head dim: q has {q.shape[-1]}, k_cache has {k_cache.shape[-1]}.")
    if k_cache.shape[2] == 0 or q.shape[-2] % k_cache.shape[2] != 0:
        raise ShapeError(
            f"q's heads must be a multiple of k_cache's: q has {q.shape[-2]} heads, k_cache has {k_cache.shape[2]}."
        )
    if paged and k_cache.shape[1] == 0:
        raise ShapeError(f"k_cache must have pages of at least one row, got {checks.sizes(k_cache)}.")
    # What is left: dtypes that have kernels, devices, head dims. A batch without sequences has all of them.
    if packed_q:
        checks.check_qkv(q[None, :0], k_cache[:1, :0], v_cache[:1, :0], fp8=True)
    else:
        checks.check_qkv(q[:0], k_cache[:0], v_cache[:0], fp8=True)


def _check_fp8(cache: _Cache, k: Tensor | None, **options: Tensor | None) -> None:
    """What a cache of FP8 does not go together with: ``options``, and new rows that cannot be moved as they are."""
    for name, option in options.items():
        if option is not None:
            raise UnsupportedFeatureError(f"{name} must be None with a cache of FP8.")
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if k is not None and (x.shape[-1] % 16 != 0 or x.stride(-1) != 1):
            raise UnsupportedFeatureError(
                f"{name} must have a contiguous head dim that is a multiple of 16 where k is appended to a cache of "
                f"FP8, got {x.shape[-1]} with a stride of {x.stride(-1)}."
            )


def _check_contents(q: Tensor, new: int | Tensor, cache: _Cache, cu_seqlens_q: Tensor | None) -> None:
    """On the CPU, the numbers in tensors can be seen. ``new``: how many rows each sequence is about to get."""
    if not checks.has_numbers(q):
        return
    if cu_seqlens_q is not None:
        boundaries("cu_seqlens_q", q, cu_seqlens_q)
    check_places(cache.block_table, cache.batch_idx, cache.k, cache.starts() + new)


# New keys and values.


class _Rotation(NamedTuple):
    """Rotary embedding; cos is None for none. ``starts``: positions, where they are not the cache's lengths."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    starts: Tensor | None
    same_position: bool


def _rotation_of(
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    starts: Tensor | None,
    same_position: bool,
    q: Tensor,
    cache: _Cache,
) -> _Rotation:
    starts = checks.numbers_of("rotary_seqlens", starts, cache.batch, q)
    cos, sin = _detached(cos), _detached(sin)
    if cos is None and sin is None:
        return _Rotation(None, None, interleaved, None, same_position)
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        x = checks.tensor_of(name, x)
        checks.same_device(name, x, q)
        if x.dtype not in (q.dtype, torch.float32):
            raise DtypeError(f"{name} must have q's dtype or be torch.float32: q is {q.dtype}, {name} is {x.dtype}.")
        if x.dim() != 2 or not 0 < 2 * x.shape[1] <= q.shape[-1]:
            raise ShapeError(
                f"{name} must have shape (positions, rotary_dim / 2) with rotary_dim at most {q.shape[-1]}, "
                f"got {checks.sizes(x)}."
            )
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape or cos.dtype != sin.dtype:
        raise ShapeError(
            f"rotary_sin must be like rotary_cos: rotary_cos is {cos.dtype} {checks.sizes(cos)}, rotary_sin is "
            f"{sin.dtype} {checks.sizes(sin)}."
        )
    if cache.length is None and starts is None and cos.shape[0] < cache.capacity:
        raise ShapeError(
            f"rotary_cos must have a position for each row of a cache: {cache.capacity}, got {cos.shape[0]}."
        )
    return _Rotation(cos.contiguous(), sin.contiguous(), bool(interleaved), starts, same_position)


def _check_new_rows(q: Tensor, k: Tensor, v: Tensor | None, cache: _Cache, packed: bool) -> Tensor:
    """Checks k and v, and returns v."""
    v, k = checks.tensor_of("v", v), checks.tensor_of("k", k)
    heads_kv = cache.k.shape[2]
    layout = "(T, Hk, D)" if packed else "(B, Sn, Hk, D)"
    rank = layout.count(",") + 1
    if k.dim() != rank:
        raise ShapeError(f"k must have {rank} dimensions, {layout}, got {k.dim()}: {checks.sizes(k)}.")
    lengths = tuple(k.shape[:1]) if packed else (cache.batch, k.shape[1])
    for name, x, head_dim in (("k", k, cache.k.shape[3]), ("v", v, cache.v.shape[3])):
        checks.same_device(name, x, q)
        if x.dtype != q.dtype:
            raise DtypeError(f"{name} must have q's dtype: q is {q.dtype}, {name} is {x.dtype}.")
        wanted = (*lengths, heads_kv, head_dim)
        if tuple(x.shape) != wanted:
            raise ShapeError(f"{name} must have shape {wanted} here, got {checks.sizes(x)}.")
    for name, x in (("k_cache", cache.k), ("v_cache", cache.v)):
        if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
            raise ShapeError(
                f"{name} must not be expanded where k is written to it, got {checks.sizes(x)}, strides {x.stride()}."
            )
    if cache.length is None and cache.lengths is None:
        raise ArgumentError("cache_seqlens must say where k goes: k is given, cache_seqlens is None.")
    return v


def _check_room(query_rows: int, new: int, cache: _Cache, rotation: _Rotation) -> None:
    """Where the host knows the length: that the new rows fit, and that they and the query's have positions."""
    length = cache.length
    if length is None:
        return
    if length + new > cache.capacity:
        raise ArgumentError(
            f"cache_seqlens must leave room for k: {length} + {new} new rows are more than the capacity, "
            f"{cache.capacity}."
        )
    positions = max(new, query_rows)
    if rotation.cos is not None and rotation.starts is None and length + positions > rotation.cos.shape[0]:
        raise ShapeError(
            f"rotary_cos must have a position for each new row: {length} + {positions} are needed, "
            f"got {rotation.cos.shape[0]}."
        )


def _starts_of_new_rows(k: Tensor, cu_seqlens_k_new: Tensor, cache: _Cache) -> Tensor:
    x = checks.cu_seqlens_of("cu_seqlens_k_new", cu_seqlens_k_new, k)
    if x.shape[0] != cache.batch + 1:
        raise ShapeError(
            f"cu_seqlens_k_new must have shape (B + 1,), ({cache.batch + 1},) here, got {checks.sizes(x)}."
        )
    if checks.has_numbers(k):
        boundaries("cu_seqlens_k_new", k, x)
    return x


def _append(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: _Cache,
    rotation: _Rotation,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k_new: Tensor | None,
) -> tuple[Tensor, _Cache]:
    """Write k and v, packed or not, into the cache, with positions of their own or not: (q, rotated; the cache after
    it)."""
    starts = cache.starts()
    if cache.batch == 0:  # no row belongs to any sequence
        return q, cache
    if rotation.cos is not None and rotation.sin is not None:
        positions = starts if cache.leftpad is None else starts - cache.leftpad.clamp(min=0)
        if rotation.starts is not None:
            positions = rotation.starts
        k = _rotated(k, positions, cu_seqlens_k_new, rotation, False)
        q = _rotated(q, positions, cu_seqlens_q, rotation, rotation.same_position)
    if cu_seqlens_k_new is None:
        APPEND(*_as_moved(k, v, cache.k, cache.v), starts, 0, cache.batch_idx, cache.block_table)
        return q, cache._replace(lengths=starts + k.shape[1], length=None)
    # Every token is handed over as a sequence of its own, of one row, with its own place.
    tokens = _Tokens.of(k, cu_seqlens_k_new)
    rows = torch.where(tokens.exists, tokens.at(starts), -1).to(torch.int32)
    slab = tokens.sequence.to(torch.int32) if cache.batch_idx is None else cache.batch_idx[tokens.sequence]
    block_table = None if cache.block_table is None else cache.block_table[tokens.sequence]
    rows_of = _as_moved(k[:, None], v[:, None], cache.k, cache.v)
    APPEND(*rows_of, rows, 0, slab if block_table is None else None, block_table)
    return q, cache._replace(lengths=starts + tokens.counts, length=None)


def _as_moved(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple[Tensor, ...]:
    """Rows are moved in elements of 16 bits: of FP8, two at a time."""
    if k.dtype is not checks.FP8:
        return k, v, k_cache, v_cache
    return tuple(x.view(torch.bfloat16) for x in (k.contiguous(), v.contiguous(), k_cache, v_cache))


def _rotated(x: Tensor, starts: Tensor, cu_seqlens: Tensor | None, rotation: _Rotation, same_position: bool) -> Tensor:
    """x, its rows rotated by their positions from ``starts`` (B) on, or all by the first one.

    ``cu_seqlens`` if x is packed.
    """
    assert rotation.cos is not None
    assert rotation.sin is not None
    if same_position:  # which the kernel does not have
        if cu_seqlens is None:
            positions = starts.to(torch.int64)[:, None].expand(x.shape[0], x.shape[1])
        else:
            positions = _Tokens.of(x, cu_seqlens).of_sequence(starts)
        return rotate(x, rotation.cos, rotation.sin, positions, rotation.interleaved, False)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    longest = x.shape[0 if cu_seqlens is not None else 1]
    ROTARY(x, out, rotation.cos, rotation.sin, starts, 0, cu_seqlens, longest, rotation.interleaved, False)
    return out


class _Tokens(NamedTuple):
    """Where each token of a packed tensor (T) belongs."""

    sequence: Tensor  # int64, its sequence
    row: Tensor  # int64, its row in it
    exists: Tensor  # bool: there may be tokens of no sequence at the end
    counts: Tensor  # int32 (B), tokens of each sequence

    @classmethod
    def of(cls, x: Tensor, cu_seqlens: Tensor) -> _Tokens:
        token = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:], token, right=True).clamp(max=cu_seqlens.shape[0] - 2)
        return cls(sequence, token - cu_seqlens[sequence], token < cu_seqlens[-1], cu_seqlens.diff())

    def of_sequence(self, values: Tensor) -> Tensor:
        """``values`` (B), for each token."""
        return values[self.sequence].to(torch.int64)

    def at(self, starts: Tensor) -> Tensor:
        return self.of_sequence(starts) + self.row


# Partial results.


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """The attention over all keys from the attentions over parts of them.

    Args:
        out_partial: (parts, B, S, H, D), or packed (parts, T, H, D): the output over each part, in any dtype.
        lse_partial: (parts, B, S, H), or packed (parts, T, H): its log-sum-exp, fp32, -inf where a part had no key for
            a row. (``softmax_lse.transpose(-1, -2)`` of the other functions.)
        out: where to write the output, (B, S, H, D) or (T, H, D). None: a new tensor.
        out_dtype: its dtype, if new; out_partial's if None.

    Returns:
        (out, softmax_lse): softmax_lse is a view of a contiguous (B, H, S) as (B, S, H), packed (T, H). Both are
        differentiable functions of the parts unless ``out`` is given.
    """
    checks.tensor_of("out_partial", out_partial)
    checks.tensor_of("lse_partial", lse_partial)
    checks.same_device("lse_partial", lse_partial, out_partial, "out_partial")
    if out_partial.dim() not in (4, 5):
        raise ShapeError(
            f"out_partial must have shape (parts, B, S, H, D) or (parts, T, H, D), got {checks.sizes(out_partial)}."
        )
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ShapeError(
            f"lse_partial must have out_partial's shape without the head dim, {tuple(out_partial.shape[:-1])}, "
            f"got {checks.sizes(lse_partial)}."
        )
    if not lse_partial.dtype.is_floating_point:
        raise DtypeError(f"lse_partial must be a floating point tensor, got {lse_partial.dtype}.")
    lse = torch.logsumexp(lse_partial, dim=0)
    share = torch.exp(lse_partial - lse.masked_fill(lse == float("-inf"), 0.0))
    # A part without a key for a row has no part in it, whatever its output is.
    values = out_partial.to(share.dtype).masked_fill((share == 0.0)[..., None], 0.0)
    total = (values * share[..., None]).sum(dim=0)
    lse = lse.transpose(-1, -2).contiguous().transpose(-1, -2)
    if out is None:
        return total.to(out_dtype or out_partial.dtype), lse
    checks.same_device("out", checks.tensor_of("out", out), out_partial, "out_partial")
    if out.shape != total.shape:
        raise ShapeError(f"out must have shape {tuple(total.shape)}, got {checks.sizes(out)}.")
    return out.copy_(total), lse
