"""KV caches and rotary embeddings in plain PyTorch: the implementation of their operators for CPU tensors.

``rotate`` and ``rotary_positions`` work on any device without waiting for it: they also serve what has no kernel, as
float32 tensors on a GPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference_general
from .errors import ShapeError
from .problem import Problem
from .reference import lse_dtype

__all__ = [
    "append",
    "check_places",
    "decode",
    "gather_pages",
    "kvcache",
    "rotary",
    "rotary_positions",
    "rotate",
    "select",
]


def rotate(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, conjugate: bool) -> Tensor:
    """``x`` (..., H, D) with its first ``2 * cos.shape[1]`` columns rotated by the angles at ``positions`` (...).

    The pairs are neighbours if ``interleaved``, else column i and i + rotary_dim / 2; ``conjugate`` rotates back. Rows
    at positions that cos does not have stay as they are.
    """
    half = cos.shape[1]
    known = (positions >= 0) & (positions < cos.shape[0])
    row = positions.clamp(0, cos.shape[0] - 1)
    dtype = lse_dtype(x.dtype)
    c = torch.where(known[..., None], cos[row].to(dtype), 1.0)[..., None, :]
    s = torch.where(known[..., None], sin[row].to(dtype), 0.0)[..., None, :]
    if conjugate:
        s = -s
    rotated, rest = x[..., : 2 * half].to(dtype), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., ::2], rotated[..., 1::2]
        pairs = torch.stack((first * c - second * s, first * s + second * c), dim=-1).flatten(-2)
    else:
        first, second = rotated[..., :half], rotated[..., half:]
        pairs = torch.cat((first * c - second * s, first * s + second * c), dim=-1)
    return torch.cat((pairs.to(x.dtype), rest), dim=-1)


def rotary_positions(x: Tensor, offsets: Tensor | None, offset: int, cu_seqlens: Tensor | None) -> Tensor:
    """The position of each row of ``x`` (B, S, H, D) or, with cu_seqlens, (T, H, D): int64 (B, S) or (T)."""
    row = torch.arange(x.shape[1 if cu_seqlens is None else 0], device=x.device)
    if cu_seqlens is None:
        first = offset if offsets is None else offsets.to(torch.int64)[:, None]
        return (row + first).expand(x.shape[0], x.shape[1])
    sequence = torch.searchsorted(cu_seqlens[1:].contiguous(), row, right=True).clamp(max=cu_seqlens.shape[0] - 2)
    return row - cu_seqlens[sequence] + (offset if offsets is None else offsets[sequence])


def rotary(
    source: Tensor,
    destination: Tensor,
    cos: Tensor,
    sin: Tensor,
    offsets: Tensor | None,
    offset: int,
    cu_seqlens: Tensor | None,
    max_seqlen: int,
    interleaved: bool,
    conjugate: bool,
) -> None:
    """Write ``source``, rotated, to ``destination``, which may be the same. Row i of a sequence has position offset +
    i."""
    positions = rotary_positions(source, offsets, offset, cu_seqlens)
    destination.copy_(rotate(source, cos, sin, positions, interleaved, conjugate))


def append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    offsets: Tensor | None,
    offset: int,
    cache_batch_idx: Tensor | None,
    block_table: Tensor | None,
) -> None:
    """Write k and v (B, Sn, Hk, D) into rows offset and up of each cache.

    Rows past the end of a cache, and those of a page that does not exist, are dropped.
    """
    batch, new = k.shape[:2]
    page_size = k_cache.shape[1]
    capacity = page_size * (1 if block_table is None else block_table.shape[1])
    for number, start in enumerate([offset] * batch if offsets is None else offsets.tolist()):
        for i in range(max(0, -start), min(new, capacity - start)):
            slab, row = number, start + i
            if block_table is not None:
                slab, row = int(block_table[number, row // page_size]), row % page_size
            elif cache_batch_idx is not None:
                slab = int(cache_batch_idx[number])
            if 0 <= slab < k_cache.shape[0]:
                k_cache[slab, row] = k[number, i]
                v_cache[slab, row] = v[number, i]


def select(x: Tensor, index: Tensor) -> Tensor:
    """``x.index_select(0, index)``, which some versions of torch do not have for FP8."""
    if x.dtype.itemsize == 1:
        return x.view(torch.uint8).index_select(0, index).view(x.dtype)
    return x.index_select(0, index)


def gather_pages(pages: Tensor, block_table: Tensor) -> Tensor:
    """The pages (n, page_size, Hk, D) of each sequence one after the other, (B, pages * page_size, Hk, D).

    Entries that are no page, as those past a sequence's end may be, are taken for the nearest one: the rows that they
    stand for are to be masked.
    """
    index = block_table.clamp(0, max(0, pages.shape[0] - 1)).reshape(-1)
    gathered = select(pages, index)
    return gathered.reshape(block_table.shape[0], block_table.shape[1] * pages.shape[1], *pages.shape[2:])


def check_places(block_table: Tensor | None, cache_batch_idx: Tensor | None, k_cache: Tensor, lengths: Tensor) -> None:
    """On the CPU, a page that is used and does not exist can be seen, and so can a slab; ``lengths`` (B) in rows."""
    count, page_size = k_cache.shape[:2]
    if block_table is not None:
        for number, (pages, length) in enumerate(zip(block_table.tolist(), lengths.tolist(), strict=True)):
            for i, page in enumerate(pages[: max(0, -(-length // page_size))]):
                if not 0 <= page < count:
                    raise ShapeError(
                        f"block_table must hold page numbers from 0 to {count - 1}, got {page} at ({number}, {i})."
                    )
    if cache_batch_idx is not None:
        for number, slab in enumerate(cache_batch_idx.tolist()):
            if not 0 <= slab < count:
                raise ShapeError(
                    f"cache_batch_idx must hold numbers of slabs from 0 to {count - 1}, got {slab} at ({number},)."
                )


def decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    softmax_scale: float,
    causal: bool,
    seqlens_k: Tensor | None = None,
    seqlen_k: int = -1,
    block_table: Tensor | None = None,
    num_splits: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    leftpad_k: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    attention_chunk: int = 0,
    softcap: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attention of q (B, Sq, H, D) over what each sequence has in the cache; ``num_splits`` changes nothing."""
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if seqlens_k is None and seqlen_k >= 0:
        seqlens_k = torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device)
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    full = torch.full((batch,), capacity, dtype=torch.int32, device=q.device)
    check_places(block_table, cache_batch_idx, k_cache, full if seqlens_k is None else seqlens_k)
    if block_table is not None:
        k, v = gather_pages(k_cache, block_table), gather_pages(v_cache, block_table)
    elif cache_batch_idx is not None:
        k, v = k_cache.index_select(0, cache_batch_idx), v_cache.index_select(0, cache_batch_idx)
    else:
        k, v = k_cache[:batch], v_cache[:batch]
    p = Problem(
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqlens_k,
        leftpad_k=leftpad_k,
        alibi_slopes=alibi_slopes,
        sink=sink,
        max_seqlen_q=q.shape[1] if cu_seqlens_q is None else max_seqlen_q,
        max_seqlen_k=k.shape[1],
        softmax_scale=softmax_scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        attention_chunk=attention_chunk,
        softcap=softcap,
    )
    return reference_general.forward(q, k, v, p)


def kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    softmax_scale: float,
    causal: bool,
    seqlens_k: Tensor | None = None,
    seqlen_k: int = -1,
    block_table: Tensor | None = None,
    num_splits: int = 0,
    window_left: int = -1,
    window_right: int = -1,
    leftpad_k: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    """``append`` of k, and ``decode`` of q, both rotated at their places in the cache less its padding.

    Where the mask does not depend on a query's position, all of q has that of the first new row.
    """
    batch, new = k.shape[:2]
    starts = torch.full((batch,), seqlen_k, dtype=torch.int32, device=q.device) if seqlens_k is None else seqlens_k
    if cos is not None and sin is not None:
        positions = starts.to(torch.int64)[:, None]
        if leftpad_k is not None:
            positions = positions - leftpad_k.clamp(min=0)[:, None]
        k = rotate(k, cos, sin, positions + torch.arange(new, device=q.device), interleaved, False)
        same_position = not causal and window_left < 0 and window_right < 0
        steps = torch.arange(q.shape[1], device=q.device) * (0 if same_position else 1)
        q = rotate(q, cos, sin, positions + steps, interleaved, False)
    append(k, v, k_cache, v_cache, starts, 0, cache_batch_idx, block_table)
    return decode(
        q, k_cache, v_cache, softmax_scale, causal, starts + new, -1, block_table, num_splits, window_left,
        window_right, leftpad_k, cache_batch_idx, *options,
    )  # fmt: skip
