"""The operators of attention with every feature; :mod:`flash_attn._ops` says what an operator is.

===================================  ==================================================================================
``flash_attn::fwd_general``          the forward kernels; no gradient
``flash_attn::bwd_general``          the backward kernels, which write where they are told; no gradient
``flash_attn::attention_general``    both joined for autograd
``flash_attn::attention_packed``     likewise, of a packed qkv or kv: its gradient is written into one packed tensor
===================================  ==================================================================================

:class:`flash_attn.problem.Problem` says what the shared arguments mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import reference_general
from ._ops import LIB, define, define_joined, register_cpu, register_in_turn, register_output, usual_scale
from .errors import UnsupportedFeatureError
from .problem import Problem, sink_gradient
from .reference import lse_dtype

__all__ = [
    "ATTENTION_GENERAL",
    "ATTENTION_PACKED",
    "BWD_GENERAL",
    "FWD_GENERAL",
    "FWD_GENERAL_OUTPUT",
    "apply_attention_general",
    "apply_attention_packed",
    "backward_of",
    "forward_of",
]

_SEQUENCES = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, "
_TENSORS = "Tensor? alibi_slopes, Tensor? sink, Tensor? rng_state, "
# Lengths are SymInt so that a graph compiled with dynamic shapes serves all of them; the kernels are given an int.
_VALUES = (
    "SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, int window_right, "
    "int attention_chunk, float softcap, float dropout_p, int sm_margin"
)

# q (B, Sq, H, D) or packed (T, H, D); out, contiguous, and lse (B, H, Sq) or packed (H, T). block_table is for kernels
# that follow page tables, of which this version has none: None.
define(
    f"fwd_general(Tensor q, Tensor k, Tensor v, {_SEQUENCES}Tensor? block_table, {_TENSORS}{_VALUES}) "
    "-> (Tensor out, Tensor lse)"
)
define(
    "fwd_general.output(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool causal=False, float? softmax_scale=None) -> Tensor"
)
define(
    "bwd_general(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor(a!) dq, "
    f"Tensor(b!) dk, Tensor(c!) dv, {_SEQUENCES}{_TENSORS}{_VALUES}, bool deterministic) -> ()"
)

FWD_GENERAL = torch.ops.flash_attn.fwd_general.default
FWD_GENERAL_OUTPUT = torch.ops.flash_attn.fwd_general.output
BWD_GENERAL = torch.ops.flash_attn.bwd_general.default


def forward_of(q: Tensor, k: Tensor, v: Tensor, p: Problem) -> tuple[Tensor, Tensor]:
    result: tuple[Tensor, Tensor] = FWD_GENERAL(q, k, v, *p[:5], None, *p[5:])
    return result


def backward_of(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    p: Problem,
    deterministic: bool,
) -> None:
    """Fill dq, dk and dv."""
    BWD_GENERAL(dout, q, k, v, out, lse, dlse, dq, dk, dv, *p, deterministic)


def plain_backward_of_lse(
    dout: Tensor | None,
    dlse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of plain attention whose log-sum-exp has a gradient too."""
    p = Problem(max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], softmax_scale=softmax_scale, causal=causal)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    dout = _no_gradient(out) if dout is None else dout
    backward_of(dout, q, k, v, out, lse, dlse, dq, dk, dv, p, deterministic)
    return dq, dk, dv


def _no_gradient(out: Tensor) -> Tensor:
    return out.new_zeros(()).expand(out.shape)


# CPU and fake tensors.


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    if options[5] is not None:
        raise UnsupportedFeatureError("block_table must be None: fwd_general does not follow page tables.")
    return reference_general.forward(q, k, v, Problem(*options[:5], *options[6:]))


def _cpu_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    dlse: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    *options: Any,
) -> None:
    reference_general.backward(dout, q, k, v, out, lse, dlse, dq, dk, dv, Problem(*options[:-1]))


def _fake_outputs(q: Tensor, out_shape: tuple[int, ...], packed: bool) -> tuple[Tensor, Tensor]:
    lse_shape = (out_shape[1], out_shape[0]) if packed else (out_shape[0], out_shape[2], out_shape[1])
    return q.new_empty(out_shape), q.new_empty(lse_shape, dtype=lse_dtype(q.dtype))


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    return _fake_outputs(q, (*q.shape[:-1], v.shape[-1]), cu_seqlens_q is not None)


def _fake_backward(*_: object) -> None:
    return None


