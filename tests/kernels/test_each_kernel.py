"""Every key of the installed kernel set, at the shapes where tiles end: one test for each key.

A process has one family of kernels for problems as small as these; see test_faster_families.py.
"""

import itertools
import math

import pytest
import torch
from cache_cases import CacheCase
from cache_cases import run as run_cache
from feature_cases import Case
from feature_cases import run as run_feature
from feature_oracle import Modifiers, Rows, attention
from kernel_set import BASE_FAMILY, EVERY_KERNEL, FORCED_FAMILY, GENERAL, KERNELS, served
from layouts import LAYOUTS, contiguous
from memory import poison
from oracle import expected, largest, largest_finite, mismatches, results
from rotary_cases import run as run_rotary

from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

PLAIN, WITH_FEATURES, DECODE, ROTARY = map(
    served,
    (KERNELS, GENERAL, [k for k in EVERY_KERNEL if k.op == "decode"], [k for k in EVERY_KERNEL if k.op == "rotary"]),
)


def each(kernels):
    return pytest.mark.parametrize("kernel", kernels, ids=lambda kernel: kernel.key)


# (seqlen_q, seqlen_k): inside one tile, tails of one row, whole tiles, more keys than queries and the other way round.
SHAPES = [(1, 1), (5, 2), (17, 300), (64, 64), (128, 128), (129, 257), (256, 127), (333, 64)]


def check(kernel, head_dim, shape, layout=contiguous, **arguments):
    seqlen_q, seqlen_k = shape
    q, dout = (torch.randn(2, seqlen_q, 4, head_dim, device="cuda").to(kernel.dtype) for _ in range(2))
    k, v = (torch.randn(2, seqlen_k, 2, head_dim, device="cuda").to(kernel.dtype) for _ in range(2))
    q, k, v, dout = map(layout, (q, k, v, dout))
    dout = dout if kernel.op == "bwd" else None
    exact, allowed = expected(q, k, v, head_dim**-0.5, kernel.causal, dout)

    def function(q, k, v):
        poison()
        out, lse, _ = flash_attn_func(q, k, v, causal=kernel.causal, return_attn_probs=True, **arguments)
        poison()
        return out, lse

    wrong = mismatches(results(function, q, k, v, dout), exact, allowed)
    assert not wrong, "\n".join([f"{kernel.key}, head dim {head_dim}, Sq, Sk = {shape}, {layout.__name__}", *wrong])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@each(PLAIN)
def test_shapes(kernel, shape):
    check(kernel, kernel.head_dim, shape)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
@each(PLAIN)
def test_layouts(kernel, layout):
    check(kernel, kernel.head_dim, (130, 200), layout)


@pytest.mark.parametrize("less", [1, 3, 8, 16, 24])
@each(PLAIN)
def test_smaller_head_dims(kernel, less):
    check(kernel, kernel.head_dim - less, (65, 129))


# What the keys of each block of 64 add to the scores, in units of ln 2, from the last block back. Kernels go through
# the keys in this order, and take scores relative to those of the first ones.
JUMPS = {
    "grow a little": lambda block: 3 * block,
    "grow": lambda block: 14 * block,
    "grow beyond a float": lambda block: 144 * block,
    "grow by 1000": lambda block: 1000 * block,
    "grow by 30000 once": lambda block: 30000 * (block == 4),
    "fall": lambda block: -14 * block,
    "fall by 1000": lambda block: -1000 * block,
    "fall by 30000 once": lambda block: -30000 * (block == 4),
    "up and down": lambda block: 200 * (block % 3),
}
# (seqlen_q, seqlen_k, columns less, packed). The keys of a query end anywhere in a block, at its end, or before all.
JUMP_CASES = [(200, 700, 0, False), (193, 640, 24, True), (128, 639, 8, False), (700, 450, 16, True)]


# Of the general mask kind: edges in and at the ends of blocks, with and without blocks between them.
JUMPS_UNDER = [{"causal": True, "window": (250, 0)}, {"window": (300, 100)}, {"window": (70, 3)}, {"chunk": 400}]
SOFTCAP = 200.0  # so many scores that jump by 30000 are this one


