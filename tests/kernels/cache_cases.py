"""Random calls of flash_attn_with_kvcache: appended or not, rotated or not, in slabs or pages, a seed each.

What is checked: the new rows are in the cache, nothing else of it has changed, and the output is the attention with
what is then there.
"""

import random
from dataclasses import dataclass, fields

import torch
from feature_oracle import Modifiers, Rows, allowed_errors, compare, differentiate, largest, that_differ

import flash_attn


@dataclass(frozen=True)
class CacheCase:
    """A call; what is left at its default is not asked for."""

    seed: int
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    capacity: int  # of slabs; the least of pages
    lengths: tuple | None  # before the call; None: the cache is full
    new: int = 0
    int_length: bool = False
    page_size: int = 0
    batch_idx: bool = False
    leftpad: tuple | None = None
    rotary_dim: int = 0
    interleaved: bool = False
    table_fp32: bool = False
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: bool = False
    sink: bool = False
    num_splits: int = 0
    packed: tuple | None = None  # the queries of each sequence, at most seqlen_q, packed
    far_slabs: bool = False  # rows of a cache that are further apart than they need to be

    def __str__(self):
        given = [f for f in fields(self) if f.name != "seed" and getattr(self, f.name) != f.default]
        text = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in given)
        return (
            f"cache case seed={self.seed} ({text}); again: FLASH_ATTN_TEST_SEED={self.seed} FLASH_ATTN_TEST_CASES=1 "
            "pytest tests/kernels/test_feature_cases.py -k cache"
        )


