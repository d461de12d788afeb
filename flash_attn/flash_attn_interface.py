"""The public functions, with the names, argument order and defaults of flash-attn 2.8.

Every check happens before anything is launched. On the way of a correct call the checks are a handful of comparisons;
what is wrong, and which argument, is worked out only once something is.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ._ops import ATTENTION, FWD, apply_attention
from .errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedFeatureError

__all__ = ["flash_attn_func"]

MAX_HEAD_DIM = 256

_KERNEL_DTYPES = (torch.float16, torch.bfloat16)
# What a CPU tensor may have besides, since the reference takes any.
_CPU_DTYPES = (*_KERNEL_DTYPES, torch.float32, torch.float64)
_NO_WINDOW = (-1, -1)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """Exact attention, ``softmax(softmax_scale * q @ k.T) @ v``, without holding the score matrix on a GPU.

    Grouped-query attention: H may be a multiple of Hk, and query head h then attends with KV head ``h // (H // Hk)``.

    Args:
        q: (B, Sq, H, D), any strides (copied if the last dimension is not contiguous). D <= 256.
        k: (B, Sk, Hk, D), of q's dtype and device.
        v: (B, Sk, Hk, D), likewise.
        dropout_p: probability of dropping an attention weight. Only 0.0 in this version.
        softmax_scale: factor of the scores; 1 / sqrt(D) if None.
        causal: hide keys after the query. The mask is aligned to the bottom right: query i sees the keys
            ``j <= i + Sk - Sq``. A query that sees no key gets output 0, log-sum-exp -inf and zero gradients.
        window_size: (left, right) bounds of a sliding window. Only (-1, -1), no window, in this version.
        softcap: c > 0 turns a score s into ``c * tanh(s / c)``. Only 0.0 in this version.
        alibi_slopes: fp32 (H,) or (B, H), slopes of a linear bias. Only None in this version.
        deterministic: give the backward the same bits every time, at some cost in speed (the forward always does).
        return_attn_probs: also return the log-sum-exp and the tensor of attention weights.

    Returns:
        out, contiguous (B, Sq, H, D) in q's dtype; with ``return_attn_probs`` the tuple (out, softmax_lse, S_dmask):
        softmax_lse is the natural log-sum-exp of every row of scores, fp32 (B, H, Sq) (fp64 for fp64 CPU tensors),
        with no gradient; S_dmask is empty, since it holds something with dropout only.

    dtypes are float16 and bfloat16; float32 tensors are cast under ``torch.autocast``. CPU tensors (float16, bfloat16,
    float32, float64) run a reference implementation, which is exact but slow.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: a ``ValueError`` naming the argument and what was found.
        UnsupportedFeatureError: a ``NotImplementedError`` naming the argument that this version does not have.
        NotBuiltError, HostLibraryError: a ``RuntimeError``: this installation has no kernels, or they do not load.
    """
    if dropout_p != 0.0 or softcap != 0.0 or alibi_slopes is not None or window_size != _NO_WINDOW:
        _check_features(dropout_p, window_size, softcap, alibi_slopes)
    try:
        q_shape, k_shape, dtype, device = q.shape, k.shape, q.dtype, q.device
        correct = (
            len(q_shape) == 4
            and len(k_shape) == 4
            and k_shape == v.shape
            and q_shape[0] == k_shape[0]
            and k_shape[2] > 0
            and q_shape[2] % k_shape[2] == 0
            and q_shape[3] == k_shape[3]
            and 0 < q_shape[3] <= MAX_HEAD_DIM
            and dtype in _KERNEL_DTYPES
            and k.dtype is dtype
            and v.dtype is dtype
            and k.device == device
            and v.device == device
            and (q.is_cuda or q.is_cpu)
        )
    except AttributeError:  # not tensors
        correct = False
    if not correct:
        q, k, v = _explain_or_convert(q, k, v)
    if softmax_scale is None:
        softmax_scale = q.shape[3] ** -0.5
    elif isinstance(softmax_scale, Tensor):
        raise ArgumentError("softmax_scale must be a number or None, got a tensor: reading it would stall the GPU.")
    elif softmax_scale <= 0.0:
        # The kernels take the largest raw score for the largest score: only a positive scale keeps that order.
        q, softmax_scale = (-q, -softmax_scale) if softmax_scale < 0.0 else (q * 0, 1.0)
    causal, deterministic = bool(causal), bool(deterministic)

    if is_compiling():
        out, lse = ATTENTION(q, k, v, softmax_scale, causal, deterministic)
    elif is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out, lse = apply_attention(q, k, v, softmax_scale, causal, deterministic)
    else:
        out, lse = FWD(q, k, v, softmax_scale, causal)
    if return_attn_probs:
        return out, lse, q.new_empty(0)
    result: Tensor = out
    return result


def _check_features(
    dropout_p: float, window_size: tuple[int, int], softcap: float, alibi_slopes: Tensor | None
) -> None:
    """Raise for an argument that has another value than the one this version has; return if all are harmless."""
    if dropout_p != 0.0:
        if not 0.0 <= dropout_p < 1.0:
            raise ArgumentError(f"dropout_p must be in [0, 1), got {dropout_p}.")
        _unsupported("dropout_p", dropout_p, "0.0")
    if softcap != 0.0:
        if softcap < 0.0:
            raise ArgumentError(f"softcap must be 0.0 (none) or positive, got {softcap}.")
        _unsupported("softcap", softcap, "0.0")
    if alibi_slopes is not None:
        _unsupported("alibi_slopes", "a tensor" if isinstance(alibi_slopes, Tensor) else alibi_slopes, "None")
    if not isinstance(window_size, (tuple, list)) or len(window_size) != 2:
        raise ArgumentError(f"window_size must be two integers (left, right), got {window_size}.")
    if tuple(window_size) != _NO_WINDOW:
        _unsupported("window_size", window_size, _NO_WINDOW)


def _unsupported(name: str, value: object, only: object) -> NoReturn:
    raise UnsupportedFeatureError(f"{name}={value} is not supported by this version of flash_attn: only {name}={only}.")


def _explain_or_convert(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Off the fast way: cast under autocast, accept what only the CPU takes, and name what is wrong in all else."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a torch.Tensor, got {type(x).__name__}.")
    _check_devices(q, k, v)
    q, k, v = _autocast(q, k, v)
    _check_dtypes(q, k, v)
    _check_shapes(q, k, v)
    return q, k, v


def _check_devices(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("k", k), ("v", v)):
        if x.device != q.device:
            raise DeviceError(f"{name} must be on q's device: q is on {q.device}, {name} is on {x.device}.")
    if q.device.type not in ("cuda", "cpu", "meta"):
        raise DeviceError(f"q must be on a CUDA device or on the CPU, got {q.device}.")


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Under ``torch.autocast``, tensors of which any is float32 are all cast to the autocast dtype."""
    kind = q.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return q, k, v
    dtypes = (q.dtype, k.dtype, v.dtype)
    if torch.float32 not in dtypes or not all(d in (*_KERNEL_DTYPES, torch.float32) for d in dtypes):
        return q, k, v
    dtype = torch.get_autocast_dtype(kind)
    return q.to(dtype), k.to(dtype), v.to(dtype)


