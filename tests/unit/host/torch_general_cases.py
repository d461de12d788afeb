"""Cases of the general operators: packed sequences, masks, score modifiers, dropout, gradients into given tensors."""

from __future__ import annotations

import ctypes
import gc
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_support import BWD, BWD_GENERAL, FWD, FWD_GENERAL, close, made, raises

WORD = 0xFFFFFFFF


@dataclass
class Options:
    """The operators' arguments after the tensors of attention, in their order."""

    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    seqused_q: Tensor | None = None
    seqused_k: Tensor | None = None
    leftpad_k: Tensor | None = None
    block_table: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    rng_state: Tensor | None = None
    max_seqlen_q: int = 0
    max_seqlen_k: int = 0
    softmax_scale: float = 0.3
    causal: bool = False
    window_left: int = -1
    window_right: int = -1
    attention_chunk: int = 0
    softcap: float = 0.0
    dropout_p: float = 0.0
    sm_margin: int = 0

    def forward(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self)]

    def backward(self) -> list[Any]:
        return [getattr(self, f.name) for f in fields(self) if f.name != "block_table"]


@dataclass
class Case:
    """q (B, Sq, H, D) or packed (T, H, D), k, v likewise, and the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    options: Options = field(default_factory=Options)

    def forward(self) -> tuple[Tensor, Tensor]:
        out: tuple[Tensor, Tensor] = FWD_GENERAL(self.q, self.k, self.v, *self.options.forward())
        return out


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def starts(lengths: Sequence[int]) -> Tensor:
    return ints(*torch.tensor([0, *lengths]).cumsum(0).tolist())


def halves(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def batched(
    b: int = 2, sq: int = 9, sk: int = 13, h: int = 4, hk: int = 2, d: int = 64, dv: int = 64, **more: Any
) -> Case:
    torch.manual_seed(sq * 1000 + d)
    return Case(halves(b, sq, h, d), halves(b, sk, hk, d), halves(b, sk, hk, dv), Options(**more))


def packed(
    lengths_q: Sequence[int], lengths_k: Sequence[int], h: int = 4, hk: int = 2, d: int = 64, dv: int = 64, **more: Any
) -> Case:
    torch.manual_seed(sum(lengths_q))
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    options = Options(
        cu_seqlens_q=starts(lengths_q),
        cu_seqlens_k=starts(lengths_k),
        max_seqlen_q=max(lengths_q, default=0),
        max_seqlen_k=max(lengths_k, default=0),
        **more,
    )
    return Case(halves(total_q, h, d), halves(total_k, hk, d), halves(total_k, hk, dv), options)


# ---- Attention in float64 ----


def mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & WORD
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & WORD
    return x ^ (x >> 16)


def kept(state: Tensor, index: int, sq: int, sk: int, dropout_p: float) -> Tensor:
    """The weights that dropout keeps: csrc/kernels/common/dropout.cuh."""
    seed, offset = (int(x) & 0xFFFFFFFFFFFFFFFF for x in state)
    h = torch.zeros((), dtype=torch.int64)
    for word in (seed & WORD, seed >> 32, offset & WORD, offset >> 32, index & WORD, index >> 32):
        h = mix(h ^ word)
    row, column = mix(torch.arange(sq) ^ h), mix(torch.arange(sk) ^ mix(h ^ 0x9E3779B9))
    return mix(row[:, None] ^ column[None]) >= int(dropout_p * 2**32)


def attend(q: Tensor, k: Tensor, v: Tensor, o: Options, batch: int) -> tuple[Tensor, Tensor]:
    """One sequence: q (H, sq, D), k (H, sk, D), v (H, sk, Dv) to out (H, sq, Dv) and lse (H, sq)."""
    heads, sq, sk = q.shape[0], q.shape[1], k.shape[1]
    s = q @ k.transpose(1, 2) * o.softmax_scale
    if o.softcap > 0:
        s = o.softcap * torch.tanh(s / o.softcap)
    position, key = torch.arange(sq)[:, None] + sk - sq, torch.arange(sk)[None]
    if o.alibi_slopes is not None:
        slopes = o.alibi_slopes.double()
        s = s - (slopes if slopes.dim() == 1 else slopes[batch])[:, None, None] * (position - key).abs()
    hidden = torch.zeros(sq, sk, dtype=torch.bool)
    if o.causal or o.window_right >= 0:
        hidden |= key > position + (0 if o.causal else o.window_right)
    if o.window_left >= 0:
        hidden |= key < position - o.window_left
    if o.attention_chunk > 0:
        hidden |= position.div(o.attention_chunk, rounding_mode="floor") != key // o.attention_chunk
    s = s.masked_fill(hidden, -math.inf)
    if o.sink is not None:
        s = torch.cat([s, o.sink.double()[:, None, None].expand(heads, sq, 1)], 2)
    blind = (s == -math.inf).all(2)
    lse = s.masked_fill(blind[:, :, None], 0.0).logsumexp(2) if s.shape[2] > 0 else torch.zeros(heads, sq).double()
    weights = torch.exp(s - lse[:, :, None]).masked_fill(blind[:, :, None], 0.0)[:, :, :sk]
    if o.dropout_p > 0 and o.rng_state is not None:
        keep = [kept(o.rng_state, batch * heads + h, sq, sk, o.dropout_p) for h in range(heads)]
        weights = weights * torch.stack(keep) / (1 - o.dropout_p)
    return weights @ v, lse.masked_fill(blind, -math.inf)


def reference(q: Tensor, k: Tensor, v: Tensor, o: Options) -> tuple[Tensor, Tensor]:
    """out and lse of the operator; rows that are not in use are 0 and -inf."""
    is_packed, heads = o.cu_seqlens_q is not None, q.shape[-2]
    out = q.new_zeros((*q.shape[:-1], v.shape[-1]))
    lse = q.new_full((heads, q.shape[0]) if is_packed else (q.shape[0], heads, q.shape[1]), -math.inf)
    group = heads // max(k.shape[-2], 1)
    batch = q.shape[0] if o.cu_seqlens_q is None else len(o.cu_seqlens_q) - 1
    for b in range(batch):

        def rows(x: Tensor, cu: Tensor | None, used: Tensor | None, skipped: int, b: int = b) -> tuple[Tensor, slice]:
            first, last = (0, x.shape[1]) if cu is None else (int(cu[b]), int(cu[b + 1]))
            last = last if used is None else min(last, first + int(used[b]))
            where = slice(first + skipped, max(first + skipped, last))
            return (x if cu is not None else x[b])[where].transpose(0, 1), where

        skipped = 0 if o.leftpad_k is None else max(0, int(o.leftpad_k[b]))
        q_b, where = rows(q, o.cu_seqlens_q, o.seqused_q, 0)
        k_b, v_b = (rows(x, o.cu_seqlens_k, o.seqused_k, skipped)[0].repeat_interleave(group, 0) for x in (k, v))
        if q_b.shape[1] == 0:
            continue
        out_b, lse_b = attend(q_b, k_b, v_b, o, b)
        if is_packed:
            out[where], lse[:, where] = out_b.transpose(0, 1), lse_b
        else:
            out[b, where], lse[b, :, where] = out_b.transpose(0, 1), lse_b
    return out, lse


def check(
    case: Case,
    dlse: bool = False,
    lse_view: Callable[[Tensor], Tensor] | None = None,
    grads: Sequence[Tensor] | None = None,
    dout: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Forward and backward against float64; the inputs stay as they were."""
    view = lse_view or (lambda x: x)
    before = [x.clone() for x in (case.q, case.k, case.v)]
    out, lse = case.forward()
    leaves = [x.detach().double().requires_grad_() for x in (case.q, case.k, case.v)]
    wanted_out, wanted_lse = reference(*leaves, case.options)
    assert (out.dtype, lse.dtype) == (case.q.dtype, torch.float32)
    close(out, wanted_out, "out")
    close(lse, wanted_lse, "lse", 2e-3)
    dout = halves(*out.shape) if dout is None else dout
    lse_grad = torch.randn(lse.shape) if dlse else None
    loss = (wanted_out * dout).sum() + sum(0.0 * x.sum() for x in leaves)
    if lse_grad is not None:
        loss = loss + (wanted_lse.masked_fill(wanted_lse == -math.inf, 0.0) * lse_grad).sum()
    wanted = torch.autograd.grad(loss, leaves)
    given = grads or [torch.full_like(x, math.nan, memory_format=torch.contiguous_format) for x in before]
    found = BWD_GENERAL(
        dout, case.q, case.k, case.v, out, view(lse), None if lse_grad is None else view(lse_grad), *given,
        *case.options.backward(), True,
    )  # fmt: skip
    assert found is None
    for name, gradient, expected in zip(("dq", "dk", "dv"), given, wanted, strict=True):
        close(gradient, expected, name, 0.1, contiguous=grads is None)
    for x, old in zip((case.q, case.k, case.v), before, strict=True):
        assert torch.equal(x, old)
    return out, lse


