"""What the cases share: the built library loaded into torch, and what every result is held to.

The library's path is the process's first argument.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_OPTIONS = (
    "Tensor? alibi_slopes, Tensor? sink, Tensor? rng_state, SymInt max_seqlen_q, SymInt max_seqlen_k, "
    "float softmax_scale, bool causal, int window_left, int window_right, int attention_chunk, float softcap, "
    "float dropout_p, int sm_margin"
)
_SEQUENCES = "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, Tensor? leftpad_k"

_LIB = torch.library.Library("flash_attn", "DEF")
_LIB.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)")
_LIB.define(
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, bool causal, "
    "bool deterministic) -> (Tensor, Tensor, Tensor)"
)
_LIB.define(
    f"fwd_general(Tensor q, Tensor k, Tensor v, {_SEQUENCES}, Tensor? block_table, {_OPTIONS}) -> (Tensor, Tensor)"
)
_LIB.define(
    "bwd_general(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor? dlse, Tensor(a!) dq, "
    f"Tensor(b!) dk, Tensor(c!) dv, {_SEQUENCES}, {_OPTIONS}, bool deterministic) -> ()"
)
_LIB.define(
    "fwd_fp8(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    f"{_SEQUENCES}, Tensor? sink, SymInt max_seqlen_q, SymInt max_seqlen_k, float softmax_scale, bool causal, "
    "int window_left, int window_right, int attention_chunk, float softcap, int sm_margin) -> (Tensor, Tensor)"
)
_CACHE = (
    "float softmax_scale, bool causal, Tensor? seqlens_k=None, SymInt seqlen_k=-1, Tensor? block_table=None, "
    "int num_splits=0, int window_left=-1, int window_right=-1, Tensor? leftpad_k=None, Tensor? cache_batch_idx=None, "
    "Tensor? alibi_slopes=None, Tensor? sink=None, int attention_chunk=0, float softcap=0.0"
)
_LIB.define(
    f"decode(Tensor q, Tensor k_cache, Tensor v_cache, {_CACHE}, Tensor? cu_seqlens_q=None, SymInt max_seqlen_q=0) "
    "-> (Tensor, Tensor)"
)
_LIB.define(
    "kvcache(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cos, Tensor? sin, "
    f"bool interleaved, {_CACHE}) -> (Tensor, Tensor)"
)
_LIB.define(
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? offsets, SymInt offset, "
    "Tensor? cache_batch_idx, Tensor? block_table) -> ()"
)
_LIB.define(
    "rotary(Tensor source, Tensor(a!) destination, Tensor cos, Tensor sin, Tensor? offsets, SymInt offset, "
    "Tensor? cu_seqlens, SymInt max_seqlen, bool interleaved, bool conjugate) -> ()"
)
_USUAL = "bool causal, Tensor? seqlens_k=None, SymInt seqlen_k=-1, Tensor? block_table=None, float? softmax_scale=None"
_LIB.define("fwd.output(Tensor q, Tensor k, Tensor v, bool causal=False, float? softmax_scale=None) -> Tensor")
_LIB.define(
    "fwd_general.output(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, SymInt max_seqlen_q, "
    "SymInt max_seqlen_k, bool causal=False, float? softmax_scale=None) -> Tensor"
)
_LIB.define(
    "fwd_fp8.output(Tensor q, Tensor k, Tensor v, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
    "bool causal=False, float? softmax_scale=None) -> Tensor"
)
_LIB.define(
    "fwd_rounded(Tensor q, Tensor k, Tensor v, bool causal, int key, bool smooth_k, bool smooth_v, "
    "float? softmax_scale=None) -> Tensor"
)
_LIB.define(f"decode.output(Tensor q, Tensor k_cache, Tensor v_cache, {_USUAL}) -> Tensor")
_LIB.define(
    "kvcache.output(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor? cos, Tensor? sin, "
    f"bool interleaved, {_USUAL}) -> Tensor"
)
torch.ops.load_library(sys.argv[1])
FWD = torch.ops.flash_attn.fwd.default
BWD = torch.ops.flash_attn.bwd.default
FWD_GENERAL = torch.ops.flash_attn.fwd_general.default
BWD_GENERAL = torch.ops.flash_attn.bwd_general.default
FWD_FP8 = torch.ops.flash_attn.fwd_fp8.default
DECODE = torch.ops.flash_attn.decode.default
KVCACHE = torch.ops.flash_attn.kvcache.default
APPEND = torch.ops.flash_attn.append.default
ROTARY = torch.ops.flash_attn.rotary.default
FWD_OUTPUT = torch.ops.flash_attn.fwd.output
FWD_GENERAL_OUTPUT = torch.ops.flash_attn.fwd_general.output
FWD_ROUNDED = torch.ops.flash_attn.fwd_rounded.default
FWD_FP8_OUTPUT = torch.ops.flash_attn.fwd_fp8.output
DECODE_OUTPUT = torch.ops.flash_attn.decode.output
KVCACHE_OUTPUT = torch.ops.flash_attn.kvcache.output
_COUNTER = ctypes.CDLL(None)


def close(found: Tensor, expected: Tensor, name: str, tolerance: float = 2e-2, contiguous: bool = True) -> None:
    assert found.shape == expected.shape, f"{name} has shape {found.shape}, expected {expected.shape}"
    assert not contiguous or found.is_contiguous(), f"{name} has strides {found.stride()}"
    assert torch.equal(found.isinf(), expected.isinf()), name
    finite = ~expected.isinf()
    error = (found.double() - expected.double())[finite].abs().max().item() if finite.any() else 0.0
    assert error <= tolerance, f"{name} is off by {error}"


def made(call: Callable[[], Any]) -> tuple[Any, int]:
    """What ``call`` of one operator gives, and how many tensors of the library's are left after it."""
    _COUNTER.fake_torch_forget()
    result = call()
    return result, _COUNTER.fake_torch_live()


def raises(call: Callable[[], object], *parts: str) -> None:
    """``call`` raises a RuntimeError that names ``parts``, and no tensor is left over."""
    _COUNTER.fake_torch_forget()
    try:
        call()
    except RuntimeError as error:
        text = str(error)
    else:
        text = "nothing was raised"
    assert text.startswith("flash_attn: "), text
    for part in parts:
        assert part in text, text
    assert _COUNTER.fake_torch_live() == 0, "tensors were left behind"
