"""The operators of KV caches and rotary embeddings; :mod:`flash_attn._ops` says what an operator is.

===================================  ==================================================================================
``flash_attn::decode``               attention of few queries with a cache in slabs or pages
``flash_attn::kvcache``              the same after new keys and values were appended, rotated with the queries or not
``flash_attn::append``               new keys and values into a cache
``flash_attn::rotary``               rotary embedding from one tensor to another, or in place; no gradient
``flash_attn::rotary_embedding``     the same as a function with a gradient
===================================  ==================================================================================

The first three have no gradient at all: a cache is for inference.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference_cache
from ._ops import LIB, define, define_joined, register_cpu, register_output, usual_scale
from .errors import DeviceError
from .reference import lse_dtype

__all__ = ["APPEND", "DECODE", "DECODE_OUTPUT", "KVCACHE", "KVCACHE_OUTPUT", "ROTARY", "ROTARY_EMBEDDING"]

# seqlens_k: the length of each cache; without it seqlen_k is that of all, a negative one the capacity. Of kvcache: the
# lengths before k and v are appended. cu_seqlens_q: q is packed, and so are out and lse. num_splits 0: automatic.
# What is seldom given comes last: a default costs a call a tenth of what an argument does.
_OPTIONS = (
    "float softmax_scale, bool causal, Tensor? seqlens_k=None, SymInt seqlen_k=-1, Tensor? block_table=None, "
    "int num_splits=0, int window_left=-1, int window_right=-1, Tensor? leftpad_k=None, Tensor? cache_batch_idx=None, "
    "Tensor? alibi_slopes=None, Tensor? sink=None, int attention_chunk=0, float softcap=0.0"
)
_DECODE = "(Tensor q, Tensor k_cache, Tensor v_cache, "
_KVCACHE = (
    "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cos, Tensor? sin, "
    "bool interleaved, "
)
# Of the overloads `output`: what is seldom given is not there at all.
_USUAL = "bool causal, Tensor? seqlens_k=None, SymInt seqlen_k=-1, Tensor? block_table=None, float? softmax_scale=None"
define(f"decode{_DECODE}{_OPTIONS}, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0) -> (Tensor out, Tensor lse)")
define(f"decode.output{_DECODE}{_USUAL}) -> Tensor")
define(f"kvcache{_KVCACHE}{_OPTIONS}) -> (Tensor out, Tensor lse)")
define(f"kvcache.output{_KVCACHE}{_USUAL}) -> Tensor")
define(
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? offsets, SymInt offset, "
    "Tensor? cache_batch_idx, Tensor? block_table) -> ()"
)
define(
    "rotary(Tensor source, Tensor(a!) destination, Tensor cos, Tensor sin, Tensor? offsets, SymInt offset, "
    "Tensor? cu_seqlens, SymInt max_seqlen, bool interleaved, bool conjugate) -> ()"
)

DECODE = torch.ops.flash_attn.decode.default
KVCACHE = torch.ops.flash_attn.kvcache.default
DECODE_OUTPUT = torch.ops.flash_attn.decode.output
KVCACHE_OUTPUT = torch.ops.flash_attn.kvcache.output
APPEND = torch.ops.flash_attn.append.default
ROTARY = torch.ops.flash_attn.rotary.default


def _fake_decode(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: object, **_more: object) -> tuple[Tensor, Tensor]:
    if type(q) is Tensor and q.device.type != "meta":  # torch comes here where any tensor is on meta
        raise DeviceError(f"q is on {q.device}, and another tensor on meta.")
    tokens, heads = q.shape[:-2], q.shape[-2]
    lse_shape = (heads, *tokens) if len(tokens) == 1 else (tokens[0], heads, tokens[1])
    out = q.new_empty((*tokens, heads, v_cache.shape[-1]))
    return out, q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


def _fake_in_place(*_: object) -> None:
    return None


def _output_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    causal: bool,
    seqlens_k: Tensor | None = None,
    seqlen_k: int = -1,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    scale = usual_scale(q, softmax_scale)
    return reference_cache.decode(q, k_cache, v_cache, scale, causal, seqlens_k, seqlen_k, block_table)


def _output_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    causal: bool,
    seqlens_k: Tensor | None = None,
    seqlen_k: int = -1,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    return reference_cache.kvcache(
        q, k_cache, v_cache, k, v, cos, sin, interleaved, usual_scale(q, softmax_scale), causal, seqlens_k, seqlen_k,
        block_table,
    )  # fmt: skip


register_cpu("decode", reference_cache.decode)
register_cpu("kvcache", reference_cache.kvcache)
register_output("decode", _output_decode, _fake_decode)
register_output("kvcache", _output_kvcache, _fake_decode)
register_cpu("append", reference_cache.append)
register_cpu("rotary", reference_cache.rotary)
torch.library.register_fake("flash_attn::decode", _fake_decode, lib=LIB)
torch.library.register_fake("flash_attn::kvcache", _fake_decode, lib=LIB)
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