# ---- Masks and score modifiers ----


def case_general_like_plain() -> None:
    """Without options the general operators are the plain ones, to the bit."""
    for causal in (False, True):
        case = batched(causal=causal)
        out, lse = check(case)
        for found, expected in zip((out, lse), FWD(case.q, case.k, case.v, 0.3, causal), strict=True):
            assert torch.equal(found, expected)
        given = [torch.empty_like(x) for x in (case.q, case.k, case.v)]
        BWD_GENERAL(out, case.q, case.k, case.v, out, lse, None, *given, *case.options.backward(), False)
        plain = BWD(out, case.q, case.k, case.v, out, lse, 0.3, causal, False)
        assert all(torch.equal(found, expected) for found, expected in zip(given, plain, strict=True))


def case_windows() -> None:
    for left, right in ((3, -1), (-1, 2), (2, 4), (0, 0)):
        check(batched(window_left=left, window_right=right))
    for left, right in ((3, 0), (5, 1)):
        check(batched(window_left=left, window_right=right, causal=True))
    check(batched(sq=13, sk=5, window_left=2, window_right=1))  # rows that see no key
    check(batched(b=1, sq=100, sk=70, h=1, hk=1, d=8, dv=8, window_left=20, window_right=30))


def case_chunks() -> None:
    for sq, sk, causal in ((9, 13, False), (13, 9, True), (13, 13, True)):
        check(batched(sq=sq, sk=sk, attention_chunk=4, causal=causal))
    check(batched(attention_chunk=5, window_left=2, causal=True))


