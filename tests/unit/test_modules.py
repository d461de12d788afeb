"""Attention with its projections, MLPs and blocks, against formulas in plain torch."""

import math

import pytest
import torch
from torch import nn

from flash_attn.layers.rotary import apply_rotary_emb_torch
from flash_attn.modules.block import Block, ParallelBlock, StochasticDepth
from flash_attn.modules.embedding import GPT2Embeddings
from flash_attn.modules.mha import MHA, CrossAttention, ScaledRotaryEmbedding, SelfAttention, get_alibi_slopes
from flash_attn.modules.mlp import GatedMlp, Mlp
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.utils.generation import InferenceParams

SIZE, HEADS, HEAD_DIM = 48, 6, 8


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def mha(**options):
    return MHA(SIZE, HEADS, layer_idx=0, dtype=torch.float64, **options)


def naive(module, x, visible, bias=None):
    """Self attention by its definition: ``visible`` is a bool (S, S)."""
    heads_kv = module.num_heads_kv
    q, k, v = module.Wqkv(x).split([SIZE, heads_kv * HEAD_DIM, heads_kv * HEAD_DIM], dim=-1)
    q, k, v = (t.unflatten(-1, (-1, HEAD_DIM)) for t in (q, k, v))
    if module.rotary_emb_dim > 0:
        angles = torch.arange(x.shape[1])[:, None] * module.rotary_emb.inv_freq.double()
        q, k = (apply_rotary_emb_torch(t, angles.cos(), angles.sin(), module.rotary_emb.interleaved) for t in (q, k))
    k, v = (t.repeat_interleave(HEADS // heads_kv, dim=2) for t in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM)
    scores = scores if bias is None else scores + bias
    weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
    return module.out_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))


def causal_mask(length):
    return torch.ones(length, length, dtype=torch.bool).tril()


KINDS = {
    "plain": {},
    "grouped": {"num_heads_kv": 2},
    "rotary": {"rotary_emb_dim": 8},
    "grouped, part of a head rotated": {"num_heads_kv": 3, "rotary_emb_dim": 4, "rotary_emb_interleaved": True},
    "no biases": {"qkv_proj_bias": False, "out_proj_bias": False},
}


def close(found, wanted, tolerance=1e-6):
    """float64, but for the angles of rotary embedding, which are float32's."""
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_self_attention(kind, flash, causal):
    module = mha(causal=causal, use_flash_attn=flash, **KINDS[kind])
    x = torch.randn(2, 9, SIZE, dtype=torch.float64, requires_grad=True)
    dout = torch.randn(2, 9, SIZE, dtype=torch.float64)
    leaves = [x, *module.parameters()]
    found = module(x)
    wanted = naive(module, x, causal_mask(9) if causal else torch.ones(9, 9, dtype=torch.bool))
    close(found, wanted)
    for one, other in zip(
        torch.autograd.grad(found, leaves, dout), torch.autograd.grad(wanted, leaves, dout), strict=True
    ):
        close(one, other)


def test_bias_and_window():
    module = mha(causal=True, use_flash_attn=True, use_alibi=True, window_size=(3, 0))
    x = torch.randn(2, 9, SIZE, dtype=torch.float64)
    distance = torch.arange(9)[:, None] - torch.arange(9)
    bias = -torch.tensor(get_alibi_slopes(HEADS), dtype=torch.float64)[:, None, None] * distance.abs()
    close(module(x), naive(module, x, causal_mask(9) & (distance <= 3), bias))


@pytest.mark.parametrize(("heads", "slopes"), [(4, [2**-2, 2**-4, 2**-6, 2**-8]), (3, [2**-4, 2**-8, 2**-2])])
def test_alibi_slopes(heads, slopes):
    assert get_alibi_slopes(heads) == slopes


@pytest.mark.parametrize("kind", KINDS)
def test_packed_sequences(kind):
    module = mha(causal=True, use_flash_attn=True, **KINDS[kind])
    lengths = (4, 1, 7)
    x = torch.randn(sum(lengths), SIZE, dtype=torch.float64)
    bounds = torch.tensor([0, 4, 5, 12], dtype=torch.int32)
    wanted = torch.cat([module(part[None])[0] for part in x.split(lengths)])
    close(module(x, cu_seqlens=bounds, max_seqlen=7), wanted)


