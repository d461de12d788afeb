"""Random calls of every attention function with any features together: one seed is one call.

``draw`` makes the call's description, ``run`` makes the call, on the GPU or, for the reference, on the CPU.
"""

import random
from dataclasses import dataclass, field, fields, replace

import torch
from feature_oracle import Modifiers, Rows, allowed_errors, compare, differentiate, that_differ
from layouts import LAYOUTS

import flash_attn

FORMS = ("func", "kvpacked", "qkvpacked", "varlen", "varlen_kvpacked", "varlen_qkvpacked")
MAX_SCORES = 2**20
EDGES = (1, 2, 15, 16, 17, 63, 64, 65, 100, 127, 128, 129, 190, 255, 256, 257, 300)


@dataclass(frozen=True)
class Limits:
    """What can be drawn from: dtypes, the largest head dim, the longest sequence."""

    dtypes: tuple
    head_dim: int
    seqlen: int = 600


@dataclass(frozen=True)
class Case:
    """A call; what is left at its default is not asked for."""

    seed: int
    form: str
    dtype: torch.dtype
    lengths_q: tuple  # of each sequence; all alike where the form is not varlen
    lengths_k: tuple
    heads: int
    heads_kv: int
    head_dim: int
    head_dim_v: int
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    softmax_scale: float | None = None
    alibi: str = ""  # "H" or "BH"
    dropout_p: float = 0.0
    sink: bool = False
    seqused_q: tuple | None = None
    seqused_k: tuple | None = None
    leftpad_k: tuple | None = None
    spare_tokens: int = 0  # of no sequence, at the end of packed tensors
    dlse: bool = False
    deterministic: bool = False
    page_size: int = 0  # k and v in pages, of the varlen form; forward alone
    backward: bool = True
    layouts: tuple = field(default=("contiguous",) * 4)  # of q, k, v and dout

    def __str__(self):
        given = [f for f in fields(self) if f.name != "seed" and getattr(self, f.name) != f.default]
        text = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in given)
        return (
            f"feature case seed={self.seed} ({text}); again: FLASH_ATTN_TEST_SEED={self.seed} FLASH_ATTN_TEST_CASES=1 "
            "pytest tests/kernels/test_feature_cases.py -k feature"
        )

    @property
    def varlen(self):
        return self.form.startswith("varlen")