def case_softcap() -> None:
    for causal in (False, True):
        check(batched(softcap=1.5, causal=causal))


def case_alibi() -> None:
    torch.manual_seed(2)
    check(batched(alibi_slopes=torch.rand(4)))
    check(batched(alibi_slopes=torch.rand(2, 4), causal=True))
    check(batched(sq=13, sk=9, alibi_slopes=torch.rand(4)))


def case_alibi_in_other_layouts() -> None:
    torch.manual_seed(2)
    check(batched(alibi_slopes=torch.rand(4).half()))
    check(batched(alibi_slopes=torch.rand(4, 2).T))
    check(batched(alibi_slopes=torch.rand(4).double().expand(2, 4)))
    check(batched(alibi_slopes=torch.rand(8)[::2]))


def case_sink() -> None:
    check(batched(sink=torch.tensor([-1.0, 0.5, 3.0, -9.0])))
    # Rows that see the sink alone.
    check(batched(sq=5, sk=2, sink=torch.tensor([1.0, 0.0, 2.0, -2.0]).bfloat16(), causal=True))
    check(batched(sk=0, sink=torch.ones(4)))


def case_dropout() -> None:
    for p, state in ((0.1, (5, 7)), (0.5, (-(1 << 62) + 12345, 1 << 40)), (0.9, (1 << 33, -1))):
        check(batched(dropout_p=p, rng_state=torch.tensor(state)))
    check(packed([3, 9], [11, 8], dropout_p=0.3, rng_state=torch.tensor([3, 4]), causal=True))
    check(batched(rng_state=torch.tensor([3, 4])))  # without dropout it is of no account