@pytest.mark.parametrize("causal", [False, True])
def test_padding_mask(causal):
    module = mha(causal=causal)
    x = torch.randn(3, 7, SIZE, dtype=torch.float64)
    lengths = torch.tensor([7, 3, 1])
    mask = torch.arange(7) < lengths[:, None]
    found = module(x, key_padding_mask=mask)
    for row, length in enumerate(lengths.tolist()):
        close(found[row, :length], module(x[row : row + 1, :length])[0])


@pytest.mark.parametrize("flash", [False, True])
def test_cross_attention(flash):
    module = mha(cross_attn=True, num_heads_kv=2, use_flash_attn=flash)
    x, other = torch.randn(2, 5, SIZE, dtype=torch.float64), torch.randn(2, 8, SIZE, dtype=torch.float64)
    q = module.Wq(x).unflatten(-1, (HEADS, HEAD_DIM))
    k, v = module.Wkv(other).unflatten(-1, (2, 2, HEAD_DIM)).repeat_interleave(3, dim=3).unbind(2)
    weights = (torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(HEAD_DIM)).softmax(-1)
    wanted = module.out_proj(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(-2))
    close(module(x, other), wanted)
    close(module(x, other, mixer_subset=slice(0, 1)), wanted[:, :1])


def test_causal_cross_attention_with_padding():
    """The last query stands at the last key that counts."""
    q, kv = torch.randn(2, 3, 2, 8), torch.randn(2, 6, 2, 2, 8)
    mask = torch.arange(6) < torch.tensor([[6], [4]])
    found = CrossAttention(causal=True)(q, kv, key_padding_mask=mask)
    for row, length in enumerate((6, 4)):
        torch.testing.assert_close(
            found[row], CrossAttention(causal=True)(q[row : row + 1], kv[row : row + 1, :length])[0]
        )
    torch.testing.assert_close(found[:, -1], CrossAttention()(q, kv, key_padding_mask=mask)[:, -1])


def test_attention_in_half_precision_is_finite_without_keys():
    qkv = torch.randn(1, 3, 3, 2, 8, dtype=torch.float16)
    found = SelfAttention(causal=True)(qkv, key_padding_mask=torch.zeros(1, 3, dtype=torch.bool))
    assert found.isfinite().all()


@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, "xpos"])
def test_cache(kind, flash):
    """Pieces with a cache are the whole; the batch may be a part of what the cache has."""
    options = {"rotary_emb_dim": 8, "rotary_emb_scale_base": 16.0} if kind == "xpos" else KINDS[kind]
    module = mha(causal=True, use_flash_attn=flash, **options)
    x = torch.randn(2, 11, SIZE, dtype=torch.float64)
    params = InferenceParams(max_seqlen=11, max_batch_size=3, batch_size_offset=1)
    found = []
    with torch.no_grad():
        for start, end in ((0, 5), (5, 6), (6, 9), (9, 11)):
            params.seqlen_offset = start
            found.append(module(x[:, start:end], inference_params=params))
        wanted = module(x)
        close(torch.cat(found, dim=1), wanted, 1e-5)
    assert params.key_value_memory_dict[0].shape == (3, 11, 2, module.num_heads_kv, HEAD_DIM)


def test_cache_with_a_length_for_each_sequence():
    module = mha(causal=True, use_flash_attn=True, rotary_emb_dim=8)
    x = torch.randn(2, 6, SIZE, dtype=torch.float64)
    memory = {0: module.allocate_inference_cache(2, 8)}
    params = InferenceParams(8, 2, 0, 0, memory)
    with torch.no_grad():
        module(x[:, :5], inference_params=params)
        params.lengths_per_sample = torch.tensor([5, 3], dtype=torch.int32)
        params.seqlen_offset = 5
        found = module(x[:, 5:], inference_params=params)
        close(found[:1], module(x[:1])[:, -1:])
        close(found[1:], module(torch.cat((x[1:, :3], x[1:, 5:]), dim=1))[:, -1:])


