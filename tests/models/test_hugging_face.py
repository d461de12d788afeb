"""GPT-2 and LLaMA with random weights give what transformers gives, and weights come back as they were."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from flash_attn.models.gpt import GPTLMHeadModel, inv_remap_state_dict_hf_gpt2, remap_state_dict_hf_gpt2
from flash_attn.models.llama import (
    config_from_checkpoint,
    inv_remap_state_dict_hf_llama,
    llama_config_to_gpt2_config,
    remap_state_dict_hf_llama,
)
from flash_attn.utils.generation import InferenceParams

VOCABULARY = 101
GPT2 = {
    "plain": {},
    "scaled by the layer": {"scale_attn_by_inverse_layer_idx": True},
    "unscaled": {"scale_attn_weights": False, "activation_function": "relu"},
    "inner": {"n_inner": 72, "activation_function": "gelu"},
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
LLAMA = {
    "plain": {},
    "grouped": {"num_key_value_heads": 2},
    "one KV head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3": {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "num_key_value_heads": 2},
    "linear": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 4.0}},
}
VARIANTS = {
    "torch": {},
    "flash": {"use_flash_attn": True},
    "fused": {"use_flash_attn": True, "fused_dropout_add_ln": True, "residual_in_fp32": True},
    "padded": {"use_flash_attn": True, "pad_vocab_size_multiple": 8},
}


def randomized(model):
    """Weights that are not all alike, as biases and norms are after initialization."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


def gpt2(options):
    config = GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=VOCABULARY, n_positions=64, **options)
    return config, randomized(GPT2LMHeadModel(config))


def llama(options):
    options = {"num_key_value_heads": 4, **options}
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=88, vocab_size=VOCABULARY,
        max_position_embeddings=64, rms_norm_eps=1e-5, **options,
    )  # fmt: skip
    return llama_config_to_gpt2_config(config), randomized(LlamaForCausalLM(config))


def compare(model, theirs, ids):
    """Logits, gradients' effect on the loss, and generation."""
    with torch.no_grad():
        wanted = theirs(ids).logits
        found = model(ids).logits
    torch.testing.assert_close(found[..., :VOCABULARY], wanted, rtol=2e-4, atol=2e-4)

    # Everything at once, and by pieces of several lengths with a cache.
    params = InferenceParams(max_seqlen=ids.shape[1], max_batch_size=ids.shape[0])
    pieces = []
    with torch.no_grad():
        for start, end in ((0, 7), (7, 8), (8, 12), (12, ids.shape[1])):
            positions = torch.arange(start, end).expand(ids.shape[0], -1)
            pieces.append(model(ids[:, start:end], positions, params).logits)
            params.seqlen_offset = end
    torch.testing.assert_close(torch.cat(pieces, dim=1), found, rtol=2e-4, atol=2e-4)

    tokens = model.generate(ids[:, :7], max_length=15, vocab_size=VOCABULARY, return_dict_in_generate=True)
    wanted = theirs.generate(
        ids[:, :7], attention_mask=torch.ones_like(ids[:, :7]), max_length=15, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    assert torch.equal(tokens.sequences, wanted)

    theirs(ids, labels=ids).loss.backward()
    logits = model(ids).logits[:, :-1, :VOCABULARY].flatten(0, 1)
    torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten()).backward()


def ids_of(batch=3, length=20):
    return torch.randint(VOCABULARY, (batch, length))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", GPT2)
def test_gpt2(kind, variant):
    config, theirs = gpt2(GPT2[kind])
    for name, value in VARIANTS[variant].items():
        setattr(config, name, value)
    model = GPTLMHeadModel(config).eval()
    model.load_state_dict(remap_state_dict_hf_gpt2(theirs.state_dict(), config))
    compare(model, theirs, ids_of())
    returned = inv_remap_state_dict_hf_gpt2(model.state_dict(), config)
    assert returned.keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in returned.items())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads["lm_head.weight"] = grads["transformer.embeddings.word_embeddings.weight"]
    grads = inv_remap_state_dict_hf_gpt2(grads, config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", LLAMA)
def test_llama(kind, variant, interleaved):
    config, theirs = llama(LLAMA[kind])
    config.rotary_emb_interleaved = interleaved
    for name, value in VARIANTS[variant].items():
        setattr(config, name, value)
    model = GPTLMHeadModel(config).eval()
    model.load_state_dict(remap_state_dict_hf_llama(theirs.state_dict(), config))
    compare(model, theirs, ids_of())
    returned = inv_remap_state_dict_hf_llama(model.state_dict(), config)
    assert returned.keys() == theirs.state_dict().keys()
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in returned.items())
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    grads.setdefault("lm_head.weight", grads["transformer.embeddings.word_embeddings.weight"])
    grads = inv_remap_state_dict_hf_llama(grads, config)
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("make", [gpt2, llama])
@pytest.mark.parametrize("safe", [True, False])
def test_from_pretrained_of_a_folder(make, safe, tmp_path):
    config, theirs = make({})
    if safe:
        theirs.save_pretrained(tmp_path, max_shard_size="50KB")
        assert (tmp_path / "model.safetensors.index.json").is_file()
    else:
        torch.save(theirs.state_dict(), tmp_path / "pytorch_model.bin")
    model = GPTLMHeadModel.from_pretrained(str(tmp_path), config).eval()
    ids = ids_of()
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, theirs(ids).logits, rtol=2e-4, atol=2e-4)


def test_configuration_of_a_folder(tmp_path):
    _, theirs = llama({"num_key_value_heads": 2})
    theirs.config.save_pretrained(tmp_path / "tiny-hf")
    config = llama_config_to_gpt2_config(config_from_checkpoint(tmp_path, "tiny", "hf"))
    assert (config.n_head_kv, config.n_inner, config.rotary_emb_base) == (2, 88, 10000.0)


def test_what_a_llama_cannot_be():
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=32)
    with pytest.raises(NotImplementedError, match="head_dim"):
        llama_config_to_gpt2_config(config)
    config = LlamaConfig(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(NotImplementedError, match="'dynamic'"):
        llama_config_to_gpt2_config(config)