def case_everything_at_once() -> None:
    torch.manual_seed(4)
    check(
        packed(
            [3, 0, 9], [11, 4, 8], alibi_slopes=torch.rand(3, 4), sink=torch.randn(4), causal=True, window_left=4,
            dropout_p=0.25, rng_state=torch.tensor([1, 2]), seqused_k=ints(10, 0, 8), d=36, dv=20,
        ),
        dlse=True,
    )  # fmt: skip


# ---- Sequences ----


def case_packed_sequences() -> None:
    for causal in (False, True):
        check(packed([5, 1, 0, 9], [3, 7, 2, 9], causal=causal))
        check(packed([70, 130, 1], [40, 1, 100], h=1, hk=1, d=8, dv=8, causal=causal))  # several tiles each
        check(packed([2, 3], [4, 5], d=128, dv=128, causal=causal))  # a split kernel


def case_max_seqlen_above_the_longest() -> None:
    case = packed([5, 3], [4, 6], causal=True)
    check(replace(case, options=replace(case.options, max_seqlen_q=1 << 40, max_seqlen_k=100)))


def case_packed_queries_and_batched_keys() -> None:
    case = packed([5, 2], [], causal=True)
    options = replace(case.options, cu_seqlens_k=None, seqused_k=ints(6, 3))
    check(replace(case, k=halves(2, 7, 2, 64), v=halves(2, 7, 2, 64), options=options))


def case_batched_queries_and_packed_keys() -> None:
    case = packed([], [5, 2], causal=True)
    options = replace(case.options, cu_seqlens_q=None)
    check(replace(case, q=halves(2, 4, 4, 64), options=options))


def case_used_lengths_and_left_padding() -> None:
    check(batched(seqused_q=ints(4, 0)))
    check(batched(seqused_k=ints(13, 5), causal=True))
    check(batched(seqused_q=ints(9, 3), seqused_k=ints(0, 8), window_left=3))
    check(batched(leftpad_k=ints(2, 13), causal=True))
    check(batched(leftpad_k=ints(-2, 3), causal=True))
    check(batched(leftpad_k=ints(2, 0), seqused_k=ints(9, 1), causal=True))
    check(packed([5, 4], [8, 6], seqused_q=ints(2, 4), seqused_k=ints(7, 3), leftpad_k=ints(1, 0)))


def case_rows_past_the_last_sequence() -> None:
    """Left alone where there are sequences, cleared where there is none that they could be of."""
    q, k, v = halves(5, 4, 64), halves(6, 2, 64), halves(6, 2, 64)
    for lengths_q, lengths_k in (([], []), ([0], [6]), ([5], [0])):
        check(Case(q, k, v, packed(lengths_q, lengths_k).options))


def case_nothing_at_all() -> None:
    for lengths_q, lengths_k in (([], []), ([0, 0], [0, 0]), ([0], [3]), ([3], [0])):
        check(packed(lengths_q, lengths_k))
    for case in (batched(b=0), batched(sk=0), batched(sq=0, softcap=1.0), batched(h=0, hk=0)):
        check(case)


# ---- Head dims and layouts ----


def case_value_head_dims() -> None:
    for d, dv in ((64, 32), (32, 64), (40, 128), (128, 8), (36, 20), (7, 64), (64, 7)):
        check(batched(d=d, dv=dv, causal=True), dlse=d == 64)
    check(packed([5, 3], [4, 6], d=36, dv=100))


