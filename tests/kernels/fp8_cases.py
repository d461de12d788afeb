"""Random calls of FP8 attention with any features together, and what its error is held to.

Two references, both in float64: attention of the very numbers that the FP8 tensors stand for, and the emulation, which
also rounds the weights of the softmax to FP8 as the kernels do. Between them lies the error that FP8 has to have.
"""

import random
from dataclasses import dataclass, replace

import torch
from feature_cases import draw as draw_feature
from feature_cases import prepare
from feature_oracle import Modifiers, attention, largest

import flash_attn
from flash_attn import reference_fp8
from flash_attn.problem import Problem

FP8 = torch.float8_e4m3fn
NAN = 0x7F


def _wide(x, before, after):
    """``x`` as columns of rows that are so much longer, NaN beside them."""
    shape = (*x.shape[:-1], before + x.shape[-1] + after)
    rows = torch.full(shape, NAN, dtype=torch.uint8, device=x.device).view(FP8)
    return rows[..., before : before + x.shape[-1]].copy_(x)


def _packed(x):
    shape = (*x.shape[:-2], 3, *x.shape[-2:])
    rows = torch.full(shape, NAN, dtype=torch.uint8, device=x.device).view(FP8)
    return rows[..., 1, :, :].copy_(x)


LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "heads_first": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2),
    "wide_rows": lambda x: _wide(x, 0, 16),
    "odd_rows": lambda x: _wide(x, 0, 1),
    "odd_pointer": lambda x: _wide(x, 1, 15),
    "packed": _packed,
}


@dataclass(frozen=True)
class Case:
    feature: object  # of feature_cases, without what FP8 lacks
    layouts: tuple
    descales: tuple  # of q, k and v: "head", "block", or "" for none

    def __str__(self):
        return f"FP8 case, layouts {self.layouts}, descales {self.descales}: {self.feature}"


def draw(seed, limits):
    rng = random.Random(seed)
    feature = draw_feature(seed, limits)
    while feature.form not in ("func", "varlen"):  # the packed forms have no descale of their own size
        seed += 1_000_003
        feature = draw_feature(seed, limits)
    feature = replace(
        feature,
        alibi="",
        dropout_p=0.0,
        page_size=0,
        dlse=False,
        deterministic=False,
        backward=False,
        layouts=("contiguous",) * 4,
    )
    layouts = tuple(rng.choice(list(LAYOUTS)) if rng.random() < 0.3 else "contiguous" for _ in range(3))
    return Case(feature, layouts, tuple(rng.choice(("", "head", "block")) for _ in range(3)))


# Of a block's factor: values differ more than a format of FP8 can tell, and some are 0.
GAINS = {"q": (0.0, 0.5, 1.0, 1.5), "k": (0.0, 0.25, 1.0, 2.0), "v": (0.0, 1e-5, 0.03, 1.0, 4.0)}


