"""Cases of the operators of KV caches."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_general_cases import Options, attend, halves, ints
from torch_rotary_cases import tables, turned
from torch_support import APPEND, DECODE, KVCACHE, ROTARY, close, made, raises

# ---- Decoding ----


@dataclass
class Decode:
    """The operator's arguments in their order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    softmax_scale: float = 0.3
    causal: bool = False
    seqlens_k: Tensor | None = None
    seqlen_k: int = -1
    block_table: Tensor | None = None
    num_splits: int = 0
    window_left: int = -1
    window_right: int = -1
    leftpad_k: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    attention_chunk: int = 0
    softcap: float = 0.0
    cu_seqlens_q: Tensor | None = None
    max_seqlen_q: int = 0

    def arguments(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = DECODE(*self.arguments())
        return out

    def options(self) -> Options:
        shared = {f.name for f in fields(self)} & {f.name for f in fields(Options)}
        return Options(**{name: getattr(self, name) for name in shared})


def slabs(
    b: int = 2, sq: int = 1, capacity: int = 40, h: int = 4, hk: int = 2, d: int = 64, dv: int = 64, **more: Any
) -> Decode:
    torch.manual_seed(capacity * 100 + d)
    return Decode(halves(b, sq, h, d), halves(b, capacity, hk, d), halves(b, capacity, hk, dv), **more)


def paged(page_size: int = 16, pages: int = 3, b: int = 2, sq: int = 1, d: int = 64, **more: Any) -> Decode:
    torch.manual_seed(page_size)
    caches = (halves(b * pages + 1, page_size, 2, d) for _ in range(2))
    table = torch.randperm(b * pages + 1)[: b * pages].int().view(b, pages)
    return Decode(halves(b, sq, 4, d), *caches, block_table=table, **more)


def whole(cache: Tensor, batch: int, cache_batch_idx: Tensor | None, block_table: Tensor | None) -> Tensor:
    """The cache of one sequence, (capacity, Hk, D)."""
    if block_table is not None:
        pages = [cache[i] for i in block_table[batch].tolist()]
        return torch.cat(pages) if pages else cache.new_zeros((0, *cache.shape[2:]))
    return cache[batch if cache_batch_idx is None else int(cache_batch_idx[batch])]


def reference(c: Decode) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    bounds = None if c.cu_seqlens_q is None else c.cu_seqlens_q.tolist()
    for b in range(c.q.shape[0] if bounds is None else len(bounds) - 1):
        rows = []
        for cache in (c.k_cache, c.v_cache):
            x = whole(cache, b, c.cache_batch_idx, c.block_table).double()
            length = len(x) if c.seqlens_k is None and c.seqlen_k < 0 else c.seqlen_k
            last = min(len(x), length if c.seqlens_k is None else int(c.seqlens_k[b]))
            first = 0 if c.leftpad_k is None else min(last, max(0, int(c.leftpad_k[b])))
            group = c.q.shape[-2] // max(x.shape[1], 1)
            rows.append(x[first:last].transpose(0, 1).repeat_interleave(group, 0))
        q = c.q[b] if bounds is None else c.q[bounds[b] : bounds[b + 1]]
        out, lse = attend(q.double().transpose(0, 1), *rows, c.options(), b)
        outs.append(out.transpose(0, 1))
        lses.append(lse)
    if bounds is not None:
        return torch.cat(outs), torch.cat(lses, dim=-1)
    if not outs:
        _, sq, heads, _ = c.q.shape
        return c.q.new_zeros((0, sq, heads, c.v_cache.shape[3])), torch.zeros(0, heads, sq)
    return torch.stack(outs), torch.stack(lses)


def check(case: Decode) -> None:
    """Against float64; the inputs stay as they were."""
    before = [x.clone() for x in case.arguments() if isinstance(x, Tensor)]
    out, lse = case()
    wanted_out, wanted_lse = reference(case)
    assert (out.dtype, lse.dtype) == (case.q.dtype, torch.float32)
    close(out, wanted_out, "out")
    close(lse, wanted_lse, "lse", 2e-3)
    after = [x for x in case.arguments() if isinstance(x, Tensor)]
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


@contextmanager
def launches() -> Iterator[list[dict[str, str]]]:
    """What the driver launched meanwhile."""
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "launches")
        os.environ["FAKE_CUDA_LOG"] = str(log)
        try:
            yield found
        finally:
            del os.environ["FAKE_CUDA_LOG"]
        lines = log.read_text("utf-8").splitlines() if log.exists() else []  # there is one once the driver was called
    for kind, *values in map(str.split, lines):
        if kind == "launch":
            found.append(dict(value.split("=", 1) for value in values))