def case_value_head_dim_of_the_plain_operators() -> None:
    for d, dv in ((64, 32), (20, 72)):
        case = batched(d=d, dv=dv)
        out, lse = FWD(case.q, case.k, case.v, 0.3, False)
        expected_out, expected_lse = check(case)
        assert torch.equal(out, expected_out)
        assert torch.equal(lse, expected_lse)
        grads = BWD(out, case.q, case.k, case.v, out, lse, 0.3, False, True)
        assert [g.shape for g in grads] == [case.q.shape, case.k.shape, case.v.shape]


def case_lse_gradient() -> None:
    check(batched(causal=True), dlse=True)
    check(batched(sq=5, sk=2, causal=True), dlse=True)  # rows that see no key
    check(packed([5, 3], [4, 6]), dlse=True)


def case_lse_in_other_layouts() -> None:
    def transposed(x: Tensor) -> Tensor:
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    check(batched(), dlse=True, lse_view=transposed)
    check(packed([5, 3], [4, 6]), dlse=True, lse_view=transposed)
    case = packed([5, 3], [4, 6])
    out, lse = case.forward()
    given = [[torch.empty_like(x) for x in (case.q, case.k, case.v)] for _ in range(2)]
    for grads, dlse in zip(given, (torch.ones(()).expand(lse.shape), torch.ones(lse.shape)), strict=True):
        BWD_GENERAL(out, case.q, case.k, case.v, out, lse, dlse, *grads, *case.options.backward(), True)
    assert all(torch.equal(a, b) for a, b in zip(*given, strict=True))


def case_packed_inputs_that_are_copied() -> None:
    case = packed([5, 3], [4, 6], causal=True)
    check(replace(case, q=case.q.transpose(0, 2).contiguous().transpose(0, 2)))
    check(replace(case, k=torch.cat([case.k, case.k], -1)[..., 1:65], v=case.v[:, :1].expand(-1, 2, -1)))
    check(case, dout=torch.ones((), dtype=torch.float16).expand(case.q.shape))


# ---- Gradients into given tensors ----


def case_gradients_into_qkv() -> None:
    """The parts of one packed tensor, (B, S, 3, H, D) or (T, 3, H, D); nothing else is written."""
    for lead in ((2, 9), (14,)):
        case = packed([5, 9], [5, 9], h=2) if len(lead) == 1 else batched(sk=9, h=2)
        qkv, dqkv = halves(*lead, 3, 2, 64), torch.full((*lead, 4, 2, 64), math.nan).half()
        q, k, v = qkv.unbind(-3)
        check(replace(case, q=q, k=k, v=v), grads=dqkv.unbind(-3)[:3])
        assert dqkv.select(-3, 3).isnan().all()


def case_gradients_into_kv() -> None:
    case = packed([3, 5], [5, 9], d=64, causal=True)
    kv, dkv = halves(14, 2, 2, 64), torch.full((14, 2, 2, 64), math.nan).half()
    grads = [torch.empty_like(case.q), *dkv.unbind(1)]
    check(replace(case, k=kv[:, 0], v=kv[:, 1]), grads=grads)


def case_gradients_through_temporaries() -> None:
    """Where the kernels cannot write: odd head dims, odd addresses, transposed columns; and rows that none writes."""
    for d in (64, 36):
        for more in ({}, {"seqused_q": ints(3, 0), "seqused_k": ints(0, 6)}):
            case = batched(d=d, dv=d, hk=4, sk=9, **more)
            shape = case.q.shape
            odd = torch.full((case.q.numel() + 1,), math.nan).half()[1:].view(shape)
            wide = torch.full((*shape[:3], d + 6), math.nan).half()
            turned = torch.full((shape[0], d, shape[2], shape[1]), math.nan).half().transpose(1, 3)
            check(case, grads=[odd, wide[..., 3 : d + 3], turned])
            assert wide[..., :3].isnan().all()
            assert wide[..., d + 3 :].isnan().all()
    case = packed([3, 5], [4, 9], d=20, dv=12)
    dqkv = torch.full((8, 5, 20), math.nan).half()
    check(case, grads=[dqkv[:, :4], torch.empty_like(case.k), torch.empty_like(case.v)])
    assert dqkv[:, 4].isnan().all()


