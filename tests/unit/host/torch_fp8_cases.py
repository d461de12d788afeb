"""Cases of the FP8 operator: e4m3 tensors with factors, V through the workspace, and what it refuses."""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_cache_cases import launches
from torch_general_cases import Options, ints, reference, starts
from torch_support import FWD_FP8, close, made, raises

E4M3 = torch.float8_e4m3fn
_LACKING = ("block_table", "alibi_slopes", "rng_state", "dropout_p")


@dataclass
class Case:
    """q (B, Sq, H, D) or packed (T, H, D), k, v likewise, their factors and the options."""

    q: Tensor
    k: Tensor
    v: Tensor
    descales: list[Tensor | None] = field(default_factory=lambda: [None, None, None])
    options: Options = field(default_factory=Options)

    def forward(self) -> tuple[Tensor, Tensor]:
        names = [name for name in vars(Options()) if name not in _LACKING]
        options = [getattr(self.options, name) for name in names]
        out: tuple[Tensor, Tensor] = FWD_FP8(self.q, self.k, self.v, *self.descales, *options)
        return out

    def wide(self, x: Tensor, descale: Tensor | None, cu_seqlens: Tensor | None) -> Tensor:
        """In float64, each sequence and KV head, or block of rows, times its factor."""
        result = x.double()
        if descale is None:
            return result
        if descale.dim() == 3:
            bounds = None if cu_seqlens is None else cu_seqlens.tolist()
            for b in range(descale.shape[0] if bounds is None else len(bounds) - 1):
                rows = result[b] if bounds is None else result[bounds[b] : bounds[b + 1]]
                slab, first = (b, 0) if bounds is None else (0, bounds[b] // 64 + b)
                for i in range(rows.shape[0]):
                    rows[i] *= descale[slab, :, first + i // 64, None].double()
            return result
        factors = descale.double().repeat_interleave(x.shape[-2] // descale.shape[1], 1)
        for b in range(descale.shape[0]):
            rows = b if cu_seqlens is None else slice(int(cu_seqlens[b]), int(cu_seqlens[b + 1]))
            result[rows] *= factors[b][:, None]
        return result

    def check(self, key: str = "d64") -> tuple[Tensor, Tensor]:
        with launches() as found:
            out, lse = self.forward()
        assert [x["entry"] for x in found][-1:] == ["flash_fwd"], found
        assert all(x["key"].startswith("fwd-sm90-e4m3-") and key in x["key"] for x in found), found
        o = self.options
        wide = [
            self.wide(self.q, self.descales[0], o.cu_seqlens_q),
            self.wide(self.k, self.descales[1], o.cu_seqlens_k),
            self.wide(self.v, self.descales[2], o.cu_seqlens_k),
        ]
        wanted_out, wanted_lse = reference(*wide, o)
        assert out.dtype is torch.bfloat16
        close(out, wanted_out, "out")
        close(lse, wanted_lse, "lse", 2e-3)
        return out, lse


def eights(*shape: int) -> Tensor:
    return torch.randn(shape).to(E4M3)


def factors(b: int, hk: int) -> list[Tensor | None]:
    return [torch.rand(b, hk) + 0.5 for _ in range(3)]


def blocks(case: Case) -> Case:
    """With a factor for each 64 rows of each head; NaN where packed rows have none."""
    o = case.options
    for i, (x, bounds) in enumerate(((case.q, o.cu_seqlens_q), (case.k, o.cu_seqlens_k), (case.v, o.cu_seqlens_k))):
        if bounds is None:
            case.descales[i] = torch.rand(x.shape[0], x.shape[2], -(-x.shape[1] // 64)) + 0.5
            continue
        starts = bounds.tolist()
        given = torch.full((1, x.shape[1], x.shape[0] // 64 + len(starts) - 1), float("nan"))
        for b, (first, last) in enumerate(pairwise(starts)):
            at, count = first // 64 + b, -(-(last - first) // 64)
            given[..., at : at + count] = torch.rand(x.shape[1], count) + 0.5
        case.descales[i] = given
    return case


def batched(
    b: int = 2, sq: int = 9, sk: int = 70, h: int = 4, hk: int = 2, d: int = 64, dv: int = 64, **more: Any
) -> Case:
    torch.manual_seed(sq * 1000 + d)
    return Case(eights(b, sq, h, d), eights(b, sk, hk, d), eights(b, sk, hk, dv), factors(b, hk), Options(**more))


def packed(
    lengths_q: Sequence[int], lengths_k: Sequence[int], h: int = 4, hk: int = 2, d: int = 64, **more: Any
) -> Case:
    torch.manual_seed(sum(lengths_q))
    total_q, total_k = sum(lengths_q), sum(lengths_k)
    options = Options(
        cu_seqlens_q=starts(lengths_q),
        cu_seqlens_k=starts(lengths_k),
        max_seqlen_q=max(lengths_q),
        max_seqlen_k=max(lengths_k),
        **more,
    )
    return Case(
        eights(total_q, h, d), eights(total_k, hk, d), eights(total_k, hk, d), factors(len(lengths_q), hk), options
    )


def case_fp8_batches() -> None:
    batched().check()
    batched(causal=True).check()
    batched(sq=150, sk=130, d=128, dv=128).check("d128")
    batched(window_left=3, window_right=1, softcap=2.0, sink=torch.ones(4)).check()
    batched(attention_chunk=7).check()
    batched(seqused_q=ints(5, 9), seqused_k=ints(70, 33), leftpad_k=ints(0, 4)).check()


def case_fp8_packed() -> None:
    packed([9, 0, 40], [33, 5, 64]).check()
    packed([9, 0, 40], [33, 5, 64], causal=True).check()
    packed([1, 2], [31, 100], seqused_k=ints(31, 64)).check()


def case_fp8_head_dims() -> None:
    """Rows are moved in pieces of 16 elements: others are copied, padded."""
    for d, dv, key in ((8, 8, "d64"), (40, 24, "d64"), (33, 64, "d64"), (64, 72, "d128"), (120, 128, "d128")):
        batched(d=d, dv=dv).check(key)


def case_fp8_without_factors() -> None:
    case = batched()
    for which in range(3):
        some: list[Tensor | None] = [None, None, None]
        some[which] = case.descales[which]
        Case(case.q, case.k, case.v, some, case.options).check()
    one_for_all = torch.full((1, 1), 0.5).expand(2, 2)
    Case(case.q, case.k, case.v, [one_for_all, None, torch.rand(2, 2).t()], case.options).check()


def case_fp8_factors_of_blocks() -> None:
    """Served by the kernel of mask kind general, whatever the mask; any of the three may be for heads or missing."""
    for more in ({}, {"causal": True}, {"window_left": 90}):
        blocks(batched(sq=70, sk=200, **more)).check("d64-general")
    blocks(batched(seqused_q=ints(5, 9), seqused_k=ints(170, 133), leftpad_k=ints(0, 100), sk=180)).check("d64-general")
    blocks(packed([9, 0, 140], [133, 5, 64], causal=True)).check("d64-general")
    for which in range(3):
        case, of_blocks = batched(sk=130), blocks(batched(sk=130)).descales[which]
        case.descales[which] = of_blocks
        case.check("d64-general")
        some: list[Tensor | None] = [None, None, None]
        some[which] = of_blocks
        Case(case.q, case.k, case.v, some, case.options).check("d64-general")
    case = blocks(batched(sk=130))
    case.descales = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in case.descales if x is not None]
    case.check("d64-general")
    assert blocks(batched(sk=0)).check("d64")[0].shape == (2, 9, 4, 64)


def case_fp8_strides() -> None:
    case = batched()
    qkv = eights(2, 30, 3, 4, 64)
    Case(*qkv.unbind(2), options=case.options).check()
    Case(case.q.transpose(1, 2).contiguous().transpose(1, 2), case.k, case.v, case.descales).check()
    Case(eights(2, 9, 4, 72)[..., 8:], case.k, eights(2, 70, 2, 66)[..., 1:65], case.descales).check()
    Case(case.q, case.k, eights(2, 70, 64, 2).transpose(2, 3), case.descales).check()
    # A stride of 0 has no tensor map: copied.
    Case(case.q, eights(1, 70, 2, 64).expand(2, -1, -1, -1), case.v, case.descales).check()
    Case(eights(1, 9, 4, 64).expand(2, -1, -1, -1), case.k, eights(1, 70, 2, 64).expand(2, -1, -1, -1)).check()


def case_fp8_nothing_to_see() -> None:
    batched(sk=0).check()
    batched(sk=0, sink=torch.ones(4)).check()
    batched(sq=5, sk=2, causal=True).check()
    assert batched(sq=0).forward()[0].shape == (2, 0, 4, 64)
    out, lse = batched(b=0).forward()
    assert (out.shape, lse.shape) == ((0, 9, 4, 64), (0, 4, 9))


def case_fp8_refuses() -> None:
    case = batched()
    q, k, v = case.q, case.k, case.v

    def call(**changes: Any) -> Any:
        given = {"q": q, "k": k, "v": v, "descales": case.descales, **changes}
        return lambda: Case(given["q"], given["k"], given["v"], given["descales"]).forward()

    raises(call(v=v.half()), "v is float16, q is float8_e4m3fn")
    raises(call(q=q.half(), k=k.half(), v=v.half()), "q is float16, expected float8_e4m3fn")
    raises(call(descales=[torch.ones(2, 4), None, None]), "q_descale has shape (2, 4), expected (2, 2)")
    raises(call(descales=[None, torch.ones(2, 2).double(), None]), "k_descale is of another dtype, expected float32")
    raises(call(descales=[None, None, torch.ones(2)]), "v_descale has 1 dimensions, not 2")
    raises(call(descales=[torch.ones(2, 2, 1), None, None]), "q_descale has shape (2, 2, 1), expected (2, 4, 1)")
    raises(call(descales=[None, torch.ones(2, 2, 1), None]), "k_descale has shape (2, 2, 1), expected (2, 2, 2)")
    raises(call(k=k[:, :5]), "v has shape")


def case_fp8_failures_free_everything() -> None:
    for where in ("cuLaunchKernel=700", "cuTensorMapEncodeTiled=1", "aoti_torch_empty_strided", "aoti_torch_copy_"):
        case = batched(d=40)
        references = [
            StorageWeakRef(x.untyped_storage()) for x in (case.q, case.k, case.v, *case.descales) if x is not None
        ]
        variable = "FAKE_CUDA_FAIL" if "=" in where else "FAKE_TORCH_FAIL"
        os.environ[variable] = where
        part = {"cuL": "launching kernel", "cuT": "cannot be put into tensor maps"}.get(where[:3], "torch could not")
        try:
            raises(case.forward, part)
        finally:
            del os.environ[variable]
        del case
        gc.collect()
        assert all(reference.expired() for reference in references), where


def case_fp8_success_frees_everything() -> None:
    for d in (64, 36):
        case = batched(d=d)
        _, left = made(case.forward)
        assert left in (0, 2), left
