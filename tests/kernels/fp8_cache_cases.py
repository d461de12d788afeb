"""Random calls of flash_attn_with_kvcache with caches of FP8: what they do to the cache, and their output."""

import random

import torch

from flash_attn import flash_attn_with_kvcache, reference_general
from flash_attn.fp8 import quantize
from flash_attn.problem import Problem

FP8 = torch.float8_e4m3fn


def _rows(x):
    """As integers, which torch compares and indexes in every version."""
    return x.view(torch.uint8)


def run(seed, device="cuda", before=lambda: None, head_dims=(64, 128)):
    """Lines saying what is wrong with the case of a seed."""
    choose = random.Random(seed)
    generator = torch.Generator(device).manual_seed(seed)
    batch, heads_kv, group = choose.randint(1, 4), choose.randint(1, 2), choose.choice([1, 2, 4])
    head_dim, sq = choose.choice(head_dims), choose.choice([1, 1, 3, 40])
    new, causal = choose.choice([0, 1, 5]), choose.random() < 0.5
    paged, packed = choose.random() < 0.4, new > 0 and choose.random() < 0.3
    page_size = choose.choice([16, 48])
    pages = choose.randint(2, 5)
    capacity = page_size * pages
    lengths = [choose.randint(0, capacity - new) for _ in range(batch)]

    def normal(*sizes):
        return torch.randn(sizes, generator=generator, device=device)

    def numbers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    q, q_descale = quantize(normal(batch, sq, heads_kv * group, head_dim), heads_kv)
    slabs = batch * pages if paged else batch + 2
    sizes = (slabs, page_size if paged else capacity, heads_kv, head_dim)
    k_cache, v_cache = ((normal(*sizes) * 50).to(FP8) for _ in range(2))
    by_block = [choose.random() < 0.4 for _ in range(2)]
    factors = [(batch, heads_kv, -(-capacity // 64)) if x else (batch, heads_kv) for x in by_block]
    k_descale, v_descale = (torch.rand(n, generator=generator, device=device) / 50 for n in factors)
    places = torch.randperm(slabs, generator=torch.Generator().manual_seed(seed))[: batch * pages if paged else batch]
    places = places.to(torch.int32).to(device)
    options = {}
    if paged:
        options["block_table"] = places.reshape(batch, pages)
    else:
        options["cache_batch_idx"] = places
    if choose.random() < 0.3:
        options["cache_leftpad"] = numbers([choose.randint(0, n) for n in lengths])
    if new:
        k, v = ((normal(batch, new, heads_kv, head_dim) * 50).to(FP8) for _ in range(2))
        options.update(k=k, v=v)
        if packed:
            options.update({n: _rows(x).flatten(0, 1).view(FP8) for n, x in (("k", k), ("v", v))})
            options["cu_seqlens_k_new"] = numbers([b * new for b in range(batch + 1)])

    wanted_k, wanted_v = _rows(k_cache).clone(), _rows(v_cache).clone()
    for b in range(batch if new else 0):
        for i in range(new):
            at = lengths[b] + i
            slab, row = (places[b * pages + at // page_size], at % page_size) if paged else (places[b], at)
            wanted_k[slab, row], wanted_v[slab, row] = _rows(k)[b, i], _rows(v)[b, i]
    before()
    out, lse = flash_attn_with_kvcache(
        q, k_cache, v_cache, cache_seqlens=numbers(lengths), causal=causal, q_descale=q_descale, k_descale=k_descale,
        v_descale=v_descale, return_softmax_lse=True, **options,
    )  # fmt: skip
    lines = []
    if not torch.equal(_rows(k_cache), wanted_k) or not torch.equal(_rows(v_cache), wanted_v):
        lines.append("the caches do not hold what they should")
    used = [x[places.long()].reshape(batch, capacity, heads_kv, head_dim) for x in (wanted_k, wanted_v)]
    k_all, v_all = (x.view(FP8).double() for x in used)
    wide = [q.double() * _by_head(q_descale, group), k_all * _by_head(k_descale, 1, capacity)]
    wide.append(v_all * _by_head(v_descale, 1, capacity))
    p = Problem(
        seqused_k=numbers([n + new for n in lengths]),
        leftpad_k=options.get("cache_leftpad"),
        max_seqlen_q=sq,
        max_seqlen_k=capacity,
        softmax_scale=head_dim**-0.5,
        causal=causal,
    )
    exact, exact_lse = reference_general.forward(*wide, p)
    error = (out.double() - exact).square().mean().sqrt().item()
    allowed = 0.06 * exact.square().mean().sqrt().item() + 1e-6
    if not error <= allowed:
        lines.append(f"out has an RMS error of {error:.3g}, allowed is {allowed:.3g}")
    finite = exact_lse != float("-inf")
    if not torch.equal(lse != float("-inf"), finite):
        lines.append("lse is -inf in other places than it should be")
    elif finite.any() and not (lse - exact_lse)[finite].abs().max() < 2e-2:
        lines.append(f"lse is off by {(lse - exact_lse)[finite].abs().max():.3g}")
    return [f"FP8 cache case {seed}, {sorted(options)}: {line}" for line in lines]


def _by_head(descale, group, rows=None):
    """(B, H) or (B, H, blocks) for each row: (B, 1 or rows, H, 1)."""
    by_head = descale.double().repeat_interleave(group, 1)
    if descale.dim() == 2:
        return by_head[:, None, :, None]
    return by_head.repeat_interleave(64, 2).transpose(1, 2)[:, :rows, :, None]