def case_gradient_into_an_expanded_tensor() -> None:
    case = batched()
    out, lse = case.forward()
    narrow = torch.zeros(2, 9, 1, 64).half().expand(case.q.shape)
    grads = [narrow, torch.empty_like(case.k), torch.empty_like(case.v)]
    arguments = (out, case.q, case.k, case.v, out, lse, None, *grads, *case.options.backward(), False)
    raises(lambda: BWD_GENERAL(*arguments), "torch could not copy a tensor")


# ---- Errors and ownership ----


def case_wrong_options() -> None:
    case = packed([5, 3], [4, 6], causal=True)

    def call(**changes: Any) -> Callable[[], object]:
        return replace(case, options=replace(case.options, **changes)).forward

    raises(call(cu_seqlens_q=None), "q has 3 dimensions, not 4")
    raises(call(cu_seqlens_k=None), "k has 3 dimensions, not 4")
    raises(call(cu_seqlens_k=ints(0, 4)), "cu_seqlens_k has shape (2), expected (3)")
    raises(call(cu_seqlens_q=ints()), "cu_seqlens_q has shape (0), expected (batch + 1)")
    raises(call(cu_seqlens_q=ints(0, 5, 8).long()), "cu_seqlens_q is int64, expected int32")
    raises(call(cu_seqlens_q=ints(0, 5, 8)[None]), "cu_seqlens_q has 2 dimensions, not 1")
    raises(call(cu_seqlens_k=ints(0, 1, 4, 7, 10)[::2]), "cu_seqlens_k of shape (3) has strides (2)", "contiguous")
    for name in ("seqused_q", "seqused_k", "leftpad_k"):
        raises(call(**{name: ints(1)}), f"{name} has shape (1), expected (2)")
        raises(call(**{name: torch.ones(2)}), f"{name} is float32, expected int32")
    raises(call(alibi_slopes=torch.ones(3)), "alibi_slopes has shape (3), expected (4)")
    raises(call(alibi_slopes=torch.ones(4, 2)), "alibi_slopes has shape (4, 2), expected (2, 4)")
    raises(call(alibi_slopes=torch.ones(())), "alibi_slopes has 0 dimensions, not 2")
    raises(call(sink=torch.ones(2)), "sink has shape (2), expected (4)")
    raises(call(dropout_p=0.1), "dropout_p is 0.1, but rng_state is None")
    raises(call(dropout_p=1.0, rng_state=torch.tensor([1, 2])), "dropout_p is 1")
    raises(call(dropout_p=0.1, rng_state=torch.tensor([1])), "rng_state has shape (1), expected (2)")
    raises(call(dropout_p=0.1, rng_state=ints(1, 2)), "rng_state is int32, expected int64")
    raises(call(max_seqlen_q=-1), "max_seqlen_q is -1")
    raises(call(max_seqlen_k=-1), "max_seqlen_k is -1")
    raises(call(block_table=ints(0)[None]), "block_table")
    raises(lambda: replace(case, k=case.k[:-1]).forward(), "v has shape (10, 2, 64), expected (9, 2, 64)")
    raises(lambda: replace(case, k=case.k[..., :32]).forward(), "k has shape (10, 2, 32), expected (10, 2, 64)")
    wide = batched(d=8, dv=136)
    raises(wide.forward, "fwd-sm80-fp16-d192-full is not built", "head_dim 136")


