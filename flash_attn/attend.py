"""From the arguments of a public function to an operator: every call but the plainest goes through here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import checks
from ._ops import ATTENTION, FWD, apply_attention
from ._ops_cache import DECODE
from ._ops_fp8 import FWD_FP8, fp8_options
from ._ops_general import (
    ATTENTION_GENERAL,
    ATTENTION_PACKED,
    apply_attention_general,
    apply_attention_packed,
    forward_of,
)
from .dropout import draw_rng_state
from .errors import ArgumentError, ShapeError, UnsupportedFeatureError
from .problem import NO_WINDOW, Problem
from .reference_cache import check_places, gather_pages
from .s_dmask import s_dmask

__all__ = [
    "Request",
    "Result",
    "attend",
    "attend_packed",
    "check_no_gradient",
    "forward_fp8",
    "forward_without_gradient",
    "positive_scale",
    "problem_of",
]

Result = Tensor | tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]


class Request(NamedTuple):
    """What the user gave besides q, k and v, not looked at yet: the arguments of the public functions."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: Sequence[int | None] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False
    block_table: Tensor | None = None
    return_lse: bool = False
    learnable_sink: Tensor | None = None
    attention_chunk: int = 0
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    qv: Tensor | None = None
    q_descale: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    sm_margin: int = 0

    @property
    def descales(self) -> checks.Descales:
        return self.q_descale, self.k_descale, self.v_descale