def case_decode() -> None:
    for sq in (1, 3):
        for h, hk in ((2, 2), (4, 2), (8, 1)):
            for causal in (False, True):
                check(slabs(sq=sq, h=h, hk=hk, causal=causal))
    check(slabs(d=128, dv=128))
    case = slabs()
    check(Decode(*(x.bfloat16().half() for x in (case.q, case.k_cache, case.v_cache))))
    bf16 = Decode(*(x.bfloat16() for x in (case.q, case.k_cache, case.v_cache)))
    close(bf16()[0], reference(bf16)[0], "out", 5e-2)


def case_decode_of_several_row_tiles() -> None:
    """64 rows a block in the tests' kernels: 20 heads by 4 tokens are two tiles, one of them partly used."""
    for num_splits in (1, 3):
        for h, tiles in ((8, 1), (16, 1), (20, 2)):
            case = slabs(b=2, sq=4, h=h, hk=1, d=8, dv=8, causal=True, num_splits=num_splits)
            with launches() as found:
                check(case)
            assert [x["grid"] for x in found if x["entry"] == "flash_decode"] == [f"{2 * tiles * num_splits},1"]


def case_decode_packed_queries() -> None:
    for bounds in (ints(0, 3, 4), ints(0, 0, 7), ints(0, 4, 4)):
        for num_splits in (1, 3):
            torch.manual_seed(int(bounds[1]))
            more: dict[str, Any] = {"cu_seqlens_q": bounds, "max_seqlen_q": 7, "num_splits": num_splits}
            q, caches = halves(int(bounds[-1]), 40, 8), [halves(2, 30, 1, 8) for _ in range(2)]
            check(Decode(q, *caches, **more))
            check(Decode(q, *caches, seqlens_k=ints(9, 30), causal=True, sink=torch.randn(40), **more))
            pages = paged(5, 3, d=8)
            q = halves(int(bounds[-1]), 4, 8)
            check(replace(pages, q=q, seqlens_k=ints(9, 15), causal=True, alibi_slopes=torch.rand(2, 4), **more))
            check(replace(pages, q=halves(int(bounds[-1]), 4, 20)[..., :8], leftpad_k=ints(3, 1), **more))
    check(Decode(halves(5, 4, 8), *(halves(1, 9, 2, 8) for _ in range(2)), cu_seqlens_q=ints(0, 5), max_seqlen_q=5))


def case_decode_splits() -> None:
    for num_splits, grids in (
        (1, ["4,1"]), (2, ["8,1", "4,1"]), (7, ["28,1", "4,1"]), (64, ["256,1", "4,1"]), (9999, ["512,1", "4,1"]),
    ):  # fmt: skip
        with launches() as found:
            check(slabs(num_splits=num_splits))
        assert [x["grid"] for x in found] == grids, found
        check(slabs(num_splits=num_splits, seqlens_k=ints(3, 0), sq=2))
        check(slabs(num_splits=num_splits, capacity=200, window_left=20, causal=True, d=20, dv=36))
        check(paged(num_splits=num_splits, sink=torch.tensor([-1.0, 0.5, 3.0, -9.0]), leftpad_k=ints(4, 11)))


def case_decode_automatic_splits() -> None:
    """The pretended GPU has 7 multiprocessors."""
    for b, capacity, splits in ((1, 40, 1), (1, 300, 1), (1, 1000, 3), (2, 1000, 1), (3, 1000, 1)):
        with launches() as found:
            check(slabs(b=b, capacity=capacity, d=8, dv=8))
        assert found[0]["grid"] == f"{2 * b * splits},1", found
        assert len(found) == (2 if splits > 1 else 1)


def case_decode_lengths() -> None:
    check(slabs(seqlens_k=ints(7, 40)))
    for length in (0, 1, 7, 40):
        check(slabs(seqlen_k=length))
        check(slabs(seqlen_k=length, sq=3, causal=True, leftpad_k=ints(2, 0), num_splits=2))
    check(slabs(seqlens_k=ints(0, 1), sq=3, causal=True))
    check(slabs(seqlens_k=ints(41, 1000)))  # more than there is
    check(slabs(leftpad_k=ints(3, 40)))
    check(slabs(leftpad_k=ints(-3, -40)))  # there is nothing before the first row
    check(slabs(leftpad_k=ints(5, 30), seqlens_k=ints(20, 20), sq=2, causal=True))


