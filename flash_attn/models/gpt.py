"""GPT: a decoder-only transformer that its configuration turns into GPT-2, LLaMA and others of the kind.

    config = transformers.GPT2Config.from_pretrained("gpt2")
    config.use_flash_attn = config.fused_dropout_add_ln = True
    model = GPTLMHeadModel.from_pretrained("gpt2", config, device="cuda", dtype=torch.bfloat16)
    model.generate(input_ids, max_length=100)

The configuration is a transformers.GPT2Config, or any object with its attributes: hidden_size, num_hidden_layers,
num_attention_heads, vocab_size, max_position_embeddings (0: none), n_inner, activation_function, layer_norm_epsilon,
initializer_range, attn_pdrop, resid_pdrop, embd_pdrop, scale_attn_weights, scale_attn_by_inverse_layer_idx. These may
be added (with their defaults):

    use_flash_attn (False)            this package's attention
    fused_dropout_add_ln (False)      dropout, addition and norm in one kernel
    residual_in_fp32 (False)          the residual stream in float32
    rms_norm (False)                  RMS norm rather than layer norm
    prenorm (True)                    the norm before attention and MLP
    n_head_kv (None)                  KV heads, if fewer than heads
    rotary_emb_fraction (0.0)         share of a head's columns that are rotated; also rotary_emb_base,
                                      rotary_emb_scale_base, rotary_emb_interleaved, rotary_emb_scaling
    use_alibi (False), window_size ((-1, -1))
    qkv_proj_bias, out_proj_bias, mlp_fc1_bias, mlp_fc2_bias (True), lm_head_bias (False)
    mlp_multiple_of (128)             what a gated MLP's size is rounded up to
    parallel_block (False), parallel_block_tied_norm (False)
    tie_word_embeddings (True), pad_vocab_size_multiple (1), word_embed_proj_dim (None), norm_head (False)
    attn_checkpointing (False)        compute attention again in the backward

fused_mlp, fused_bias_fc and fused_dense_sqrelu_dense are hints of other implementations, without any effect.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ArgumentError, ShapeError, UnsupportedFeatureError
from ..modules.block import Block, ParallelBlock, fused_add_norm
from ..modules.embedding import GPT2Embeddings
from ..modules.mha import MHA
from ..modules.mlp import GatedMlp, Mlp
from ..ops.triton.layer_norm import RMSNorm
from ..utils.generation import GenerationMixin
from ..utils.pretrained import state_dict_from_pretrained
from ._remap import padded_vocab, padded_words, renamed
from .llama import remap_state_dict_hf_llama

__all__ = [
    "CausalLMOutput",
    "GPTLMHeadModel",
    "GPTModel",
    "create_block",
    "create_mixer_cls",
    "create_mlp_cls",
    "inv_remap_state_dict_hf_gpt2",
    "remap_state_dict_hf_gpt2",
]

logger = logging.getLogger(__name__)

_GATES: dict[str, Callable[[Tensor], Tensor]] = {"glu": torch.sigmoid, "swiglu": F.silu, "geglu": F.gelu}


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "sqrelu": _squared_relu,
    **dict.fromkeys(("gelu_new", "gelu_fast", "gelu_approx", "gelu_pytorch_tanh"), partial(F.gelu, approximate="tanh")),
}


def create_mixer_cls(
    config: Any,
    layer_idx: int | None = None,
    process_group: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[int], nn.Module]:
    """The attention of a layer, to be called with the hidden states' size."""
    _check_single(process_group)
    head_dim = config.hidden_size // config.num_attention_heads
    softmax_scale = head_dim**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        if layer_idx is None:
            raise ArgumentError("layer_idx must be given for config.scale_attn_by_inverse_layer_idx, got None.")
        softmax_scale /= layer_idx + 1
    if getattr(config, "attn_dwconv", False):
        raise UnsupportedFeatureError("config.attn_dwconv must be False.")
    return partial(
        MHA,
        num_heads=config.num_attention_heads,
        num_heads_kv=getattr(config, "n_head_kv", None),
        qkv_proj_bias=getattr(config, "qkv_proj_bias", True),
        out_proj_bias=getattr(config, "out_proj_bias", True),
        dropout=config.attn_pdrop,
        softmax_scale=softmax_scale,
        causal=True,
        layer_idx=layer_idx,
        rotary_emb_dim=int(getattr(config, "rotary_emb_fraction", 0.0) * head_dim),
        rotary_emb_base=getattr(config, "rotary_emb_base", 10000.0),
        rotary_emb_scale_base=getattr(config, "rotary_emb_scale_base", None),
        rotary_emb_interleaved=getattr(config, "rotary_emb_interleaved", False),
        rotary_emb_scaling=getattr(config, "rotary_emb_scaling", None),
        use_alibi=getattr(config, "use_alibi", False),
        window_size=getattr(config, "window_size", (-1, -1)),
        use_flash_attn=getattr(config, "use_flash_attn", False),
        checkpointing=getattr(config, "attn_checkpointing", False),
        device=device,
        dtype=dtype,
    )