def draw(seed, limits):
    """The case of a seed."""
    rng = random.Random(seed)

    def maybe(probability):
        return rng.random() < probability

    batch, heads_kv, group = rng.randint(1, 3), rng.randint(1, 3), rng.choice((1, 2, 4, 7, 8))
    capacity = min(limits.seqlen, rng.choice((1, 17, 64, 100, 257, 300, 1000)))
    page_size = rng.choice((1, 10, 16, 32, 64, 128, 256)) if maybe(0.4) else 0
    seqlen_q = rng.choice((1, 1, 1, 2, 3, 5, 8, 16, 20, 70, 130))
    new = rng.choice((0, seqlen_q, seqlen_q, rng.randint(1, 20)))
    if new > capacity:
        new = 0
    lengths = tuple(rng.randint(0, capacity - new) for _ in range(batch))
    if maybe(0.2):
        lengths = (lengths[0],) * batch
    if not new and maybe(0.1):
        lengths = None
    head_dim = rng.choice((16, 40, 64, 72, 96, 128, 192, 256)) if maybe(0.7) else rng.randint(1, 256)
    head_dim = min(limits.head_dim, head_dim)
    rotates = new > 0 and head_dim >= 16 and maybe(0.6)
    return CacheCase(
        seed=seed,
        dtype=rng.choice(limits.dtypes),
        batch=batch,
        seqlen_q=seqlen_q,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=rng.randint(1, limits.head_dim) if maybe(0.15) else head_dim,
        capacity=capacity,
        lengths=lengths,
        new=new,
        int_length=lengths is not None and len(set(lengths)) == 1 and maybe(0.7),
        page_size=page_size,
        batch_idx=not page_size and maybe(0.4),
        leftpad=tuple(rng.randint(0, min(9, n)) for n in lengths) if lengths is not None and maybe(0.2) else None,
        rotary_dim=rng.choice((2, 16, head_dim // 2 * 2, head_dim // 4 * 2)) if rotates else 0,
        interleaved=maybe(0.5),
        table_fp32=maybe(0.3),
        causal=maybe(0.5),
        window=(rng.choice((0, 5, 100)) if maybe(0.3) else -1, rng.choice((0, 3, 50)) if maybe(0.2) else -1),
        chunk=rng.choice((7, 64)) if maybe(0.1) else 0,
        softcap=rng.choice((5.0, 30.0)) if maybe(0.2) else 0.0,
        softmax_scale=rng.choice((None, None, 0.2, -0.3)),
        alibi=maybe(0.2),
        sink=maybe(0.2),
        num_splits=rng.choice((0, 0, 1, 2, 3, 7, 40)),
        packed=tuple(rng.randint(0, seqlen_q) for _ in range(batch)) if maybe(0.15) else None,
        far_slabs=maybe(0.2),
    )


def rotated(x, cos, sin, positions, interleaved):
    """x (B, S, H, D) in float64, its pairs as complex numbers turned by the angles at ``positions`` (B, S)."""
    half = cos.shape[1]
    head, rest = x[..., : 2 * half].double(), x[..., 2 * half :].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    turn = torch.complex(cos.double(), sin.double())[positions][:, :, None]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * turn)
    head = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat((head, rest), dim=-1)


def run(case, before=lambda: None, device="cuda"):
    """Lines saying what is wrong with a case; an empty list if nothing is."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    def numbers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    batch, heads_kv = case.batch, case.heads_kv
    slabs, rows = batch + 2 if case.batch_idx else batch, case.capacity
    block_table = index = None
    if case.page_size:
        pages_each = -(-case.capacity // case.page_size)
        slabs, rows = batch * pages_each + 3, case.page_size
        block_table = torch.randperm(slabs, generator=generator, device=device)[: batch * pages_each]
        block_table = block_table.view(batch, pages_each).int()
    elif case.batch_idx:
        index = torch.randperm(slabs, generator=generator, device=device)[:batch].int()
    capacity = rows if block_table is None else rows * block_table.shape[1]

    def cache(head_dim):
        x = normal(slabs, rows + (5 if case.far_slabs else 0), heads_kv, head_dim).to(case.dtype)
        return x[:, :rows]

    k_cache, v_cache = cache(case.head_dim), cache(case.head_dim_v)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    q = normal(batch, case.seqlen_q, case.heads, case.head_dim).to(case.dtype)
    k = v = cos = sin = None
    if case.new:
        k = normal(batch, case.new, heads_kv, case.head_dim).to(case.dtype)
        v = normal(batch, case.new, heads_kv, case.head_dim_v).to(case.dtype)
    if case.rotary_dim:
        angles = normal(capacity + max(case.seqlen_q, case.new), case.rotary_dim // 2) * 3
        cos, sin = (t.to(torch.float32 if case.table_fp32 else case.dtype) for t in (angles.cos(), angles.sin()))
    alibi = normal(case.heads).abs() * 0.3 if case.alibi else None
    sink = normal(case.heads) * 2 if case.sink else None
    lengths = None if case.lengths is None else numbers(case.lengths)
    counts = [case.seqlen_q] * batch if case.packed is None else list(case.packed)
    bounds = numbers([sum(counts[:b]) for b in range(batch + 1)])
    given = q if case.packed is None else torch.cat([q[b, :n] for b, n in enumerate(counts)])
    before()
    out, lse = flash_attn.flash_attn_with_kvcache(
        given,
        k_cache,
        v_cache,
        k,
        v,
        rotary_cos=cos,
        rotary_sin=sin,
        cache_seqlens=case.lengths[0] if case.int_length else lengths,
        cache_batch_idx=index,
        cache_leftpad=None if case.leftpad is None else numbers(case.leftpad),
        block_table=block_table,
        softmax_scale=case.softmax_scale,
        causal=case.causal,
        window_size=case.window,
        softcap=case.softcap,
        rotary_interleaved=case.interleaved,
        alibi_slopes=alibi,
        num_splits=case.num_splits,
        return_softmax_lse=True,
        learnable_sink=sink,
        attention_chunk=case.chunk,
        **({} if case.packed is None else {"cu_seqlens_q": bounds, "max_seqlen_q": case.seqlen_q}),
    )

    # Every row of a cache, by the sequence that it belongs to: slab and row in it.
    step = torch.arange(capacity, device=device)
    if block_table is not None:
        slab, row = block_table.long()[:, step // rows], (step % rows).expand(batch, capacity)
    else:
        slab = (torch.arange(batch, device=device) if index is None else index.long())[:, None].expand(batch, capacity)
        row = step.expand(batch, capacity)
    padding = torch.zeros(batch, dtype=torch.int64, device=device)
    padding = padding if case.leftpad is None else numbers(case.leftpad).long()
    start = torch.full((batch,), capacity, device=device) if lengths is None else lengths.long()
    lines = []
    if case.new:
        at = start[:, None] + torch.arange(case.new, device=device)
        place = (slab.gather(1, at), row.gather(1, at))
        wanted_k = k.double()
        if cos is not None:
            wanted_k = rotated(k, cos, sin, at - padding[:, None], case.interleaved)
            still = not case.causal and case.window == (-1, -1)
            q_at = start[:, None] + torch.arange(case.seqlen_q, device=device) * (0 if still else 1)
            q = rotated(q, cos, sin, q_at - padding[:, None], case.interleaved).to(case.dtype)
        # One rounding, of a number as large as the rotated pair may be.
        close = 1.01 * torch.finfo(case.dtype).eps * largest(wanted_k).clamp(min=1.0)
        written = {"new rows of k_cache": k_cache[place]}
        lines += compare(written, {"new rows of k_cache": wanted_k}, {"new rows of k_cache": close})
        if that_differ({"v": (v_cache[place], v)}):
            lines.append("new rows of v_cache are not v")
        k_before[place], v_before[place] = k_cache[place], v_cache[place]
    pairs = {"k_cache": (k_cache, k_before), "v_cache": (v_cache, v_before)}
    lines += [f"{n} has changed outside of the new rows" for n in that_differ(pairs)]

    used = [n + case.new for n in case.lengths] if case.lengths is not None else [capacity] * batch
    pads = case.leftpad or (0,) * batch
    queries = Rows.of(bounds[:-1].tolist(), counts, device)
    seen = [u - p for u, p in zip(used, pads, strict=True)]
    keys = Rows.of([b * capacity + p for b, p in enumerate(pads)], seen, device)
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    m = Modifiers(scale, case.causal, case.window, case.chunk, case.softcap, alibi)
    inputs = (
        torch.cat([q[b, :n] for b, n in enumerate(counts)]),
        k_cache[slab, row].flatten(0, 1),
        v_cache[slab, row].flatten(0, 1),
        sink,
    )
    exact, reach = differentiate(inputs, queries, keys, m, None, None, torch.float64)
    same, _ = differentiate(inputs, queries, keys, m, None, None, case.dtype)
    # A query that is rotated is rounded, and may be so to the other side.
    factor = 3.0 if case.softcap or case.rotary_dim else 2.0
    allowed = allowed_errors(exact, same, case.dtype, factor, scale, case.softcap, inputs, None, reach)
    if case.rotary_dim:
        lost = abs(scale) * torch.finfo(case.dtype).eps * largest(inputs[1].double().norm(dim=-1)) * 4
        allowed["lse"] += lost
        allowed["out"] += lost * largest(inputs[2])
    if case.packed is None:
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    found = {"out": out, "lse": lse.transpose(0, 1)}
    return lines + compare(found, exact, allowed)