def case_decode_slabs() -> None:
    case = slabs(b=2)
    more = [halves(5, 40, 2, 64) for _ in range(2)]
    check(replace(case, k_cache=more[0], v_cache=more[1]))
    check(replace(case, k_cache=more[0], v_cache=more[1], cache_batch_idx=ints(4, 1), seqlens_k=ints(30, 2)))
    one = [x[:1] for x in more]
    check(replace(case, k_cache=one[0], v_cache=one[1], cache_batch_idx=ints(0, 0)))


def case_decode_pages() -> None:
    for page_size in (1, 16, 20):
        for num_splits in (0, 3):
            check(paged(page_size, num_splits=num_splits))
            check(paged(page_size, seqlens_k=ints(3, 2), sq=2, causal=True, num_splits=num_splits))
    case = paged(leftpad_k=ints(17, 3), seqlens_k=ints(40, 47))
    check(case)
    wide = torch.full((2, 9), -1, dtype=torch.int32)
    wide[:, :3] = case.block_table
    check(replace(case, block_table=wide[:, :3]))
    check(paged(d=36))


def case_decode_modifiers() -> None:
    torch.manual_seed(3)
    for more in (
        {"window_left": 5}, {"window_left": 4, "window_right": 1}, {"window_right": 0},
        {"window_left": 0, "causal": True},
        {"attention_chunk": 7}, {"attention_chunk": 7, "causal": True}, {"softcap": 1.5},
        {"alibi_slopes": torch.rand(4)}, {"alibi_slopes": torch.rand(2, 4), "causal": True},
        {"alibi_slopes": torch.rand(4, 2).T.double()}, {"sink": torch.randn(4)},
        {"sink": torch.randn(8).bfloat16()[::2]},
        {"window_left": 1 << 40, "window_right": 1 << 40, "attention_chunk": 1 << 40},
        {"alibi_slopes": torch.rand(4), "sink": torch.randn(4), "window_left": 9, "causal": True, "softcap": 2.0},
    ):  # fmt: skip
        for num_splits in (1, 4):
            check(slabs(sq=3, num_splits=num_splits, **more))
    check(slabs(sq=3, seqlens_k=ints(2, 0), sink=torch.randn(4), causal=True))  # rows that see the sink alone


def case_decode_head_dims_and_layouts() -> None:
    for d, dv in ((36, 36), (7, 7), (64, 20), (20, 64), (40, 128), (128, 8)):
        for num_splits in (1, 3):
            check(slabs(d=d, dv=dv, num_splits=num_splits))
    case = slabs(b=2)
    kv = halves(2, 40, 2, 2, 64)  # K and V side by side
    check(replace(case, k_cache=kv[:, :, 0], v_cache=kv[:, :, 1]))
    check(replace(case, k_cache=halves(2, 2, 40, 64).transpose(1, 2), v_cache=halves(2, 2, 40, 64).transpose(1, 2)))
    check(replace(case, q=halves(2, 4, 1, 65)[..., 1:].transpose(1, 2)))
    check(replace(case, k_cache=halves(2, 40, 2, 65)[..., 1:], v_cache=halves(2, 40, 2, 128)[..., ::2]))
    check(replace(case, k_cache=halves(1, 40, 2, 64).expand(2, -1, -1, -1)))


def case_decode_of_nothing() -> None:
    check(slabs(b=0))
    check(slabs(sq=0))
    check(slabs(h=0, hk=0))
    check(slabs(capacity=0))
    check(slabs(capacity=0, sink=torch.ones(4), num_splits=3))
    check(paged(pages=0))
    check(slabs(d=36, capacity=0))


