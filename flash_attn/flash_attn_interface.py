"""The public functions, with the names, argument order and defaults of flash-attn 2.8.

Every check happens before anything is launched. On the way of a correct plain call the checks are a handful of
comparisons; what is wrong, and which argument, is worked out only once something is. A call that asks for more than a
scale and a causal mask goes through :mod:`flash_attn.attend`.

The arguments that flash-attn 2.8 does not have come last and are meant to be given by name. In ``flash_attn_func``
they are not keyword-only: Python looks the default of each such argument up in a dictionary, which a plain call feels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, is_grad_enabled
from torch.compiler import is_compiling

from ._ops import ATTENTION, FWD, FWD_OUTPUT, apply_attention, direct
from ._ops_fp8 import FWD_FP8_OUTPUT
from ._ops_general import FWD_GENERAL_OUTPUT
from .attend import Request, Result, attend, attend_packed
from .checks import FP8, KERNEL_DTYPES, MAX_HEAD_DIM, check_qkv, scale_of
from .errors import ArgumentError
from .kvcache import flash_attn_combine, flash_attn_with_kvcache
from .sequence_parallel import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

_NO_WINDOW = (-1, -1)
_FWD_OUTPUT: Callable[..., Tensor] = direct(FWD_OUTPUT)
_FWD_GENERAL_OUTPUT: Callable[..., Tensor] = direct(FWD_GENERAL_OUTPUT)
_FWD_FP8_OUTPUT: Callable[..., Tensor] = direct(FWD_FP8_OUTPUT)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """Exact attention, ``softmax(softmax_scale * q @ k.T) @ v``, without holding the score matrix on a GPU.

    Grouped-query attention: H may be a multiple of Hk, and query head h then attends with KV head ``h // (H // Hk)``.

    Args:
        q: (B, Sq, H, D), any strides (copied if the last dimension is not contiguous). D <= 256.
        k: (B, Sk, Hk, D), of q's dtype and device.
        v: (B, Sk, Hk, Dv), likewise. Dv <= 256 may differ from D.
        dropout_p: probability of dropping an attention weight, in [0, 1). The seed comes from torch's generator of q's
            device: the same ``torch.manual_seed`` drops the same weights, in the backward too.
        softmax_scale: factor of the scores; 1 / sqrt(D) if None (1 / sqrt(D + Dv) with ``qv``).
        causal: hide keys after the query. The mask is aligned to the bottom right: query i stands at position
            i + Sk - Sq and sees the keys up to it. A query that sees no key gets output 0, log-sum-exp -inf and zero
            gradients.
        window_size: (left, right): a query sees ``left`` keys before its position and ``right`` after it, besides the
            one at it. -1 or None is no bound. With ``causal``, right is 0 whatever it says.
        softcap: c > 0 turns a scaled score s into ``c * tanh(s / c)``. Not with dropout.
        alibi_slopes: fp32 (H,) or (B, H): ``slope * |position - key|`` is taken off each score. Has no gradient.
        deterministic: give the backward the same bits every time, at some cost in speed (the forward always does).
        return_attn_probs: also return the log-sum-exp, without a gradient, and the attention weights; see below.
        return_lse: also return the log-sum-exp, with its gradient.
        learnable_sink: (H,), one more logit in the softmax of every row, which takes weight and gives no value.
        attention_chunk: c > 0 hides keys of another chunk of c positions than the query's.
        qv: (B, Sq, H, Dv): scores become ``softmax_scale * (q @ k.T + qv @ v.T)``. D + Dv <= 256; q and k are copied.
        seqused_q, seqused_k: int32 (B,), how many rows of each sequence count, from the first on. Sq and Sk above are
            then these. Queries that do not count get output 0 and log-sum-exp -inf; gradients there are 0.
        leftpad_k: int32 (B,), how many keys at the beginning of each sequence do not count, as if they were not there;
            a negative number is 0.
        q_descale, k_descale, v_descale: fp32 (B, Hk), for FP8 inputs alone (see below): what the elements of each
            sequence and KV head (of q: the H // Hk heads that attend with it) are multiplied by. None: 1. Each may
            instead hold a factor for each 64 rows of a head, (B, H, ceil(Sq / 64)) or (B, Hk, ceil(Sk / 64)), counted
            from the first row of a sequence whatever leftpad_k is. A factor is positive, or 0 for rows that are 0
            whatever they hold; a negative one is refused on the CPU, and on a GPU, which is not waited for, its rows'
            result is undefined.
        sm_margin: multiprocessors to leave free for kernels of other streams, such as a collective's. The forward on
            GPUs of compute capability 9.0 does, down to one; others take no notice.
        num_splits, pack_gqa: hints of other implementations: accepted, and without any effect.

    Returns:
        out, contiguous (B, Sq, H, Dv) in q's dtype. With ``return_lse`` (out, softmax_lse): softmax_lse is the natural
        log-sum-exp of every row of scores, fp32 (B, H, Sq) (fp64 for fp64 CPU tensors). With ``return_attn_probs``
        (out, softmax_lse, S_dmask): S_dmask is empty without dropout; with it, the weights of the softmax in q's dtype,
        negative where they were dropped, (B, H, Sq, Sk) with Sq and Sk rounded up to multiples of 128. It is made by
        torch, as a whole, and meant for tests.

    dtypes are float16 and bfloat16; float32 tensors are cast under ``torch.autocast``. CPU tensors (float16, bfloat16,
    float32, float64) run a reference implementation, which is exact but slow.

    FP8: q, k and v may all be float8_e4m3fn, on GPUs of compute capability 9.0 (and, emulated, on the CPU). The output
    is bfloat16, and the weights of the softmax are rounded to float8_e4m3fn on the way. Without dropout, alibi_slopes
    and qv, and without a gradient. :mod:`flash_attn.fp8` has what turns other tensors into FP8 with little error.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: a ``ValueError`` naming the argument and what was found.
        UnsupportedFeatureError: a ``NotImplementedError`` naming the argument that this version does not have.
        NotBuiltError, HostLibraryError: a ``RuntimeError``: this installation has no kernels, or they do not load.
    """
    plain = (
        dropout_p == 0.0
        and softcap == 0.0
        and alibi_slopes is None
        and window_size == _NO_WINDOW
        and learnable_sink is None
        and attention_chunk == 0
        and qv is None
        and seqused_q is None
        and seqused_k is None
        and leftpad_k is None
        and sm_margin == 0
    )
    without_descales = q_descale is None and k_descale is None and v_descale is None

    # The usual call of inference at once: the host library checks the tensors while it reads them. What it refuses goes
    # the long way below, which converts what can be, or says what is wrong and with which argument.
    if (
        plain
        and type(q) is Tensor
        and k is not None
        and v is not None
        and q.is_cuda
        and not (return_lse or return_attn_probs)
        and (softmax_scale is None or (type(softmax_scale) is float and softmax_scale > 0.0))
        and not is_compiling()
    ):
        try:
            if q.dtype is not FP8:
                if without_descales and not (
                    is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
                ):
                    return _FWD_OUTPUT(q, k, v, causal, softmax_scale)
            elif not is_grad_enabled() or not _any_requires_grad(q, k, v, q_descale, k_descale, v_descale):
                return _FWD_FP8_OUTPUT(q, k, v, q_descale, k_descale, v_descale, causal, softmax_scale)
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass

    plain = plain and without_descales
    if plain:
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
                and dtype in KERNEL_DTYPES
                and k.dtype is dtype
                and v.dtype is dtype
                and k.device == device
                and v.device == device
                and (q.is_cuda or q.is_cpu)
            )
        except AttributeError:  # not tensors
            correct = False
        if not correct:
            q, k, v = check_qkv(q, k, v, fp8=True)
            plain = q.shape[3] == v.shape[3] and q.dtype is not FP8
    if not plain:
        request = Request(
            dropout_p=dropout_p,
            softmax_scale=softmax_scale,
            causal=causal,
            window_size=window_size,
            softcap=softcap,
            alibi_slopes=alibi_slopes,
            deterministic=deterministic,
            return_attn_probs=return_attn_probs,
            return_lse=return_lse,
            learnable_sink=learnable_sink,
            attention_chunk=attention_chunk,
            seqused_q=seqused_q,
            seqused_k=seqused_k,
            leftpad_k=leftpad_k,
            qv=qv,
            q_descale=q_descale,
            k_descale=k_descale,
            v_descale=v_descale,
            sm_margin=sm_margin,
        )
        return attend(q, k, v, request)

    if softmax_scale is None:
        softmax_scale = q_shape[3] ** -0.5
    else:
        if type(softmax_scale) is not float:
            softmax_scale = scale_of(softmax_scale, q_shape[3])
        if softmax_scale <= 0.0:
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
        return out, lse if return_lse else lse.detach(), q.new_empty(0)
    if return_lse:
        return out, lse
    result: Tensor = out
    return result


def _any_requires_grad(*tensors: Tensor | None) -> bool:
    return any(x is not None and x.requires_grad for x in tensors)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    sm_margin: int = 0,
) -> Result:
    """:func:`flash_attn_func` of q, k and v in one tensor, whose gradient is written as one tensor too.

    Args:
        qkv: (B, S, 3, H, D): ``q, k, v = qkv.unbind(2)``.

    The other arguments, the results and the errors are those of :func:`flash_attn_func`.
    """
    request = Request(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sm_margin=sm_margin,
    )
    return attend_packed(None, qkv, request)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_func` of q (B, Sq, H, D) with k and v in one tensor, whose gradient is one tensor too.

    Args:
        q: (B, Sq, H, D).
        kv: (B, Sk, 2, Hk, D): ``k, v = kv.unbind(2)``.

    The other arguments, the results and the errors are those of :func:`flash_attn_func`.
    """
    request = Request(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return attend_packed(_query(q), kv, request)


def _query(q: Tensor) -> Tensor:
    """None would mean that q is in the packed tensor."""
    if not isinstance(q, Tensor):
        raise ArgumentError(f"q must be a torch.Tensor, got {type(q).__name__}.")
    return q


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    qv: Tensor | None = None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> Result:
    """:func:`flash_attn_func` of sequences of different lengths, packed one after the other without padding.

    Args:
        q: (Tq, H, D), the tokens of all sequences.
        k: (Tk, Hk, D).
        v: (Tk, Hk, Dv).
        cu_seqlens_q: int32 (B + 1,): the queries of sequence b are the rows ``cu_seqlens_q[b]`` up to, and without,
            ``cu_seqlens_q[b + 1]``. It ascends from 0 to at most Tq; equal neighbours are an empty sequence. Rows after
            the last sequence are nobody's: they are not read, and their output and gradients are not written.
        cu_seqlens_k: int32 (B + 1,), the same of keys.
        max_seqlen_q, max_seqlen_k: integers, at least the length of the longest sequence. Rows past them are not
            computed.
        block_table: int32 (B, n): k and v are pages, (pages, page_size, Hk, D), and ``block_table[b, i]`` is the page
            of sequence b's keys ``i * page_size`` and up; cu_seqlens_k then only gives lengths. The pages are gathered
            into a padded batch of n * page_size keys first; for few queries use :func:`flash_attn_with_kvcache`, which
            reads them where they are.
        seqused_q, seqused_k, leftpad_k: as in :func:`flash_attn_func`, counted from a sequence's first row.
        q_descale, k_descale, v_descale: fp32 (B, Hk); or for each 64 rows of a head, (1, H, Tq // 64 + B) and
            (1, Hk, Tk // 64 + B), where rows 64 i and up of sequence b have the factor number
            ``cu_seqlens[b] // 64 + b + i``. With a block_table, those of keys are the padded batch's.

    The other arguments, the results (out is (Tq, H, Dv) and softmax_lse (H, Tq)) and the errors are those of
    :func:`flash_attn_func`.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ArgumentError(f"{name} must be a torch.Tensor, got NoneType.")
    # As in flash_attn_func.
    if (
        type(q) is Tensor
        and q.is_cuda
        and dropout_p == 0.0
        and softcap == 0.0
        and window_size == _NO_WINDOW
        and attention_chunk == 0
        and sm_margin == 0
        and alibi_slopes is block_table is learnable_sink is qv is seqused_q is seqused_k is leftpad_k is None
        and q_descale is k_descale is v_descale is None
        and k is not None
        and v is not None
        and type(max_seqlen_q) is type(max_seqlen_k) is int
        and not (return_lse or return_attn_probs)
        and (softmax_scale is None or (type(softmax_scale) is float and softmax_scale > 0.0))
        and not is_compiling()
    ):
        try:
            if not (is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
                return _FWD_GENERAL_OUTPUT(
                    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale
                )
        except (AttributeError, RuntimeError, TypeError, ValueError):
            pass
    request = Request(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        block_table=block_table,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        seqused_q=seqused_q,
        seqused_k=seqused_k,
        leftpad_k=leftpad_k,
        qv=qv,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        sm_margin=sm_margin,
    )
    return attend(q, k, v, request)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` of q, k and v in one tensor, whose gradient is written as one tensor too.

    Args:
        qkv: (T, 3, H, D): ``q, k, v = qkv.unbind(1)``.
        cu_seqlens: int32 (B + 1,).
        max_seqlen: the longest sequence.

    The other arguments, the results and the errors are those of :func:`flash_attn_varlen_func`.
    """
    if cu_seqlens is None:
        raise ArgumentError("cu_seqlens must be a torch.Tensor, got NoneType.")
    request = Request(
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_k=cu_seqlens,
        max_seqlen_q=max_seqlen,
        max_seqlen_k=max_seqlen,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return attend_packed(None, qkv, request)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    return_lse: bool = False,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
) -> Result:
    """:func:`flash_attn_varlen_func` with k and v in one tensor, whose gradient is written as one tensor too.

    Args:
        q: (Tq, H, D).
        kv: (Tk, 2, Hk, D): ``k, v = kv.unbind(1)``.

    The other arguments, the results and the errors are those of :func:`flash_attn_varlen_func`.
    """
    if cu_seqlens_q is None or cu_seqlens_k is None:
        name = "cu_seqlens_q" if cu_seqlens_q is None else "cu_seqlens_k"
        raise ArgumentError(f"{name} must be a torch.Tensor, got NoneType.")
    request = Request(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=window_size,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
        return_lse=return_lse,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
    )
    return attend_packed(_query(q), kv, request)