def create_mlp_cls(
    config: Any,
    layer_idx: int | None = None,
    process_group: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Callable[[int], nn.Module]:
    """The MLP of a layer, to be called with the hidden states' size."""
    _check_single(process_group)
    name = config.activation_function
    if name not in (*_GATES, *_ACTIVATIONS):
        raise ArgumentError(f"config.activation_function must be one of {[*_GATES, *_ACTIVATIONS]}, got {name!r}.")
    options: dict[str, Any] = {
        "hidden_features": config.n_inner,
        "bias1": getattr(config, "mlp_fc1_bias", True),
        "bias2": getattr(config, "mlp_fc2_bias", True),
        "device": device,
        "dtype": dtype,
    }
    if name in _GATES:
        multiple_of = getattr(config, "mlp_multiple_of", 128)
        return partial(GatedMlp, activation=_GATES[name], multiple_of=multiple_of, **options)
    return partial(Mlp, activation=_ACTIVATIONS[name], **options)


def create_block(
    config: Any,
    layer_idx: int | None = None,
    process_group: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Block | ParallelBlock:
    """A layer."""
    common: dict[str, Any] = {
        "mixer_cls": create_mixer_cls(config, layer_idx, process_group, device, dtype),
        "mlp_cls": create_mlp_cls(config, layer_idx, process_group, device, dtype),
        "norm_cls": _norm_cls(config, device, dtype),
        # The dropout of a block's input: of the embeddings in the first, of the block's before in the others.
        "resid_dropout1": config.resid_pdrop if layer_idx is None or layer_idx > 0 else config.embd_pdrop,
        "resid_dropout2": config.resid_pdrop,
        "fused_dropout_add_ln": getattr(config, "fused_dropout_add_ln", False),
        "residual_in_fp32": getattr(config, "residual_in_fp32", False),
    }
    prenorm = getattr(config, "prenorm", True)
    if not getattr(config, "parallel_block", False):
        return Block(config.hidden_size, prenorm=prenorm, **common)
    if not prenorm:
        raise ArgumentError("config.prenorm must be True with config.parallel_block.")
    return ParallelBlock(config.hidden_size, tied_norm=getattr(config, "parallel_block_tied_norm", False), **common)


def _norm_cls(config: Any, device: Any, dtype: Any) -> Callable[[int], nn.Module]:
    norm: Any = RMSNorm if getattr(config, "rms_norm", False) else nn.LayerNorm
    return partial(norm, eps=config.layer_norm_epsilon, device=device, dtype=dtype)


def _check_single(process_group: Any) -> None:
    if process_group is not None:
        raise UnsupportedFeatureError("process_group must be None: these models are not split between processes.")


def _init_weights(module: nn.Module, n_layer: int, initializer_range: float) -> None:
    """GPT-2's initialization: what is added to the residual stream shrinks with the number of layers."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=initializer_range)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
    for name, parameter in module.named_parameters(recurse=True):
        if name in ("out_proj.weight", "fc2.weight"):
            nn.init.normal_(parameter, std=initializer_range / math.sqrt(2 * n_layer))


class GPTPreTrainedModel(nn.Module):
    """A model with a configuration, that can be made from a checkpoint."""

    def __init__(
        self,
        config: Any,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_single(process_group)
        for name in ("mup_embeddings_multiplier", "mup_output_multiplier", "mup_width_scale", "mup_init_scale"):
            if (value := getattr(config, name, 1.0)) != 1.0:
                raise UnsupportedFeatureError(f"config.{name} must be 1.0, got {value}.")
        self.config = config

    def _initialize(self) -> None:
        init = partial(
            _init_weights, n_layer=self.config.num_hidden_layers, initializer_range=self.config.initializer_range
        )
        self.apply(init)

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        config: Any,
        *args: Any,
        strict: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        world_size: int = 1,
        rank: int = 0,
        **kwargs: Any,
    ) -> Any:
        """The model with the weights of a checkpoint of GPT-2 or LLaMA, or of this model.

        Args:
            model_name: a folder with Hugging Face's files, or a model on its hub (needs ``transformers``).
            config: for LLaMA, what :func:`flash_attn.models.llama.llama_config_to_gpt2_config` makes.
            strict: every parameter has to be in the checkpoint, and the other way round.
            device, dtype: of the model.
            world_size: only 1: the model is not split between processes.
        """
        if world_size != 1:
            _check_single(world_size)
        model = cls(config, *args, device=device, dtype=dtype, **kwargs)  # type: ignore[misc]
        state_dict = state_dict_from_pretrained(model_name, device="cpu", dtype=dtype)
        if any(key.endswith("wte.weight") for key in state_dict):
            state_dict = remap_state_dict_hf_gpt2(state_dict, config)
        elif "model.embed_tokens.weight" in state_dict:
            state_dict = remap_state_dict_hf_llama(state_dict, config)
        elif "transformer.embeddings.word_embeddings.weight" not in state_dict:
            raise UnsupportedFeatureError(
                f"{model_name} must be a checkpoint of GPT-2 or LLaMA, or of this model; its first tensors are "
                f"{list(state_dict)[:3]}."
            )
        logger.info(model.load_state_dict(state_dict, strict=strict))
        return model


class GPTModel(GPTPreTrainedModel):
    """The transformer without its head: token numbers (B, S) -> hidden states (B, S, hidden_size)."""

    def __init__(
        self,
        config: Any,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, process_group, device, dtype)
        self.prenorm = getattr(config, "prenorm", True)
        self.parallel_block = getattr(config, "parallel_block", False)
        self.fused_dropout_add_ln = getattr(config, "fused_dropout_add_ln", False)
        self.embeddings = GPT2Embeddings(
            config.hidden_size,
            padded_vocab(config.vocab_size, config),
            config.max_position_embeddings,
            word_embed_proj_dim=getattr(config, "word_embed_proj_dim", None),
            device=device,
            dtype=dtype,
        )
        self.layers = nn.ModuleList(
            create_block(config, layer, device=device, dtype=dtype) for layer in range(config.num_hidden_layers)
        )
        if getattr(config, "rotary_emb_fraction", 0.0) > 0.0:
            # One table of angles for all.
            for layer in self.layers[1:]:
                layer.mixer.rotary_emb = self.layers[0].mixer.rotary_emb  # type: ignore[union-attr]
        if self.prenorm:
            self.drop_f = nn.Dropout(config.resid_pdrop)
            self.ln_f = _norm_cls(config, device, dtype)(config.hidden_size)
        self._initialize()

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> dict[int, Tensor]:
        """Memory for the keys and values of a batch, by layer."""
        return {i: layer.allocate_inference_cache(batch_size, max_seqlen, dtype) for i, layer in enumerate(self.layers)}  # type: ignore[operator]

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, inference_params: Any = None) -> Tensor:
        """
        Args:
            input_ids: (B, S).
            position_ids: (B, S), for absolute positions; 0, 1, ... if None.
            inference_params: :class:`flash_attn.utils.generation.InferenceParams`: continue what it holds.
        """
        x = self.embeddings(input_ids, position_ids)
        kwargs = {} if inference_params is None else {"inference_params": inference_params}
        # What the layers add to the residual stream is added by the next.
        residual = x2 = None
        for layer in self.layers:
            if not self.prenorm:
                x = layer(x, mixer_kwargs=kwargs)
            elif self.parallel_block:
                x, x2, residual = layer(x, x2, residual, mixer_kwargs=kwargs)
            else:
                x, residual = layer(x, residual, mixer_kwargs=kwargs)
        if not self.prenorm:
            return x  # type: ignore[no-any-return]
        if self.fused_dropout_add_ln:
            return fused_add_norm(self.ln_f, self.drop_f, x, residual, x2)  # type: ignore[no-any-return]
        total = self.drop_f(x)
        for other in (residual, None if x2 is None else self.drop_f(x2)):
            total = total if other is None else total + other
        return self.ln_f(total.to(self.ln_f.weight.dtype))  # type: ignore[no-any-return]


class CausalLMOutput(NamedTuple):
    logits: Tensor


class GPTLMHeadModel(GPTPreTrainedModel, GenerationMixin):
    """The transformer with a head that predicts the next token: token numbers (B, S) -> logits (B, S, vocabulary)."""

    def __init__(
        self,
        config: Any,
        process_group: Any = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(config, process_group, device, dtype)
        self.transformer = GPTModel(config, process_group, device, dtype)
        self.tie_word_embeddings = getattr(config, "tie_word_embeddings", True)
        size = getattr(config, "word_embed_proj_dim", None)
        self.project_out = (
            None if size is None else nn.Linear(config.hidden_size, size, bias=False, device=device, dtype=dtype)
        )
        self.lm_head = nn.Linear(
            config.hidden_size if size is None else size,
            padded_vocab(config.vocab_size, config),
            bias=getattr(config, "lm_head_bias", False),
            device=device,
            dtype=dtype,
        )
        self.norm_head = getattr(config, "norm_head", False)
        for module in (self.project_out, self.lm_head):
            if module is not None:
                _init_weights(module, config.num_hidden_layers, config.initializer_range)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.tie_word_embeddings:
            self.lm_head.weight = self.transformer.embeddings.word_embeddings.weight

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> dict[int, Tensor]:
        """Memory for the keys and values of a batch, by layer."""
        return self.transformer.allocate_inference_cache(batch_size, max_seqlen, dtype)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        inference_params: Any = None,
        num_last_tokens: int = 0,
    ) -> CausalLMOutput:
        """A named tuple with ``logits``, of the last ``num_last_tokens`` tokens if that is not 0.

        Args:
            input_ids, position_ids, inference_params: as in :meth:`GPTModel.forward`.
        """
        if input_ids.dim() != 2:
            raise ShapeError(f"input_ids must have shape (B, S), got {tuple(input_ids.shape)}.")
        x = self.transformer(input_ids, position_ids, inference_params)
        if num_last_tokens > 0:
            x = x[:, -num_last_tokens:]
        if self.project_out is not None:
            x = self.project_out(x)
        weight = F.normalize(self.lm_head.weight) if self.norm_head else self.lm_head.weight
        return CausalLMOutput(F.linear(x, weight, self.lm_head.bias))


_HF_LAYER = r"h\.(\d+)\."
_HF_NAMES = [
    (r"wte\.weight", r"transformer.embeddings.word_embeddings.weight"),
    (r"wpe\.weight", r"transformer.embeddings.position_embeddings.weight"),
    (r"ln_f\.(\w+)", r"transformer.ln_f.\1"),
    (_HF_LAYER + r"ln_(1|2)\.(\w+)", r"transformer.layers.\1.norm\2.\3"),
    (_HF_LAYER + r"mlp\.c_fc\.(\w+)", r"transformer.layers.\1.mlp.fc1.\2"),
    (_HF_LAYER + r"mlp\.c_proj\.(\w+)", r"transformer.layers.\1.mlp.fc2.\2"),
    (_HF_LAYER + r"attn\.c_attn\.(\w+)", r"transformer.layers.\1.mixer.Wqkv.\2"),
    (_HF_LAYER + r"attn\.c_proj\.(\w+)", r"transformer.layers.\1.mixer.out_proj.\2"),
]
_GPT_LAYER = r"transformer\.layers\.(\d+)\."
_INVERSE_NAMES = [
    (r"transformer\.embeddings\.word_embeddings\.weight", r"transformer.wte.weight"),
    (r"transformer\.embeddings\.position_embeddings\.weight", r"transformer.wpe.weight"),
    (_GPT_LAYER + r"norm(1|2)\.(\w+)", r"transformer.h.\1.ln_\2.\3"),
    (_GPT_LAYER + r"mlp\.fc1\.(\w+)", r"transformer.h.\1.mlp.c_fc.\2"),
    (_GPT_LAYER + r"mlp\.fc2\.(\w+)", r"transformer.h.\1.mlp.c_proj.\2"),
    (_GPT_LAYER + r"mixer\.Wqkv\.(\w+)", r"transformer.h.\1.attn.c_attn.\2"),
    (_GPT_LAYER + r"mixer\.out_proj\.(\w+)", r"transformer.h.\1.attn.c_proj.\2"),
]
_MATRICES = ("mlp.fc1.weight", "mlp.fc2.weight", "mixer.Wqkv.weight", "mixer.out_proj.weight")


def remap_state_dict_hf_gpt2(state_dict: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """Hugging Face's GPT2LMHeadModel or GPT2Model -> :class:`GPTLMHeadModel` of ``config``.

    GPT-2 keeps its matrices the other way round, and always ties its embeddings.
    """
    result = {}
    for key, value in renamed(
        {key.removeprefix("transformer."): value for key, value in state_dict.items()}, _HF_NAMES
    ).items():
        # The causal mask of old checkpoints.
        if not key.endswith((".attn.bias", ".attn.masked_bias")):
            result[key] = value.t() if key.endswith(_MATRICES) else value
    words = padded_words(result["transformer.embeddings.word_embeddings.weight"], config)
    result["transformer.embeddings.word_embeddings.weight"] = result["lm_head.weight"] = words
    return result


def inv_remap_state_dict_hf_gpt2(state_dict: Mapping[str, Tensor], config: Any) -> dict[str, Tensor]:
    """The inverse of :func:`remap_state_dict_hf_gpt2`, for GPT2LMHeadModel; padding of the vocabulary is taken off."""
    turned = {key: value.t() if key.endswith(_MATRICES) else value for key, value in state_dict.items()}
    result = renamed(turned, _INVERSE_NAMES)
    for key in ("transformer.wte.weight", "lm_head.weight"):
        result[key] = result[key][: config.vocab_size]
    return result
