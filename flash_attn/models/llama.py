"""LLaMA as a :class:`flash_attn.models.gpt.GPTLMHeadModel`: its configuration, and its checkpoints in both directions.

    config = llama_config_to_gpt2_config(transformers.AutoConfig.from_pretrained(folder))
    config.use_flash_attn = True
    model = GPTLMHeadModel.from_pretrained(folder, config, device="cuda", dtype=torch.bfloat16)

A fused projection holds q, k and v one behind the other, and fc1 the up projection and then the gate.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedFeatureError
from ._remap import padded_words, renamed

__all__ = [
    "config_from_checkpoint",
    "inv_remap_state_dict_hf_llama",
    "llama_config_to_gpt2_config",
    "remap_state_dict_hf_llama",
    "remap_state_dict_meta_llama",
    "state_dicts_from_checkpoint",
]

_HF_LAYER = r"model\.layers\.(\d+)\."
_HF_NAMES = [
    (r"model\.embed_tokens\.(\w+)", r"transformer.embeddings.word_embeddings.\1"),
    (r"model\.norm\.(\w+)", r"transformer.ln_f.\1"),
    (_HF_LAYER + r"input_layernorm\.(\w+)", r"transformer.layers.\1.norm1.\2"),
    (_HF_LAYER + r"post_attention_layernorm\.(\w+)", r"transformer.layers.\1.norm2.\2"),
    (_HF_LAYER + r"mlp\.down_proj\.(\w+)", r"transformer.layers.\1.mlp.fc2.\2"),
    (_HF_LAYER + r"self_attn\.o_proj\.(\w+)", r"transformer.layers.\1.mixer.out_proj.\2"),
]
_GPT_LAYER = r"transformer\.layers\.(\d+)\."
_INVERSE_NAMES = [
    (r"transformer\.embeddings\.word_embeddings\.(\w+)", r"model.embed_tokens.\1"),
    (r"transformer\.ln_f\.(\w+)", r"model.norm.\1"),
    (_GPT_LAYER + r"norm1\.(\w+)", r"model.layers.\1.input_layernorm.\2"),
    (_GPT_LAYER + r"norm2\.(\w+)", r"model.layers.\1.post_attention_layernorm.\2"),
    (_GPT_LAYER + r"mlp\.fc2\.(\w+)", r"model.layers.\1.mlp.down_proj.\2"),
    (_GPT_LAYER + r"mixer\.out_proj\.(\w+)", r"model.layers.\1.self_attn.o_proj.\2"),
]
_META_LAYER = r"layers\.(\d+)\."
_META_NAMES = [
    (r"tok_embeddings\.(\w+)", r"transformer.embeddings.word_embeddings.\1"),
    (r"norm\.(\w+)", r"transformer.ln_f.\1"),
    (r"output\.(\w+)", r"lm_head.\1"),
    (_META_LAYER + r"attention_norm\.(\w+)", r"transformer.layers.\1.norm1.\2"),
    (_META_LAYER + r"ffn_norm\.(\w+)", r"transformer.layers.\1.norm2.\2"),
    (_META_LAYER + r"feed_forward\.w2\.(\w+)", r"transformer.layers.\1.mlp.fc2.\2"),
    (_META_LAYER + r"attention\.wo\.(\w+)", r"transformer.layers.\1.mixer.out_proj.\2"),
]
_WORDS = "transformer.embeddings.word_embeddings.weight"


def _swap_pairs(w: Tensor, heads: int, config: Any, interleave: bool) -> Tensor:
    """The rows of a projection (heads * D, ...) as rotary embedding pairs them: halves into neighbours, or back.

    Hugging Face rotates column i of a head with i + D / 2. A model with ``rotary_emb_interleaved`` rotates neighbours.
    """
    if not getattr(config, "rotary_emb_interleaved", False):
        return w
    half = w.shape[0] // heads // 2
    sizes = (heads, 2, half) if interleave else (heads, half, 2)
    return w.reshape(*sizes, *w.shape[1:]).transpose(1, 2).reshape(w.shape)


def _heads(config: Any) -> tuple[int, int]:
    heads_kv = getattr(config, "n_head_kv", None)
    return config.num_attention_heads, config.num_attention_heads if heads_kv is None else heads_kv


def _with_words(state_dict: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Word embeddings and head of the model's sizes."""
    state_dict[_WORDS] = padded_words(state_dict[_WORDS], config)
    if getattr(config, "tie_word_embeddings", True):
        state_dict["lm_head.weight"] = state_dict[_WORDS]
    else:
        state_dict["lm_head.weight"] = padded_words(state_dict["lm_head.weight"], config)
    return state_dict