@pytest.mark.parametrize("jump", JUMPS)
@each([kernel for kernel in [*PLAIN, *WITH_FEATURES] if kernel.op == "fwd"])
def test_scores_that_jump(kernel, jump):
    """Those of every row in one head, those of one row in 16 in the other.

    The measure is float64 alone, not what torch makes of such scores in the dtype: they are exact in a kernel's sums.
    """
    eps = torch.finfo(kernel.dtype).eps
    masks = [{"causal": kernel.causal}]
    if kernel.mask == "general":
        masks = [*JUMPS_UNDER, *([{"softcap": SOFTCAP}] if jump == "grow by 30000 once" else [])]
    for (seqlen_q, seqlen_k, less, packed), mask in itertools.product(JUMP_CASES, masks):
        head_dim, scale = kernel.head_dim - less, 0.125
        q = torch.randint(-2, 3, (2, seqlen_q, 2, head_dim), device="cuda").to(kernel.dtype)
        k = torch.randint(-2, 3, (2, seqlen_k, 1, head_dim), device="cuda").to(kernel.dtype)
        v = torch.randn(2, seqlen_k, 1, head_dim, device="cuda").to(kernel.dtype)
        block = torch.arange(seqlen_k - 1, -1, -1, device="cuda") // 64
        k[:, :, 0, 0] = (JUMPS[jump](block) * math.log(2) / (32.0 * scale)).to(kernel.dtype)
        q[:, :, 0, 0] = 32.0
        q[:, :, 1, 0] = 32.0 * (torch.arange(seqlen_q, device="cuda") % 16 == 5)
        queries, keys = (Rows.of([0, n], [n, n], "cuda") for n in (seqlen_q, seqlen_k))
        rows = [x.flatten(0, 1) for x in (q, k, v)]
        exact = attention(*(x.double() for x in rows), None, queries, keys, Modifiers(scale, **mask))
        options = {"causal": mask.get("causal", False), "window_size": mask.get("window", (-1, -1))}
        options |= {"attention_chunk": mask.get("chunk", 0), "softcap": mask.get("softcap", 0.0)}
        options |= {"softmax_scale": scale, "return_attn_probs": True}
        poison()
        if packed:
            starts = [torch.arange(3, dtype=torch.int32, device="cuda") * n for n in (seqlen_q, seqlen_k)]
            out, lse, _ = flash_attn_varlen_func(*rows, *starts, seqlen_q, seqlen_k, **options)
            lse = lse.transpose(0, 1)
        else:
            out, lse, _ = flash_attn_func(q, k, v, **options)
            out, lse = out.flatten(0, 1), lse.transpose(1, 2).flatten(0, 1)
        size = largest_finite(exact[1]).clamp(min=1.0)
        allowed = {"out": 2 * eps * largest(v) + 1e-6 * size, "lse": 1e-6 * size + 1e-5}
        if "softcap" in mask:  # tanh is not exact
            allowed = {"out": allowed["out"] + 0.02, "lse": allowed["lse"] + 2e-3 * size}
        wrong = mismatches({"out": out, "lse": lse}, {"out": exact[0], "lse": exact[1]}, allowed)
        assert not wrong, "\n".join([f"{kernel.key}, {jump}, {(seqlen_q, seqlen_k, less, packed)}, {mask}", *wrong])


@each([kernel for kernel in PLAIN if kernel.op == "fwd"])
def test_scores_of_infinity_and_nan(kernel):
    """What IEEE arithmetic makes of them: NaN in the rows that see one, and the other rows as they are."""
    q, k, v = (torch.randn(1, n, 1, kernel.head_dim, device="cuda").to(kernel.dtype) for n in (300, 500, 500))
    exact, allowed = expected(q, k, v, kernel.head_dim**-0.5, kernel.causal)
    touched = torch.zeros(300, dtype=torch.bool, device="cuda")
    for row, value in ((3, math.nan), (77, math.inf), (130, -math.inf), (299, math.nan)):
        q[0, row] = value
        touched[row] = True
    out, lse, _ = flash_attn_func(q, k, v, causal=kernel.causal, return_attn_probs=True)
    assert out[:, touched].isnan().all()
    found = {"out": out[:, ~touched], "lse": lse[:, :, ~touched]}
    wrong = mismatches(found, {"out": exact["out"][:, ~touched], "lse": exact["lse"][:, :, ~touched]}, allowed)
    assert not wrong, "\n".join([kernel.key, *wrong])


