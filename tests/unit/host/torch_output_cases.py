"""Cases of the overloads ``output``: an operator's first result alone, and what the host library checks itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch_cache_cases import Decode, Update, launches, paged, slabs, updating
from torch_fp8_cases import Case as Fp8Case
from torch_fp8_cases import batched as fp8
from torch_general_cases import Options, halves, ints, packed
from torch_general_cases import reference as general_reference
from torch_support import (
    DECODE_OUTPUT,
    FWD,
    FWD_FP8_OUTPUT,
    FWD_GENERAL_OUTPUT,
    FWD_OUTPUT,
    FWD_ROUNDED,
    KVCACHE_OUTPUT,
    made,
    raises,
)


def one_tensor(call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """What ``call`` gives: nothing else that it made is left."""
    out, left = made(partial(call, *arguments))
    assert isinstance(out, Tensor)
    assert left <= 1, left
    return out


def tensors(sq: int = 9, sk: int = 13, h: int = 4, hk: int = 2, d: int = 64, dv: int | None = None) -> list[Tensor]:
    torch.manual_seed(sq + d)
    return [halves(2, sq, h, d), halves(2, sk, hk, d), halves(2, sk, hk, d if dv is None else dv)]


def case_output() -> None:
    for d in (1, 24, 36, 64, 100, 128):
        q, k, v = tensors(d=d)
        for causal in (False, True):
            assert torch.equal(one_tensor(FWD_OUTPUT, q, k, v, causal), FWD(q, k, v, d**-0.5, causal)[0])
            assert torch.equal(one_tensor(FWD_OUTPUT, q, k, v, causal, 0.3), FWD(q, k, v, 0.3, causal)[0])
    q, k, v = tensors(dv=32)
    assert torch.equal(one_tensor(FWD_OUTPUT, q, k, v), FWD(q, k, v, 0.125, False)[0])


def case_output_of_nothing() -> None:
    for sizes in ({"sq": 0}, {"sk": 0}, {"h": 0}):
        q, k, v = tensors(**sizes)
        assert torch.equal(one_tensor(FWD_OUTPUT, q, k, v), FWD(q, k, v, 0.125, False)[0])


def case_output_of_each_family() -> None:
    """The kernels of few scores are given no memory for the log-sum-exp; the others have it."""
    for sk, family in ((1024, "sm90"), (1023, "sm80")):
        q, k, v = halves(1, 1024, 2, 8), halves(1, sk, 1, 8), halves(1, sk, 1, 8)
        with launches() as found:
            out = one_tensor(FWD_OUTPUT, q, k, v, True)
        assert [x["key"].split("-")[1] for x in found] == [family], found
        assert torch.equal(out, FWD(q, k, v, 8**-0.5, True)[0])


def case_output_wrong_arguments() -> None:
    q, k, v = tensors()
    raises(lambda: FWD_OUTPUT(q[0], k, v), "q has 3 dimensions, not 4")
    raises(lambda: FWD_OUTPUT(q, k[:1], v), "k has shape (1, 13, 2, 64), expected (2, 13, 2, 64)")
    raises(lambda: FWD_OUTPUT(q, k, v[:, 1:], True, 0.3), "v has shape (2, 12, 2, 64), expected (2, 13, 2, 64)")
    raises(lambda: FWD_OUTPUT(q, k.bfloat16(), v), "k is bfloat16")
    raises(lambda: FWD_OUTPUT(q.float(), k.float(), v.float()), "q is float32")
    raises(lambda: FWD_OUTPUT(q[:, :, :3], k, v), "q has 3 heads", "2 heads of k and v")
    raises(lambda: FWD_OUTPUT(q[:, :, :0], k[:, :, :0], v[:, :, :0]), "k has no heads")


def case_output_of_packed_sequences() -> None:
    for lengths_q, lengths_k in (([5, 0, 70], [9, 3, 70]), ([1024], [1024]), ([0], [0])):
        case = packed(lengths_q, lengths_k, causal=True, softmax_scale=0.125)
        o = case.options
        arguments = (case.q, case.k, case.v, o.cu_seqlens_q, o.cu_seqlens_k, o.max_seqlen_q, o.max_seqlen_k, True)
        wanted, _ = case.forward()
        assert torch.equal(one_tensor(FWD_GENERAL_OUTPUT, *arguments), wanted)
        assert torch.equal(FWD_GENERAL_OUTPUT(*arguments, 0.125), wanted)
    q, k, v, starts_q, starts_k = arguments[:5]
    raises(
        lambda: FWD_GENERAL_OUTPUT(q, k, v, starts_q, starts_k[:1], 1, 1), "cu_seqlens_k has shape (1), expected (2)"
    )
    raises(lambda: FWD_GENERAL_OUTPUT(q, k, v, starts_q, starts_k, -1, 1), "max_seqlen_q is -1")
    raises(lambda: FWD_GENERAL_OUTPUT(q, k, v, starts_q.long(), starts_k, 1, 1), "cu_seqlens_q is int64")
    raises(lambda: FWD_GENERAL_OUTPUT(q, k[:, :0], v[:, :0], starts_q, starts_k, 1, 1), "heads")


def decode_output(c: Decode, *scale: float) -> Tensor:
    out: Tensor = DECODE_OUTPUT(c.q, c.k_cache, c.v_cache, c.causal, c.seqlens_k, c.seqlen_k, c.block_table, *scale)
    return out


def case_decode_output() -> None:
    for case in (
        slabs(softmax_scale=0.125),
        slabs(sq=3, causal=True, seqlens_k=ints(40, 7), softmax_scale=0.125),
        slabs(capacity=700, seqlen_k=600, softmax_scale=0.125),
        slabs(b=0, softmax_scale=0.125),
        paged(seqlens_k=ints(17, 3), softmax_scale=0.125),
        slabs(d=36, dv=36, softmax_scale=36**-0.5),
    ):
        wanted, _ = case()
        assert torch.equal(one_tensor(decode_output, case), wanted)
        assert torch.equal(decode_output(case, case.softmax_scale), wanted)
    case = slabs()
    assert torch.equal(decode_output(case, 0.3), case()[0])
    raises(lambda: decode_output(replace(case, q=case.q.float()), 0.3), "different dtypes")
    raises(lambda: decode_output(replace(case, seqlens_k=ints(1))), "seqlens_k has shape (1), expected (2)")
    wide = {name: getattr(case, name).float() for name in ("k_cache", "v_cache")}
    raises(lambda: decode_output(replace(case, q=case.q[:, :0].float(), **wide)), "q is float32")


def kvcache_output(c: Update, *scale: float) -> Tensor:
    out: Tensor = KVCACHE_OUTPUT(
        c.q, c.k_cache, c.v_cache, c.k, c.v, c.cos, c.sin, c.interleaved, c.causal, c.seqlens_k, c.seqlen_k,
        c.block_table, *scale,
    )  # fmt: skip
    return out


def case_update_output() -> None:
    """The caches are written as by the operator."""
    for rotates in (0, 16):
        case = updating(seqlens_k=ints(0, 11), causal=True, rotates=rotates, softmax_scale=0.125)
        other = replace(case, k_cache=case.k_cache.clone(), v_cache=case.v_cache.clone())
        wanted, _ = case()
        assert torch.equal(one_tensor(kvcache_output, other), wanted)
        assert torch.equal(other.k_cache, case.k_cache)
        assert torch.equal(other.v_cache, case.v_cache)
        assert torch.equal(kvcache_output(other, 0.125), wanted)
    raises(lambda: kvcache_output(replace(case, seqlens_k=None)), "k is given, but neither seqlens_k nor seqlen_k")


def fp8_output(c: Fp8Case, *options: Any) -> Tensor:
    out: Tensor = FWD_FP8_OUTPUT(c.q, c.k, c.v, *c.descales, *options)
    return out


def case_fp8_output() -> None:
    for causal in (False, True):
        case = fp8(causal=causal, softmax_scale=0.125)
        wanted, _ = case.forward()
        assert torch.equal(one_tensor(fp8_output, case, causal), wanted)
        assert torch.equal(fp8_output(case, causal, 0.125), wanted)
        plain = replace(case, descales=[None, None, None])
        assert torch.equal(fp8_output(plain, causal), plain.forward()[0])
    case = fp8(sq=0)
    assert torch.equal(fp8_output(case), case.forward()[0])
    case = fp8()
    raises(lambda: fp8_output(replace(case, q=case.q.half())), "different dtypes")
    raises(lambda: fp8_output(replace(case, descales=[torch.ones(2, 3), None, None])), "q_descale has shape (2, 3)")


def case_rounded() -> None:
    """FP8 attention of 16-bit tensors: the error is FP8's, in any layout, with outliers and biased keys and values."""
    options = {"causal": True, "softmax_scale": 0.1}
    for d, dv, dtype in ((64, 64, torch.float16), (128, 128, torch.bfloat16), (48, 32, torch.float16)):
        for key in (-1, 7):
            errors = {}
            for smooth_k, smooth_v in itertools.product((False, True), repeat=2):
                q, k, v = (x.to(dtype) for x in tensors(sq=230, sk=250, d=d, dv=dv))
                k[..., 3] += 4.0
                v += 1.0
                q[:, ::7, :, 5] *= 9.0
                layouts = [q, k.transpose(1, 2).contiguous().transpose(1, 2), v]
                with launches() as found:
                    out = one_tensor(FWD_ROUNDED, *layouts, True, key, smooth_k, smooth_v, 0.1)
                names = ["sums", "largest", "round", "transpose_v", "fwd"]
                wanted_names = [f"flash_round_{name}" if name in names[:2] else f"flash_{name}" for name in names]
                assert [x["entry"] for x in found] == wanted_names, found
                forward = f"sm90-e4m3-d{(max(d, dv) + 63) // 64 * 64}"
                keys = [f"round-{forward}-general"] * 3 + [f"fwd-{forward}-causal"] * 2
                assert [x["key"] for x in found] == keys, found
                wanted, _ = general_reference(*(x.double() for x in (q, k, v)), Options(**options))
                assert out.dtype is torch.bfloat16
                error = (out.double() - wanted).norm() / (wanted - 1.0).norm()
                assert error < 0.065, (d, key, smooth_k, smooth_v, error)
                errors[smooth_k, smooth_v] = error
            assert all(errors[k, True] < 0.95 * errors[k, False] for k in (False, True)), errors