def _check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    accepted = _KERNEL_DTYPES if q.is_cuda else _CPU_DTYPES
    if q.dtype not in accepted:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in accepted)
        hint = " Cast it, or use torch.autocast." if q.dtype in (torch.float32, torch.float64) else ""
        raise DtypeError(f"q must be one of {names} on {q.device.type}, got {q.dtype}.{hint}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise DtypeError(f"{name} must have q's dtype: q is {q.dtype}, {name} is {x.dtype}.")


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x, layout in (("q", q, "(B, Sq, H, D)"), ("k", k, "(B, Sk, Hk, D)"), ("v", v, "(B, Sk, Hk, D)")):
        if x.dim() != 4:
            raise ShapeError(f"{name} must have 4 dimensions, {layout}, got {x.dim()}: {_sizes(x)}.")
    if k.shape != v.shape:
        raise ShapeError(f"v must have k's shape (B, Sk, Hk, D): k is {_sizes(k)}, v is {_sizes(v)}.")
    if q.shape[0] != k.shape[0]:
        raise ShapeError(f"k must have q's batch size: q has {q.shape[0]}, k has {k.shape[0]}.")
    if q.shape[3] != k.shape[3]:
        raise ShapeError(f"k must have q's head dim: q has {q.shape[3]}, k has {k.shape[3]}.")
    if not 0 < q.shape[3] <= MAX_HEAD_DIM:
        raise ShapeError(f"the head dim (last size) of q must be 1 to {MAX_HEAD_DIM}, got {q.shape[3]}.")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2] != 0:
        raise ShapeError(f"q's heads must be a multiple of k's: q has {q.shape[2]} heads, k has {k.shape[2]}.")


def _sizes(x: Tensor) -> str:
    return str(tuple(x.shape))
