"""The forward and the backward as functions of their own, without autograd.

Libraries that spread a sequence over several GPUs import these from ``flash_attn.flash_attn_interface`` and merge
partial results themselves: names, arguments and results are those of flash-attn 2.8. The backward takes the merged
output and log-sum-exp and gives each part's share of the gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import checks
from ._ops_general import backward_of
from .attend import Request, forward_without_gradient, positive_scale, problem_of
from .errors import ArgumentError, DtypeError, ShapeError
from .problem import Problem
from .reference import lse_dtype
from .reference_cache import gather_pages
from .s_dmask import s_dmask

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
]

_Forward = tuple[Tensor, Tensor, Tensor, Tensor]


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
) -> _Forward:
    """(out, softmax_lse, S_dmask, rng_state): rng_state, int64 (2,), is what the backward needs with dropout."""
    request = Request(
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    return _forward(q, k, v, request, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> _Forward:
    """(out, softmax_lse, S_dmask, rng_state) of packed sequences. ``zero_tensors`` clears the rows of no sequence."""
    request = Request(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        dropout_p=dropout_p,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        leftpad_k=leftpad_k,
        seqused_k=seqused_k,
    )
    if block_table is not None:
        batch = checks.cu_seqlens_of("cu_seqlens_k", cu_seqlens_k, q).shape[0] - 1
        table = checks.block_table_of(block_table, batch, q)
        k, v = gather_pages(k, table), gather_pages(v, table)
        used = cu_seqlens_k.diff() if seqused_k is None else seqused_k
        request = request._replace(cu_seqlens_k=None, max_seqlen_k=None, seqused_k=used)
    out, lse, probs, rng_state = _forward(q, k, v, request, return_softmax)
    if zero_tensors:
        of_none = torch.arange(q.shape[0], device=q.device) >= cu_seqlens_q[-1]
        out.masked_fill_(of_none[:, None, None], 0.0)
        lse.masked_fill_(of_none, float("-inf"))
    return out, lse, probs, rng_state


def _forward(q: Tensor, k: Tensor, v: Tensor, request: Request, return_softmax: bool) -> _Forward:
    with torch.no_grad():
        q, k, v = checks.check_qkv(q, k, v, request.cu_seqlens_q is not None, request.cu_seqlens_k is not None)
        q, p = positive_scale(q, problem_of(q, k.shape, request))
        out, lse = forward_without_gradient(q, k, v, p)
        probs = s_dmask(q, k, lse, p) if return_softmax and p.rng_state is not None else q.new_empty(0)
        rng_state = p.rng_state
        if rng_state is None:
            rng_state = torch.empty(2, dtype=torch.int64, device=q.device)
        return out, lse, probs, rng_state


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Fill dq, dk and dv (those that are given) and return softmax_d: rowsum(dout * out), fp32 (B, H, Sq).

    Its last size is rounded up to a multiple of 128.
    """
    request = Request(
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    delta = _backward(
        dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, request, deterministic, rng_state
    ).transpose(1, 2)
    return torch.nn.functional.pad(delta, (0, -q.shape[1] % 128))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Fill dq, dk and dv (those that are given) and return softmax_d: rowsum(dout * out), fp32 (H, T).

    ``zero_tensors`` clears the rows of no sequence.
    """
    request = Request(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        softmax_scale=softmax_scale,
        causal=causal,
        window_size=(window_size_left, window_size_right),
        softcap=softcap,
        alibi_slopes=alibi_slopes,
    )
    delta = _backward(dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, request, deterministic, rng_state)
    if zero_tensors:
        for gradient, cu_seqlens in ((dq, cu_seqlens_q), (dk, cu_seqlens_k), (dv, cu_seqlens_k)):
            if gradient is not None:
                of_none = torch.arange(gradient.shape[0], device=q.device) >= cu_seqlens[-1]
                gradient.masked_fill_(of_none[:, None, None], 0.0)
    return delta.transpose(0, 1).contiguous()


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    dropout_p: float,
    request: Request,
    deterministic: bool,
    rng_state: Tensor | None,
) -> Tensor:
    with torch.no_grad():
        q, k, v = checks.check_qkv(q, k, v, request.cu_seqlens_q is not None, request.cu_seqlens_k is not None)
        p = problem_of(q, k.shape, request)
        p = _with_dropout(p, dropout_p, rng_state, q)
        _check_results(dout, q, v, out, lse, p)
        lse = lse.to(lse_dtype(q.dtype)).contiguous()
        dq, dk, dv = (
            _gradient(name, given, x) for name, given, x in zip(("dq", "dk", "dv"), gradients, (q, k, v), strict=True)
        )
        query, positive = positive_scale(q, p)
        backward_of(dout, query, k, v, out, lse, None, dq, dk, dv, positive, bool(deterministic))
        if positive is not p:
            dq.mul_(-1.0 if p.softmax_scale < 0.0 else 0.0)
        # In the inputs' dtype first: a float32 copy of both would be twice as much memory as they take.
        return (dout * out).sum(-1, dtype=lse.dtype)


def _with_dropout(p: Problem, dropout_p: float, rng_state: Tensor | None, q: Tensor) -> Problem:
    checks.check_dropout(dropout_p, p.softcap)
    if dropout_p == 0.0:
        return p
    if rng_state is None:
        raise ArgumentError(f"rng_state must be the forward's with dropout_p={dropout_p}, got None.")
    checks.same_device("rng_state", rng_state, q)
    if rng_state.dtype != torch.int64 or rng_state.shape != (2,):
        raise ShapeError(
            f"rng_state must be the forward's, torch.int64 (2,), got {rng_state.dtype} {checks.sizes(rng_state)}."
        )
    return p._replace(rng_state=rng_state, dropout_p=float(dropout_p))


def _check_results(dout: Tensor, q: Tensor, v: Tensor, out: Tensor, lse: Tensor, p: Problem) -> None:
    wanted = (*q.shape[:-1], v.shape[-1])
    for name, x in (("dout", dout), ("out", out)):
        checks.same_device(name, x, q)
        if tuple(x.shape) != wanted:
            raise ShapeError(f"{name} must have the output's shape {wanted}, got {checks.sizes(x)}.")
        _check_dtype(name, x, q)
    checks.same_device("softmax_lse", lse, q)
    if tuple(lse.shape) != tuple(p.lse_shape(q)):
        raise ShapeError(f"softmax_lse must have shape {tuple(p.lse_shape(q))}, got {checks.sizes(lse)}.")


def _check_dtype(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != q.dtype:
        raise DtypeError(f"{name} must have q's dtype: q is {q.dtype}, {name} is {x.dtype}.")


def _gradient(name: str, given: Tensor | None, x: Tensor) -> Tensor:
    if given is None:
        return torch.empty_like(x)
    checks.same_device(name, given, x)
    if given.shape != x.shape:
        raise ShapeError(f"{name} must have {name[1:]}'s shape {checks.sizes(x)}, got {checks.sizes(given)}.")
    _check_dtype(name, given, x)
    return given
