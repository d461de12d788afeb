"""Multi-head attention: projections, rotary embedding, attention, and a KV cache for inference.

The attention within is the package's (``Flash...``), or a few operations of torch that hold the whole score matrix and
take padding masks (``SelfAttention``, ``CrossAttention``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..errors import ArgumentError, ShapeError, UnsupportedFeatureError
from ..flash_attn_interface import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from ..layers.rotary import RotaryEmbedding, apply_rotary_emb

__all__ = [
    "MHA",
    "CrossAttention",
    "FlashCrossAttention",
    "FlashSelfAttention",
    "LinearResidual",
    "ScaledRotaryEmbedding",
    "SelfAttention",
    "get_alibi_slopes",
]


def get_alibi_slopes(nheads: int) -> list[float]:
    """The slopes of ALiBi (Press et al. 2022) for ``nheads`` heads."""
    power = 2 ** math.floor(math.log2(nheads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    # Heads beyond a power of two take every other slope of the next one.
    return slopes + [2.0 ** (-4.0 * (2 * i + 1) / power) for i in range(nheads - power)]


class _Attention(nn.Module):
    """What attention modules have: the mask, the scale and dropout."""

    def __init__(self, causal: bool, softmax_scale: float | None, attention_dropout: float) -> None:
        super().__init__()
        self.causal = causal
        self.softmax_scale = softmax_scale
        self.drop = nn.Dropout(attention_dropout)


class _FlashAttention(_Attention):
    alibi_slopes: Tensor | None

    def __init__(
        self,
        causal: bool = False,
        softmax_scale: float | None = None,
        attention_dropout: float = 0.0,
        window_size: tuple[int, int] = (-1, -1),
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)
        self.register_buffer("alibi_slopes", alibi_slopes, persistent=False)
        self.window_size = window_size
        self.deterministic = deterministic

    def options(self, causal: bool | None) -> dict[str, Any]:
        return {
            "dropout_p": self.drop.p if self.training else 0.0,
            "softmax_scale": self.softmax_scale,
            "causal": self.causal if causal is None else causal,
            "window_size": self.window_size,
            # Slopes are float32, whatever the module was cast to.
            "alibi_slopes": None if self.alibi_slopes is None else self.alibi_slopes.float(),
            "deterministic": self.deterministic,
        }


class FlashSelfAttention(_FlashAttention):
    """:func:`flash_attn.flash_attn_qkvpacked_func` as a module, and its varlen form."""

    def forward(
        self, qkv: Tensor, causal: bool | None = None, cu_seqlens: Tensor | None = None, max_seqlen: int | None = None
    ) -> Tensor:
        """qkv (B, S, 3, H, D) -> (B, S, H, D), or packed (T, 3, H, D) -> (T, H, D) with int32 cu_seqlens (B + 1,).

        ``causal`` overrides the module's.
        """
        if cu_seqlens is None:
            return flash_attn_qkvpacked_func(qkv, **self.options(causal))  # type: ignore[return-value]
        if max_seqlen is None:
            raise ArgumentError("max_seqlen must be given with cu_seqlens, got None.")
        return flash_attn_varlen_qkvpacked_func(qkv, cu_seqlens, max_seqlen, **self.options(causal))  # type: ignore[return-value]


class FlashCrossAttention(_FlashAttention):
    """:func:`flash_attn.flash_attn_kvpacked_func` as a module, and its varlen form."""

    def forward(
        self,
        q: Tensor,
        kv: Tensor,
        causal: bool | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_k: int | None = None,
    ) -> Tensor:
        """q (B, Sq, H, D) and kv (B, Sk, 2, Hk, D) -> (B, Sq, H, D); packed with int32 cu_seqlens and cu_seqlens_k.

        ``causal`` overrides the module's.
        """
        if cu_seqlens is None:
            return flash_attn_kvpacked_func(q, kv, **self.options(causal))  # type: ignore[return-value]
        if cu_seqlens_k is None or max_seqlen is None or max_seqlen_k is None:
            raise ArgumentError("max_seqlen, cu_seqlens_k and max_seqlen_k must be given with cu_seqlens.")
        return flash_attn_varlen_kvpacked_func(  # type: ignore[return-value]
            q, kv, cu_seqlens, cu_seqlens_k, max_seqlen, max_seqlen_k, **self.options(causal)
        )


class _TorchAttention(_Attention):
    """Attention in plain torch, with a mask of padding; it holds the score matrix."""

    def __init__(
        self, causal: bool = False, softmax_scale: float | None = None, attention_dropout: float = 0.0
    ) -> None:
        super().__init__(causal, softmax_scale, attention_dropout)

    def attend(self, q: Tensor, kv: Tensor, key_padding_mask: Tensor | None, last_key: Tensor | None) -> Tensor:
        """``last_key`` is the last key that a query sees, of a shape that (B, H, Sq, Sk) broadcasts with."""
        k, v = kv.repeat_interleave(q.shape[2] // kv.shape[3], dim=3).unbind(dim=2)
        scale = q.shape[-1] ** -0.5 if self.softmax_scale is None else self.softmax_scale
        scores = torch.einsum("bthd,bshd->bhts", q, k * scale)
        # The lowest number rather than -inf: rows without any key stay finite.
        lowest = torch.finfo(scores.dtype).min
        if key_padding_mask is not None:
            if key_padding_mask.dtype != torch.bool or key_padding_mask.shape != kv.shape[:2]:
                raise ShapeError(
                    f"key_padding_mask must be torch.bool (B, Sk), {tuple(kv.shape[:2])} here, "
                    f"got {key_padding_mask.dtype} of shape {tuple(key_padding_mask.shape)}."
                )
            scores = scores.masked_fill(~key_padding_mask[:, None, None, :], lowest)
        if last_key is not None:
            scores = scores.masked_fill(torch.arange(kv.shape[1], device=q.device) > last_key, lowest)
        attention = torch.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
        return torch.einsum("bhts,bshd->bthd", self.drop(attention.to(v.dtype)), v)


class SelfAttention(_TorchAttention):
    """Self attention in plain torch."""

    def forward(self, qkv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None) -> Tensor:
        """qkv (B, S, 3, H, D) -> (B, S, H, D).

        ``key_padding_mask``: bool (B, S), True for keys that count. ``causal`` overrides the module's.
        """
        last_key = None
        if self.causal if causal is None else causal:
            last_key = torch.arange(qkv.shape[1], device=qkv.device)[:, None]
        return self.attend(qkv[:, :, 0], qkv[:, :, 1:], key_padding_mask, last_key)


class CrossAttention(_TorchAttention):
    """Cross attention in plain torch; H may be a multiple of Hk."""

    def forward(
        self, q: Tensor, kv: Tensor, causal: bool | None = None, key_padding_mask: Tensor | None = None
    ) -> Tensor:
        """q (B, Sq, H, D) and kv (B, Sk, 2, Hk, D) -> (B, Sq, H, D).

        ``key_padding_mask``: bool (B, Sk), True for keys that count. ``causal`` overrides the module's, and aligns the
        last query with the last key that counts.
        """
        last_key = None
        if self.causal if causal is None else causal:
            keys = torch.full((q.shape[0], 1), kv.shape[1], device=q.device)
            if key_padding_mask is not None:
                keys = key_padding_mask.sum(-1, keepdim=True)
            last_key = torch.arange(q.shape[1], device=q.device) + keys - q.shape[1]
            last_key = last_key[:, None, :, None]
        return self.attend(q, kv, key_padding_mask, last_key)


class LinearResidual(nn.Linear):
    """A linear layer that returns its input too."""

    def forward(self, input: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(input), input


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Rotary embedding with frequencies that were changed for longer contexts.

    Args:
        scaling: "rope_type" and its parameters, as Hugging Face's configurations have them: "linear" (``factor``),
            or "llama3" (``factor``, ``low_freq_factor``, ``high_freq_factor``, ``original_max_position_embeddings``).
    """

    def __init__(self, dim: int, scaling: Mapping[str, Any], **kwargs: Any) -> None:
        self.scaling = dict(scaling)
        super().__init__(dim, **kwargs)

    def _inverse_frequencies(self, device: torch.device | str | None) -> Tensor:
        frequencies = super()._inverse_frequencies(device)
        kind = self.scaling.get("rope_type", self.scaling.get("type", "default"))
        if kind == "default":
            return frequencies
        if kind not in ("linear", "llama3"):
            raise UnsupportedFeatureError(f"rope_type must be 'default', 'linear' or 'llama3', got {kind!r}.")
        slowed = frequencies / float(self.scaling["factor"])
        if kind == "linear":
            return slowed
        # As they were where a context has many turns, slowed down where it has few, and between the two in between.
        low, high = self.scaling["low_freq_factor"], self.scaling["high_freq_factor"]
        turns = self.scaling["original_max_position_embeddings"] * frequencies / (2 * math.pi)
        share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return torch.lerp(slowed, frequencies, share)