@each([kernel for kernel in PLAIN if kernel.op == "bwd"])
def test_deterministic_backward(kernel):
    check(kernel, kernel.head_dim, (300, 500), deterministic=True)


FEATURES = [
    {"window": (50, 20)},
    {"window": (0, 3)},
    {"causal": True, "window": (33, -1)},
    {"chunk": 48},
    {"softcap": 5.0},
    {"alibi": "BH"},
    {"sink": True},
    {"dropout_p": 0.2},
    {"causal": True, "window": (70, 0), "softcap": 20.0, "alibi": "H", "sink": True, "chunk": 100, "dlse": True},
    {"causal": True, "dropout_p": 0.4, "alibi": "BH", "sink": True, "seqused_k": (200, 0), "leftpad_k": (3, 0)},
]


@pytest.mark.parametrize("features", FEATURES, ids=lambda features: "-".join(features))
@each(WITH_FEATURES)
def test_features(kernel, features):
    for seed, (seqlen_q, seqlen_k) in enumerate([(129, 257), (300, 200), (64, 333)]):
        for deterministic in (False, True) if kernel.op == "bwd" else (False,):
            case = Case(
                seed=seed,
                form="func",
                dtype=kernel.dtype,
                lengths_q=(seqlen_q,) * 2,
                lengths_k=(seqlen_k,) * 2,
                heads=4,
                heads_kv=2,
                head_dim=kernel.head_dim,
                head_dim_v=kernel.head_dim - 8 * seed,
                deterministic=deterministic,
                backward=kernel.op == "bwd",
                **features,
            )
            wrong = run_feature(case, before=poison)
            assert not wrong, "\n".join([kernel.key, str(case), *wrong])


@pytest.mark.parametrize("form", ["varlen", "varlen_kvpacked", "varlen_qkvpacked", "kvpacked", "qkvpacked"])
@each([*PLAIN, *WITH_FEATURES])
def test_forms(kernel, form):
    """Packed sequences and packed tensors, by every kernel."""
    together = form.endswith("qkvpacked")
    lengths_q, lengths_k = ((1, 0, 130, 257), (77, 5, 300, 64)) if form.startswith("varlen") else ((130,), (200,))
    case = Case(
        seed=0,
        form=form,
        dtype=kernel.dtype,
        lengths_q=lengths_q,
        lengths_k=lengths_q if together else lengths_k,
        heads=4,
        heads_kv=4 if together else 2,
        head_dim=kernel.head_dim,
        head_dim_v=kernel.head_dim,
        causal=kernel.causal,
        window=(40, 9) if kernel.mask == "general" else (-1, -1),
        dlse=True,
        deterministic=True,
        backward=kernel.op == "bwd",
    )
    wrong = run_feature(case, before=poison)
    assert not wrong, "\n".join([kernel.key, str(case), *wrong])


CACHES = [
    {"seqlen_q": 1, "num_splits": 1},
    {"seqlen_q": 1, "num_splits": 5},
    {"seqlen_q": 5, "new": 5, "rotary_dim": 32, "causal": True, "page_size": 16},
    {"seqlen_q": 3, "new": 3, "rotary_dim": 16, "interleaved": True, "batch_idx": True, "leftpad": (2, 0, 5)},
    {"seqlen_q": 16, "causal": True},
    {"seqlen_q": 9, "packed": (9, 0, 4), "causal": True, "page_size": 16, "num_splits": 2},
    {
        "seqlen_q": 40,
        "causal": True,
        "window": (100, 0),
        "page_size": 64,
        "num_splits": 3,
        "softcap": 10.0,
        "sink": True,
    },
]


