"""GPT-2 and LLaMA against their definitions in plain torch, with weights as Hugging Face names them; generation.

tests/models compares them with transformers.
"""

import json
import math
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from flash_attn.models.gpt import GPTLMHeadModel, inv_remap_state_dict_hf_gpt2, remap_state_dict_hf_gpt2
from flash_attn.models.llama import (
    inv_remap_state_dict_hf_llama,
    llama_config_to_gpt2_config,
    remap_state_dict_hf_llama,
    remap_state_dict_meta_llama,
)
from flash_attn.utils.generation import InferenceParams, decode, sample
from flash_attn.utils.pretrained import state_dict_from_pretrained

WORDS, SIZE, HEADS, LAYERS, INNER = 37, 32, 4, 2, 40


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def config_of(**changes):
    config = {
        "vocab_size": WORDS, "hidden_size": SIZE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "max_position_embeddings": 24, "n_inner": INNER, "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0,
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "use_flash_attn": True, **changes,
    }  # fmt: skip
    return types.SimpleNamespace(**config)


def llama_config_of(**changes):
    return config_of(
        max_position_embeddings=0, activation_function="swiglu", rms_norm=True, rotary_emb_fraction=1.0,
        mlp_multiple_of=1, tie_word_embeddings=False, qkv_proj_bias=False, out_proj_bias=False, mlp_fc1_bias=False,
        mlp_fc2_bias=False, **changes,
    )  # fmt: skip


def attend(q, k, v):
    """Causal attention of (B, S, H, D)."""
    length = q.shape[1]
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[-1])
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v).flatten(-2)


def gpt2_weights():
    sizes = {"wte.weight": (WORDS, SIZE), "wpe.weight": (24, SIZE), "ln_f.weight": (SIZE,), "ln_f.bias": (SIZE,)}
    for layer in range(LAYERS):
        for name, inputs, outputs in (
            ("attn.c_attn", SIZE, 3 * SIZE), ("attn.c_proj", SIZE, SIZE), ("mlp.c_fc", SIZE, INNER),
            ("mlp.c_proj", INNER, SIZE),
        ):  # fmt: skip
            sizes[f"h.{layer}.{name}.weight"], sizes[f"h.{layer}.{name}.bias"] = (inputs, outputs), (outputs,)
        for name in ("ln_1.weight", "ln_1.bias", "ln_2.weight", "ln_2.bias"):
            sizes[f"h.{layer}.{name}"] = (SIZE,)
    weights = {f"transformer.{name}": torch.randn(size) * 0.3 for name, size in sizes.items()}
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights


def gpt2_logits(weights, ids):
    w = {name.removeprefix("transformer."): weight for name, weight in weights.items()}
    x = w["wte.weight"][ids] + w["wpe.weight"][: ids.shape[1]]

    def norm(x, name):
        return F.layer_norm(x, (SIZE,), w[f"{name}.weight"], w[f"{name}.bias"])

    for i in range(LAYERS):

        def linear(x, name, i=i):
            return x @ w[f"h.{i}.{name}.weight"] + w[f"h.{i}.{name}.bias"]

        q, k, v = (t.unflatten(-1, (HEADS, -1)) for t in linear(norm(x, f"h.{i}.ln_1"), "attn.c_attn").chunk(3, -1))
        x = x + linear(attend(q, k, v), "attn.c_proj")
        x = x + linear(F.gelu(linear(norm(x, f"h.{i}.ln_2"), "mlp.c_fc"), approximate="tanh"), "mlp.c_proj")
    return norm(x, "ln_f") @ w["wte.weight"].T


def llama_weights(heads_kv, tied=False):
    head_dim = SIZE // HEADS
    sizes = {"model.embed_tokens.weight": (WORDS, SIZE), "model.norm.weight": (SIZE,), "lm_head.weight": (WORDS, SIZE)}
    for layer in range(LAYERS):
        for name, size in {
            "self_attn.q_proj": (SIZE, SIZE), "self_attn.k_proj": (heads_kv * head_dim, SIZE),
            "self_attn.v_proj": (heads_kv * head_dim, SIZE), "self_attn.o_proj": (SIZE, SIZE),
            "mlp.gate_proj": (INNER, SIZE), "mlp.up_proj": (INNER, SIZE), "mlp.down_proj": (SIZE, INNER),
            "input_layernorm": (SIZE,), "post_attention_layernorm": (SIZE,),
        }.items():  # fmt: skip
            sizes[f"model.layers.{layer}.{name}.weight"] = size
    weights = {name: torch.randn(size) * 0.3 for name, size in sizes.items()}
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    return weights