def attend(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Result:
    """Attention of q, k and v, with gradients where they are wanted."""
    if request.block_table is not None:
        return _attend_pages(q, k, v, request)
    q, k, v = checks.check_qkv(q, k, v, request.cu_seqlens_q is not None, request.cu_seqlens_k is not None, fp8=True)
    if q.dtype is checks.FP8:
        return attend_fp8(q, k, v, request)
    checks.check_no_descales(q, request.descales)
    if request.qv is not None:
        checks.check_qv(q, request.qv, v.shape[-1])
        q, k = torch.cat((q, request.qv.to(q.dtype)), dim=-1), torch.cat((k, v), dim=-1)
    p = problem_of(q, k.shape, request)
    q, p = positive_scale(q, p)
    out, lse = _run(q, k, v, p, bool(request.deterministic))
    return _result(q, k, out, lse, p, request)


def attend_packed(q: Tensor | None, packed: Tensor, request: Request) -> Result:
    """Attention of a packed qkv (..., 3, H, D), or of q with a packed kv (..., 2, Hk, D): one gradient for it."""
    name, count = ("qkv", 3) if q is None else ("kv", 2)
    layout = (f"(T, {count}, " if request.cu_seqlens_k is not None else f"(B, S, {count}, ") + "H, D)"
    rank = layout.count(",") + 1
    checks.tensor_of(name, packed)
    if packed.dim() != rank or packed.shape[-3] != count:
        raise ShapeError(f"{name} must have shape {layout}, got {checks.sizes(packed)}.")
    if q is not None:
        checks.tensor_of("q", q)
        checks.same_device(name, packed, q)
        q, packed = checks.autocast(q, packed)
    else:
        (packed,) = checks.autocast(packed)
    query, key, value = packed.unbind(-3) if q is None else (q, *packed.unbind(-3))
    checks.check_qkv(query, key, value, request.cu_seqlens_q is not None, request.cu_seqlens_k is not None, fp8=True)
    if query.dtype is checks.FP8:
        return attend_fp8(query, key, value, request)
    checks.check_no_descales(query, request.descales)
    p = problem_of(query, key.shape, request)
    wanted = torch.is_grad_enabled() and (packed.requires_grad or any(_requires_grad(x) for x in (q, p.sink)))
    deterministic = bool(request.deterministic)
    if not wanted or p.softmax_scale <= 0.0:
        query, p = positive_scale(query, p)
        out, lse = _run(query, key, value, p, deterministic)
        return _result(query, key, out, lse, p, request)
    function = ATTENTION_PACKED if is_compiling() else apply_attention_packed
    out, lse = function(q, packed, *p, deterministic)
    return _result(query, key, out, lse, p, request)


def attend_fp8(q: Tensor, k: Tensor, v: Tensor, request: Request) -> Result:
    """Attention of float8_e4m3fn q, k and v, already checked: bf16, without a gradient."""
    if request.dropout_p != 0.0:
        raise UnsupportedFeatureError(f"dropout_p must be 0.0 with FP8 inputs, got {request.dropout_p}.")
    for name, option in (("alibi_slopes", request.alibi_slopes), ("qv", request.qv)):
        if option is not None:
            raise UnsupportedFeatureError(f"{name} must be None with FP8 inputs.")
    check_no_gradient(
        q=q, k=k, v=v, learnable_sink=request.learnable_sink,
        q_descale=request.q_descale, k_descale=request.k_descale, v_descale=request.v_descale,
    )  # fmt: skip
    p = problem_of(q, k.shape, request)
    out, lse = forward_fp8(q, k, v, p, request.descales)
    return _result(out, k, out, lse, p, request)  # without dropout, of q only the dtype of an empty tensor counts


def check_no_gradient(**tensors: Tensor | None) -> None:
    for name, x in tensors.items():
        if torch.is_grad_enabled() and _requires_grad(x):
            raise ArgumentError(
                f"{name} must not require grad, got a tensor that does: FP8 attention has no backward. "
                f"Pass {name}.detach(), or compute with float16 or bfloat16."
            )


def forward_fp8(q: Tensor, k: Tensor, v: Tensor, p: Problem, descales: checks.Descales) -> tuple[Tensor, Tensor]:
    """out in bf16 and the log-sum-exp; checks the factors."""
    packed_q, packed_k = p.cu_seqlens_q is not None, p.cu_seqlens_k is not None
    descales = checks.descales_of(descales, p.batch(q), q, k.shape[-2], k.shape[-3], packed_q, packed_k)
    if p.softmax_scale <= 0.0:  # exact: a sign, or zeros. torch has no arithmetic of FP8
        wide, p = positive_scale(q.to(torch.float32), p)
        q = wide.to(q.dtype)
    result: tuple[Tensor, Tensor] = FWD_FP8(q, k, v, *descales, *fp8_options(p))
    return result


def problem_of(q: Tensor, k_shape: Sequence[int], r: Request) -> Problem:
    """The request, checked: what is wrong with it raises."""
    checks.check_softcap(r.softcap)
    checks.check_dropout(r.dropout_p, r.softcap)
    causal, left, right = checks.window_of(r.window_size, r.causal)
    cu_seqlens_q = cu_seqlens_k = None
    max_seqlen_q = q.shape[0 if r.cu_seqlens_q is not None else 1]
    max_seqlen_k = k_shape[0 if r.cu_seqlens_k is not None else 1]
    if r.cu_seqlens_q is not None:
        cu_seqlens_q = checks.cu_seqlens_of("cu_seqlens_q", r.cu_seqlens_q, q)
        max_seqlen_q = checks.length_of("max_seqlen_q", r.max_seqlen_q)
    batch = q.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if r.cu_seqlens_k is not None:
        cu_seqlens_k = checks.cu_seqlens_of("cu_seqlens_k", r.cu_seqlens_k, q)
        max_seqlen_k = checks.length_of("max_seqlen_k", r.max_seqlen_k)
        if cu_seqlens_k.shape[0] - 1 != batch:
            raise ShapeError(
                f"cu_seqlens_k must have as many sequences as the queries: {batch}, got {cu_seqlens_k.shape[0] - 1}."
            )
    elif k_shape[0] != batch:
        raise ShapeError(f"k must have a batch size of {batch}, got {k_shape[0]}.")
    heads = q.shape[-2]
    return Problem(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_q=checks.numbers_of("seqused_q", r.seqused_q, batch, q),
        seqused_k=checks.numbers_of("seqused_k", r.seqused_k, batch, q),
        leftpad_k=checks.numbers_of("leftpad_k", r.leftpad_k, batch, q),
        alibi_slopes=checks.alibi_slopes_of(r.alibi_slopes, batch, heads, q),
        sink=checks.sink_of(r.learnable_sink, heads, q),
        rng_state=draw_rng_state(q.device) if r.dropout_p > 0.0 else None,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=checks.scale_of(r.softmax_scale, q.shape[-1]),
        causal=causal,
        window_left=left,
        window_right=right,
        attention_chunk=checks.attention_chunk_of(r.attention_chunk),
        softcap=float(r.softcap),
        dropout_p=float(r.dropout_p),
        sm_margin=checks.sm_margin_of(r.sm_margin),
    )


def positive_scale(q: Tensor, p: Problem) -> tuple[Tensor, Problem]:
    """The kernels take the largest raw score for the largest score: only a positive scale keeps that order."""
    if not p.softmax_scale <= 0.0:
        return q, p
    if p.softmax_scale < 0.0:
        return -q, p._replace(softmax_scale=-p.softmax_scale)
    return q * 0, p._replace(softmax_scale=1.0)


def _requires_grad(x: Tensor | None) -> bool:
    return isinstance(x, Tensor) and x.requires_grad


def _is_plain(q: Tensor, v: Tensor, p: Problem) -> bool:
    """Whether the fast operators do: a dense batch with a scale and a causal mask."""
    return (
        p.window_left == NO_WINDOW
        and p.window_right == NO_WINDOW
        and p.attention_chunk == 0
        and p.softcap == 0.0
        and p.sm_margin == 0
        and q.shape[-1] == v.shape[-1]
        and p.cu_seqlens_q is p.cu_seqlens_k is p.seqused_q is p.seqused_k is p.leftpad_k is None
        and p.alibi_slopes is p.sink is p.rng_state is None
    )


def _run(q: Tensor, k: Tensor, v: Tensor, p: Problem, deterministic: bool) -> tuple[Tensor, Tensor]:
    plain = _is_plain(q, v, p)
    arguments: tuple[Any, ...] = (p.softmax_scale, p.causal, deterministic) if plain else (*p, deterministic)
    result: tuple[Tensor, Tensor]
    if is_compiling():
        result = (ATTENTION if plain else ATTENTION_GENERAL)(q, k, v, *arguments)
    elif torch.is_grad_enabled() and any(_requires_grad(x) for x in (q, k, v, p.sink)):
        result = (apply_attention if plain else apply_attention_general)(q, k, v, *arguments)
    else:
        result = forward_without_gradient(q, k, v, p)
    return result


def forward_without_gradient(q: Tensor, k: Tensor, v: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    if _is_plain(q, v, p):
        result: tuple[Tensor, Tensor] = FWD(q, k, v, p.softmax_scale, p.causal)
        return result
    return forward_of(q, k, v, p)


def _result(q: Tensor, k: Tensor, out: Tensor, lse: Tensor, p: Problem, request: Request) -> Result:
    if request.return_attn_probs:
        probs = q.new_empty(0) if p.rng_state is None else s_dmask(q, k, lse, p)
        return out, lse if request.return_lse else lse.detach(), probs
    return (out, lse) if request.return_lse else out


# Up to so many rows of query for a KV head of a sequence (tokens times the heads that share it, on average) the decode
# kernels are faster: than the forward kernels, whose tiles are larger and which split nothing; with pages, than
# gathering them first and then those. Measured on an H200.
ROWS_OF_SLABS = 128
ROWS_OF_PAGES = 256


def decoding_is_faster(tokens: int, heads: int, sequences: int, heads_kv: int, paged: bool) -> bool:
    """Whether the decode kernels, rather than the forward ones, are to serve ``tokens`` queries of all sequences."""
    return tokens * heads <= (ROWS_OF_PAGES if paged else ROWS_OF_SLABS) * sequences * heads_kv


def _attend_pages(q: Tensor, k: Tensor, v: Tensor, r: Request) -> Result:
    """Attention of packed q with k and v in pages (pages, page_size, Hk, D), of which cu_seqlens_k counts.

    The decode kernels follow the table. They have no gradient, no dropout and no FP8, and take no seqused_q or qv:
    for those, and for many queries, k and v are gathered first.
    """
    checks.tensor_of("q", q)
    for name, x in (("k", k), ("v", v)):
        checks.tensor_of(name, x)
        checks.same_device(name, x, q)
        if x.dim() != 4:
            raise ShapeError(
                f"{name} must have 4 dimensions, (pages, page_size, Hk, D), with a block_table, got {checks.sizes(x)}."
            )
    if k.shape[:-1] != v.shape[:-1]:
        raise ShapeError(f"v must have k's shape but for the head dim: k is {checks.sizes(k)}, v is {checks.sizes(v)}.")
    if k.shape[1] == 0:
        raise ShapeError(f"k must have pages of at least one row, got {checks.sizes(k)}.")
    checks.check_dropout(r.dropout_p)
    cu_seqlens_k = checks.cu_seqlens_of("cu_seqlens_k", r.cu_seqlens_k, q)
    batch = cu_seqlens_k.shape[0] - 1
    block_table = checks.block_table_of(r.block_table, batch, q)
    seqused = cu_seqlens_k.diff() if r.seqused_k is None else checks.numbers_of("seqused_k", r.seqused_k, batch, q)
    if checks.has_numbers(q) and seqused is not None:
        check_places(block_table, None, k, seqused)
    r = r._replace(block_table=None, cu_seqlens_k=None, max_seqlen_k=None, seqused_k=seqused)
    wanted = torch.is_grad_enabled() and any(_requires_grad(x) for x in (q, k, v, r.learnable_sink))
    lacking = wanted or r.dropout_p > 0.0 or r.seqused_q is not None or r.qv is not None or q.dtype is checks.FP8
    if lacking or q.dim() != 3 or not decoding_is_faster(q.shape[0], q.shape[1], batch, k.shape[2], True):
        return attend(q, gather_pages(k, block_table), gather_pages(v, block_table), r)
    q, k, v = checks.check_qkv(q, k, v, packed_q=True)
    checks.check_no_descales(q, r.descales)
    p = problem_of(q, (batch, block_table.shape[1] * k.shape[1]), r)
    q, p = positive_scale(q, p)
    out, lse = DECODE(
        q, k, v, p.softmax_scale, p.causal, p.seqused_k, -1, block_table, 0, p.window_left, p.window_right,
        p.leftpad_k, None, p.alibi_slopes, p.sink, p.attention_chunk, p.softcap, p.cu_seqlens_q, p.max_seqlen_q,
    )  # fmt: skip
    return _result(q, k, out, lse, p, r)
