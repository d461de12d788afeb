"""Every feature on CPU tensors: the random cases of the kernel tests, and what a function promises besides numbers."""

import math

import pytest
import torch
from cache_cases import draw as draw_cache
from cache_cases import run as run_cache
from feature_cases import Limits, draw, run
from rotary_cases import run as run_rotary

import flash_attn
import flash_attn_interface
from flash_attn import (
    bert_padding,
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from flash_attn.flash_attn_interface import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_torch

LIMITS = Limits((torch.float32, torch.bfloat16, torch.float16), 64, 100)


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def randn(*shape, dtype=torch.float64, requires_grad=True):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.mark.parametrize("seed", range(60))
def test_feature_case(seed):
    case = draw(seed, LIMITS)
    wrong = run(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("seed", range(60))
def test_cache_case(seed):
    case = draw_cache(seed, LIMITS)
    wrong = run_cache(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(8, 8), (64, 16), (20, 10)])
def test_rotary_case(dtype, head_dim, rotary_dim, interleaved):
    assert not run_rotary(0, dtype, head_dim, rotary_dim, interleaved, device="cpu")


def test_a_negative_number_of_padded_keys_is_none():
    q, k, v = (randn(2, 5, 2, 4, requires_grad=False) for _ in "qkv")
    cu_seqlens = int32(0, 4, 10)
    cos, sin = torch.rand(20, 2), torch.rand(20, 2)

    def results(padding):
        used = {"leftpad_k": padding, "causal": True}
        torch.manual_seed(0)
        yield from flash_attn_func(q, k, v, return_attn_probs=True, dropout_p=0.2, **used)
        packed = (x.flatten(0, 1) for x in (q, k, v))
        yield flash_attn_varlen_func(*packed, cu_seqlens, cu_seqlens, 6, 6, seqused_k=int32(4, 5), **used)
        caches = [k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)]
        options = {"cache_seqlens": int32(3, 4), "cache_leftpad": padding, "causal": True}
        yield flash_attn_with_kvcache(q, *caches, k, v, cos, sin, **options)
        yield from caches

    for found, wanted in zip(results(int32(-3, 2)), results(int32(0, 2)), strict=True):
        assert torch.equal(found, wanted)


# Gradients.

FEATURES = {
    "window": {"window_size": (2, 1)},
    "causal window": {"window_size": (2, 0), "causal": True},
    "chunk": {"attention_chunk": 2},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.7]), "causal": True},
    "alibi of each sequence": {"alibi_slopes": torch.tensor([[0.1, 0.7], [0.3, 0.2]])},
    "dropout": {"dropout_p": 0.4},
    "used and padded": {"seqused_q": int32(3, 4), "seqused_k": int32(5, 2), "leftpad_k": int32(1, 0), "causal": True},
    "negative scale": {"softmax_scale": -0.3, "causal": True},
    "zero scale": {"softmax_scale": 0.0, "window_size": (2, 2)},
}


@pytest.mark.parametrize("features", FEATURES.values(), ids=FEATURES)
def test_gradcheck(features):
    inputs = (randn(2, 4, 2, 3), randn(2, 5, 1, 3), randn(2, 5, 1, 4), randn(2))

    def function(q, k, v, sink):
        torch.manual_seed(1)
        out, lse = flash_attn_func(q, k, v, learnable_sink=sink, return_lse=True, **features)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(function, inputs)


def test_gradcheck_of_the_log_sum_exp_of_plain_attention():
    def function(q, k, v):
        return flash_attn_func(q, k, v, causal=True, return_lse=True)

    assert torch.autograd.gradcheck(function, (randn(1, 4, 2, 3), randn(1, 5, 1, 3), randn(1, 5, 1, 3)))


