"""The operator of FP8 attention; :mod:`flash_attn._ops` says what an operator is.

===================================  ==================================================================================
``flash_attn::fwd_fp8``              the FP8 forward kernels; no gradient
``flash_attn::fwd_rounded``          the same of fp16 or bf16 tensors, which kernels round first; no gradient
===================================  ==================================================================================
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import reference_fp8
from ._ops import LIB, define, register_cpu, register_output, register_without_gradient, usual_scale
from .problem import Problem

__all__ = ["FWD_FP8", "FWD_FP8_OUTPUT", "FWD_ROUNDED", "fp8_options"]

# q, k and v are float8_e4m3fn, out is bfloat16; the factors are fp32 (B, Hk), or (B, H or Hk, blocks) for 64 rows each
# (see checks.descale_blocks), None for 1. The rest is fwd_general's, without what FP8 kernels lack.
define(
    "fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k, "
    "Tensor? sink, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, int window_left, "
    "int window_right, int attention_chunk, float softcap, int sm_margin) -> (Tensor out, Tensor lse)"
)
define(
    "fwd_fp8.output(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "bool causal=False, float? softmax_scale=None) -> Tensor"
)
# key: of the rotation's signs, negative for none; smooth_k, smooth_v: the mean of a sequence's keys, or values, is
# taken off each, and that of values added to out, which is bfloat16.
define(
    "fwd_rounded(Tensor q, Tensor k, Tensor v, bool causal, int key, bool smooth_k, bool smooth_v, "
    "float? softmax_scale=None) -> Tensor"
)
FWD_ROUNDED = torch.ops.flash_attn.fwd_rounded.default
FWD_FP8 = torch.ops.flash_attn.fwd_fp8.default
FWD_FP8_OUTPUT = torch.ops.flash_attn.fwd_fp8.output

_OPTIONS = tuple(name for name in Problem._fields if name not in ("alibi_slopes", "rng_state", "dropout_p"))


def fp8_options(p: Problem) -> tuple[Any, ...]:
    """The fields of a problem that the operator has, in its order."""
    return tuple([getattr(p, name) for name in _OPTIONS])


def _cpu_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    *options: Any,
) -> tuple[Tensor, Tensor]:
    p = Problem(**dict(zip(_OPTIONS, options, strict=True)))
    return reference_fp8.forward(q, k, v, q_descale, k_descale, v_descale, p)


def _fake_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    cu_seqlens_q: Tensor | None,
    *_: object,
) -> tuple[Tensor, Tensor]:
    p = Problem(cu_seqlens_q=cu_seqlens_q)
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=torch.bfloat16)
    return out, q.new_empty(tuple(p.lse_shape(q)), dtype=torch.float32)


def _usual_problem(q: Tensor, k: Tensor, causal: bool, softmax_scale: float | None) -> Problem:
    scale = usual_scale(q, softmax_scale)
    return Problem(max_seqlen_q=q.shape[1], max_seqlen_k=k.shape[1], softmax_scale=scale, causal=causal)


def _output_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_descale: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    causal: bool = False,
    softmax_scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    p = _usual_problem(q, k, causal, softmax_scale)
    return reference_fp8.forward(q, k, v, q_descale, k_descale, v_descale, p)


def _fake_output(q: Tensor, k: Tensor, v: Tensor, *descales: Any) -> tuple[Tensor, Tensor]:
    return _fake_forward(q, k, v, *descales[:3], None)


def _cpu_rounded(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    key: int,
    smooth_k: bool,
    smooth_v: bool,
    softmax_scale: float | None = None,
) -> Tensor:
    from .fp8 import attend_in_steps  # which imports this file

    p = _usual_problem(q, k, causal, softmax_scale)
    return attend_in_steps(q, k, v, p, key if key >= 0 else None, smooth_k, smooth_v)[0]


def _fake_rounded(q: Tensor, k: Tensor, v: Tensor, *_: object) -> Tensor:
    return _fake_output(q, k, v, None, None, None)[0]


register_cpu("fwd_rounded", _cpu_rounded)
register_without_gradient("fwd_rounded", _fake_rounded)
register_cpu("fwd_fp8", _cpu_forward)
register_output("fwd_fp8", _output_forward, _fake_output)
torch.library.register_fake("flash_attn::fwd_fp8", _fake_forward, lib=LIB)