def test_a_full_cache_is_an_error():
    module = mha(causal=True, use_flash_attn=True)
    x = torch.randn(2, 6, SIZE, dtype=torch.float64)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"room for 2 sequences from 0 on and for 6 positions, got \(2, 5\)"):
            module(x, inference_params=InferenceParams(5, 2))
        with pytest.raises(ValueError, match="room for 2 sequences from 1 on"):
            module(x, inference_params=InferenceParams(9, 2, batch_size_offset=1))


@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({"num_heads": 5}, {}, "num_heads must divide embed_dim.*embed_dim is 48, num_heads 5"),
        ({"num_heads": 6, "num_heads_kv": 4}, {}, "num_heads_kv 4"),
        ({"num_heads": 0}, {}, "num_heads 0"),
        ({"num_heads_kv": 0}, {}, "num_heads_kv 0"),
        ({}, {"key_padding_mask": torch.ones(2, 3, dtype=torch.bool)}, r"key_padding_mask must .*\(2, 4\) here"),
        ({}, {"key_padding_mask": torch.ones(2, 4)}, "key_padding_mask must be torch.bool.*float32"),
        ({"dwconv": True}, {}, "dwconv must be False"),
        ({"use_alibi": True}, {}, "use_alibi and window_size need use_flash_attn=True"),
        ({"cross_attn": True, "rotary_emb_dim": 8}, {}, "rotary_emb_dim must be 0"),
        ({}, {"cu_seqlens": torch.tensor([0, 4])}, "cu_seqlens needs max_seqlen"),
        ({"use_flash_attn": True}, {"key_padding_mask": torch.ones(2, 4, dtype=torch.bool)}, "key_padding_mask needs"),
        ({}, {"x_kv": torch.ones(2, 4, SIZE)}, "x_kv and mixer_subset need cross_attn=True"),
        ({}, {"inference_params": InferenceParams(8, 2)}, "layer_idx must be given"),
    ],
)  # fmt: skip
def test_what_is_refused(options, call, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        MHA(SIZE, **{"num_heads": HEADS, **options})(torch.ones(2, 4, SIZE), **call)


def test_checkpointing_and_residual():
    plain, kept = (
        mha(causal=True, use_flash_attn=True),
        mha(causal=True, use_flash_attn=True, checkpointing=True, return_residual=True),
    )
    kept.load_state_dict(plain.state_dict())
    x = torch.randn(1, 5, SIZE, dtype=torch.float64, requires_grad=True)
    wanted, (found, same) = plain(x), kept(x)
    assert same is x
    assert torch.equal(found, wanted)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(wanted.sum(), x)[0])


def test_scaled_frequencies_survive_a_cast():
    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    rotary = ScaledRotaryEmbedding(8, scaling)
    # 64 positions are 10.2 turns of the first frequency, 1.02 of the second, and 0.1 and 0.01 of the others.
    plain = torch.tensor([1.0, 0.1, 0.01, 0.001])
    share = (6.4 / (2 * math.pi) - 1) / 3
    wanted = torch.tensor([1.0, 0.1 / 8 + share * (0.1 - 0.1 / 8), 0.01 / 8, 0.001 / 8])
    torch.testing.assert_close(rotary.inv_freq, wanted)
    torch.testing.assert_close(ScaledRotaryEmbedding(8, {"type": "linear", "factor": 2.0}).inv_freq, plain / 2)
    before = ScaledRotaryEmbedding(8, scaling)
    before._update_cos_sin_cache(1000, torch.device("cpu"), torch.float32)
    rotary.to(torch.bfloat16)._update_cos_sin_cache(1000, torch.device("cpu"), torch.float32)
    assert torch.equal(rotary._cos_cached, before._cos_cached)
    with pytest.raises(NotImplementedError, match=r"rope_type must be .*'yarn'"):
        ScaledRotaryEmbedding(8, {"rope_type": "yarn", "factor": 2.0})


def test_mlps():
    x = torch.randn(3, 8)
    mlp = Mlp(8, 12, 4, activation=torch.relu, return_residual=True)
    found, same = mlp(x)
    assert same is x
    torch.testing.assert_close(found, torch.relu(x @ mlp.fc1.weight.T + mlp.fc1.bias) @ mlp.fc2.weight.T + mlp.fc2.bias)
    gated = GatedMlp(8, 12, activation=torch.nn.functional.silu, multiple_of=8, bias1=False, bias2=False)
    assert gated.fc1.weight.shape == (32, 8)
    up, gate = x @ gated.fc1.weight[:16].T, x @ gated.fc1.weight[16:].T
    torch.testing.assert_close(gated(x), (up * gate * torch.sigmoid(gate)) @ gated.fc2.weight.T)
    assert GatedMlp(96).fc2.weight.shape == (96, 256)