def case_wrong_gradients() -> None:
    for case in (batched(), packed([5, 3], [4, 6])):
        out, lse = case.forward()
        sound = {"dout": out, "q": case.q, "k": case.k, "v": case.v, "out": out, "lse": lse, "dlse": lse}
        sound.update(dq=torch.empty_like(case.q), dk=torch.empty_like(case.k), dv=torch.empty_like(case.v))

        def call(case: Case = case, sound: dict[str, Tensor] = sound, **changes: Tensor) -> Callable[[], object]:
            return lambda: BWD_GENERAL(*{**sound, **changes}.values(), *case.options.backward(), False)

        raises(call(dout=out[..., :32]), "dout has shape")
        raises(call(out=out.bfloat16()), "out and q have different dtypes: out is bfloat16, q is float16")
        raises(call(dlse=lse.double()), "dlse is of another dtype, expected float32")
        raises(call(dlse=lse[..., :-1]), "dlse has shape")
        raises(call(lse=lse[0]), "lse has ")
        raises(call(dq=sound["dq"][..., :32]), "dq has shape")
        raises(call(dk=sound["dk"][:-1]), "dk has shape")
        raises(call(dv=sound["dv"].float()), "dv and v have different dtypes")
        raises(call(dv=sound["dv"][0]), "dv has ")


def loaded_case(d: int) -> Case:
    """With every option, all of them in need of a copy."""
    case = packed([5, 3], [4, 6], d=d, dv=d, seqused_q=ints(5, 2), seqused_k=ints(4, 6), leftpad_k=ints(0, 1))
    slopes, sink = torch.rand(2, 4).half()
    more = {"alibi_slopes": slopes, "sink": sink, "dropout_p": 0.5, "rng_state": torch.tensor([1, 2])}
    return replace(case, options=replace(case.options, **more))


def tensors(case: Case) -> list[StorageWeakRef]:
    found = [x for x in (case.q, case.k, case.v, *case.options.forward()) if isinstance(x, Tensor)]
    return [StorageWeakRef(x.untyped_storage()) for x in found]


def case_general_success_frees_everything() -> None:
    for d in (64, 36):
        case = loaded_case(d)
        (out, lse), left = made(case.forward)
        assert left in (0, 2), left  # as case_success_frees_everything
        given = [torch.empty_like(x) for x in (case.q, case.k, case.v)]
        arguments = [out, case.q, case.k, case.v, out, lse, lse, *given, *case.options.backward(), False]
        _, left = made(lambda arguments=arguments: BWD_GENERAL(*arguments))
        assert left == 0
        references = [*tensors(case), *(StorageWeakRef(x.untyped_storage()) for x in (out, lse, *given))]
        del case, out, lse, given, arguments
        gc.collect()
        assert all(reference.expired() for reference in references)


class MallocState(ctypes.Structure):
    """What glibc's mallinfo2 returns; ``in_use`` are bytes."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in ("a", "b", "c", "d", "e", "f", "g", "in_use", "h", "i"))


def case_optionals_are_freed() -> None:
    """torch boxes each in a piece of memory that is the operator's to free."""
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = MallocState
    case = loaded_case(64)
    options = replace(case.options, block_table=ints(0))
    arguments = (case.q, case.k, case.v, *options.forward())

    def call() -> None:
        raises(lambda: FWD_GENERAL(*arguments), "block_table")

    call()
    before = mallinfo().in_use
    for _ in range(5000):
        call()
    assert mallinfo().in_use - before < 5000 * 32


def case_general_failures_free_everything() -> None:
    for where in ("cuLaunchKernel=700", "cuMemsetD32Async=700", "aoti_torch_empty_strided", "aoti_torch_copy_"):
        case = loaded_case(36)
        out, lse = case.forward()
        given = [torch.empty_like(x) for x in (case.q, case.k, case.v)]
        arguments = [out, case.q, case.k, case.v, out, lse, lse, *given, *case.options.backward(), False]
        references = [*tensors(case), *(StorageWeakRef(x.untyped_storage()) for x in (out, lse, *given))]
        variable = "FAKE_CUDA_FAIL" if "=" in where else "FAKE_TORCH_FAIL"
        os.environ[variable] = where
        try:
            part = "CUDA_ERROR_ILLEGAL_ADDRESS" if "=" in where else "torch could not"
            raises(case.forward, part)
            if "Memset" not in where:
                raises(lambda arguments=arguments: BWD_GENERAL(*arguments), part)
        finally:
            del os.environ[variable]
        del case, out, lse, given, arguments
        gc.collect()
        assert all(reference.expired() for reference in references), where
