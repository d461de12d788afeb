"""The operators of the package, as torch sees them.

============================  =========================================================================================
``flash_attn::fwd``           the forward kernel; no gradient
``flash_attn::bwd``           the backward kernels; no gradient
``flash_attn::attention``     both joined for autograd: what torch.compile keeps in a graph and opcheck checks
============================  =========================================================================================

The host library registers ``fwd`` and ``bwd`` for CUDA; this file defines their schemas, and registers the reference
for CPU, the shapes for fake tensors and the formula for autograd. Nothing here checks a user's input: callers outside
of this package use :mod:`flash_attn.flash_attn_interface`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _library, reference

__all__ = ["ATTENTION", "BWD", "FWD", "HOST_LIBRARY", "apply_attention"]

_new_library: Any = torch.library.Library
# The library object owns the registrations: they live as long as it does.
_LIB = _new_library("flash_attn", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

# out (B, Sq, H, D) and dq, dk, dv in the inputs' shapes are contiguous; lse is (B, H, Sq).
_LIB.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)", tags=_TAGS)
_LIB.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, bool causal, "
    "bool deterministic) -> (Tensor, Tensor, Tensor)",
    tags=_TAGS,
)
_LIB.define(
    "attention(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic) -> (Tensor, Tensor)",
    tags=_TAGS,
)

# Overloads rather than packets: calling one skips the choice among overloads.
FWD = torch.ops.flash_attn.fwd.default
BWD = torch.ops.flash_attn.bwd.default
ATTENTION = torch.ops.flash_attn.attention.default

HOST_LIBRARY = _library.load(Path(__file__).resolve().parent)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = FWD(q, k, v, softmax_scale, causal)
    return out


# Inside torch.autocast the reference's own matrix products would be cast down.
_LIB.impl("fwd", torch.autocast("cpu", enabled=False)(reference.attention_forward), "CPU")
_LIB.impl("bwd", torch.autocast("cpu", enabled=False)(reference.attention_backward), "CPU")
_LIB.impl("attention", _attention, "CPU")
_LIB.impl("attention", _attention, "CUDA")
if HOST_LIBRARY.failure is not None:
    _error_class, _error_text = HOST_LIBRARY.failure

    def _raise_failure(*_: object) -> NoReturn:
        raise _error_class(_error_text)

    _LIB.impl("fwd", _raise_failure, "CUDA")
    _LIB.impl("bwd", _raise_failure, "CUDA")


def _fake_forward(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _head_dim = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen_q), dtype=reference.lse_dtype(q.dtype))


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake("flash_attn::fwd", _fake_forward, lib=_LIB)
torch.library.register_fake("flash_attn::bwd", _fake_backward, lib=_LIB)
torch.library.register_fake("flash_attn::attention", _fake_forward, lib=_LIB)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep on ``ctx`` what the backward reads."""
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.deterministic = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, _dlse: None) -> tuple[Tensor | None, ...]:
    """Gradients for the six inputs of ``attention``; the log-sum-exp has none to give."""
    if dout is None:
        return None, None, None, None, None, None
    dq, dk, dv = BWD(dout, *ctx.saved_tensors, ctx.softmax_scale, ctx.causal, ctx.deterministic)
    return dq, dk, dv, None, None, None


torch.library.register_autograd("flash_attn::attention", once_differentiable(_backward), setup_context=_save, lib=_LIB)


class Attention(torch.autograd.Function):
    """The same formula for eager calls, without torch.library's wrapping of it: about half the host time.

    ``apply(q, k, v, softmax_scale, causal, deterministic)`` -> (out, lse), as ``ATTENTION``.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool
    ) -> tuple[Tensor, Tensor]:
        output: tuple[Tensor, Tensor] = FWD(q, k, v, softmax_scale, causal)
        _save(ctx, (q, k, v, softmax_scale, causal, deterministic), output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward(ctx, *grads)


# Typed as torch does not.
apply_attention: Callable[[Tensor, Tensor, Tensor, float, bool, bool], tuple[Tensor, Tensor]] = Attention.apply
