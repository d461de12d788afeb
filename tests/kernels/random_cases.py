"""Random calls: one seed is one call, drawn from all that the installed kernels can do."""

import random
from dataclasses import dataclass

import torch
from feature_oracle import that_differ
from kernel_set import largest_head_dim, variants
from layouts import LAYOUTS
from oracle import expected, mismatches, results

MAX_SCORES = 2**22  # elements of the score matrices of a case, which the float64 reference holds several times
MAX_SEQLEN = 1100
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 511, 512, 513)


@dataclass(frozen=True)
class Case:
    """Everything about a call but its numbers, which the seed gives too."""

    seed: int
    dtype: torch.dtype
    batch: int
    seqlen_q: int
    seqlen_k: int
    heads: int
    heads_kv: int
    head_dim: int
    causal: bool
    softmax_scale: float | None
    magnitude: float
    layouts: tuple[str, str, str]
    dout: str
    backward: bool
    deterministic: bool

    def __str__(self):
        fields = ", ".join(f"{name}={value}" for name, value in vars(self).items() if name != "seed")
        return (
            f"flash_attn case seed={self.seed} ({fields}); again: FLASH_ATTN_TEST_SEED={self.seed} "
            "FLASH_ATTN_TEST_CASES=1 pytest tests/kernels/test_random_cases.py"
        )


def _seqlen(rng):
    if rng.random() < 0.5:
        return rng.choice(EDGES)
    return int(MAX_SEQLEN ** rng.random())


def _head_dim(rng, limit):
    if rng.random() < 0.5:
        return rng.choice([d for d in (16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256) if d <= limit] or [limit])
    return rng.randint(1, limit)


def draw(seed):
    """The case of a seed."""
    rng = random.Random(seed)
    dtype, causal = rng.choice(variants("fwd"))
    limit = largest_head_dim("fwd", dtype, causal)
    head_dim = _head_dim(rng, limit)
    batch, heads_kv, group = rng.randint(1, 4), rng.randint(1, 4), rng.choice((1, 1, 2, 3, 4, 8))
    seqlen_q = _seqlen(rng)
    seqlen_k = seqlen_q if rng.random() < 0.3 else _seqlen(rng)
    while batch * heads_kv * group * seqlen_q * seqlen_k > MAX_SCORES:
        if batch * group > 1:
            batch, group = (batch + 1) // 2, (group + 1) // 2
        elif heads_kv > 1:
            heads_kv //= 2
        else:
            break
    return Case(
        seed=seed,
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=head_dim,
        causal=causal,
        softmax_scale=rng.choice((None, None, 0.1, 1.0, -0.3)),
        magnitude=rng.choice((1.0, 1.0, 0.1, 4.0)),
        layouts=tuple(rng.choice(LAYOUTS).__name__ for _ in "qkv"),
        dout=rng.choice(("expanded", "rows", *(layout.__name__ for layout in LAYOUTS))),
        backward=head_dim <= largest_head_dim("bwd", dtype, causal),
        deterministic=rng.random() < 0.3,
    )


def inputs(case, device="cuda"):
    """q, k, v and dout of a case."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device) * case.magnitude

    by_name = {layout.__name__: layout for layout in LAYOUTS}
    q_shape = (case.batch, case.seqlen_q, case.heads, case.head_dim)
    k_shape = (case.batch, case.seqlen_k, case.heads_kv, case.head_dim)
    shapes = (q_shape, k_shape, k_shape)
    q, k, v = (by_name[name](normal(*s).to(case.dtype)) for name, s in zip(case.layouts, shapes, strict=True))
    if case.dout == "expanded":  # the gradient of a sum: every stride is 0
        dout = torch.ones((), dtype=case.dtype, device=device).expand(q_shape)
    elif case.dout == "rows":  # the gradient of a sum over the last dimension
        dout = normal(*q_shape[:-1], 1).to(case.dtype).expand(q_shape)
    else:
        dout = by_name[case.dout](normal(*q_shape).to(case.dtype))
    return q, k, v, dout


def run(case, flash_attn_func, before=lambda: None, device="cuda"):
    """Lines saying what is wrong with ``flash_attn_func`` in this case; an empty list if nothing is."""
    q, k, v, dout = inputs(case, device)
    dout = dout if case.backward else None
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    exact, allowed = expected(q, k, v, scale, case.causal, dout)
    copies = [x.clone() for x in (q, k, v, dout) if x is not None]

    def function(q, k, v):
        before()
        out, lse, _ = flash_attn_func(
            q,
            k,
            v,
            softmax_scale=case.softmax_scale,
            causal=case.causal,
            deterministic=case.deterministic,
            return_attn_probs=True,
        )
        before()
        return out, lse

    found = results(function, q, k, v, dout)
    lines = mismatches(found, exact, allowed)
    lines += [f"{name} is not contiguous" for name, value in found.items() if not value.is_contiguous()]
    lines += [
        f"{name} is {x.dtype}"
        for name, x in found.items()
        if x.dtype != (torch.float32 if name == "lse" else case.dtype)
    ]
    pairs = dict(zip(("q", "k", "v", "dout"), zip((q, k, v, dout), copies, strict=False), strict=False))
    return lines + [f"{name} was changed" for name in that_differ(pairs)]