def case_rounded_sequences_do_not_meet() -> None:
    """Each has the bits that it has alone, whatever the other is; NaN stays in its head."""
    for sk in (13, 250):
        q, k, v = tensors(sk=sk)
        v[0] += 7.0
        k[0] *= 5.0
        v[1, 5, 1, 3] = float("nan")
        for key in (-1, 7):
            found = one_tensor(FWD_ROUNDED, q, k, v, False, key, True, True)
            for b in range(2):
                alone = FWD_ROUNDED(q[b : b + 1], k[b : b + 1], v[b : b + 1], False, key, True, True)
                torch.testing.assert_close(alone[0], found[b], rtol=0, atol=0, equal_nan=True)
            assert torch.equal(found.isnan().any(1).any(-1), torch.tensor([[False] * 4, [False] * 2 + [True] * 2]))


def case_rounded_wrong_arguments() -> None:
    """What Python then rounds by other means."""
    q, k, v = tensors()
    raises(
        lambda: FWD_ROUNDED(*tensors(d=40), False, 1, True, True), "q has rows that are not whole pieces of 32 bytes"
    )
    raises(lambda: FWD_ROUNDED(*tensors(dv=72), False, 1, True, True), "v has rows that are not whole pieces")
    raises(
        lambda: FWD_ROUNDED(q[..., ::2], k[..., ::2], v, False, 1, True, True), "q has rows that are not whole pieces"
    )
    raises(lambda: FWD_ROUNDED(*tensors(dv=128), False, 1, True, True), "fewer columns than v")
    raises(lambda: FWD_ROUNDED(*tensors(sq=0), False, 1, True, True), "nothing to round")
    raises(lambda: FWD_ROUNDED(*tensors(sk=0), False, 1, True, True), "nothing to round")
    raises(lambda: FWD_ROUNDED(q.float(), k.float(), v.float(), False, 1, True, True), "q is float32")
    raises(
        lambda: FWD_ROUNDED(*tensors(d=256), False, 1, True, True), "kernel round-sm90-e4m3-d256-general is not built"
    )