def test_embeddings():
    ids = torch.tensor([[3, 1, 2]])
    embeddings = GPT2Embeddings(8, 5, 10, word_embed_proj_dim=4)
    words = embeddings.project_in(embeddings.word_embeddings(ids))
    torch.testing.assert_close(embeddings(ids), words + embeddings.position_embeddings.weight[:3])
    moved = embeddings(ids, torch.tensor([[4, 5, 6]]))
    torch.testing.assert_close(moved, words + embeddings.position_embeddings.weight[4:7])
    assert not hasattr(GPT2Embeddings(8, 5, 0), "position_embeddings")


@pytest.mark.parametrize("norm", [nn.LayerNorm, RMSNorm])
@pytest.mark.parametrize("prenorm", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_block(fused, prenorm, norm):
    block = Block(SIZE, lambda dim: MHA(dim, HEADS), Mlp, norm, prenorm=prenorm, fused_dropout_add_ln=fused)
    x, residual = torch.randn(2, 5, SIZE), torch.randn(2, 5, SIZE)
    if prenorm:
        total = x + residual
        between = total + block.mixer(block.norm1(total))
        found, kept = block(x, residual)
        torch.testing.assert_close(kept, between)
        torch.testing.assert_close(found, block.mlp(block.norm2(between)))
        torch.testing.assert_close(block(x)[1], x + block.mixer(block.norm1(x)))
    else:
        between = block.norm1(block.mixer(x) + x)
        torch.testing.assert_close(block(x), block.norm2(block.mlp(between) + between))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_parallel_block(fused, tied):
    block = ParallelBlock(SIZE, lambda dim: MHA(dim, HEADS), Mlp, tied_norm=tied, fused_dropout_add_ln=fused)
    x, x2, residual = (torch.randn(2, 5, SIZE) for _ in range(3))
    total = x + x2 + residual
    to_mlp = (block.norm1 if tied else block.norm2)(total)
    for one, other in zip(
        block(x, x2, residual), (block.mixer(block.norm1(total)), block.mlp(to_mlp), total), strict=True
    ):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(block(x)[2], x)


def test_residual_in_float32_and_no_mlp():
    for fused in (False, True):
        block = Block(
            SIZE, lambda dim: MHA(dim, HEADS, dtype=torch.bfloat16), nn.Identity,
            lambda dim: nn.LayerNorm(dim, dtype=torch.bfloat16), residual_in_fp32=True, fused_dropout_add_ln=fused,
        )  # fmt: skip
        found, residual = block(torch.randn(2, 5, SIZE, dtype=torch.bfloat16))
        assert (found.dtype, residual.dtype) == (torch.bfloat16, torch.float32)
        assert not hasattr(block, "norm2")


@pytest.mark.parametrize("fused", [False, True])
def test_dropout_and_stochastic_depth(fused):
    block = Block(
        SIZE, lambda dim: nn.Identity(), lambda dim: nn.Linear(dim, dim), resid_dropout1=0.5, drop_path1=0.5,
        fused_dropout_add_ln=fused,
    )  # fmt: skip
    block.norm1 = nn.LayerNorm(SIZE, elementwise_affine=True)
    residual = torch.zeros(200, 1, SIZE)
    _, total = block.train()(torch.ones(200, 1, SIZE), residual)
    # What comes out of the mixer is the norm of what was kept: rows that were dropped are 0.
    dropped = (total == 0).all(-1).double().mean().item()
    assert 0.35 < dropped < 0.65
    _, total = block.eval()(torch.ones(200, 1, SIZE), residual)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_stochastic_depth_keeps_the_mean():
    x = torch.ones(4000, 2)
    found = StochasticDepth(0.75).train()(x)
    assert set(found.unique().tolist()) == {0.0, 4.0}
    assert torch.equal(found[:, 0], found[:, 1])
    assert abs(found.mean().item() - 1.0) < 0.15
    assert StochasticDepth(0.75).eval()(x) is x