def draw(seed, limits):
    """The case of a seed."""
    rng = random.Random(seed)

    def maybe(probability):
        return rng.random() < probability

    def length():
        return (
            rng.choice([e for e in EDGES if e <= limits.seqlen]) if maybe(0.6) else int(limits.seqlen ** rng.random())
        )

    form = rng.choice(("func", *FORMS))
    batch, heads_kv, group = rng.randint(1, 4), rng.randint(1, 3), rng.choice((1, 1, 2, 3, 4))
    together = form.endswith("qkvpacked")
    if together:
        group = 1
    if form.startswith("varlen"):
        lengths_q = [0 if maybe(0.1) else length() for _ in range(batch)]
        lengths_k = [0 if maybe(0.05) else length() for _ in range(batch)]
    else:
        lengths_q, lengths_k = [length()] * batch, [length()] * batch
    if together or maybe(0.2):
        lengths_k = lengths_q
    while max(1, *lengths_q, *lengths_k) ** 2 * batch * heads_kv * group > MAX_SCORES:
        if batch > 1:
            batch -= 1
            lengths_q, lengths_k = lengths_q[:batch], lengths_k[:batch]
        elif group > 1 or heads_kv > 1:
            group, heads_kv = (group + 1) // 2, (heads_kv + 1) // 2
        else:
            break
    head_dim = rng.choice((16, 32, 40, 64, 72, 80, 96, 128, 160, 192, 256)) if maybe(0.6) else rng.randint(1, 256)
    head_dim = min(head_dim, limits.head_dim)
    packed = form.endswith("packed")
    head_dim_v = rng.randint(1, limits.head_dim) if maybe(0.2) and not packed else head_dim
    softcap = rng.choice((1.0, 5.0, 30.0)) if maybe(0.2) else 0.0
    options = {}
    if not packed and maybe(0.25):
        options["seqused_k"] = tuple(rng.randint(0, n) for n in lengths_k)
    if not packed and maybe(0.1):
        options["seqused_q"] = tuple(rng.randint(0, n) for n in lengths_q)
    if not packed and maybe(0.15):
        options["leftpad_k"] = tuple(rng.randint(0, min(n, 20)) for n in lengths_k)
    case = Case(
        seed=seed,
        form=form,
        dtype=rng.choice(limits.dtypes),
        lengths_q=tuple(lengths_q),
        lengths_k=tuple(lengths_k),
        heads=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        causal=maybe(0.5),
        window=(
            rng.choice((0, 1, 10, 64, 100)) if maybe(0.4) else -1,
            rng.choice((0, 1, 10, 64)) if maybe(0.3) else -1,
        ),
        chunk=rng.choice((7, 32, 64, 100)) if maybe(0.15) else 0,
        softcap=softcap,
        softmax_scale=rng.choice((None, None, 0.1, 0.5, -0.2)),
        alibi=rng.choice(("H", "BH")) if maybe(0.2) else "",
        dropout_p=rng.choice((0.1, 0.5, 0.17)) if maybe(0.25) and not softcap else 0.0,
        sink=maybe(0.2),
        spare_tokens=rng.randint(1, 70) if form.startswith("varlen") and maybe(0.1) else 0,
        dlse=maybe(0.3),
        deterministic=maybe(0.3),
        layouts=tuple(rng.choice(LAYOUTS).__name__ if maybe(0.3) else "contiguous" for _ in range(4)),
        **options,
    )
    if form == "varlen" and max(lengths_k) and maybe(0.5):
        return replace(case, page_size=rng.choice((1, 16, 48, 64, 128, 256)), backward=False)
    return case


# The call.


def _boundaries(lengths):
    bounds = [0]
    for n in lengths:
        bounds.append(bounds[-1] + n)
    return bounds


def _laid_out(name, x):
    """Packed tensors are laid out as a batch of one."""
    layout = {f.__name__: f for f in LAYOUTS}[name]
    return layout(x[None])[0] if x.dim() == 3 else layout(x)


@dataclass
class Call:
    """A case with its numbers, and where its rows are."""

    tensors: dict  # q, k, v, dout; dlse, sink, alibi or None
    queries: Rows
    keys: Rows
    arguments: dict