def test_gradcheck_of_qv():
    def function(q, k, v, qv):
        return flash_attn_func(q, k, v, qv=qv, causal=True)

    inputs = (randn(1, 4, 2, 3), randn(1, 5, 1, 3), randn(1, 5, 1, 2), randn(1, 4, 2, 2))
    assert torch.autograd.gradcheck(function, inputs)
    q, k, v, qv = inputs
    scores = torch.einsum("bihd,bjhd->bhij", q, k.expand(1, 5, 2, 3)) + torch.einsum(
        "bihd,bjhd->bhij", qv, v.expand(1, 5, 2, 2)
    )
    hidden = torch.ones(4, 5).triu(2).bool()
    weights = (scores / math.sqrt(5)).masked_fill(hidden, -math.inf).softmax(-1)
    torch.testing.assert_close(function(*inputs), torch.einsum("bhij,bjhd->bihd", weights, v.expand(1, 5, 2, 2)))


def test_packed_forms_give_packed_gradients():
    qkv, kv, q = randn(2, 5, 3, 2, 4), randn(2, 7, 2, 1, 4), randn(2, 5, 2, 4)
    cu_q, cu_k = int32(0, 5, 10), int32(0, 7, 14)
    options = {"causal": True, "softcap": 2.0}
    apart = qkv.detach().unbind(2)
    wanted = torch.autograd.grad(flash_attn_func(*(x.requires_grad_() for x in apart), **options).square().sum(), apart)
    wanted = torch.stack(wanted, dim=2)
    for out, leaf in (
        (flash_attn_qkvpacked_func(qkv, **options), qkv),
        (flash_attn_varlen_qkvpacked_func(qkv.flatten(0, 1), cu_q, 5, **options), qkv),
    ):
        (grad,) = torch.autograd.grad(out.square().sum(), leaf)
        torch.testing.assert_close(grad, wanted)
    k, v = (x.requires_grad_() for x in kv.detach().unbind(2))
    wanted_q, *rest = torch.autograd.grad(flash_attn_func(q, k, v, **options).square().sum(), (q, k, v))
    for out in (
        flash_attn_kvpacked_func(q, kv, **options),
        flash_attn_varlen_kvpacked_func(q.flatten(0, 1), kv.flatten(0, 1), cu_q, cu_k, 5, 7, **options),
    ):
        dq, dkv = torch.autograd.grad(out.square().sum(), (q, kv))
        torch.testing.assert_close(dq, wanted_q)
        torch.testing.assert_close(dkv, torch.stack(rest, dim=2))


@pytest.mark.parametrize("softmax_scale", [-0.4, 0.0])
def test_packed_forms_with_a_scale_that_is_not_positive(softmax_scale):
    qkv = randn(2, 5, 3, 2, 4)
    assert torch.autograd.gradcheck(lambda x: flash_attn_qkvpacked_func(x, softmax_scale=softmax_scale), qkv)


def test_only_return_lse_has_a_gradient():
    q = randn(1, 3, 1, 4)
    assert flash_attn_func(q, q, q, return_lse=True)[1].requires_grad
    assert not flash_attn_func(q, q, q, return_attn_probs=True)[1].requires_grad
    assert not flash_attn_func(q, q, q, return_attn_probs=True, window_size=(1, 1))[1].requires_grad
    out, lse, probs = flash_attn_func(q, q, q, return_attn_probs=True, return_lse=True)
    assert (out.requires_grad, lse.requires_grad, probs.numel()) == (True, True, 0)


def test_gradient_of_the_log_sum_exp_alone():
    q, k, v = randn(1, 4, 2, 3), randn(1, 5, 1, 3), randn(1, 5, 1, 3)
    for options in ({}, {"window_size": (2, 2)}):
        _, lse = flash_attn_func(q, k, v, return_lse=True, **options)
        dq, dk, dv = torch.autograd.grad(lse.sum(), (q, k, v))
        assert dq.abs().sum() > 0
        assert dk.abs().sum() > 0
        assert torch.all(dv == 0)


# Dropout.