def case_decode_wrong_arguments() -> None:
    case = slabs(sq=3)

    def call(**changes: Any) -> Callable[[], object]:
        return replace(case, **changes)

    q, k, v = case.q, case.k_cache, case.v_cache
    raises(call(q=q[0]), "q has 3 dimensions, not 4")
    raises(call(k_cache=k[0]), "k_cache has 3 dimensions, not 4")
    raises(call(k_cache=k.bfloat16()), "k_cache and q have different dtypes: k_cache is bfloat16, q is float16")
    raises(call(v_cache=v.float()), "v_cache and q have different dtypes: v_cache is float32, q is float16")
    raises(call(q=q.float(), k_cache=k.float(), v_cache=v.float()), "q is float32", "float16 and bfloat16")
    raises(call(k_cache=k[..., :32]), "k_cache has shape (2, 40, 2, 32), expected (2, 40, 2, 64)")
    raises(call(v_cache=v[:, :39]), "v_cache has shape (2, 39, 2, 64), expected (2, 40, 2, 64)")
    raises(call(q=q[:, :, :3]), "q has 3 heads", "2 heads of k_cache")
    raises(call(k_cache=k[:, :, :0], v_cache=v[:, :, :0]), "q has 4 heads", "0 heads of k_cache")
    raises(call(k_cache=k[:1], v_cache=v[:1]), "k_cache holds 1 sequences, and there are 2")
    raises(call(q=q[..., :0], k_cache=k[..., :0]), "q has head_dim 0")
    raises(call(v_cache=v.repeat(1, 1, 1, 5)), "v_cache 320")
    raises(call(seqlens_k=ints(1)), "seqlens_k has shape (1), expected (2)")
    raises(call(seqlens_k=torch.ones(2)), "seqlens_k is float32, expected int32")
    raises(call(seqlen_k=41), "seqlen_k 41", "a cache of 40 rows")
    raises(call(cu_seqlens_q=ints(0, 1, 2)), "q has 4 dimensions, not 3")
    packed = {"q": q[0], "cu_seqlens_q": ints(0, 1, 3), "max_seqlen_q": 2}
    raises(call(**{**packed, "cu_seqlens_q": ints()}), "cu_seqlens_q has shape (0)")
    raises(call(**{**packed, "cu_seqlens_q": ints(0, 1, 3).long()}), "cu_seqlens_q is int64, expected int32")
    raises(call(**{**packed, "max_seqlen_q": -1}), "max_seqlen_q is -1")
    raises(call(**packed, seqlens_k=ints(1)), "seqlens_k has shape (1), expected (2)")
    raises(call(leftpad_k=ints(1, 2, 3)), "leftpad_k has shape (3), expected (2)")
    raises(call(cache_batch_idx=ints(1, 0).long()), "cache_batch_idx is int64, expected int32")
    raises(call(cache_batch_idx=ints(0, 1, 2, 3)[::2]), "cache_batch_idx of shape (2) has strides (2)", "contiguous")
    raises(call(alibi_slopes=torch.ones(3)), "alibi_slopes has shape (3), expected (4)")
    raises(call(alibi_slopes=torch.ones(4, 2)), "alibi_slopes has shape (4, 2), expected (2, 4)")
    raises(call(sink=torch.ones(4, 1)), "sink has 2 dimensions, not 1")
    table = ints(0, 1, 1, 0).view(2, 2)
    raises(call(block_table=table, cache_batch_idx=ints(0, 1)), "cache_batch_idx and block_table")
    raises(call(block_table=table.view(4)), "block_table has 1 dimensions, not 2")
    raises(call(block_table=table[:1]), "block_table has shape (1, 2), expected (2, 2)")
    raises(call(block_table=table.long()), "block_table is int64, expected int32")
    raises(call(block_table=table.T), "block_table", "contiguous")
    raises(call(block_table=ints(0).expand(2, 1 << 26)), "block_table", "contiguous")
    huge = torch.empty(1, 1, 1, 8, dtype=torch.float16).expand(2, 1 << 30, 1, 8)
    raises(Decode(halves(2, 1, 1, 8), huge, huge), "1073741824 rows")
    wide = slabs(d=8, dv=136)
    raises(wide, "decode-sm80-fp16-d192-general is not built", "head_dim 136")


# ---- Appending ----


@dataclass
class Append:
    """The operator's arguments in their order."""

    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    offsets: Tensor | None = None
    offset: int = 0
    cache_batch_idx: Tensor | None = None
    block_table: Tensor | None = None

    def __call__(self) -> None:
        assert APPEND(*(getattr(self, f.name) for f in fields(self))) is None


def appending(
    b: int = 2, new: int = 3, capacity: int = 20, hk: int = 2, d: int = 64, dv: int = 64, **more: Any
) -> Append:
    torch.manual_seed(new + d)
    caches = halves(b, capacity, hk, d), halves(b, capacity, hk, dv)
    return Append(halves(b, new, hk, d), halves(b, new, hk, dv), *caches, **more)