def _factors(name, x, descale, boundaries, heads_kv, generator):
    """(factors as a call takes them, ``x`` in FP8, each row's and head's factor)."""
    heads = x.shape[-2]
    whole = x.shape[0] if boundaries is None else 1
    spans = x.shape[0] if boundaries is None else len(boundaries) - 1
    rows = x.shape[-3]
    blocks = -(-rows // 64) if boundaries is None else rows // 64 + spans
    of_heads = torch.ones(spans, heads_kv, device=x.device)
    of_blocks = torch.full((whole, heads, blocks), float("nan"), device=x.device)  # where there is no row
    fit, by_row = (torch.ones(*x.shape[:-1], 1, device=x.device) for _ in range(2))
    for b in range(spans):
        at = (b, slice(0, rows)) if boundaries is None else (slice(boundaries[b], boundaries[b + 1]),)
        part = x[at].float().abs()
        count = part.shape[0]
        if descale == "head" and part.numel():
            of_heads[b] = part.unflatten(-2, (heads_kv, heads // heads_kv)).amax(dim=(0, 2, 3)) / 448
            fit[at] = by_row[at] = of_heads[b].repeat_interleave(heads // heads_kv)[:, None]
        for i in range(-(-count // 64) if descale == "block" and heads else 0):
            of_block = part[64 * i : 64 * i + 64].amax(dim=(0, 2)) / 448
            gains = torch.tensor(GAINS[name], device=x.device)
            factor = of_block * gains[torch.randint(len(gains), (heads,), generator=generator, device=x.device)]
            number = i if boundaries is None else boundaries[b] // 64 + b + i
            of_blocks[b if boundaries is None else 0, :, number] = factor
            fit[at][64 * i : 64 * i + 64] = of_block[:, None]
            by_row[at][64 * i : 64 * i + 64] = factor[:, None]
    factors = {"": None, "head": of_heads, "block": of_blocks}[descale]
    if descale == "block" and whole == 1 and heads % 2:
        factors = factors.transpose(1, 2).contiguous().transpose(1, 2)
    return factors, (x.float() / fit).clamp(-448, 448).to(FP8), by_row


def run(case, before=lambda: None, device="cuda"):
    """Lines saying what is wrong with a case; an empty list if nothing is."""
    f = case.feature
    prepared = prepare(f, device)
    generator = torch.Generator(device).manual_seed(f.seed)
    fp8, descales, wide = [], [], []
    for name, layout, scaled in zip("qkv", case.layouts, case.descales, strict=True):
        x = prepared.tensors[name]
        boundaries = None
        if f.varlen:
            lengths = f.lengths_q if name == "q" else f.lengths_k
            boundaries = [sum(lengths[:b]) for b in range(len(lengths) + 1)]
        factors, rounded, by_row = _factors(name, x, scaled, boundaries, f.heads_kv, generator)
        fp8.append(LAYOUTS[layout](rounded))
        wide.append(rounded.double() * by_row.double())
        descales.append(factors)

    function = flash_attn.flash_attn_varlen_func if f.varlen else flash_attn.flash_attn_func
    arguments = {n: x for n, x in prepared.arguments.items() if n not in ("alibi_slopes", "dropout_p", "deterministic")}
    names = ("q_descale", "k_descale", "v_descale")
    before()
    out, lse = function(
        *fp8,
        **arguments,
        **dict(zip(names, descales, strict=True)),
        learnable_sink=prepared.tensors["sink"],
        return_lse=True,
    )

    scale = f.head_dim**-0.5 if f.softmax_scale is None else f.softmax_scale
    rows = sum(f.lengths_q) if f.varlen else None
    m = Modifiers(scale, f.causal, f.window, f.chunk, f.softcap)
    rows_first = [x[: sum(n)] if f.varlen else x.flatten(0, 1) for x, n in zip(wide, _lengths(f), strict=True)]
    sink = prepared.tensors["sink"]
    exact, exact_lse, _ = attention(*rows_first, sink, prepared.queries, prepared.keys, m)
    emulated, _ = emulate(fp8, descales, f, prepared, scale)
    if not f.varlen:
        out, emulated = out.flatten(0, 1), emulated.flatten(0, 1)
    lse = (lse.transpose(-1, -2) if f.varlen else lse.transpose(1, 2).flatten(0, 1))[:rows]
    reach = abs(scale) * longest(wide[0]) * longest(wide[1])
    return check(out, out[:rows], emulated[:rows], exact, lse, exact_lse, f.softcap, reach)


def _lengths(f):
    return f.lengths_q, f.lengths_k, f.lengths_k


def emulate(fp8, descales, f, prepared, scale):
    arguments = prepared.arguments
    sign = -1.0 if scale < 0 else 1.0
    p = Problem(
        cu_seqlens_q=arguments.get("cu_seqlens_q"),
        cu_seqlens_k=arguments.get("cu_seqlens_k"),
        seqused_q=arguments.get("seqused_q"),
        seqused_k=arguments.get("seqused_k"),
        leftpad_k=arguments.get("leftpad_k"),
        sink=prepared.tensors["sink"],
        max_seqlen_q=max(f.lengths_q),
        max_seqlen_k=max(f.lengths_k),
        softmax_scale=sign * scale,
        causal=f.causal,
        window_left=f.window[0],
        window_right=-1 if f.causal else f.window[1],
        attention_chunk=f.chunk,
        softcap=f.softcap,
    )
    q = (fp8[0].float() * sign).to(FP8)
    return reference_fp8.forward(q, *fp8[1:], *descales, p, torch.float64)


def rms(x):
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def longest(x):
    """The largest norm of a row."""
    return x.norm(dim=-1).max().item() if x.numel() else 0.0


def check(whole, out, emulated, exact, lse, exact_lse, softcap, reach):
    """``reach``: no score is larger, by the norms of its query and key."""
    lines = []
    if whole.dtype is not torch.bfloat16 or not whole.is_contiguous():
        lines.append(f"out is {whole.dtype}, contiguous: {whole.is_contiguous()}")
    if out.shape != exact.shape or lse.shape != exact_lse.shape:
        return [*lines, f"shapes {tuple(out.shape)} and {tuple(lse.shape)}"]
    # Where few weights count, the luck of their rounding is all there is: a part of the output itself is allowed too.
    error, allowed = rms(out - exact), 1.3 * rms(emulated - exact) + 0.02 * rms(exact) + 1e-6
    if not error <= allowed:
        lines.append(f"out has an RMS error of {error:.3g}, allowed is {allowed:.3g}")
    worst, limit = largest(out.double() - exact).item(), 0.13 * largest(exact).item() + 5 * allowed
    if not worst <= limit:
        lines.append(f"out is off by {worst:.3g}, allowed is {limit:.3g}")
    infinite = exact_lse == float("-inf")
    if ((lse == float("-inf")) != infinite).any():
        lines.append("lse is -inf in other places than it should be")
    worst = largest((lse.double() - exact_lse).masked_fill(infinite, 0.0)).item()
    # The tensor cores add up FP8 products with 14 bits: of a score, up to 1.3e-4 of the norms' product is lost, by a
    # model of them and 20,000 random rows of each head dim.
    limit = (1e-2 if softcap else 2e-3) + 2.5e-4 * reach
    if not worst <= limit:
        lines.append(f"lse is off by {worst:.3g}, allowed is {limit:.3g}")
    if (out[infinite] != 0).any():
        lines.append("rows that see nothing are not 0")
    return lines