class MHA(nn.Module):
    """Multi-head self or cross attention, with its projections.

    Args:
        embed_dim: of the hidden states, H * D.
        num_heads: H.
        num_heads_kv: Hk, a divisor of H; None: H.
        cross_attn: queries and keys come from different tensors.
        qkv_proj_bias, out_proj_bias: whether the projections have one.
        dropout: of attention weights, while training.
        softmax_scale: 1 / sqrt(D) if None.
        causal: hide keys after the query.
        layer_idx: the key of this layer's cache in ``inference_params``.
        rotary_emb_dim: columns of each head that are rotated; 0: none.
        rotary_emb_base, rotary_emb_scale_base, rotary_emb_interleaved: as in :class:`flash_attn.layers.rotary
            .RotaryEmbedding`.
        rotary_emb_scaling: as in :class:`ScaledRotaryEmbedding`.
        use_alibi: ALiBi's bias; needs ``use_flash_attn``.
        window_size: as in :func:`flash_attn.flash_attn_func`; needs ``use_flash_attn``.
        fused_bias_fc: a hint of other implementations: accepted, and without any effect.
        use_flash_attn: this package's attention rather than plain torch's.
        return_residual: return (output, x).
        checkpointing: compute the attention again in the backward.
        dwconv: only False in this version.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        num_heads_kv: int | None = None,
        cross_attn: bool = False,
        qkv_proj_bias: bool = True,
        out_proj_bias: bool = True,
        dropout: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        layer_idx: int | None = None,
        dwconv: bool = False,
        rotary_emb_dim: int = 0,
        rotary_emb_base: float = 10000.0,
        rotary_emb_scale_base: float | None = None,
        rotary_emb_interleaved: bool = False,
        use_alibi: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        fused_bias_fc: bool = False,
        use_flash_attn: bool = False,
        return_residual: bool = False,
        checkpointing: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rotary_emb_scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        if min(embed_dim, num_heads, heads_kv) < 1 or embed_dim % num_heads != 0 or num_heads % heads_kv != 0:
            raise ArgumentError(
                "num_heads must divide embed_dim and be a multiple of num_heads_kv: "
                f"embed_dim is {embed_dim}, num_heads {num_heads}, num_heads_kv {heads_kv}."
            )
        if dwconv:
            raise UnsupportedFeatureError("dwconv must be False: there is no convolution of q, k and v here.")
        if (use_alibi or tuple(window_size) != (-1, -1)) and not use_flash_attn:
            raise ArgumentError("use_alibi and window_size need use_flash_attn=True.")
        if cross_attn and rotary_emb_dim > 0:
            raise UnsupportedFeatureError("rotary_emb_dim must be 0 with cross_attn=True.")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = heads_kv
        self.head_dim = embed_dim // num_heads
        self.cross_attn = cross_attn
        self.causal = causal
        self.layer_idx = layer_idx
        self.rotary_emb_dim = rotary_emb_dim
        self.use_flash_attn = use_flash_attn
        self.return_residual = return_residual
        self.checkpointing = checkpointing

        if rotary_emb_dim > 0:
            rotary: dict[str, Any] = {
                "base": rotary_emb_base,
                "scale_base": rotary_emb_scale_base,
                "interleaved": rotary_emb_interleaved,
                "device": device,
            }
            self.rotary_emb = (
                RotaryEmbedding(rotary_emb_dim, **rotary)
                if rotary_emb_scaling is None
                else ScaledRotaryEmbedding(rotary_emb_dim, rotary_emb_scaling, **rotary)
            )
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        linear = LinearResidual if return_residual else nn.Linear
        kv_dim = 2 * self.head_dim * heads_kv
        if cross_attn:
            self.Wq = nn.Linear(embed_dim, embed_dim, bias=qkv_proj_bias, **factory)
            self.Wkv = linear(embed_dim, kv_dim, bias=qkv_proj_bias, **factory)
        else:
            self.Wqkv = linear(embed_dim, embed_dim + kv_dim, bias=qkv_proj_bias, **factory)
        inner: dict[str, Any] = {"causal": causal, "softmax_scale": softmax_scale, "attention_dropout": dropout}
        if use_flash_attn:
            inner["window_size"] = tuple(window_size)
            if use_alibi:
                inner["alibi_slopes"] = torch.tensor(get_alibi_slopes(num_heads), dtype=torch.float32, device=device)
        self.inner_attn = (FlashSelfAttention if use_flash_attn else SelfAttention)(**inner)
        self.inner_cross_attn = (FlashCrossAttention if use_flash_attn else CrossAttention)(**inner)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=out_proj_bias, **factory)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        """Memory for the keys and values of a batch: (batch_size, max_seqlen, 2, Hk, D)."""
        weight = self.out_proj.weight
        sizes = (batch_size, max_seqlen, 2, self.num_heads_kv, self.head_dim)
        return torch.empty(sizes, dtype=weight.dtype if dtype is None else dtype, device=weight.device)

    def _cache(self, kv: Tensor, inference_params: Any) -> Tensor:
        """This layer's cache of the batch that ``kv`` (B, S, 2, Hk, D) belongs to; made if there is none."""
        if self.layer_idx is None:
            raise ArgumentError("layer_idx must be given to MHA for inference_params, got None.")
        caches = inference_params.key_value_memory_dict
        if self.layer_idx not in caches:
            sizes = (inference_params.max_batch_size, inference_params.max_seqlen, *kv.shape[2:])
            caches[self.layer_idx] = kv.new_empty(sizes)
        start = inference_params.batch_size_offset
        cache: Tensor = caches[self.layer_idx][start : start + kv.shape[0]]
        end = inference_params.seqlen_offset + kv.shape[1]
        if cache.shape[0] != kv.shape[0] or cache.shape[1] < end:
            raise ShapeError(
                f"The cache must have room for {kv.shape[0]} sequences from {start} on and for {end} positions, "
                f"got {tuple(caches[self.layer_idx].shape[:2])}: see max_batch_size and max_seqlen."
            )
        return cache

    def _attend_cached(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """Attention with what the cache holds and ``kv``, which is put into it; both are rotated already."""
        if inference_params.lengths_per_sample is not None and inference_params.seqlen_offset > 0:
            raise UnsupportedFeatureError("lengths_per_sample must be None without use_flash_attn=True.")
        start = inference_params.seqlen_offset
        cache = self._cache(kv, inference_params)
        cache[:, start : start + kv.shape[1]] = kv.detach()
        result: Tensor = self.inner_cross_attn(q, cache[:, : start + kv.shape[1]])
        return result

    def _attend_kvcache(self, q: Tensor, kv: Tensor, inference_params: Any) -> Tensor:
        """The same in one call, rotation included, with lengths that may be on the GPU."""
        cache = self._cache(kv, inference_params)
        rotary: dict[str, Any] = {}
        if self._rotates_in_kvcache():
            positions = max(inference_params.max_seqlen, cache.shape[1])
            self.rotary_emb._update_cos_sin_cache(positions, device=q.device, dtype=q.dtype)
            rotary["rotary_cos"], rotary["rotary_sin"] = self.rotary_emb._cos_cached, self.rotary_emb._sin_cached
            rotary["rotary_interleaved"] = self.rotary_emb.interleaved
        options = self.inner_cross_attn.options(None)  # type: ignore[operator]
        lengths = inference_params.lengths_per_sample
        result: Tensor = flash_attn_with_kvcache(  # type: ignore[assignment]
            q,
            cache[:, :, 0],
            cache[:, :, 1],
            kv[:, :, 0],
            kv[:, :, 1],
            cache_seqlens=inference_params.seqlen_offset if lengths is None else lengths[: q.shape[0]],
            softmax_scale=options["softmax_scale"],
            causal=options["causal"],
            window_size=options["window_size"],
            alibi_slopes=options["alibi_slopes"],
            **rotary,
        )
        return result

    def _rotates_in_kvcache(self) -> bool:
        # XPos has tables of its own for k.
        return self.rotary_emb_dim > 0 and self.rotary_emb.scale is None

    def _rotated(self, qkv: Tensor, cu_seqlens: Tensor | None, max_seqlen: int | None, inference_params: Any) -> Tensor:
        """Of (B, S, H + 2 Hk, D), or of packed (T, H + 2 Hk, D), the q and k."""
        if cu_seqlens is not None:
            if self.rotary_emb.scale is not None:
                raise UnsupportedFeatureError("rotary_emb_scale_base must be None with cu_seqlens.")
            self.rotary_emb._update_cos_sin_cache(max_seqlen or 0, device=qkv.device, dtype=qkv.dtype)
            cos, sin = self.rotary_emb._cos_cached, self.rotary_emb._sin_cached
            turned = apply_rotary_emb(
                qkv[:, : self.num_heads + self.num_heads_kv],
                cos,  # type: ignore[arg-type]
                sin,  # type: ignore[arg-type]
                interleaved=self.rotary_emb.interleaved,
                cu_seqlens=cu_seqlens,
                max_seqlen=max_seqlen,
            )
            return torch.cat((turned, qkv[:, self.num_heads + self.num_heads_kv :]), dim=1)
        offset: int | Tensor = 0
        longest = None
        if inference_params is not None:
            offset, longest = inference_params.seqlen_offset, inference_params.max_seqlen
            if inference_params.lengths_per_sample is not None and offset > 0:
                offset = inference_params.lengths_per_sample[: qkv.shape[0]]
        result: Tensor = self.rotary_emb(qkv, seqlen_offset=offset, max_seqlen=longest, num_heads_q=self.num_heads)
        return result

    def forward(
        self,
        x: Tensor,
        x_kv: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        mixer_subset: Any = None,
        inference_params: Any = None,
        **kwargs: Any,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            x: (B, S, embed_dim), or packed (T, embed_dim) with cu_seqlens.
            x_kv: (B, Sk, embed_dim), of keys and values, with ``cross_attn``; x if None.
            key_padding_mask: bool (B, S), True for keys that count; not with ``use_flash_attn``.
            cu_seqlens: int32 (B + 1,), the sequences of a packed x; with ``use_flash_attn``.
            max_seqlen: the longest of them.
            mixer_subset: an index of positions: only these are queries, with ``cross_attn``.
            inference_params: :class:`flash_attn.utils.generation.InferenceParams`: keys and values are kept there, and
                those that are there already take part. Without a gradient.
            kwargs: further arguments of the inner attention.

        Returns:
            a tensor like x; with ``return_residual`` (that, x), of cross attention without x_kv's part.
        """
        if cu_seqlens is not None and (max_seqlen is None or not self.use_flash_attn or self.cross_attn):
            raise ArgumentError("cu_seqlens needs max_seqlen, use_flash_attn=True and cross_attn=False.")
        if key_padding_mask is not None and self.use_flash_attn:
            raise ArgumentError("key_padding_mask needs use_flash_attn=False; pack the sequences, and give cu_seqlens.")
        if inference_params is not None and not (key_padding_mask is None and cu_seqlens is None):
            raise ArgumentError("key_padding_mask and cu_seqlens must be None with inference_params.")
        if (x_kv is not None or mixer_subset is not None) and not self.cross_attn:
            raise ArgumentError("x_kv and mixer_subset need cross_attn=True.")
        if self.use_flash_attn:
            kwargs = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen, **kwargs}
        else:
            kwargs = {"key_padding_mask": key_padding_mask, **kwargs}

        decodes = inference_params is not None and inference_params.seqlen_offset > 0 and self.use_flash_attn
        if self.cross_attn:
            source = x if x_kv is None else x_kv
            kv = self.Wkv(source)
            if self.return_residual:
                kv, source = kv
                x = source if x_kv is None else x
            q = self.Wq(x if mixer_subset is None else x[:, mixer_subset])
            q, qkv = q.unflatten(-1, (self.num_heads, self.head_dim)), None
            kv = kv.unflatten(-1, (2, self.num_heads_kv, self.head_dim))
        else:
            qkv = self.Wqkv(x)
            if self.return_residual:
                qkv, x = qkv
            qkv = qkv.unflatten(-1, (self.num_heads + 2 * self.num_heads_kv, self.head_dim))
            if self.rotary_emb_dim > 0 and not (decodes and self._rotates_in_kvcache()):
                qkv = self._rotated(qkv, cu_seqlens, max_seqlen, inference_params)
            q = qkv[..., : self.num_heads, :]
            kv = qkv[..., self.num_heads :, :].unflatten(-2, (2, self.num_heads_kv))

        if decodes:
            context = self._attend_kvcache(q, kv, inference_params)
        elif inference_params is not None:
            context = self._attend_cached(q, kv, inference_params)
        elif qkv is not None and self.num_heads == self.num_heads_kv:
            context = self._inner(self.inner_attn, qkv.unflatten(-2, (3, self.num_heads)), **kwargs)
        else:
            if cu_seqlens is not None:
                kwargs = {"cu_seqlens_k": cu_seqlens, "max_seqlen_k": max_seqlen, **kwargs}
            context = self._inner(self.inner_cross_attn, q, kv, **kwargs)
        out: Tensor = self.out_proj(context.flatten(-2))
        return (out, x) if self.return_residual else out

    def _inner(self, attention: nn.Module, *tensors: Tensor, **kwargs: Any) -> Tensor:
        result: Tensor = (
            checkpoint(attention, *tensors, use_reentrant=False, **kwargs)
            if self.checkpointing
            else attention(*tensors, **kwargs)
        )
        return result