def written(c: Append) -> list[Tensor]:
    """What the caches should hold afterwards; whatever is not appended to stays as it was."""
    wanted = [c.k_cache.double(), c.v_cache.double()]
    for b in range(c.k.shape[0]):
        offset = c.offset if c.offsets is None else int(c.offsets[b])
        for cache, rows in zip(wanted, (c.k[b].double(), c.v[b].double()), strict=True):
            size = cache.shape[1]
            for i, row in enumerate(rows):
                at = offset + i
                if c.block_table is not None:
                    if 0 <= at < size * c.block_table.shape[1]:
                        cache[int(c.block_table[b, at // size]), at % size] = row
                elif 0 <= at < size:
                    cache[b if c.cache_batch_idx is None else int(c.cache_batch_idx[b]), at] = row
    return wanted


def check_append(c: Append) -> None:
    wanted = written(c)
    c()
    for name, found, expected in zip(("k_cache", "v_cache"), (c.k_cache, c.v_cache), wanted, strict=True):
        close(found, expected, name, 0.0, contiguous=False)


def case_append() -> None:
    check_append(appending(offset=5))
    check_append(appending(offsets=ints(0, 11)))


def case_append_past_the_capacity() -> None:
    """Rows that have no place are dropped."""
    check_append(appending(offset=18))
    check_append(appending(offset=20))
    check_append(appending(offsets=ints(19, 1000)))
    check_append(appending(offsets=ints(-2, 0)))
    check_append(appending(capacity=4, new=9, offset=1))


def case_append_slabs_and_pages() -> None:
    check_append(appending(cache_batch_idx=ints(1, 0), offset=3))
    case = appending(offsets=ints(2, 0))
    more = {"k_cache": halves(5, 20, 2, 64), "v_cache": halves(5, 20, 2, 64)}
    check_append(replace(case, **more, cache_batch_idx=ints(4, 2)))
    check_append(replace(case, **more))
    for d in (64, 36):
        pages = {"k_cache": halves(7, 4, 2, d), "v_cache": halves(7, 4, 2, d)}
        pages["block_table"] = ints(6, 2, 0, -9, 5, 1, 3, -9).view(2, 4)[:, :3]
        case = appending(new=5, d=d, dv=d, offsets=ints(3, 8))
        check_append(replace(case, **pages))  # over the end of the second


def case_append_head_dims_and_layouts() -> None:
    """Caches that the kernels cannot write to are copied there and back."""
    for d, dv in ((36, 36), (7, 64), (64, 7), (64, 32), (32, 128)):
        check_append(appending(d=d, dv=dv, offset=2))
    case = appending(offset=2)
    kv = halves(2, 20, 2, 2, 64)
    check_append(replace(case, k_cache=kv[:, :, 0], v_cache=kv[:, :, 1]))
    check_append(replace(case, k_cache=halves(2, 2, 20, 64).transpose(1, 2)))
    odd, wide = halves(2, 20, 2, 65), halves(2, 20, 2, 128)
    before = odd[..., 0].clone(), wide[..., 1::2].clone()
    check_append(replace(case, k_cache=odd[..., 1:], v_cache=wide[..., ::2]))
    assert torch.equal(odd[..., 0], before[0])
    assert torch.equal(wide[..., 1::2], before[1])
    kv = halves(2, 3, 4, 65)[..., :-1]  # the new key and value in one
    check_append(replace(case, k=kv[:, :, :2], v=kv[:, :, 2:]))


def case_append_to_a_lazy_copy() -> None:
    """A cache that shares its memory until it is written gets memory of its own."""
    case = appending(offset=2)
    before = case.k_cache.clone(), case.v_cache.clone()
    check_append(replace(case, k_cache=torch._lazy_clone(case.k_cache), v_cache=torch._lazy_clone(case.v_cache)))
    assert torch.equal(case.k_cache, before[0])
    assert torch.equal(case.v_cache, before[1])


def case_append_of_nothing() -> None:
    for case in (appending(b=0), appending(new=0), appending(hk=0), appending(capacity=0), appending(new=0, d=36)):
        check_append(case)
    case = appending()
    pages = {"k_cache": halves(0, 4, 2, 64), "v_cache": halves(0, 4, 2, 64)}
    check_append(replace(case, **pages, block_table=torch.zeros(2, 0, dtype=torch.int32)))


def case_append_wrong_arguments() -> None:
    case = appending()

    def call(**changes: Any) -> Callable[[], object]:
        return replace(case, **changes)

    raises(call(k=case.k[0]), "k has 3 dimensions, not 4")
    raises(call(v=case.v[:, :2]), "v has shape (2, 2, 2, 64), expected (2, 3, 2, 64)")
    raises(call(v=case.v.bfloat16()), "v and k have different dtypes")
    raises(call(k_cache=case.k_cache.float()), "k_cache and k have different dtypes")
    raises(call(k_cache=case.k_cache[:, :, :1]), "v_cache has shape (2, 20, 2, 64), expected (2, 20, 1, 64)")
    raises(call(k=case.k[:, :, :1]), "k has shape (2, 3, 1, 64), expected (2, 3, 2, 64)")
    raises(call(v_cache=case.v_cache[:, :9]), "v_cache has shape (2, 9, 2, 64), expected (2, 20, 2, 64)")
    raises(call(k_cache=case.k_cache[:1], v_cache=case.v_cache[:1]), "k_cache holds 1 sequences, and there are 2")
    raises(call(offset=-1), "offset -1 is outside of a cache of 20 rows")
    raises(call(offset=21), "offset 21 is outside of a cache of 20 rows")
    raises(call(offsets=ints(1, 2).long()), "offsets is int64, expected int32")
    raises(call(cache_batch_idx=ints(1)), "cache_batch_idx has shape (1), expected (2)")
    raises(call(block_table=ints(0)[None]), "block_table has shape (1, 1), expected (2, 1)")
    raises(call(block_table=ints(0, 0)[:, None], cache_batch_idx=ints(0, 0)), "cache_batch_idx and block_table")
    rowless = {name: torch.zeros(2, 0, 2, 64).half() for name in ("k_cache", "v_cache")}
    raises(call(**rowless, block_table=ints(0, 0)[:, None]), "k_cache has pages of no rows")
    raises(Append(*(x.float() for x in (case.k, case.v, case.k_cache, case.v_cache))), "k is float32")


# ---- Appending and decoding in one ----


@dataclass
class Update:
    """The operator's arguments in their order."""

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    k: Tensor
    v: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None
    interleaved: bool = False
    softmax_scale: float = 0.3
    causal: bool = False
    seqlens_k: Tensor | None = None
    seqlen_k: int = -1
    block_table: Tensor | None = None
    num_splits: int = 0
    window_left: int = -1
    window_right: int = -1
    leftpad_k: Tensor | None = None
    cache_batch_idx: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    attention_chunk: int = 0
    softcap: float = 0.0

    def arguments(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]

    def __call__(self) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = KVCACHE(*self.arguments())
        return out


def updating(
    b: int = 2, new: int = 3, sq: int = 3, h: int = 4, d: int = 64, dv: int = 64, capacity: int = 20, rotates: int = 0,
    **more: Any,
) -> Update:  # fmt: skip
    c = appending(b=b, new=new, d=d, dv=dv, capacity=capacity)
    if rotates:
        more["cos"], more["sin"] = tables(capacity + sq + new, rotates)
    return Update(halves(b, sq, h, d), c.k_cache, c.v_cache, c.k, c.v, **more)


def check_update(c: Update) -> None:
    """The caches against the rotated rows, and the results against attention with what the caches then hold."""
    starts = [c.seqlen_k] * c.k.shape[0] if c.seqlens_k is None else c.seqlens_k.tolist()
    pads = [0] * len(starts) if c.leftpad_k is None else c.leftpad_k.clamp(min=0).tolist()
    k, q = c.k.double(), c.q.double()
    if c.cos is not None and c.sin is not None:
        still = not c.causal and c.window_left < 0 and c.window_right < 0
        for b, (start, pad) in enumerate(zip(starts, pads, strict=True)):
            k[b] = turned(c.k[b], c.cos, c.sin, torch.arange(k.shape[1]) + start - pad, c.interleaved)
            steps = torch.arange(q.shape[1]) * (0 if still else 1)
            q[b] = turned(c.q[b], c.cos, c.sin, steps + start - pad, c.interleaved)
    place = {name: getattr(c, name) for name in ("cache_batch_idx", "block_table")}
    wanted = written(Append(k, c.v, c.k_cache, c.v_cache, ints(*starts), **place))
    before = [x.clone() for x in (c.q, c.k, c.v)]
    out, lse = c()
    for name, found, expected in zip(("k_cache", "v_cache"), (c.k_cache, c.v_cache), wanted, strict=True):
        close(found, expected, name, 4e-3, contiguous=False)
    assert all(torch.equal(old, new) for old, new in zip(before, (c.q, c.k, c.v), strict=True))
    shared = {f.name for f in fields(Decode)} & {f.name for f in fields(Update)} - {"q", "seqlens_k", "seqlen_k"}
    lengths = ints(*(start + c.k.shape[1] for start in starts))
    options = {name: getattr(c, name) for name in shared}
    wanted_out, wanted_lse = reference(Decode(q, seqlens_k=lengths, **options))
    close(out, wanted_out, "out")
    close(lse, wanted_lse, "lse", 4e-3)


def case_update() -> None:
    for rotates in (0, 16, 10):
        for interleaved in (False, True):
            for num_splits in (1, 3):
                more = {"rotates": rotates, "interleaved": interleaved, "num_splits": num_splits}
                check_update(updating(seqlen_k=5, **more))
                check_update(updating(seqlens_k=ints(0, 11), causal=True, **more))
                check_update(updating(seqlens_k=ints(4, 11), leftpad_k=ints(2, 5), window_left=6, **more))
                check_update(updating(seqlens_k=ints(4, 11), leftpad_k=ints(-2, 5), causal=True, **more))
                check_update(updating(seqlen_k=17, sq=1, **more))
                check_update(updating(seqlens_k=ints(4, 11), new=1, sq=5, causal=True, **more))


def case_update_slabs_and_pages() -> None:
    for rotates in (0, 16):
        check_update(updating(cache_batch_idx=ints(1, 0), seqlen_k=3, rotates=rotates))
        case = updating(seqlens_k=ints(2, 0), rotates=rotates, sink=torch.randn(4), alibi_slopes=torch.rand(4))
        more = {"k_cache": halves(5, 20, 2, 64), "v_cache": halves(5, 20, 2, 64)}
        check_update(replace(case, **more, cache_batch_idx=ints(4, 2)))
        for d in (64, 36):
            pages = {"k_cache": halves(7, 4, 2, d), "v_cache": halves(7, 4, 2, d)}
            pages["block_table"] = ints(6, 2, 0, -9, 5, 1, 3, -9).view(2, 4)[:, :3]
            case = updating(new=4, d=d, dv=d, rotates=rotates, seqlens_k=ints(3, 8), causal=True, capacity=16)
            check_update(replace(case, **pages))


def case_update_past_the_capacity() -> None:
    """Rows that have no place are dropped, and the cache is full then."""
    check_update(updating(seqlens_k=ints(18, 3)))
    check_update(updating(seqlens_k=ints(20, 1000), rotates=8, causal=True))


def case_update_head_dims_and_layouts() -> None:
    """Caches that the kernels cannot write to are copied once, appended to, used, and copied back."""
    for d, dv in ((36, 36), (7, 64), (64, 7), (64, 32), (32, 128)):
        for num_splits in (1, 2):
            check_update(updating(d=d, dv=dv, seqlen_k=2, rotates=3, num_splits=num_splits))
    case = updating(seqlen_k=2, rotates=16)
    kv = halves(2, 20, 2, 2, 64)
    check_update(replace(case, k_cache=kv[:, :, 0], v_cache=kv[:, :, 1]))
    odd, wide = halves(2, 20, 2, 65), halves(2, 20, 2, 128)
    before = odd[..., 0].clone(), wide[..., 1::2].clone()
    check_update(replace(case, k_cache=odd[..., 1:], v_cache=wide[..., ::2]))
    assert torch.equal(odd[..., 0], before[0])
    assert torch.equal(wide[..., 1::2], before[1])
    qkv = halves(2, 3, 8, 65)[..., :-1]  # the query, the new key and value in one
    check_update(replace(case, q=qkv[:, :, :4], k=qkv[:, :, 4:6], v=qkv[:, :, 6:]))


def case_update_of_nothing() -> None:
    for case in (updating(b=0, seqlen_k=2), updating(new=0, seqlen_k=2), updating(sq=0, seqlen_k=2)):
        check_update(case)
    check_update(updating(new=0, rotates=8, seqlens_k=ints(2, 0)))
    check_update(updating(sq=0, rotates=8, seqlens_k=ints(2, 0)))


def case_update_launches() -> None:
    """In one chain: decoding may begin while whatever is before it ends, and joins as well."""
    chain = [("flash_rotary", "0"), ("flash_decode", "1"), ("flash_combine", "1")]
    for rotates in (0, 8):
        for num_splits, count in ((1, 2), (3, 3)):
            with launches() as found:
                check_update(updating(seqlen_k=5, rotates=rotates, num_splits=num_splits))
            assert [(x["entry"], x["early"]) for x in found] == chain[:count]
    with launches() as found:
        check(slabs(num_splits=3))
    assert [(x["entry"], x["early"]) for x in found] == [("flash_decode", "1"), ("flash_combine", "1")]


def case_update_wrong_arguments() -> None:
    case = updating(rotates=16, seqlens_k=ints(3, 9), causal=True)
    assert case.cos is not None
    assert case.sin is not None

    def call(**changes: Any) -> Callable[[], object]:
        return replace(case, **changes)

    with launches() as found:
        raises(call(q=case.q[0]), "q has 3 dimensions, not 4")
        raises(call(k=case.k[:1], v=case.v[:1]), "k has shape (1, 3, 2, 64), expected (2, 3, 2, 64)")
        raises(call(v=case.v[:, :2]), "v has shape (2, 2, 2, 64), expected (2, 3, 2, 64)")
        raises(call(k=case.k.bfloat16()), "k and k_cache have different dtypes")
        raises(call(q=case.q[..., :32]), "k_cache has shape (2, 20, 2, 64), expected (2, 20, 2, 32)")
        raises(call(q=case.q.bfloat16()), "k_cache and q have different dtypes")
        raises(call(seqlens_k=None), "neither seqlens_k nor seqlen_k")
        raises(call(seqlens_k=None, seqlen_k=21), "offset 21 is outside of a cache of 20 rows")
        raises(call(seqlens_k=None, seqlen_k=18), "seqlen_k 18 and 3 new rows", "a cache of 20 rows")
        raises(call(sin=None), "cos and sin", "together")
        raises(call(cos=None), "cos and sin", "together")
        raises(call(cos=case.cos[:19], sin=case.sin[:19]), "cos has 19 positions; 20 are needed")
        short = {"cos": case.cos[:7], "sin": case.sin[:7], "seqlens_k": None, "seqlen_k": 5}
        raises(call(**short), "cos has 7 positions; 8 are needed")
        raises(call(cos=case.cos.double(), sin=case.sin.double()), "expected float32")
        raises(call(leftpad_k=ints(1)), "leftpad_k has shape (1), expected (2)")
        raises(call(block_table=ints(0, 0)[:, None], cache_batch_idx=ints(0, 0)), "cache_batch_idx and block_table")
        raises(call(sink=torch.ones(3)), "sink has shape (3), expected (4)")
        shared = case.v_cache[:1].expand(2, -1, -1, -1)
        raises(call(v_cache=shared), "v_cache of shape (2, 20, 2, 64) has strides (0, ", "cannot be written")
    assert not found, "launched before all was checked"


# ---- Ownership ----


def loaded(d: int) -> list[tuple[Callable[[], object], list[StorageWeakRef]]]:
    """A call of each operator with every option, and the memory of its tensors."""
    decode = slabs(
        d=d, dv=d, num_splits=2, seqlens_k=ints(9, 20), leftpad_k=ints(0, 1), cache_batch_idx=ints(1, 0),
        alibi_slopes=torch.rand(2, 4).half(), sink=torch.rand(4).half(),
    )  # fmt: skip
    update = updating(
        d=d, dv=d, rotates=8, seqlens_k=ints(1, 2), leftpad_k=ints(0, 1), cache_batch_idx=ints(1, 0), num_splits=2,
        alibi_slopes=torch.rand(2, 4).half(), sink=torch.rand(4).half(),
    )  # fmt: skip
    append = appending(d=d, dv=d, offsets=ints(1, 2), cache_batch_idx=ints(1, 0))
    x, table = halves(9, 4, d), tables(9, 8, torch.float64)
    rotary = (x, x, *table, ints(0, 1), 0, ints(0, 4, 9), 5, False, False)
    calls: list[tuple[Callable[[], object], list[Any]]] = [
        (decode, decode.arguments()),
        (update, update.arguments()),
        (append, [getattr(append, f.name) for f in fields(append)]),
        (lambda: ROTARY(*rotary), list(rotary)),
    ]
    return [
        (call, [StorageWeakRef(t.untyped_storage()) for t in arguments if isinstance(t, Tensor)])
        for call, arguments in calls
    ]


def case_caches_success_frees_everything() -> None:
    for d in (64, 36):
        operators = loaded(d)
        for (call, _), most in zip(operators, (2, 2, 0, 0), strict=True):
            _, left = made(call)
            assert left in (0, most), left  # as case_success_frees_everything
        references = [reference for _, found in operators for reference in found]
        del operators, call, _
        gc.collect()
        assert all(reference.expired() for reference in references)


def case_caches_failures_free_everything() -> None:
    for where in ("cuLaunchKernel=700", "aoti_torch_empty_strided", "aoti_torch_copy_"):
        variable = "FAKE_CUDA_FAIL" if "=" in where else "FAKE_TORCH_FAIL"
        operators = loaded(36)
        try:
            for index, (call, _) in enumerate(operators):
                # Decoding alone is launched as what may begin early.
                os.environ[variable] = "cuLaunchKernelEx=700" if "=" in where and index == 0 else where
                raises(call, "launching kernel" if "=" in where else "torch could not")
        finally:
            del os.environ[variable]
        references = [reference for _, found in operators for reference in found]
        del operators, call, _
        gc.collect()
        assert all(reference.expired() for reference in references), where
