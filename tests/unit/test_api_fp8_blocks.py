"""FP8 attention on CPU tensors with a factor for each 64 rows of a head."""

import itertools
import math

import pytest
import torch
from fp8_support import int32, outliers, rmse

import flash_attn
from flash_attn import _ops_fp8, flash_attn_func, flash_attn_varlen_func, reference_fp8
from flash_attn.fp8 import flash_attn_fp8_func, flash_attn_varlen_fp8_func, quantize, rotate_and_quantize
from flash_attn.problem import Problem

FP8 = torch.float8_e4m3fn
NAMES = ("q_descale", "k_descale", "v_descale")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def uneven(x, spread):
    """``x`` (B, S, H, D) with another magnitude for each 64 rows of a head, by factors of up to e to the ``spread``."""
    gains = torch.exp(spread * torch.rand(x.shape[0], -(-x.shape[1] // 64), x.shape[2], 1))
    return x * gains.repeat_interleave(64, 1)[:, : x.shape[1]]


def tensors(b=2, sq=150, sk=333, h=4, hk=2, d=64):
    q, k, v = torch.randn(b, sq, h, d), torch.randn(b, sk, hk, d), torch.randn(b, sk, hk, d)
    return uneven(q, 1.0), uneven(k, 1.0), uneven(v, 8.0)


def quantized(q, k, v, **options):
    """(q, k, v in FP8, the keywords of their factors)."""
    pairs = [quantize(x, granularity="block", **options) for x in (q, k, v)]
    return [x for x, _ in pairs], {name: descale for name, (_, descale) in zip(NAMES, pairs, strict=True)}


def wide(x, descale):
    """(B, S, H, D) in float64: the numbers that ``x`` and its factors stand for, with nothing of the package."""
    return x.double() * descale.double().repeat_interleave(64, 2)[:, :, : x.shape[1], None].transpose(1, 2)


# ---- Quantising ----


@pytest.mark.parametrize("rows", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("function", [quantize, rotate_and_quantize])
def test_blocks_are_quantized_as_they_would_be_alone(function, rows):
    x = uneven(torch.randn(3, rows, 4, 64), 5.0)
    found, descale = function(x, 2, granularity="block")
    assert (found.shape, descale.shape, descale.dtype) == (x.shape, (3, 4, -(-rows // 64)), torch.float32)
    assert descale.is_contiguous()
    for i in range(descale.shape[2]):
        block = slice(64 * i, 64 * i + 64)
        alone, descale_alone = function(x[:, block])
        assert torch.equal(found[:, block].float(), alone.float())
        assert torch.equal(descale[..., i], descale_alone)


@pytest.mark.parametrize("function", [quantize, rotate_and_quantize])
def test_packed_sequences_are_quantized_as_they_would_be_alone(function):
    bounds = (0, 7, 7, 150, 278)
    x = torch.randn(290, 4, 32)
    x[:7] *= 30.0
    x[278:] = float("nan")  # of no sequence
    found, descale = function(x, None, int32(*bounds), granularity="block")
    assert descale.shape == (1, 4, 290 // 64 + 4)
    unused = torch.ones(descale.shape[2], dtype=torch.bool)
    for b, (first, last) in enumerate(itertools.pairwise(bounds)):
        alone, descale_alone = function(x[None, first:last], granularity="block")
        blocks = slice(first // 64 + b, first // 64 + b + descale_alone.shape[2])
        assert torch.equal(descale[:, :, blocks], descale_alone)
        assert torch.equal(found[first:last].float(), alone[0].float())
        assert unused[blocks].all()  # no number is two blocks'
        unused[blocks] = False
    assert (descale[..., unused] == 1).all()


def test_rows_that_do_not_count():
    x = torch.randn(2, 150, 2, 64)
    used = torch.ones(2, 150, dtype=torch.bool)
    used[0, 100:] = used[1, :70] = False
    counted = torch.where(used[..., None, None], x, 0.0)
    wanted = quantize(counted, granularity="block")[1]
    x[~used] = float("nan")
    found = quantize(x, used=used, granularity="block")[1]
    assert torch.equal(found, wanted)
    assert (found[0, :, 2] == 1).all()
    assert (found[1, :, 0] == 1).all()


def test_nothing_to_quantize():
    for rows, blocks in ((0, 0), (70, 2)):
        x, descale = rotate_and_quantize(torch.randn(2, rows, 0 if rows else 2, 64), granularity="block")
        assert (x.shape[:2], descale.shape) == ((2, rows), (2, 0 if rows else 2, blocks))
    assert quantize(torch.randn(0, 2, 64), None, int32(0, 0), granularity="block")[1].shape == (1, 2, 1)


# ---- Attention ----

OPTIONS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window_size": (50, 20)},
    "chunk": {"attention_chunk": 100},
    "softcap": {"softcap": 10.0},
    "sink": {"learnable_sink": torch.ones(4)},
    "used": {"seqused_q": int32(150, 80), "seqused_k": int32(200, 333)},
    "leftpad": {"leftpad_k": int32(70, 5), "seqused_k": int32(300, 333)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_what_the_numbers_stand_for(name):
    """Close to the attention of the numbers that the FP8 tensors and their factors stand for, row by row."""
    options = OPTIONS[name]
    (q, k, v), factors = quantized(*tensors())
    exact, exact_lse = flash_attn_func(
        *(wide(x, f) for x, f in zip((q, k, v), factors.values(), strict=True)), return_lse=True, **options
    )
    out, lse = flash_attn_func(q, k, v, return_lse=True, **factors, **options)
    size = exact.square().mean(-1).sqrt()
    error = (out.double() - exact).square().mean(-1).sqrt()
    assert (error <= 0.08 * size).all()
    torch.testing.assert_close(lse.double(), exact_lse, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("which", range(3))
def test_each_may_be_of_blocks(which):
    (q, k, v), _ = quantized(*tensors())
    of_heads = {name: 0.5 + torch.rand(2, 2) for name in NAMES}
    heads, rows = ((4, 150), (2, 333), (2, 333))[which]
    name = NAMES[which]
    spread = of_heads[name].repeat_interleave(heads // 2, 1)[..., None].expand(-1, -1, -(-rows // 64))
    wanted = flash_attn_func(q, k, v, **of_heads)
    found = flash_attn_func(q, k, v, **{**of_heads, name: spread})
    assert rmse(found, wanted) <= 4e-3 * wanted.float().std()
    alone = flash_attn_func(q, k, v, **{name: of_heads[name]})
    assert rmse(flash_attn_func(q, k, v, **{name: spread}), alone) <= 4e-3 * alone.float().std()


def test_packed_sequences():
    lengths = ((5, 0, 130, 64), (170, 9, 133, 70))
    cu = [int32(0, *torch.tensor(n).cumsum(0).tolist()) for n in lengths]
    q, k, v = torch.randn(199 + 6, 4, 64), torch.randn(382, 2, 64), torch.randn(382, 2, 64)
    pairs = [quantize(x, None, c, granularity="block") for x, c in ((q, cu[0]), (k, cu[1]), (v, cu[1]))]
    (q8, q_descale), (k8, k_descale), (v8, v_descale) = pairs
    factors = dict(zip(NAMES, (q_descale, k_descale, v_descale), strict=True))
    used = {"leftpad_k": int32(65, 3, 0, 1), "seqused_k": int32(170, 8, 100, 70)}
    for more in ({}, used):
        out, lse = flash_attn_varlen_func(q8, k8, v8, *cu, 130, 170, causal=True, return_lse=True, **factors, **more)
        for b in range(4):
            (q0, q1), (k0, k1) = ((int(c[b]), int(c[b + 1])) for c in cu)
            alone = [quantize(x[None, i:j], granularity="block") for x, i, j in ((q, q0, q1), (k, k0, k1), (v, k0, k1))]
            wanted, wanted_lse = flash_attn_func(
                *(x for x, _ in alone), causal=True, return_lse=True, **{n: x[b : b + 1] for n, x in more.items()},
                **dict(zip(NAMES, (f for _, f in alone), strict=True)),
            )  # fmt: skip
            torch.testing.assert_close(out[q0:q1], wanted[0])
            torch.testing.assert_close(lse[:, q0:q1], wanted_lse[0])


def test_weights_have_the_precision_of_what_they_add():
    """Two keys of equal weight, a score apart from all others; their values' factors differ by more than the format."""
    q, k, v = torch.zeros(1, 1, 1, 16), torch.zeros(1, 65, 1, 16), torch.zeros(1, 65, 1, 16)
    q[..., 0], k[0, 0, 0, 0], k[0, 64, 0, 0] = 1.0, 30.0, 20.0
    v[0, 0], v[0, 64] = 1.0, 3.0
    descale = torch.tensor([2.0**-30, 1.0]).reshape(1, 1, 2)
    out = flash_attn_func(*(x.to(FP8) for x in (q, k, v)), softmax_scale=1.0, v_descale=descale)
    small = math.exp(-10.0)  # of the softmax, 2^-14: by itself beyond what a weight of e4m3 can be
    torch.testing.assert_close(out.float(), torch.full_like(q, 3.0 * small / (1 + small)), atol=0, rtol=4e-2)


def test_a_block_of_zeros():
    """A factor of 0 makes values 0, and takes nothing from the weight of their keys."""
    (q, k, v), factors = quantized(*tensors())
    factors["v_descale"][..., 1] = 0.0
    exact = flash_attn_func(*(wide(x, f) for x, f in zip((q, k, v), factors.values(), strict=True)))
    assert rmse(flash_attn_func(q, k, v, **factors), exact) < 0.05 * exact.std()
    factors["v_descale"].zero_()
    assert not flash_attn_func(q, k, v, **factors).any()


def test_numbers_that_are_no_blocks_are_not_read():
    cu, x = int32(0, 10, 80), torch.randn(130, 2, 64)
    x8, descale = quantize(x, None, cu, granularity="block")
    wanted = flash_attn_varlen_func(x8, x8, x8, cu, cu, 70, 70, **dict.fromkeys(NAMES, descale))
    for hole in (float("nan"), -1.0):
        holes = descale.clone()
        holes[..., [3]] = hole
        found = flash_attn_varlen_func(x8, x8, x8, cu, cu, 70, 70, **dict.fromkeys(NAMES, holes))
        assert torch.equal(found, wanted)
    holes[..., 1] = -1.0
    with pytest.raises(ValueError, match=r"^q_descale must not be negative, got -1\.0 for sequence 1"):
        flash_attn_varlen_func(x8, x8, x8, cu, cu, 70, 70, **dict.fromkeys(NAMES, holes))


def test_a_cache():
    """Blocks are those of the rows of each sequence's slab, also where the rows are in pages."""
    q, k, v = tensors(sq=70, sk=160)
    (q8, k8, v8), factors = quantized(q, k, v)
    lengths = int32(100, 160)
    wanted = flash_attn_func(q8, k8, v8, causal=True, seqused_k=lengths, **factors)
    found = flash_attn.flash_attn_with_kvcache(q8, k8, v8, cache_seqlens=lengths, causal=True, **factors)
    torch.testing.assert_close(found, wanted)
    pages = [x.view(torch.uint8).unflatten(1, (2, 80)).flatten(0, 1).view(FP8) for x in (k8, v8)]
    table = int32(0, 1, 2, 3).reshape(2, 2)
    found = flash_attn.flash_attn_with_kvcache(
        q8, *pages, cache_seqlens=lengths, causal=True, block_table=table, **factors
    )
    torch.testing.assert_close(found, wanted)
    with pytest.raises(ValueError, match=r"^k_descale must have shape .*\(2, 2, 3\) here, got \(2, 2, 2\)"):
        flash_attn.flash_attn_with_kvcache(
            q8, k8, v8, cache_seqlens=lengths, k_descale=factors["k_descale"][..., :2].contiguous()
        )


# ---- Accuracy ----


def test_rmse_with_outliers():
    """Of 512 queries over 4,096 keys: 7.9e-3 rotated (8.2e-3 with factors of heads), 1.57e-2 as they are (1.74e-2)."""
    squares = {"block": 0.0, "head": 0.0, "block as it is": 0.0, "head as it is": 0.0}
    seeds = range(4)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (outliers(generator, rows, 128) for rows in (512, 4096, 4096))
        exact = flash_attn_func(q.double(), k.double(), v.double())
        for granularity in ("block", "head"):
            pairs = [quantize(x, granularity=granularity) for x in (q, k, v)]
            plain = flash_attn_func(*(x for x, _ in pairs), **dict(zip(NAMES, (f for _, f in pairs), strict=True)))
            rotated = flash_attn_fp8_func(q, k, v, granularity=granularity)
            squares[granularity] += rmse(rotated, exact) ** 2 / len(seeds)
            squares[f"{granularity} as it is"] += rmse(plain, exact) ** 2 / len(seeds)
    error = {name: math.sqrt(square) for name, square in squares.items()}
    assert error["block"] <= 9.1e-3
    assert error["block"] <= 1.03 * error["head"]
    assert error["block as it is"] < error["head as it is"]


def test_magnitudes_beyond_the_range_of_the_format():
    """Windows over values of blocks that differ by up to e^12: the worst row has 0.22 of its size as error, or 0.1."""
    worst = {}
    for granularity in ("head", "block"):
        generator = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(1, rows, 1, 128, generator=generator) for rows in (512, 4096, 4096))
        v = v * torch.exp(12.0 * torch.rand(64, generator=generator)).repeat_interleave(64)[None, :, None, None]
        exact = flash_attn_func(q.double(), k.double(), v.double(), window_size=(100, 0))
        out = flash_attn_fp8_func(q, k, v, window_size=(100, 0), smooth_v=False, granularity=granularity)
        error = (out.double() - exact).square().mean(-1) / exact.square().mean(-1)
        worst[granularity] = error.max().sqrt().item()
    assert worst["block"] < 0.12
    assert worst["block"] < worst["head"]


# ---- flash_attn.fp8 ----


def test_one_call_with_every_option():
    q, k, v = tensors(sk=200)
    options = {
        "softmax_scale": 0.2,
        "window_size": (90, 3),
        "softcap": 10.0,
        "learnable_sink": torch.ones(4),
        "attention_chunk": 130,
        "seqused_q": int32(150, 20),
        "seqused_k": int32(190, 200),
        "leftpad_k": int32(0, 75),
    }
    exact = flash_attn_func(q.double(), k.double(), v.double(), **options)
    k[0, 190:], v[0, 190:], k[1, :75], q[1, 20:] = (float("nan"),) * 4
    out = flash_attn_fp8_func(q, k, v, granularity="block", **options)
    assert rmse(out, exact) < 0.08 * exact.std().item()
    assert (out[1, 20:] == 0).all()


def test_one_call_of_packed_sequences():
    cu_q, cu_k = int32(0, 5, 5, 138), int32(0, 117, 126, 259)
    q, k, v = torch.randn(140, 4, 64), torch.randn(259, 2, 64), torch.randn(259, 2, 64)
    q[138:] = float("nan")  # of no sequence
    arguments = (cu_q, cu_k, 133, 133)
    exact, exact_lse = flash_attn_varlen_func(
        *(x.double() for x in (q, k, v)), *arguments, causal=True, return_lse=True
    )
    out, lse = flash_attn_varlen_fp8_func(q, k, v, *arguments, causal=True, return_lse=True, granularity="block")
    assert rmse(out[:138], exact[:138]) < 0.06
    assert (lse - exact_lse)[:, :138].abs().max() < 0.2


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: quantize(x, granularity="row"), ValueError, r'^granularity must be "head" or "block", got \'row\''),
        (
            lambda x: rotate_and_quantize(x, granularity=64),
            ValueError,
            r'^granularity must be "head" or "block", got 64',
        ),
        (lambda x: flash_attn_fp8_func(x, x, x, granularity=None), ValueError, r'^granularity must be "head" or'),
        (
            lambda x: flash_attn_func(*[x.to(FP8)] * 3, q_descale=torch.ones(2, 4, 1)),
            ValueError,
            r"^q_descale must have shape \(B, Hk\), \(2, 4\) here, or .* 64 rows, \(2, 4, 2\) here, got \(2, 4, 1\)",
        ),
        (
            lambda x: flash_attn_func(*[x.to(FP8)] * 3, v_descale=torch.ones(1, 4, 2)),
            ValueError,
            r"^v_descale must have shape .*, \(2, 4, 2\) here, got \(1, 4, 2\)",
        ),
        (
            lambda x: flash_attn_varlen_func(
                *[x[0].to(FP8)] * 3, int32(0, 70), int32(0, 70), 70, 70, k_descale=torch.ones(1, 4, 1)
            ),
            ValueError,
            r"^k_descale must have shape .*, \(1, 4, 2\) here, got \(1, 4, 1\)",
        ),
    ],
)
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call(torch.randn(2, 70, 4, 64))


# ---- Inside torch ----


def test_opcheck():
    """Without the check of the schema, as in test_api_fp8."""
    (q, k, v), factors = quantized(*tensors())
    arguments = (q, k, v, *factors.values(), *(None,) * 6, 150, 333, 0.125, True, -1, -1, 0, 0.0, 0)
    checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(_ops_fp8.FWD_FP8, arguments, test_utils=checks)
    torch.library.opcheck(_ops_fp8.FWD_FP8_OUTPUT, (q, k, v, *factors.values(), True), test_utils=checks)


def test_compiles_into_one_graph():
    torch._dynamo.reset()
    (q, k, v), factors = quantized(*tensors())
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, k, v, causal=True, **factors), flash_attn_func(q, k, v, causal=True, **factors))


@pytest.mark.parametrize("dynamic", [None, True])
def test_one_call_compiles_into_one_graph(dynamic):
    torch._dynamo.reset()
    inputs = tensors()
    compiled = torch.compile(flash_attn_fp8_func, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    wanted = flash_attn_fp8_func(*inputs, causal=True, granularity="block")
    torch.testing.assert_close(compiled(*inputs, causal=True, granularity="block"), wanted)


def test_meta_tensors():
    (q, k, v), factors = quantized(*tensors())
    meta = [x.to("meta") for x in (q, k, v)]
    out, lse = flash_attn_func(*meta, **{n: x.to("meta") for n, x in factors.items()}, return_lse=True)
    assert (out.shape, out.dtype) == ((2, 150, 4, 64), torch.bfloat16)
    assert (lse.shape, lse.dtype) == ((2, 4, 150), torch.float32)


def test_gradients_are_refused():
    (q, k, v), factors = quantized(*tensors())
    with pytest.raises(ValueError, match=r"^k_descale must not require grad"):
        flash_attn_func(q, k, v, **{**factors, "k_descale": factors["k_descale"].clone().requires_grad_()})


def test_the_emulation_in_float64():
    """It and the one in float32 differ by the ties of the weights alone."""
    (q, k, v), factors = quantized(*tensors())
    p = Problem(max_seqlen_q=150, max_seqlen_k=333, softmax_scale=0.125)
    found, lse = reference_fp8.forward(q, k, v, *factors.values(), p, torch.float64)
    out, lse_32 = reference_fp8.forward(q, k, v, *factors.values(), p)
    assert found.dtype is torch.float64
    assert rmse(out, found) <= 4e-3 * found.std()
    torch.testing.assert_close(lse_32.double(), lse, atol=1e-4, rtol=1e-4)