def test_dropout_keeps_the_share_it_should_and_follows_the_seed():
    q = randn(1, 300, 2, 8, requires_grad=False)
    _, _, probs = flash_attn_func(q, q, q, dropout_p=0.3, return_attn_probs=True)
    assert probs.shape == (1, 2, 384, 384)
    inside = probs[:, :, :300, :300]
    assert abs((inside < 0).double().mean() - 0.3) < 0.01
    torch.testing.assert_close(inside.abs().sum(-1), torch.ones(1, 2, 300, dtype=torch.float64))
    assert torch.all(probs[:, :, 300:] == 0)
    assert torch.all(probs[:, :, :, 300:] == 0)
    # Heads, rows and columns have masks of their own.
    dropped = inside[0] < 0
    assert 0.4 < (dropped[0] == dropped[1]).double().mean() < 0.7
    assert 0.4 < (dropped[0, 1:] == dropped[0, :-1]).double().mean() < 0.7
    assert 0.4 < (dropped[0, :, 1:] == dropped[0, :, :-1]).double().mean() < 0.7
    torch.manual_seed(7)
    first = flash_attn_func(q, q, q, dropout_p=0.3)
    second = flash_attn_func(q, q, q, dropout_p=0.3)
    torch.manual_seed(7)
    assert torch.equal(flash_attn_func(q, q, q, dropout_p=0.3), first)
    assert not torch.equal(first, second)


def test_the_mask_is_the_kernels_hash():
    """In plain integers, as csrc/kernels/common/dropout.cuh has it."""

    def mix(x):
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    def dropped(seed, offset, index, row, column, dropout_p):
        state = 0
        for word in (seed, offset, index):
            for half in (word % 2**32, word >> 32):
                state = mix(state ^ half)
        row_key, column_key = state, mix(state ^ 0x9E3779B9)
        return mix(mix(row ^ row_key) ^ mix(column ^ column_key)) < int(dropout_p * 2**32)

    torch.manual_seed(9)
    seed, offset = torch.randint(0, 2**63 - 1, (2,)).tolist()
    torch.manual_seed(9)
    q = randn(2, 40, 3, 8, requires_grad=False)
    torch.manual_seed(9)
    _, _, probs = flash_attn_func(q, q, q, dropout_p=0.37, return_attn_probs=True)
    for b, h, i, j in ((0, 0, 0, 0), (0, 2, 39, 1), (1, 0, 7, 33), (1, 2, 39, 39), *((1, 1, 3, j) for j in range(40))):
        assert (probs[b, h, i, j] < 0).item() == dropped(seed, offset, 3 * b + h, i, j, 0.37)


def test_dropout_under_activation_checkpointing():
    from torch.utils.checkpoint import checkpoint

    q = randn(1, 20, 2, 8)

    def step(call):
        torch.manual_seed(3)
        (grad,) = torch.autograd.grad(call(lambda x: flash_attn_func(x, x, x, dropout_p=0.5).square()).sum(), q)
        return grad

    assert torch.equal(
        step(lambda f: f(q)), step(lambda f: checkpoint(f, q, use_reentrant=False, preserve_rng_state=True))
    )


def test_attention_weights_of_dropout_multiply_to_the_output():
    q, k, v = (randn(2, n, 2, 8, requires_grad=False) for n in (6, 9, 9))
    options = {"dropout_p": 0.4, "causal": True, "alibi_slopes": torch.tensor([0.2, 0.5]), "window_size": (3, -1)}
    out, _, probs = flash_attn_func(q, k, v, return_attn_probs=True, **options)
    kept = probs.clamp(min=0)[:, :, :6, :9] / 0.6
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out)


# Pages, caches, parts.