@pytest.mark.parametrize("cache", CACHES, ids=lambda cache: "-".join(cache))
@each(DECODE)
def test_decode(kernel, cache):
    for group in (1, 4, 8):
        case = CacheCase(
            seed=group,
            dtype=kernel.dtype,
            batch=3,
            heads=2 * group,
            heads_kv=2,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            capacity=700,
            lengths=(600, 0, 333),
            **cache,
        )
        wrong = run_cache(case, before=poison)
        assert not wrong, "\n".join([kernel.key, str(case), *wrong])


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("batch", [20, 64])
@each(DECODE)
def test_decode_of_more_heads_than_multiprocessors(kernel, batch, alike):
    """Blocks of half of the warps, of lengths that are alike or not."""
    for seqlen_q in (1, 5, 16):
        case = CacheCase(
            seed=seqlen_q,
            dtype=kernel.dtype,
            batch=batch,
            seqlen_q=seqlen_q,
            heads=16,
            heads_kv=8,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            capacity=150,
            lengths=tuple(140 + i % 7 if alike else i * 11 % 151 for i in range(batch)),
            page_size=16 * (seqlen_q % 2),
            causal=True,
        )
        wrong = run_cache(case, before=poison)
        assert not wrong, "\n".join([kernel.key, str(case), *wrong])


@pytest.mark.parametrize("head_dim", [8, 64, 80, 128, 256])
@each(ROTARY)
def test_rotary(kernel, head_dim):
    for seed, rotary_dim in enumerate((head_dim, head_dim // 2, 2, head_dim // 8 * 6)):
        for interleaved in (False, True):
            wrong = run_rotary(seed, kernel.dtype, head_dim, rotary_dim, interleaved, poison)
            assert not wrong, "\n".join([f"{kernel.key}, {head_dim=}, {rotary_dim=}, {interleaved=}", *wrong])


def same_bits_thirty_times(call):
    first = call()
    for run in range(1, 30):
        for index, (a, b) in enumerate(zip(call(), first, strict=True)):
            assert torch.equal(a, b), f"run {run}, result {index} differs by up to {(a - b).abs().max().item():.3g}"


@each([*PLAIN, *WITH_FEATURES])
def test_thirty_runs_give_the_same_bits(kernel):
    """Field case 35, and the forward always."""
    backward, general = kernel.op == "bwd", kernel.mask == "general"
    # Without a forced family the problem has to be so small that the dispatcher takes this one.
    sizes = [(2, 1024, 8), (2, 1500, 2), (2, 1500, 2)] if FORCED_FAMILY else [(2, 450, 4), (2, 510, 2), (2, 510, 2)]
    inputs = [torch.randn(*size, kernel.head_dim, device="cuda").to(kernel.dtype) for size in sizes]
    inputs = [x.requires_grad_(backward) for x in inputs]
    dout = torch.randn_like(inputs[0])
    options = {"window_size": (300, 20), "softcap": 8.0} if general else {"causal": kernel.causal}

    def call():
        out, lse = flash_attn_func(*inputs, deterministic=True, return_lse=True, **options)
        return (out, lse, *(torch.autograd.grad(out, inputs, dout) if backward else ()))

    same_bits_thirty_times(call)


@each(DECODE)
def test_thirty_decoding_steps_give_the_same_bits(kernel):
    tokens = 2 if kernel.family == BASE_FAMILY else 9  # the faster families serve more than 16 rows
    q = torch.randn(3, tokens, 8, kernel.head_dim, device="cuda").to(kernel.dtype)
    caches = [torch.randn(3, 2000, 2, kernel.head_dim, device="cuda").to(kernel.dtype) for _ in range(2)]
    lengths = torch.tensor([2000, 3, 777], dtype=torch.int32, device="cuda")
    for splits in (0, 1, 9):
        same_bits_thirty_times(
            lambda splits=splits: flash_attn_with_kvcache(
                q, *caches, cache_seqlens=lengths, causal=True, num_splits=splits, return_softmax_lse=True
            )
        )


def test_the_kernel_set_is_not_empty():
    assert KERNELS
