"""The operators of KV caches and rotary embeddings; :mod:`flash_attn._ops` says what an operator is.

===================================  ==================================================================================
``flash_attn::decode``               attention of few queries with a cache in slabs or pages
``flash_attn::append``               new keys and values into a cache, rotated or not, and the query's rotation with
them ``flash_attn::rotary``               rotary embedding from one tensor to another, or in place; no gradient
``flash_attn::rotary_embedding``     the same as a function with a gradient
===================================  ==================================================================================

The first two have no gradient at all: a cache is for inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference_cache
from ._ops import LIB, define, define_joined, register_cpu
from .reference import lse_dtype

__all__ = ["APPEND", "DECODE", "ROTARY", "ROTARY_EMBEDDING"]

# seqused_k: the length of each cache, new keys included; None: all of it. num_splits 0: automatic.
define(
    "decode(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? seqused_k, Tensor? leftpad_k, Tensor? cache_batch_idx, "
    "Tensor? block_table, Tensor? alibi_slopes, Tensor? sink, float softmax_scale, bool causal, int window_left, "
    "int window_right, int attention_chunk, float softcap, int num_splits) -> (Tensor out, Tensor lse)"
)
define(
    "append(Tensor? q, Tensor(a!)? q_out, Tensor k, Tensor v, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor? cos, "
    "Tensor? sin, Tensor? offsets, SymInt offset, Tensor? leftpad_k, Tensor? cache_batch_idx, Tensor? block_table, "
    "bool interleaved, bool same_position) -> ()"
)
define(
    "rotary(Tensor source, Tensor(a!) destination, Tensor cos, Tensor sin, Tensor? offsets, SymInt offset, "
    "Tensor? cu_seqlens, SymInt max_seqlen, bool interleaved, bool conjugate) -> ()"
)

DECODE = torch.ops.flash_attn.decode.default
APPEND = torch.ops.flash_attn.append.default
ROTARY = torch.ops.flash_attn.rotary.default


def _fake_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _head_dim = q.shape
    out = q.new_empty((batch, seqlen_q, heads, v_cache.shape[-1]))
    return out, q.new_empty((batch, heads, seqlen_q), dtype=lse_dtype(q.dtype))


def _fake_in_place(*_: object) -> None:
    return None


register_cpu("decode", reference_cache.decode)
register_cpu("append", reference_cache.append)
register_cpu("rotary", reference_cache.rotary)
torch.library.register_fake("flash_attn::decode", _fake_decode, lib=LIB)
torch.library.register_fake("flash_attn::append", _fake_in_place, lib=LIB)
torch.library.register_fake("flash_attn::rotary", _fake_in_place, lib=LIB)


def _rotary_embedding(x: Tensor, *options: Any) -> Tensor:
    out = x.new_empty(x.shape)
    ROTARY(x, out, *options)
    return out


def _fake_rotary_embedding(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _x, cos, sin, offsets, ctx.offset, cu_seqlens, ctx.max_seqlen, ctx.interleaved, ctx.conjugate = inputs
    ctx.save_for_backward(cos, sin, offsets, cu_seqlens)


def _backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient of a rotation is turned back by it."""
    cos, sin, offsets, cu_seqlens = ctx.saved_tensors
    dx = ROTARY_EMBEDDING(
        dout, cos, sin, offsets, ctx.offset, cu_seqlens, ctx.max_seqlen, ctx.interleaved, not ctx.conjugate
    )
    return dx, None, None, None, None, None, None, None, None


define_joined(
    "rotary_embedding(Tensor x, Tensor cos, Tensor sin, Tensor? offsets, SymInt offset, Tensor? cu_seqlens, "
    "SymInt max_seqlen, bool interleaved, bool conjugate) -> Tensor",
    _rotary_embedding,
)
ROTARY_EMBEDDING = torch.ops.flash_attn.rotary_embedding.default
torch.library.register_fake("flash_attn::rotary_embedding", _fake_rotary_embedding, lib=LIB)
torch.library.register_autograd(
    "flash_attn::rotary_embedding", once_differentiable(_backward), setup_context=_save, lib=LIB
)
