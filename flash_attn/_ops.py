"""The operators of the package, as torch sees them.

============================  =========================================================================================
``flash_attn::fwd``           the forward kernel; no gradient
``flash_attn::bwd``           the backward kernels; no gradient
``flash_attn::attention``     both joined for autograd: what torch.compile keeps in a graph and opcheck checks
============================  =========================================================================================

An operator without a gradient may have an overload ``output``, which returns the output alone and takes None for the
scale: the usual call of inference, whose time on the host is what it leaves out. The host library checks its arguments,
so that Python need not look at them first.

These three are the fast path, attention with nothing but a scale and a causal mask; :mod:`flash_attn._ops_general` has
every other feature and :mod:`flash_attn._ops_cache` the operators of KV caches and rotary embeddings.

The host library registers the operators without a gradient for CUDA; these files define their schemas, and register
the reference for CPU, the shapes for fake tensors and the formulas for autograd. Nothing here checks a user's input:
callers outside of this package use :mod:`flash_attn.flash_attn_interface`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from . import _library, reference
from .errors import DeviceError

__all__ = [
    "ATTENTION",
    "BWD",
    "FWD",
    "FWD_OUTPUT",
    "HOST_LIBRARY",
    "apply_attention",
    "define",
    "direct",
    "register_cpu",
    "register_in_turn",
    "register_output",
    "register_without_gradient",
    "usual_scale",
]

_new_library: Any = torch.library.Library
# The library object owns the registrations: they live as long as it does.
LIB = _new_library("flash_attn", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag,)

HOST_LIBRARY = _library.load(Path(__file__).resolve().parent)


def define(schema: str) -> None:
    """An operator that the host library implements for CUDA; without one, calling it says why there is none."""
    LIB.define(schema, tags=_TAGS)
    if HOST_LIBRARY.failure is None:
        return
    error_class, text = HOST_LIBRARY.failure

    def raise_failure(*_: object) -> NoReturn:
        raise error_class(text)

    LIB.impl(schema[: schema.index("(")], raise_failure, "CUDA")


def define_joined(schema: str, function: Callable[..., Any]) -> None:
    """An operator that joins others for autograd: ``function`` calls them, on any device."""
    LIB.define(schema, tags=_TAGS)
    for device in ("CPU", "CUDA"):
        LIB.impl(schema[: schema.index("(")], function, device)


def register_cpu(name: str, function: Callable[..., Any]) -> None:
    # Inside torch.autocast the reference's own matrix products would be cast down.
    LIB.impl(name, torch.autocast("cpu", enabled=False)(function), "CPU")


def register_output(name: str, function: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """The overload ``output`` of ``name``: for CPU and fake tensors, the first result of functions of its arguments."""

    def cpu_output(*arguments: Any) -> Tensor:
        result: Tensor = function(*arguments)[0]
        return result

    def fake_output(*arguments: Any) -> Tensor:
        result: Tensor = fake(*arguments)[0]
        return result

    register_cpu(f"{name}.output", cpu_output)
    register_without_gradient(f"{name}.output", fake_output)


def register_without_gradient(name: str, fake: Callable[..., Tensor]) -> None:
    """An operator that is called before Python has looked at the tensors, and with none that wants a gradient."""

    def checked(q: Tensor, *arguments: Any) -> Tensor:
        if type(q) is Tensor and q.device.type != "meta":  # torch comes here where any tensor is on meta
            raise DeviceError(f"q is on {q.device}, and another tensor on meta.")
        return fake(q, *arguments)

    # So torch need not look for one.
    LIB.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"flash_attn::{name}", checked, lib=LIB)


def register_in_turn(operator: Any, joined: Callable[..., Any]) -> None:
    """How torch.func.vmap has ``operator``: once for each. ``joined`` does the same with a gradient.

    Inside of vmap no tensor says that it wants one, so a call is taken for inference; below vmap they do say.
    """

    def in_turn(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        wanted = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in arguments)
        function = joined if wanted else operator
        pairs = [*zip(arguments, in_dims, strict=True)]
        results = [
            function(*[x if dim is None else x.select(dim, i) for x, dim in pairs]) for i in range(info.batch_size)
        ]
        if isinstance(results[0], Tensor):
            return torch.stack(results), 0
        return tuple(torch.stack(of_all) for of_all in zip(*results, strict=True)), (0,) * len(results[0])

    torch.library.register_vmap(operator, in_turn, lib=LIB)


def direct(operator: Any) -> Callable[..., Any]:
    """What calling an overload calls, without the Python function in between, which a small call feels."""
    function: Callable[..., Any] = getattr(operator, "_op", operator)
    return function


def _attention(
    q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool, deterministic: bool
) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = FWD(q, k, v, softmax_scale, causal)
    return out


# out (B, Sq, H, D) and dq, dk, dv in the inputs' shapes are contiguous; lse is (B, H, Sq).
define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)")
define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, bool causal, "
    "bool deterministic) -> (Tensor, Tensor, Tensor)"
)
define_joined(
    "attention(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal, bool deterministic) -> (Tensor, Tensor)",
    _attention,
)
define("fwd.output(Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None) -> Tensor")
register_cpu("fwd", reference.attention_forward)
register_cpu("bwd", reference.attention_backward)

# Overloads rather than packets: calling one skips the choice among overloads.
FWD = torch.ops.flash_attn.fwd.default
BWD = torch.ops.flash_attn.bwd.default
ATTENTION = torch.ops.flash_attn.attention.default
FWD_OUTPUT = torch.ops.flash_attn.fwd.output


def _fake_forward(q: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    batch, seqlen_q, heads, _head_dim = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, seqlen_q), dtype=reference.lse_dtype(q.dtype))


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


torch.library.register_fake("flash_attn::fwd", _fake_forward, lib=LIB)
torch.library.register_fake("flash_attn::bwd", _fake_backward, lib=LIB)
torch.library.register_fake("flash_attn::attention", _fake_forward, lib=LIB)


def _output_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None
) -> tuple[Tensor, Tensor]:
    return reference.attention_forward(q, k, v, usual_scale(q, softmax_scale), causal)


def usual_scale(q: Tensor, softmax_scale: float | None) -> float:
    return float(q.shape[-1] ** -0.5) if softmax_scale is None else softmax_scale


register_output("fwd", _output_forward, _fake_forward)


def _joined(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = ATTENTION(q, k, v, softmax_scale, causal, True)  # nobody says whether it may differ
    return out


def _joined_output(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None) -> Tensor:
    return _joined(q, k, v, usual_scale(q, softmax_scale), causal)[0]


register_in_turn(FWD, _joined)
register_in_turn(FWD_OUTPUT, _joined_output)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Keep on ``ctx`` what the backward reads."""
    q, k, v, ctx.softmax_scale, ctx.causal, ctx.deterministic = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients for the six inputs of ``attention``."""
    if dlse is not None:  # rare, and the general kernels' work
        from ._ops_general import plain_backward_of_lse

        q, k, v, out, lse = ctx.saved_tensors
        grads = plain_backward_of_lse(dout, dlse, q, k, v, out, lse, ctx.softmax_scale, ctx.causal, ctx.deterministic)
        return *grads, None, None, None
    if dout is None:
        return None, None, None, None, None, None
    dq, dk, dv = BWD(dout, *ctx.saved_tensors, ctx.softmax_scale, ctx.causal, ctx.deterministic)
    return dq, dk, dv, None, None, None


torch.library.register_autograd("flash_attn::attention", once_differentiable(_backward), setup_context=_save, lib=LIB)


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