def _usual_problem(
    q: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> Problem:
    return Problem(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=usual_scale(q, softmax_scale),
        causal=causal,
    )


def _output_forward(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    return reference_general.forward(q, k, v, _usual_problem(q, *arguments))


register_cpu("fwd_general", _cpu_forward)
register_output("fwd_general", _output_forward, _fake_forward)
register_cpu("bwd_general", _cpu_backward)
torch.library.register_fake("flash_attn::fwd_general", _fake_forward, lib=LIB)
torch.library.register_fake("flash_attn::bwd_general", _fake_backward, lib=LIB)


# Autograd: q, k and v apart.

_SINK = Problem._fields.index("sink")
_TENSOR_FIELDS = 8  # the fields of Problem that are tensors, which come first


def _attention_general(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return forward_of(q, k, v, Problem(*options[:-1]))


def _save(
    ctx: Any, tensors: tuple[Tensor | None, ...], options: tuple[Any, ...], output: tuple[Tensor, Tensor]
) -> None:
    """Keep on ``ctx`` what the backward reads; ``options`` are the fields of a Problem and ``deterministic``."""
    ctx.values = options[_TENSOR_FIELDS:]
    ctx.save_for_backward(*output, *options[:_TENSOR_FIELDS], *tensors)
    ctx.set_materialize_grads(False)


def _saved(ctx: Any) -> tuple[Tensor, Tensor, Problem, bool, list[Any]]:
    """out, lse, the problem, deterministic, and the tensors that are differentiated."""
    out, lse, *rest = ctx.saved_tensors
    *values, deterministic = ctx.values
    return out, lse, Problem(*rest[:_TENSOR_FIELDS], *values), deterministic, rest[_TENSOR_FIELDS:]


def _option_gradients(
    needed: bool, dout: Tensor | None, out: Tensor, lse: Tensor, dlse: Tensor | None, p: Problem
) -> list[Tensor | None]:
    """For the fields of a Problem and ``deterministic``: the sink's, if it is wanted, and none for the others."""
    grads: list[Tensor | None] = [None] * (len(Problem._fields) + 1)
    if p.sink is not None and needed:
        grads[_SINK] = sink_gradient(dout, out, lse, dlse, p.sink, p.cu_seqlens_q)
    return grads


def _save_general(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs[:3], inputs[3:], output)


def _backward_general(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * (3 + len(Problem._fields) + 1)
    out, lse, p, deterministic, (q, k, v) = _saved(ctx)
    dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
    given = _no_gradient(out) if dout is None else dout
    backward_of(given, q, k, v, out, lse, dlse, dq, dk, dv, p, deterministic)
    return dq, dk, dv, *_option_gradients(ctx.needs_input_grad[3 + _SINK], dout, out, lse, dlse, p)


define_joined(
    f"attention_general(Tensor q, Tensor k, Tensor v, {_SEQUENCES}{_TENSORS}{_VALUES}, bool deterministic) "
    "-> (Tensor out, Tensor lse)",
    _attention_general,
)
ATTENTION_GENERAL = torch.ops.flash_attn.attention_general.default


def _joined(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = ATTENTION_GENERAL(q, k, v, *options[:5], *options[6:], True)
    return out


def _joined_output(q: Tensor, k: Tensor, v: Tensor, *arguments: Any) -> Tensor:
    out: Tensor = ATTENTION_GENERAL(q, k, v, *_usual_problem(q, *arguments), True)[0]
    return out


register_in_turn(FWD_GENERAL, _joined)
register_in_turn(FWD_GENERAL_OUTPUT, _joined_output)
torch.library.register_fake("flash_attn::attention_general", _fake_forward, lib=LIB)
torch.library.register_autograd(
    "flash_attn::attention_general", once_differentiable(_backward_general), setup_context=_save_general, lib=LIB
)


class AttentionGeneral(torch.autograd.Function):
    """``apply(q, k, v, *problem, deterministic)`` -> (out, lse): ``ATTENTION_GENERAL`` for eager calls."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        output = _attention_general(q, k, v, *options)
        _save(ctx, (q, k, v), options, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward_general(ctx, *grads)


apply_attention_general: Callable[..., tuple[Tensor, Tensor]] = AttentionGeneral.apply


# Autograd: packed tensors (..., 3, H, D), or q and (..., 2, Hk, D).


def _unpacked(q: Tensor | None, packed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views of q, k and v."""
    if q is None:
        q, k, v = packed.unbind(-3)
    else:
        k, v = packed.unbind(-3)
    return q, k, v


def _attention_packed(q: Tensor | None, packed: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return forward_of(*_unpacked(q, packed), Problem(*options[:-1]))


def _fake_packed(q: Tensor | None, packed: Tensor, cu_seqlens_q: Tensor | None, *_: object) -> tuple[Tensor, Tensor]:
    shape = (*packed.shape[:-3], *packed.shape[-2:]) if q is None else tuple(q.shape)
    return _fake_outputs(packed, shape, cu_seqlens_q is not None)


def _save_packed(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _save(ctx, inputs[:2], inputs[2:], output)


def _backward_packed(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * (2 + len(Problem._fields) + 1)
    out, lse, p, deterministic, (q, packed) = _saved(ctx)
    dq = None if q is None else q.new_empty(q.shape)
    dpacked = packed.new_empty(packed.shape)
    given = _no_gradient(out) if dout is None else dout
    query, k, v = _unpacked(q, packed)
    backward_of(given, query, k, v, out, lse, dlse, *_unpacked(dq, dpacked), p, deterministic)
    return dq, dpacked, *_option_gradients(ctx.needs_input_grad[2 + _SINK], dout, out, lse, dlse, p)


define_joined(
    f"attention_packed(Tensor? q, Tensor packed, {_SEQUENCES}{_TENSORS}{_VALUES}, bool deterministic) "
    "-> (Tensor out, Tensor lse)",
    _attention_packed,
)
ATTENTION_PACKED = torch.ops.flash_attn.attention_packed.default
torch.library.register_fake("flash_attn::attention_packed", _fake_packed, lib=LIB)
torch.library.register_autograd(
    "flash_attn::attention_packed", once_differentiable(_backward_packed), setup_context=_save_packed, lib=LIB
)


class AttentionPacked(torch.autograd.Function):
    """``apply(q or None, packed, *problem, deterministic)`` -> (out, lse): ``ATTENTION_PACKED`` for eager calls."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, packed: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
        output = _attention_packed(q, packed, *options)
        _save(ctx, (q, packed), options, output)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _backward_packed(ctx, *grads)


apply_attention_packed: Callable[..., tuple[Tensor, Tensor]] = AttentionPacked.apply