def test_block_tables_of_packed_sequences():
    q, pages = randn(5, 4, 8), randn(7, 3, 2, 8, requires_grad=False)
    table, lengths = int32(4, 1, 99, 6, 2, 0).view(2, 3), (5, 8)
    cu_q, cu_k = int32(0, 2, 5), int32(0, 5, 13)
    out = flash_attn_varlen_func(q, pages, pages, cu_q, cu_k, 3, 8, causal=True, block_table=table)
    k = torch.cat([pages[table[b].clamp(max=6).long()].flatten(0, 1)[:n] for b, n in enumerate(lengths)])
    wanted = flash_attn_varlen_func(q, k, k, cu_q, cu_k, 3, 8, causal=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), q)[0] for x in (out, wanted)))


def test_parts_of_the_keys_combine():
    q, k, v = randn(2, 5, 2, 8), randn(2, 9, 2, 8), randn(2, 9, 2, 8)
    wanted, wanted_lse = flash_attn_func(q, k, v, return_lse=True)
    parts = [flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 4), (4, 4), (4, 9))]
    outs, lses = torch.stack([o for o, _ in parts]), torch.stack([x.transpose(1, 2) for _, x in parts])
    out, lse = flash_attn_combine(outs, lses)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(lse, wanted_lse.transpose(1, 2))
    assert lse.transpose(1, 2).is_contiguous()
    grads = [torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, wanted)]
    torch.testing.assert_close(*grads)
    given = torch.empty_like(wanted, dtype=torch.float32)
    found, _ = flash_attn_combine(outs.detach(), lses.detach(), out=given)
    assert found is given
    torch.testing.assert_close(given, wanted.detach().float())
    assert flash_attn_combine(outs, lses, out_dtype=torch.bfloat16)[0].dtype == torch.bfloat16
    nothing, lse = flash_attn_combine(torch.full((2, 1, 1, 1, 4), math.nan), torch.full((2, 1, 1, 1), -math.inf))
    assert torch.all(nothing == 0)
    assert torch.all(lse == -math.inf)
    with pytest.raises(ValueError, match="lse_partial must have out_partial's shape without the head dim"):
        flash_attn_combine(outs, lses.transpose(2, 3))
    with pytest.raises(ValueError, match="out_partial must have shape"):
        flash_attn_combine(outs[0, 0, 0], lses)