def prepare(case, device):
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device)

    batch = len(case.lengths_q)
    if case.varlen:
        q_rows, k_rows = (sum(n) + case.spare_tokens for n in (case.lengths_q, case.lengths_k))
        q_shape, k_shape = (q_rows,), (k_rows,)
        first_q, first_k = _boundaries(case.lengths_q), _boundaries(case.lengths_k)
    else:
        q_shape, k_shape = (batch, case.lengths_q[0]), (batch, case.lengths_k[0])
        first_q = [b * q_shape[1] for b in range(batch)]
        first_k = [b * k_shape[1] for b in range(batch)]
    sizes = [(*q_shape, case.heads, case.head_dim), (*k_shape, case.heads_kv, case.head_dim)]
    sizes += [(*k_shape, case.heads_kv, case.head_dim_v), (*q_shape, case.heads, case.head_dim_v)]
    q, k, v, dout = (_laid_out(n, normal(*s).to(case.dtype)) for n, s in zip(case.layouts, sizes, strict=True))
    lse_shape = (case.heads, *q_shape) if case.varlen else (batch, case.heads, q_shape[1])
    tensors = {"q": q, "k": k, "v": v, "dout": dout, "dlse": normal(*lse_shape) if case.dlse else None}
    tensors["sink"] = normal(case.heads) * 2 if case.sink else None
    alibi_shape = {"H": (case.heads,), "BH": (batch, case.heads)}.get(case.alibi)
    tensors["alibi"] = None if alibi_shape is None else normal(*alibi_shape).abs() * 0.3

    used_q = case.seqused_q or case.lengths_q
    used_k = case.seqused_k or case.lengths_k
    padding = case.leftpad_k or (0,) * batch
    first_k = [f + min(p, u) for f, p, u in zip(first_k[:batch], padding, used_k, strict=True)]
    used_k = [max(0, u - p) for u, p in zip(used_k, padding, strict=True)]
    queries, keys = Rows.of(first_q[:batch], list(used_q), device), Rows.of(first_k, used_k, device)

    def numbers(values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    arguments = {
        "causal": case.causal,
        "window_size": case.window,
        "softcap": case.softcap,
        "softmax_scale": case.softmax_scale,
        "alibi_slopes": tensors["alibi"],
        "dropout_p": case.dropout_p,
        "attention_chunk": case.chunk,
        "deterministic": case.deterministic,
    }
    for name in ("seqused_q", "seqused_k", "leftpad_k"):
        if getattr(case, name) is not None:
            arguments[name] = numbers(getattr(case, name))
    if case.varlen:
        lengths = {"cu_seqlens_q": case.lengths_q, "cu_seqlens_k": case.lengths_k}
        arguments.update({name: numbers(_boundaries(n)) for name, n in lengths.items()})
        arguments.update(max_seqlen_q=max(case.lengths_q), max_seqlen_k=max(case.lengths_k))
        if case.page_size:
            arguments["block_table"] = numbers(_page_table(case))
        if case.form == "varlen_qkvpacked":
            arguments["cu_seqlens"], arguments["max_seqlen"] = arguments["cu_seqlens_q"], arguments["max_seqlen_q"]
            for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
                del arguments[name]
    return Call(tensors, queries, keys, arguments)


def _page_table(case):
    """The pages of each sequence, in any order, as a list of lists."""
    each = -(-max(case.lengths_k) // case.page_size)
    pages = list(range(len(case.lengths_k) * each + 2))
    random.Random(case.seed).shuffle(pages)
    return [pages[b * each : (b + 1) * each] for b in range(len(case.lengths_k))]


def _in_pages(x, case):
    """(T, Hk, D) -> (pages, page_size, Hk, D), NaN where there is no key."""
    table, size = _page_table(case), case.page_size
    pages = x.new_full(((len(table) * len(table[0]) + 2) * size, *x.shape[1:]), float("nan"))
    rows = [table[b][i // size] * size + i % size for b, n in enumerate(case.lengths_k) for i in range(n)]
    pages[torch.tensor(rows, dtype=torch.int64, device=x.device)] = x[: len(rows)]
    return pages.unflatten(0, (-1, size))


def _leaves(tensors, case):
    """The leaves of a form's call: packed tensors are stacked along the third dimension from the end."""
    q, k, v = (tensors[n].detach() for n in "qkv")
    form = case.form
    if case.page_size:
        return [q, _in_pages(k, case), _in_pages(v, case)]
    if form.endswith("qkvpacked"):
        leaves = [torch.stack((q, k, v), dim=-3)]
    elif form.endswith("kvpacked"):
        leaves = [q, torch.stack((k, v), dim=-3)]
    else:
        leaves = [q, k, v]
    return [x.requires_grad_() for x in leaves]


def _apart(leaves):
    """Gradients of the leaves as those of q, k and v."""
    return [part for x, count in leaves for part in ([x] if count == 1 else x.unbind(-3))]


def call(case, prepared, before):
    """({"out", "lse", "dq", ...} with rows first, S_dmask) of the package."""
    function = getattr(flash_attn, f"flash_attn_{case.form}_func" if case.form != "func" else "flash_attn_func")
    tensors = prepared.tensors
    leaves = _leaves(tensors, case)
    sink = None if tensors["sink"] is None else tensors["sink"].detach().requires_grad_()
    torch.manual_seed(case.seed)
    before()
    out, lse, probs = function(
        *leaves, **prepared.arguments, learnable_sink=sink, return_lse=True, return_attn_probs=True
    )
    rows_first = (lambda x: x) if case.varlen else (lambda x: x.flatten(0, 1))
    lse_rows_first = lse.transpose(-1, -2) if case.varlen else lse.transpose(1, 2).flatten(0, 1)
    # Rows of no sequence are not written.
    rows = out.shape[0] - case.spare_tokens if case.varlen else None
    found = {"out": rows_first(out.detach())[:rows], "lse": lse_rows_first.detach()[:rows]}
    wrong = [f"{n} is not contiguous" for n, x in (("out", out), ("lse", lse)) if not x.is_contiguous()]
    if case.backward:
        wanted = [*leaves, *([] if sink is None else [sink])]
        outputs, grads = [out], [tensors["dout"]]
        if tensors["dlse"] is not None:
            outputs, grads = [out, lse], [tensors["dout"], tensors["dlse"]]
        before()
        results = list(torch.autograd.grad(outputs, wanted, grads))
        if sink is not None:
            found["dsink"] = results.pop()
        counts = [x.shape[-3] if x.dim() > (3 if case.varlen else 4) else 1 for x in leaves]
        parts = _apart(list(zip(results, counts, strict=True)))
        lengths = (case.lengths_q, case.lengths_k, case.lengths_k)
        for name, part, n in zip(("dq", "dk", "dv"), parts, lengths, strict=True):
            found[name] = rows_first(part)[: sum(n) if case.varlen else None]
    return found, probs, wrong


def run(case, before=lambda: None, device="cuda"):
    """Lines saying what is wrong with a case; an empty list if nothing is."""
    prepared = prepare(case, device)
    tensors = prepared.tensors
    copies = {name: x.clone() for name, x in tensors.items() if x is not None}
    found, probs, lines = call(case, prepared, before)

    keep = ~torch.signbit(probs) if case.dropout_p else None
    scale = case.head_dim**-0.5 if case.softmax_scale is None else case.softmax_scale
    m = Modifiers(scale, case.causal, case.window, case.chunk, case.softcap, tensors["alibi"], keep, case.dropout_p)
    rows_first = [x if case.varlen else x.flatten(0, 1) for x in (tensors[n] for n in ("q", "k", "v", "dout"))]
    if case.varlen:
        counts = [sum(n) for n in (case.lengths_q, case.lengths_k, case.lengths_k, case.lengths_q)]
        rows_first = [x[:n] for x, n in zip(rows_first, counts, strict=True)]
    *inputs, dout = rows_first
    inputs.append(tensors["sink"])
    dlse = tensors["dlse"]
    if dlse is not None:
        dlse = dlse.transpose(-1, -2)[: dout.shape[0]] if case.varlen else dlse.transpose(1, 2).flatten(0, 1)
    dout = dout if case.backward else None
    exact, reach = differentiate(inputs, prepared.queries, prepared.keys, m, dout, dlse, torch.float64)
    same, _ = differentiate(inputs, prepared.queries, prepared.keys, m, dout, dlse, case.dtype)
    factor = 3.0 if case.softcap or case.dropout_p else 2.0
    allowed = allowed_errors(exact, same, case.dtype, factor, scale, case.softcap, inputs, dout, reach)
    lines += compare(found, exact, allowed)
    lines += [f"{n} was changed" for n in that_differ({n: (x, tensors[n]) for n, x in copies.items()})]
    if case.deterministic and case.backward:
        again, _, _ = call(case, prepared, before)
        pairs = {n: (x, found[n]) for n, x in again.items()}
        lines += [f"{n} has other bits the second time" for n in that_differ(pairs)]
    return lines