def remap_state_dict_hf_llama(state_dict: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Hugging Face's LlamaForCausalLM -> :class:`flash_attn.models.gpt.GPTLMHeadModel` of ``config``.

    The rows of q and k are put in the order that ``config.rotary_emb_interleaved`` asks for. Biases are taken along.
    """
    result = renamed(state_dict, _HF_NAMES)
    heads, heads_kv = _heads(config)
    for layer in range(config.num_hidden_layers):
        old, new = f"model.layers.{layer}", f"transformer.layers.{layer}"
        result.pop(f"{old}.self_attn.rotary_emb.inv_freq", None)  # computed, not stored
        for kind in ("weight", "bias"):
            if f"{old}.mlp.up_proj.{kind}" in result:
                parts = [result.pop(f"{old}.mlp.{name}_proj.{kind}") for name in ("up", "gate")]
                result[f"{new}.mlp.fc1.{kind}"] = torch.cat(parts)
            if f"{old}.self_attn.q_proj.{kind}" in result:
                q, k, v = (result.pop(f"{old}.self_attn.{name}_proj.{kind}") for name in "qkv")
                q, k = _swap_pairs(q, heads, config, True), _swap_pairs(k, heads_kv, config, True)
                result[f"{new}.mixer.Wqkv.{kind}"] = torch.cat((q, k, v))
    return _with_words(result, config)


def inv_remap_state_dict_hf_llama(state_dict: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The inverse of :func:`remap_state_dict_hf_llama`; padding of the vocabulary is taken off."""
    result = renamed(state_dict, _INVERSE_NAMES)
    heads, heads_kv = _heads(config)
    for layer in range(config.num_hidden_layers):
        new, old = f"model.layers.{layer}", f"transformer.layers.{layer}"
        for kind in ("weight", "bias"):
            if f"{old}.mlp.fc1.{kind}" in result:
                up, gate = result.pop(f"{old}.mlp.fc1.{kind}").chunk(2)
                result[f"{new}.mlp.up_proj.{kind}"], result[f"{new}.mlp.gate_proj.{kind}"] = up, gate
            if f"{old}.mixer.Wqkv.{kind}" in result:
                rows = result.pop(f"{old}.mixer.Wqkv.{kind}")
                head_dim = rows.shape[0] // (heads + 2 * heads_kv)
                q, k, v = torch.split(rows, [heads * head_dim, heads_kv * head_dim, heads_kv * head_dim])
                q, k = _swap_pairs(q, heads, config, False), _swap_pairs(k, heads_kv, config, False)
                for name, part in zip("qkv", (q, k, v), strict=True):
                    result[f"{new}.self_attn.{name}_proj.{kind}"] = part
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        result[name] = result[name][: config.vocab_size]
    return result


def remap_state_dict_meta_llama(state_dict: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Meta's own checkpoint, of one file -> :class:`flash_attn.models.gpt.GPTLMHeadModel`.

    Meta's rotary embedding is the interleaved one: ``config.rotary_emb_interleaved`` has to be True.
    """
    if not getattr(config, "rotary_emb_interleaved", False):
        raise UnsupportedFeatureError("config.rotary_emb_interleaved must be True for Meta's checkpoints, got False.")
    result = renamed(state_dict, _META_NAMES)
    result.pop("rope.freqs", None)
    for layer in range(config.num_hidden_layers):
        old, new = f"layers.{layer}", f"transformer.layers.{layer}"
        result.pop(f"{old}.attention.inner_attention.rope.freqs", None)
        gate, up = (result.pop(f"{old}.feed_forward.{name}.weight") for name in ("w1", "w3"))
        result[f"{new}.mlp.fc1.weight"] = torch.cat((up, gate))
        qkv = [result.pop(f"{old}.attention.{name}.weight") for name in ("wq", "wk", "wv")]
        result[f"{new}.mixer.Wqkv.weight"] = torch.cat(qkv)
    return _with_words(result, config)


def _transformers() -> Any:
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ImportError("Configurations of LLaMA need transformers: pip install transformers.") from error
    return transformers


def config_from_checkpoint(
    checkpoint_path: str | os.PathLike[str], model_name: str, checkpoint_format: str = "meta"
) -> Any:
    """The LlamaConfig of ``model_name/params.json`` there, or, with "hf", of ``model_name-hf/config.json``.

    Meta's file does not always have the vocabulary's size: it is then 32000.
    """
    config_class = _transformers().LlamaConfig
    if checkpoint_format != "meta":
        return config_class.from_pretrained(Path(checkpoint_path) / f"{model_name}-hf" / "config.json")
    params = json.loads((Path(checkpoint_path) / model_name / "params.json").read_text())
    # Two thirds of four times the size, as a gated MLP has three matrices, and a multiple.
    intermediate = int(params.get("ffn_dim_multiplier", 1.0) * int(2 * 4 * params["dim"] / 3))
    multiple = params.get("multiple_of", 1)
    return config_class(
        vocab_size=params["vocab_size"] if params.get("vocab_size", -1) > 0 else 32000,
        hidden_size=params["dim"],
        intermediate_size=-(-intermediate // multiple) * multiple,
        num_attention_heads=params["n_heads"],
        num_hidden_layers=params["n_layers"],
        num_key_value_heads=params.get("n_kv_heads"),
        rms_norm_eps=params["norm_eps"],
        rope_theta=params.get("rope_theta", 10000.0),
    )


def state_dicts_from_checkpoint(checkpoint_path: str | os.PathLike[str], model_name: str) -> list[dict[str, Tensor]]:
    """The parts of Meta's checkpoint, in order."""
    files = sorted((Path(checkpoint_path) / model_name).glob("consolidated.*.pth"))
    return [torch.load(file, map_location="cpu", weights_only=True) for file in files]


def llama_config_to_gpt2_config(llama_config: Any) -> Any:
    """What :class:`flash_attn.models.gpt.GPTLMHeadModel` needs to be this LLaMA, as a transformers.GPT2Config.

    Grouped KV heads, biases, tied embeddings, and "linear" and "llama3" scaling of the rotary frequencies are taken
    over; what the model cannot do is an UnsupportedFeatureError.
    """
    heads = llama_config.num_attention_heads
    head_dim = getattr(llama_config, "head_dim", None)
    if head_dim is not None and head_dim * heads != llama_config.hidden_size:
        raise UnsupportedFeatureError(
            f"head_dim must be hidden_size / num_attention_heads, {llama_config.hidden_size} / {heads}, got {head_dim}."
        )
    if llama_config.hidden_act != "silu":
        raise UnsupportedFeatureError(f"hidden_act must be 'silu', got {llama_config.hidden_act!r}.")
    # One dictionary in new versions of transformers; before, a base and a dictionary or None.
    rope = dict(getattr(llama_config, "rope_parameters", None) or getattr(llama_config, "rope_scaling", None) or {})
    base = rope.pop("rope_theta", None) or getattr(llama_config, "rope_theta", None)
    base = getattr(llama_config, "rotary_emb_base", None) or base or 10000.0
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedFeatureError(f"rope_type must be 'default', 'linear' or 'llama3', got {kind!r}.")
    return _transformers().GPT2Config(
        vocab_size=llama_config.vocab_size,
        n_positions=0,  # no absolute positions
        n_embd=llama_config.hidden_size,
        n_layer=llama_config.num_hidden_layers,
        n_head=heads,
        n_inner=llama_config.intermediate_size,
        activation_function="swiglu",
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        layer_norm_epsilon=llama_config.rms_norm_eps,
        initializer_range=llama_config.initializer_range,
        bos_token_id=llama_config.bos_token_id,
        eos_token_id=llama_config.eos_token_id,
        pad_token_id=llama_config.pad_token_id,
        tie_word_embeddings=llama_config.tie_word_embeddings,
        # What GPT2Config does not have.
        rms_norm=True,
        rotary_emb_fraction=1.0,
        rotary_emb_interleaved=True,
        rotary_emb_base=base,
        rotary_emb_scaling=None if kind == "default" else rope,
        n_head_kv=llama_config.num_key_value_heads,
        mlp_multiple_of=1,  # n_inner is what it says
        qkv_proj_bias=llama_config.attention_bias,
        out_proj_bias=llama_config.attention_bias,
        mlp_fc1_bias=llama_config.mlp_bias,
        mlp_fc2_bias=llama_config.mlp_bias,
    )