@pytest.mark.parametrize("varlen", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"window_size_left": 3, "window_size_right": 2, "softcap": 3.0}, {"scale": -0.2}], ids=str
)
def test_functions_of_sequence_parallel_libraries(options, varlen):
    """Keys in two parts, as a ring of two GPUs has them: the merged output's backward, part by part."""
    options = dict(options)
    scale = options.pop("scale", 0.3)
    tail = (0.0, scale, False)
    q, k, v = (randn(1, n, 2, 8, requires_grad=False) for n in (6, 9, 9))
    dout = torch.randn_like(q)
    cu_q = int32(0, 6)

    forward = _flash_attn_varlen_forward if varlen else _flash_attn_forward
    backward = _flash_attn_varlen_backward if varlen else _flash_attn_backward
    pick = (lambda x: x[0]) if varlen else (lambda x: x)

    def lengths(n):
        return (cu_q, int32(0, n), 6, n) if varlen else ()

    out, lse, probs, rng_state = forward(pick(q), pick(k), pick(v), *lengths(9), *tail, **options)
    assert (probs.numel(), rng_state.shape, rng_state.dtype) == (0, (2,), torch.int64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    window = (options.get("window_size_left", -1), options.get("window_size_right", -1))
    wanted, wanted_lse = flash_attn_func(
        *leaves, softmax_scale=scale, window_size=window, softcap=options.get("softcap", 0.0), return_lse=True
    )
    torch.testing.assert_close(out, pick(wanted))
    torch.testing.assert_close(lse, pick(wanted_lse))
    # A window follows the last key: parts of them would have others.
    parts = [(0, 9)] if window != (-1, -1) else [(0, 4), (4, 9)]
    dq, dk, dv = torch.zeros_like(pick(q)), torch.full_like(pick(k), math.nan), torch.full_like(pick(v), math.nan)
    for a, b in parts:
        rows = (lambda x: x[a:b]) if varlen else (lambda x: x[:, a:b])  # noqa: B023
        part = torch.full_like(dq, math.nan)
        softmax_d = backward(
            pick(dout), pick(q), rows(pick(k)), rows(pick(v)), out, lse, part, rows(dk), rows(dv),
            *lengths(b - a), *tail, **options,
        )  # fmt: skip
        dq += part
    found = [dq, dk, dv]
    torch.testing.assert_close(found, [pick(g) for g in torch.autograd.grad(wanted, leaves, dout)])
    delta = (dout * wanted).sum(-1)[0].T.detach()
    assert softmax_d.shape == ((2, 6) if varlen else (1, 2, 128))
    torch.testing.assert_close(softmax_d[..., :6].reshape(2, 6), delta)


def test_sequence_parallel_dropout_and_spare_tokens():
    q = randn(8, 2, 8, requires_grad=False)
    bounds = int32(0, 3, 6)
    leaf = q.clone().requires_grad_()
    torch.manual_seed(5)
    out, lse, probs, rng_state = _flash_attn_varlen_forward(
        q, q, q, bounds, bounds, 3, 3, 0.5, None, True, return_softmax=True, zero_tensors=True
    )
    assert probs.shape == (2, 2, 128, 128)
    assert torch.all(out[6:] == 0)
    assert torch.all(lse[:, 6:] == -math.inf)
    torch.manual_seed(5)
    wanted = flash_attn_varlen_func(leaf, leaf, leaf, bounds, bounds, 3, 3, 0.5, causal=True)
    torch.testing.assert_close(out[:6], wanted[:6].detach())
    grads = [torch.full_like(q, math.nan) for _ in range(3)]
    _flash_attn_varlen_backward(
        torch.ones_like(out), q, q, q, out, lse, *grads, bounds, bounds, 3, 3, 0.5, None, True, rng_state=rng_state,
        zero_tensors=True,
    )  # fmt: skip
    (grad,) = torch.autograd.grad(wanted[:6].sum(), leaf)
    torch.testing.assert_close(sum(grads), grad)
    with pytest.raises(ValueError, match=r"rng_state must be the forward's with dropout_p=0\.5, got None"):
        _flash_attn_varlen_backward(out, q, q, q, out, lse, *grads, bounds, bounds, 3, 3, 0.5, None, True)
    with pytest.raises(ValueError, match="dk must have k's shape"):
        _flash_attn_varlen_backward(
            out, q, q, q, out, lse, grads[0], grads[1][:5], grads[2], bounds, bounds, 3, 3, 0.0, None, True
        )
    with pytest.raises(ValueError, match="softmax_lse must have shape"):
        _flash_attn_varlen_backward(out, q, q, q, out, lse.T, *grads, bounds, bounds, 3, 3, 0.0, None, True)


def test_results_of_a_cache_want_no_gradient():
    q, cache = randn(1, 1, 2, 8), randn(1, 5, 2, 8)
    assert not flash_attn_with_kvcache(q, cache, cache).requires_grad
    new, angles = randn(1, 1, 2, 8), randn(5, 2, dtype=torch.float32)
    caches = [cache.detach().clone() for _ in "kv"]
    for options in ({}, {"causal": True}, {"rotary_seqlens": int32(1)}):
        assert not flash_attn_with_kvcache(
            q, *caches, new, new, angles, angles, cache_seqlens=3, **options
        ).requires_grad
    assert not any(x.requires_grad for x in caches)


def test_a_cache_with_qv():
    q, k, v, qv = randn(2, 1, 2, 8), randn(2, 9, 2, 8), randn(2, 9, 2, 8), randn(2, 1, 2, 8)
    for scale in (None, -0.5, 0.0):
        out = flash_attn_with_kvcache(q, k, v, cache_seqlens=int32(9, 9), qv=qv, softmax_scale=scale)
        torch.testing.assert_close(out, flash_attn_func(q, k, v, qv=qv, softmax_scale=scale).detach())


# FlashAttention-3's module.


def test_flash_attention_3():
    f3 = flash_attn_interface
    assert set(f3.__all__) == {
        "flash_attn_combine", "flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
        "flash_attn_with_kvcache", "get_scheduler_metadata",
    }  # fmt: skip
    q, k, v = randn(2, 5, 4, 8), randn(2, 7, 2, 8), randn(2, 7, 2, 8)
    out, lse = f3.flash_attn_func(q, k, v, 0.3, True, window_size=(3, 0), return_attn_probs=True)
    wanted = flash_attn_func(q, k, v, softmax_scale=0.3, causal=True, window_size=(3, 0), return_lse=True)
    torch.testing.assert_close((out, lse), wanted)
    bounds = int32(0, 5, 10), int32(0, 7, 14)
    flat = [x.flatten(0, 1) for x in (q, k, v)]
    out, lse = f3.flash_attn_varlen_func(*flat, *bounds, 5, 7, None, int32(3, 7), return_attn_probs=True)
    wanted = flash_attn_func(q, k, v, seqused_k=int32(3, 7), return_lse=True)
    torch.testing.assert_close(out, wanted[0].flatten(0, 1))
    torch.testing.assert_close(lse, wanted[1].transpose(0, 1).flatten(1))
    heads = randn(2, 5, 8, 8)
    out = f3.flash_attn_qkvpacked_func(heads, causal=True, num_heads_q=4)
    torch.testing.assert_close(out, flash_attn_func(heads[:, :, :4], heads[:, :, 4:6], heads[:, :, 6:], causal=True))
    qkv = randn(2, 5, 3, 2, 8)
    torch.testing.assert_close(f3.flash_attn_qkvpacked_func(qkv), flash_attn_qkvpacked_func(qkv))
    with pytest.raises(ValueError, match=r"qkv must be \(B, S, 3, H, D\), or"):
        f3.flash_attn_qkvpacked_func(heads)
    metadata = f3.get_scheduler_metadata(2, 1, 7, 4, 2, 8, int32(3, 7), num_splits=3)
    assert metadata.dtype == torch.int32
    out, lse = f3.flash_attn_with_kvcache(
        q, k, v, cache_seqlens=int32(3, 7), scheduler_metadata=metadata, return_softmax_lse=True
    )
    torch.testing.assert_close((out, lse), tuple(x.detach() for x in wanted))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_packed_tokens_into_a_cache(causal, paged):
    """cu_seqlens_q and cu_seqlens_k_new, beside one call for each sequence."""
    f3 = flash_attn_interface
    shape = (12, 4, 2, 8) if paged else (3, 20, 2, 8)
    caches = [randn(*shape, requires_grad=False) for _ in "kv"]
    options = {"page_table": torch.randperm(12)[:10].int().view(2, 5)} if paged else {"cache_batch_idx": int32(2, 0)}
    cos, sin = torch.rand(20, 3, dtype=torch.float32), torch.rand(20, 3, dtype=torch.float32)
    lengths, tokens_q, tokens_k = (5, 9), (3, 1), (2, 4)
    q, k, v = (randn(sum(n), h, 8, requires_grad=False) for n, h in ((tokens_q, 4), (tokens_k, 2), (tokens_k, 2)))
    copies = [x.clone() for x in caches]
    spare = torch.full((2, 2, 8), 9.0, dtype=torch.float64)  # tokens of no sequence
    out, lse = f3.flash_attn_with_kvcache(
        q, *caches, torch.cat((k, spare)), torch.cat((v, spare)), None, cos, sin, int32(*lengths),
        cu_seqlens_q=int32(0, 3, 4), cu_seqlens_k_new=int32(0, 2, 6), max_seqlen_q=3, causal=causal,
        cache_leftpad=int32(1, 2), return_softmax_lse=True, **options,
    )  # fmt: skip
    first_q = first_k = 0
    for b in range(2):
        rows_q, rows_k = slice(first_q, first_q + tokens_q[b]), slice(first_k, first_k + tokens_k[b])
        first_q, first_k = rows_q.stop, rows_k.stop
        here = {name: x[b : b + 1] for name, x in options.items()}
        wanted, wanted_lse = f3.flash_attn_with_kvcache(
            q[None, rows_q], *copies, k[None, rows_k], v[None, rows_k], None, cos, sin, int32(lengths[b]),
            causal=causal, cache_leftpad=int32((1, 2)[b]), return_softmax_lse=True, **here,
        )  # fmt: skip
        torch.testing.assert_close(out[rows_q], wanted[0])
        torch.testing.assert_close(lse[:, rows_q], wanted_lse[0])
    torch.testing.assert_close(caches, copies)


def test_positions_of_their_own():
    f3 = flash_attn_interface
    caches = [randn(2, 20, 2, 8, requires_grad=False) for _ in "kv"]
    q, k = randn(2, 3, 4, 8, requires_grad=False), randn(2, 3, 2, 8, requires_grad=False)
    cos, sin = torch.rand(40, 3), torch.rand(40, 3)
    lengths, positions = int32(5, 9), int32(11, 0)
    copies = [x.clone() for x in caches]
    out = f3.flash_attn_with_kvcache(
        q, *caches, k, k, None, cos, sin, lengths, rotary_seqlens=positions, rotary_interleaved=False, causal=True
    )
    q, turned = (apply_rotary_emb(x, cos, sin, seqlen_offsets=positions) for x in (q, k))
    wanted = f3.flash_attn_with_kvcache(q, *copies, turned, k, cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(out, wanted)
    torch.testing.assert_close(caches, copies)


# bert_padding and RotaryEmbedding.


def test_padding_and_back():
    x = randn(3, 4, 2, 5)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
    packed, indices, cu_seqlens, longest, seqused = bert_padding.unpad_input(x, mask)
    assert torch.equal(packed, torch.cat((x[0, :2], x[2])))
    assert (cu_seqlens.tolist(), longest, seqused.tolist()) == ([0, 2, 2, 6], 4, [2, 0, 4])
    assert (cu_seqlens.dtype, seqused.dtype, type(longest)) == (torch.int32, torch.int32, int)
    back = bert_padding.pad_input(packed, indices, 3, 4)
    assert torch.equal(back, x * mask[:, :, None, None])
    (grad,) = torch.autograd.grad(back.square().sum(), x)
    torch.testing.assert_close(grad, 2 * x * mask[:, :, None, None])
    unused = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    packed, _, cu_seqlens, longest, seqused = bert_padding.unpad_input(x, mask, unused)
    assert (cu_seqlens.tolist(), longest, seqused.tolist()) == ([0, 3, 3, 7], 4, [2, 0, 4])
    assert torch.equal(packed[2], x[0, 2])
    with pytest.raises(ValueError, match=r"attention_mask must have hidden_states' first two sizes, \(3, 4\)"):
        bert_padding.unpad_input(x, mask[:2])


def test_sequences_one_after_the_other_in_a_row():
    x = randn(2, 6, 3, requires_grad=False)
    mask = torch.tensor([[2, 3, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, mask)
    assert torch.equal(packed, torch.cat((x[0, :5], x[1])))
    assert (indices.tolist(), cu_seqlens.tolist(), longest) == ([0, 1, 2, 3, 4, *range(6, 12)], [0, 2, 5, 11], 6)


def test_rotary_in_place_where_autograd_forbids_it():
    """Leaves, and views that unbind made: what existing models do."""
    cos, sin = torch.rand(20, 4), torch.rand(20, 4)
    qkv = randn(2, 5, 3, 2, 8)
    wanted = apply_rotary_emb_torch(qkv[:, :, 0], cos[:5].double(), sin[:5].double())
    q, _, _ = (qkv * 1).unbind(2)
    leaf = qkv[:, :, 0].detach().clone().requires_grad_()
    for x, source in ((q, qkv), (leaf, leaf)):
        address = x.data_ptr()
        out = apply_rotary_emb(x, cos, sin, inplace=True)
        assert out.data_ptr() == address
        torch.testing.assert_close(out, wanted)
        (grad,) = torch.autograd.grad(out.sum(), source)
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embedding(interleaved, scale_base):
    rotary = RotaryEmbedding(6, interleaved=interleaved, scale_base=scale_base)
    angle = torch.outer(torch.arange(9.0), 10000.0 ** (-torch.arange(0, 6, 2) / 6))
    scale = torch.ones(9, 3)
    if scale_base:
        scale = ((torch.arange(0, 6, 2) + 0.4 * 6) / (1.4 * 6)) ** ((torch.arange(9.0)[:, None] - 4) / scale_base)
    qkv = randn(2, 7, 3, 2, 8, dtype=torch.float32, requires_grad=False)

    def turned(x, scale):
        return apply_rotary_emb_torch(x, (angle.cos() * scale)[2:], (angle.sin() * scale)[2:], interleaved)

    q, k, v = qkv.clone().unbind(2)
    wanted = torch.stack((turned(q, scale), turned(k, 1 / scale), v), dim=2)
    torch.testing.assert_close(rotary(qkv.clone(), seqlen_offset=2), wanted)
    found = rotary(qkv.clone(), seqlen_offset=int32(2, 2), max_seqlen=9)
    torch.testing.assert_close(found, wanted)
    found_q, found_kv = rotary(q.clone(), qkv[:, :, 1:].clone(), seqlen_offset=2)
    torch.testing.assert_close(found_q, wanted[:, :, 0])
    torch.testing.assert_close(found_kv, wanted[:, :, 1:])
    grouped = qkv.flatten(2, 3)
    torch.testing.assert_close(rotary(grouped.clone(), seqlen_offset=2, num_heads_q=2), wanted.flatten(2, 3))
    assert not rotary.state_dict()
    table = rotary._cos_cached
    rotary(qkv[:, :3].clone())
    assert rotary._cos_cached is table


def test_rotary_refuses_what_is_wrong():
    x, cos = randn(2, 5, 2, 8), torch.rand(20, 4)
    bad = (
        ((x[0], cos, cos), {}, r"x must have shape \(B, S, H, D\), got \(5, 2, 8\)"),
        ((x, torch.rand(20, 5), cos), {}, r"cos must have shape .* at most 8, got \(20, 5\)"),
        ((x, cos, torch.rand(20, 3)), {}, "sin must be like cos"),
        ((x, cos.half(), cos), {}, r"cos must have x's dtype or be torch.float32: .*float64, got torch.float16"),
        ((x, cos, cos), {"seqlen_offsets": 16}, r"cos must have a position for each row: 16 \+ 5 are needed, got 20"),
        ((x, cos, cos), {"seqlen_offsets": int32(1)}, r"seqlen_offsets must have shape \(B,\), \(2,\) here"),
        ((x[0], cos, cos), {"cu_seqlens": int32(0, 5)}, "max_seqlen must be given with cu_seqlens, got None"),
    )
    for arguments, options, text in bad:
        with pytest.raises(ValueError, match=text):
            apply_rotary_emb(*arguments, **options)
    with pytest.raises(ValueError, match="max_seqlen must be given with a tensor seqlen_offset"):
        RotaryEmbedding(8)(randn(2, 5, 3, 2, 8), seqlen_offset=int32(1, 1))


def test_public_names():
    assert set(flash_attn.__all__) >= {
        "__version__", "flash_attn_combine", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
        "flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func",
        "flash_attn_with_kvcache", "supported",
    }  # fmt: skip