def llama_logits(weights, ids, heads_kv):
    x = weights["model.embed_tokens.weight"][ids]
    frequencies = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    turn = torch.polar(torch.ones(()), torch.arange(ids.shape[1])[:, None] * frequencies)[:, None]

    def rotated(x):
        """Column i of a head with column i + D / 2, as complex numbers."""
        halves = torch.complex(*x.chunk(2, dim=-1)) * turn
        return torch.cat((halves.real, halves.imag), dim=-1)

    for layer in range(LAYERS):
        w = {name.split(".", 3)[3]: v for name, v in weights.items() if name.startswith(f"model.layers.{layer}.")}
        y = F.rms_norm(x, (SIZE,), w["input_layernorm.weight"], 1e-5)
        q, k, v = ((y @ w[f"self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, 8)) for n in "qkv")
        q, k = rotated(q), rotated(k)
        k, v = (t.repeat_interleave(HEADS // heads_kv, dim=2) for t in (k, v))
        x = x + attend(q, k, v) @ w["self_attn.o_proj.weight"].T
        y = F.rms_norm(x, (SIZE,), w["post_attention_layernorm.weight"], 1e-5)
        gate, up = (y @ w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ w["mlp.down_proj.weight"].T
    return F.rms_norm(x, (SIZE,), weights["model.norm.weight"], 1e-5) @ weights["lm_head.weight"].T


def same_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name, weight in wanted.items():
        assert torch.equal(found[name], weight), name


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


def in_pieces(model, ids):
    """Logits by a prompt and then pieces with a cache."""
    params = InferenceParams(max_seqlen=ids.shape[1], max_batch_size=ids.shape[0])
    logits = []
    for start, end in ((0, 6), (6, 7), (7, 10), (10, ids.shape[1])):
        positions = torch.arange(start, end).expand(ids.shape[0], -1)
        logits.append(model(ids[:, start:end], positions, params).logits)
        params.seqlen_offset = end
    return torch.cat(logits, dim=1)


OPTIONS = [{}, {"use_flash_attn": False}, {"fused_dropout_add_ln": True, "residual_in_fp32": True}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("padding", [1, 8])
def test_gpt2(options, padding):
    config = config_of(pad_vocab_size_multiple=padding, **options)
    weights, ids = gpt2_weights(), torch.randint(WORDS, (3, 15))
    model = GPTLMHeadModel(config).eval()
    old = {**weights, "transformer.h.0.attn.bias": torch.ones(1, 1, 24, 24)}  # the mask that old checkpoints have
    model.load_state_dict(remap_state_dict_hf_gpt2(old, config))
    with torch.no_grad():
        wanted = gpt2_logits(weights, ids)
        assert model(ids).logits.shape[-1] == -(-WORDS // padding) * padding
        close(model(ids).logits[..., :WORDS], wanted)
        close(in_pieces(model, ids)[..., :WORDS], wanted)
        close(model(ids, num_last_tokens=2).logits[..., :WORDS], wanted[:, -2:])
    same_weights(inv_remap_state_dict_hf_gpt2(model.state_dict(), config), weights)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("heads_kv", [4, 2, 1])
def test_llama(options, interleaved, heads_kv):
    tied = heads_kv == 1
    config = llama_config_of(n_head_kv=heads_kv, rotary_emb_interleaved=interleaved, **options)
    config.tie_word_embeddings = tied
    weights, ids = llama_weights(heads_kv, tied), torch.randint(WORDS, (3, 15))
    model = GPTLMHeadModel(config).eval()
    model.load_state_dict(remap_state_dict_hf_llama(weights, config))
    with torch.no_grad():
        wanted = llama_logits(weights, ids, heads_kv)
        close(model(ids).logits, wanted)
        close(in_pieces(model, ids), wanted)
    same_weights(inv_remap_state_dict_hf_llama(model.state_dict(), config), weights)


def test_llama_of_meta():
    """The same model with the rows of q and k in Meta's order."""
    config = llama_config_of(n_head_kv=2, rotary_emb_interleaved=True)
    wanted = remap_state_dict_hf_llama(llama_weights(2), config)
    names = {
        "transformer.embeddings.word_embeddings": "tok_embeddings", "transformer.ln_f": "norm", "lm_head": "output",
        "norm1": "attention_norm", "norm2": "ffn_norm", "mixer.out_proj": "attention.wo", "mlp.fc2": "feed_forward.w2",
    }  # fmt: skip
    meta = {"rope.freqs": torch.ones(4)}
    for name, weight in wanted.items():
        name = name.replace("transformer.layers", "layers")
        if "Wqkv" in name:
            for part, rows in zip(("wq", "wk", "wv"), weight.split([32, 16, 16]), strict=True):
                meta[name.replace("mixer.Wqkv", f"attention.{part}")] = rows
        elif "fc1" in name:
            for part, rows in zip(("w3", "w1"), weight.chunk(2), strict=True):
                meta[name.replace("mlp.fc1", f"feed_forward.{part}")] = rows
        else:
            for ours, theirs in names.items():
                name = name.replace(ours, theirs)
            meta[name] = weight
    same_weights(remap_state_dict_meta_llama(meta, config), wanted)
    config.rotary_emb_interleaved = False
    with pytest.raises(NotImplementedError, match="rotary_emb_interleaved must be True"):
        remap_state_dict_meta_llama(meta, config)


@pytest.mark.parametrize("options", [{}, {"parallel_block_tied_norm": True}, {"prenorm": False}, {"norm_head": True}])
@pytest.mark.parametrize("fused", [False, True])
def test_other_kinds_of_block(options, fused):
    """The fused way is the other one; a cache changes nothing; every parameter has a gradient."""
    config = config_of(
        parallel_block="prenorm" not in options, word_embed_proj_dim=16, use_alibi=True, window_size=(5, 0), **options
    )
    plain = GPTLMHeadModel(config).eval()
    config.fused_dropout_add_ln = fused
    model = GPTLMHeadModel(config).eval()
    model.load_state_dict(plain.state_dict())
    ids = torch.randint(WORDS, (2, 15))
    logits = model(ids).logits
    close(logits, plain(ids).logits)
    with torch.no_grad():
        close(in_pieces(model, ids), logits)
    logits.sum().backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_it_learns():
    """A few steps on one batch: the gradients fit together."""
    config = llama_config_of(n_head_kv=2, fused_dropout_add_ln=True, residual_in_fp32=True)
    model = GPTLMHeadModel(config).train()
    ids = torch.randint(WORDS, (4, 12))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_initialization():
    model = GPTLMHeadModel(config_of(hidden_size=128, n_inner=512, initializer_range=0.02))
    assert model.lm_head.weight is model.transformer.embeddings.word_embeddings.weight
    for name, parameter in model.named_parameters():
        wanted = 0.02 / math.sqrt(2 * LAYERS) if name.endswith(("out_proj.weight", "fc2.weight")) else 0.02
        if parameter.dim() == 2:
            assert abs(parameter.std().item() / wanted - 1) < 0.1, name


def plain_model():
    config = config_of()
    return GPTLMHeadModel(config).eval()


def test_greedy_generation():
    model, ids = plain_model(), torch.randint(WORDS, (2, 5))
    output = model.generate(ids, max_length=12, return_dict_in_generate=True, output_scores=True)
    wanted = ids
    with torch.no_grad():
        for step in range(7):
            logits = model(wanted).logits[:, -1]
            close(output.scores[step], logits)
            wanted = torch.cat((wanted, logits.argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(output.sequences, wanted)
    assert torch.equal(model.generate(ids, max_length=12), wanted)


def test_generation_stops_and_is_taught():
    model, ids = plain_model(), torch.randint(WORDS, (2, 5))
    taught = torch.cat((ids, torch.tensor([[7, 8, 9], [1, 8, 2]])), dim=1)
    assert torch.equal(decode(ids, model, 10, teacher_outputs=taught).sequences[:, :8], taught)
    stopped = decode(ids, model, 10, teacher_outputs=taught, eos_token_id=8).sequences
    assert torch.equal(stopped, taught[:, :7])
    assert int(decode(ids, model, 20, vocab_size=3).sequences[:, 5:].max()) < 3
    with pytest.raises(ValueError, match="max_length must be more than the prompts' length, 5 tokens, got 5"):
        decode(ids, model, 5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"input_ids": [[1, 2]]}, r"^input_ids must be a torch\.Tensor, got list"),
        ({"input_ids": torch.tensor([1, 2])}, r"^input_ids must have shape \(B, S\), got \(2,\)"),
        ({"max_length": 6.0}, r"^max_length must be an integer, got 6\.0"),
        ({"max_length": 15}, r"^max_length must be at most 13: the model has 12 positions, got 15"),
        ({"input_ids": torch.zeros(1, 13, dtype=torch.int64)}, r"^input_ids must have at most .* tokens, 12, got 13"),
        ({"vocab_size": 0}, r"^vocab_size must be positive or None, got 0"),
        ({"teacher_outputs": torch.zeros(1, 9, dtype=torch.int64)}, r"^teacher_outputs must have shape \(2, length\)"),
        ({"cg": True}, r"^cg=True needs a model on a GPU, input_ids is on cpu"),
    ],
)
def test_what_generation_refuses(changes, message):
    model = GPTLMHeadModel(config_of(max_position_embeddings=12)).eval()
    arguments = {"input_ids": torch.ones(2, 3, dtype=torch.int64), "max_length": 13}
    assert model.generate(**arguments).shape == (2, 13)
    with pytest.raises(ValueError, match=message):
        model.generate(**{**arguments, **({"max_length": 20} if "input_ids" in changes else {}), **changes})


def test_samples():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().expand(4000, 4)

    def shares(**options):
        return (sample(logits, **options).bincount(minlength=4) / 4000).tolist()

    assert shares() == [1.0, 0.0, 0.0, 0.0]
    assert shares(top_k=0) == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.04)
    assert shares(top_k=2) == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=0.04)
    # The least likely that have 0.2 together go.
    assert shares(top_k=0, top_p=0.81) == pytest.approx([0.5 / 0.95, 0.3 / 0.95, 0.15 / 0.95, 0.0], abs=0.04)
    assert shares(top_k=0, top_p=0.7) == pytest.approx([0.625, 0.375, 0.0, 0.0], abs=0.04)
    squares = [0.25, 0.09, 0.0225, 0.0025]
    assert shares(top_k=0, temperature=0.5) == pytest.approx([s / sum(squares) for s in squares], abs=0.04)
    with pytest.raises(ValueError, match="temperature positive"):
        sample(logits, top_k=0, temperature=0.0)


@pytest.mark.parametrize("sharded", [False, True])
def test_from_pretrained_of_a_folder(sharded, tmp_path):
    weights, ids = gpt2_weights(), torch.randint(WORDS, (2, 9))
    if sharded:
        names = sorted(weights)
        torch.save({name: weights[name] for name in names[::2]}, tmp_path / "a.bin")
        torch.save({name: weights[name] for name in names[1::2]}, tmp_path / "b.bin")
        parts = {name: "ab"[i % 2] + ".bin" for i, name in enumerate(names)}
        (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": parts}))
    else:
        torch.save(weights, tmp_path / "pytorch_model.bin")
    model = GPTLMHeadModel.from_pretrained(str(tmp_path), config_of()).eval()
    with torch.no_grad():
        close(model(ids).logits, gpt2_logits(weights, ids))
    half = state_dict_from_pretrained(str(tmp_path), dtype=torch.bfloat16)
    assert {weight.dtype for weight in half.values()} == {torch.bfloat16}
    if sharded:
        (tmp_path / "b.bin").unlink()
        with pytest.raises(FileNotFoundError, match="some are missing"):
            state_dict_from_pretrained(str(tmp_path))


def test_folders_without_a_model(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none of model\.safetensors"):
        GPTLMHeadModel.from_pretrained(str(tmp_path), config_of())
    torch.save({"encoder.weight": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(NotImplementedError, match=r"first tensors are \['encoder.weight'\]"):
        GPTLMHeadModel.from_pretrained(str(tmp_path), config_of())
    own = plain_model()
    torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")
    same_weights(GPTLMHeadModel.from_pretrained(str(tmp_path), config_of()).state_dict(), own.state_dict())


def test_what_needs_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ImportError, match="pip install transformers"):
        state_dict_from_pretrained("no/folder")
    config = types.SimpleNamespace(num_attention_heads=4, hidden_size=32, hidden_act="silu")
    with pytest.raises(ImportError, match="pip install transformers"):
        llama_config_to_gpt2_config(config)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "tanh"}, "activation_function must be one of .*'tanh'"),
        ({"parallel_block": True, "prenorm": False}, "prenorm must be True"),
        ({"attn_dwconv": True}, "attn_dwconv must be False"),
        ({"mup_width_scale": 0.5}, "mup_width_scale must be 1.0, got 0.5"),
    ],
)
def test_what_a_configuration_cannot_say(changes, message):
    with pytest.raises((ValueError, NotImplementedError), match=message):
        GPTLMHeadModel(config_of(**changes))


def test_what_a_model_refuses():
    with pytest.raises(NotImplementedError, match="process_group must be None"):
        GPTLMHeadModel(config_of(), process_group=object())
    with pytest.raises(NotImplementedError, match="tensor_parallel must be 1, got 2"):
        plain_model().generate(torch.zeros(1, 2, dtype=torch.int64), 5, tensor_parallel=2)
    with pytest.raises(ValueError, match=r"input_ids must have shape \(B, S\), got \(3,\)"):
        plain_model()(torch.zeros(3, dtype=torch.int64))


def test_compiled():
    model, ids = GPTLMHeadModel(llama_config_of(n_head_kv=2, fused_dropout_add_ln=True)), torch.randint(WORDS, (2, 9))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(ids).logits, model(ids).logits)
    grads = []
    for one in (compiled, model):
        model.zero_grad()
        one(ids).logits.square().sum().backward()
        grads.append([parameter.grad for parameter in model.parameters()])
    for found, wanted in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


def test_training_after_generation():
    """What generating leaves in the modules is no inference tensor."""
    model, ids = GPTLMHeadModel(llama_config_of(n_head_kv=2)), torch.randint(WORDS, (2, 5))
    model.generate(ids, max_length=12)
    model(ids).logits.sum().backward()
