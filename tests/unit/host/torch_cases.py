"""Runs the built host library on CPU tensors that pass for CUDA tensors; see fake_torch_gpu.cpp.

Each ``case_`` function, here and in the other files of cases, raises where something is wrong. Prints a JSON object:
for every case "" or its traceback. Arguments: the host library (its kernel set beside it), and cases if not all.
"""

from __future__ import annotations

import gc
import json
import math
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch_cache_cases
import torch_family_cases
import torch_fp8_cases
import torch_general_cases
import torch_output_cases
import torch_rotary_cases
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch_support import BWD, FWD, close, made, raises

VERSION = tuple(map(int, torch.__version__.split(".")[:2]))


def reference(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention in float64: (B, Sq, H, D) and the log-sum-exp (B, H, Sq)."""
    group = q.shape[2] // max(k.shape[2], 1)
    q, k, v = (x.double().transpose(1, 2) for x in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    scores = q @ k.transpose(-1, -2) * scale
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(keys - rows + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0).unsqueeze(-1))
    return (weights @ v).transpose(1, 2), lse


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    dout: Tensor | None = None,
    lse_view: Callable[..., Any] | None = None,
) -> None:
    """Forward and backward of both operators against float64; the inputs stay as they were."""
    before = [x.clone() for x in (q, k, v)]
    scale = 0.3
    out, lse = FWD(q, k, v, scale, causal)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = reference(*leaves, scale, causal)
    assert lse.dtype == torch.float32
    assert out.dtype == q.dtype
    close(out, expected, "out")
    close(lse, expected_lse, "lse", 1e-3)
    dout = torch.randn(out.shape).to(q.dtype) if dout is None else dout
    grads = BWD(dout, q, k, v, out, lse if lse_view is None else lse_view(lse), scale, causal, True)
    wanted = torch.autograd.grad(expected, leaves, dout.double())
    for name, found, expected_grad in zip(("dq", "dk", "dv"), grads, wanted, strict=True):
        assert found.dtype == q.dtype
        close(found, expected_grad, name, 6e-2)
    for x, old in zip((q, k, v), before, strict=True):
        assert torch.equal(x, old)


def inputs(
    b: int = 2, sq: int = 9, sk: int = 13, h: int = 4, hk: int = 2, d: int = 64, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(sq * 1000 + d)
    return tuple(torch.randn(b, s, heads, d).to(dtype) for s, heads in ((sq, h), (sk, hk), (sk, hk)))  # type: ignore[return-value]


def case_full() -> None:
    check(*inputs(), causal=False)


def case_causal() -> None:
    check(*inputs(), causal=True)


def case_bf16() -> None:
    q, k, v = inputs(dtype=torch.bfloat16)
    out, lse = FWD(q, k, v, 0.3, False)
    expected, expected_lse = reference(q, k, v, 0.3, False)
    close(out, expected, "out", 5e-2)
    close(lse, expected_lse, "lse", 1e-3)


def case_head_dim_128() -> None:
    check(*inputs(d=128), causal=True)


def case_several_tiles() -> None:
    check(*inputs(b=1, sq=130, sk=70, h=2, hk=1, d=8), causal=True)


def case_causal_more_queries_than_keys() -> None:
    check(*inputs(sq=5, sk=2), causal=True)


def case_head_dims_that_are_padded() -> None:
    for d in (1, 7, 36, 65, 100, 127):
        check(*inputs(d=d), causal=d % 2 == 0)


def case_head_dims_inside_a_larger_kernel() -> None:
    for d in (8, 40, 96, 120):
        check(*inputs(d=d), causal=True)


def case_transposed() -> None:
    """(B, H, S, D) in memory, as most models have it."""
    check(*(x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs()), causal=True)


def case_packed() -> None:
    torch.manual_seed(1)
    qkv = torch.randn(2, 9, 3, 4, 64).half()
    check(*qkv.unbind(2), causal=True)


def case_last_dimension_not_contiguous() -> None:
    check(*(x.transpose(1, 3).contiguous().transpose(1, 3) for x in inputs()), causal=True)
    check(*(torch.cat([x, x], -1)[..., ::2] for x in inputs(d=32)), causal=False)


def case_rows_not_aligned() -> None:
    """Slices whose rows are not on 16 bytes, though their last dimension is contiguous."""
    check(*(torch.nn.functional.pad(x, (3, 2))[..., 3:-2] for x in inputs()), causal=False)
    check(*(torch.nn.functional.pad(x, (0, 1))[..., :-1] for x in inputs()), causal=False)


def case_pointer_not_aligned() -> None:
    """Contiguous tensors that begin on an odd element."""
    moved = []
    for x in inputs():
        storage = torch.empty(x.numel() + 1, dtype=x.dtype)
        moved.append(storage[1:].view(x.shape).copy_(x))
        assert moved[-1].data_ptr() % 16 != 0
    check(*moved, causal=True)


def case_odd_strides_of_single_rows() -> None:
    """A dimension of size 1 may have any stride."""
    q, k, v = inputs(b=1, sq=1, sk=1, h=1, hk=1)
    odd = [torch.as_strided(x, x.shape, (3, 5, 7, 1)) for x in (q, k, v)]
    check(*odd, causal=False)


def case_expanded_inputs() -> None:
    q, k, v = inputs(h=4, hk=1)
    check(q, k.expand(-1, -1, 4, -1), v.expand(-1, -1, 4, -1), causal=True)


def case_stride_0_gradient() -> None:
    """Field case 28: out.sum().backward()."""
    q, k, v = inputs()
    check(q, k, v, causal=True, dout=torch.ones((), dtype=q.dtype).expand(q.shape))
    q, k, v = inputs(d=36)
    check(q, k, v, causal=True, dout=torch.ones((), dtype=q.dtype).expand(q.shape))


def case_sliced_gradients() -> None:
    q, k, v = inputs()
    wide = torch.randn(*q.shape[:-1], 2 * q.shape[-1]).half()
    check(q, k, v, causal=True, dout=wide[..., 1 : 1 + q.shape[-1]])
    check(q, k, v, causal=True, dout=wide[..., ::2])
    check(q, k, v, causal=True, dout=torch.randn(q.shape[::-1]).half().permute(3, 2, 1, 0))


def case_lse_not_contiguous() -> None:
    def view(lse: Tensor) -> Tensor:
        return lse.transpose(1, 2).contiguous().transpose(1, 2)

    check(*inputs(), causal=True, lse_view=view)


def case_no_batch() -> None:
    q, k, v = inputs(b=0)
    out, lse = FWD(q, k, v, 0.3, True)
    assert out.shape == q.shape
    assert lse.shape == (0, 4, 9)
    assert [g.shape for g in BWD(q, q, k, v, out, lse, 0.3, True, False)] == [q.shape, k.shape, v.shape]


def case_no_queries() -> None:
    check(*inputs(sq=0), causal=True)


def case_no_keys() -> None:
    q, k, v = inputs(sk=0)
    out, lse = FWD(q, k, v, 0.3, False)
    assert torch.equal(out, torch.zeros_like(q))
    assert (lse == -math.inf).all()
    dq, dk, dv = BWD(q, q, k, v, out, lse, 0.3, False, False)
    assert torch.equal(dq, torch.zeros_like(q))
    assert dk.shape == dv.shape == k.shape


def case_no_heads() -> None:
    q, k, v = inputs(h=0, hk=0)
    out, lse = FWD(q, k, v, 0.3, False)
    assert out.shape == q.shape
    assert lse.shape == (2, 0, 9)


def case_inputs_that_require_grad() -> None:
    """The gradient is Python's matter: here such inputs are like others, also where they are copied."""
    for d in (64, 36):
        check(*(x.requires_grad_() for x in inputs(d=d)), causal=True)


def case_wrong_forward_arguments() -> None:
    q, k, v = inputs()
    bf16 = torch.bfloat16
    raises(lambda: FWD(q[0], k, v, 1.0, False), "q has 3 dimensions")
    raises(lambda: FWD(q, k, v[0], 1.0, False), "v has 3 dimensions")
    raises(lambda: FWD(q, k.to(bf16), v, 1.0, False), "k and q", "dtypes")
    raises(lambda: FWD(q, k, v.float(), 1.0, False), "v and q", "dtypes")
    raises(lambda: FWD(q.float(), k.float(), v.float(), 1.0, False), "q is float32", "float16 and bfloat16")
    raises(lambda: FWD(q, k[:1], v, 1.0, False), "k has shape (1, 13, 2, 64)", "(2, 13, 2, 64)")
    raises(lambda: FWD(q, k, v[:, :-1], 1.0, False), "v has shape (2, 12, 2, 64)")
    raises(lambda: FWD(q, k[..., :32], v, 1.0, False), "k has shape")
    raises(lambda: FWD(q[:, :, :3], k, v, 1.0, False), "3 heads", "2 heads")
    raises(lambda: FWD(q, k[:, :, :0], v[:, :, :0], 1.0, False), "4 heads", "0 heads")
    raises(lambda: FWD(q[..., :0], k[..., :0], v[..., :0], 1.0, False), "q has head_dim 0")
    raises(lambda: FWD(q, k, v[..., :0], 1.0, False), "v has head_dim 0")
    raises(lambda: FWD(*(x.repeat(1, 1, 1, 5) for x in (q, k, v)), 1.0, False), "head_dim 320")
    raises(lambda: FWD(*(x.repeat(1, 1, 1, 3) for x in (q, k, v)), 1.0, False), "fwd-sm80-fp16-d192-full", "not built")


def case_wrong_backward_arguments() -> None:
    q, k, v = inputs()
    out, lse = FWD(q, k, v, 0.3, False)
    sound = {"dout": out, "q": q, "k": k, "v": v, "out": out, "lse": lse}

    def call(**changes: Tensor) -> Callable[[], object]:
        return lambda: BWD(*{**sound, **changes}.values(), 0.3, False, False)

    raises(call(dout=out[:, :-1]), "dout has shape")
    raises(call(dout=out.bfloat16()), "dout and q")
    raises(call(out=out[..., :32]), "out has shape")
    raises(call(out=out.float()), "out and q")
    raises(call(out=out[0]), "out has 3 dimensions")
    raises(call(lse=lse.half()), "lse is float16, expected float32")
    raises(call(lse=lse[..., :-1]), "lse has shape (2, 4, 8)", "(2, 4, 9)")
    raises(call(lse=lse[:, :, None]), "lse has 4 dimensions")
    raises(call(k=k[:, :5]), "v has shape")


def case_failures_free_everything() -> None:
    """Whatever fails, the inputs are given back and what was made is freed, outputs and copies included."""
    for where in ("cuLaunchKernel=700", "aoti_torch_empty_strided", "aoti_torch_copy_"):
        q, k, v = inputs(d=36)
        out, lse = FWD(q, k, v, 0.3, False)
        references = [StorageWeakRef(x.untyped_storage()) for x in (q, k, v, out, lse)]
        variable = "FAKE_CUDA_FAIL" if "=" in where else "FAKE_TORCH_FAIL"
        os.environ[variable] = where
        try:
            part = "launching kernel" if "=" in where else "torch could not"
            raises(lambda q=q, k=k, v=v: FWD(q, k, v, 0.3, False), part)
            raises(lambda q=q, k=k, v=v, o=out, e=lse: BWD(o, q, k, v, o, e, 0.3, False, False), part)
        finally:
            del os.environ[variable]
        del q, k, v, out, lse
        gc.collect()
        assert all(reference.expired() for reference in references), where


def case_success_frees_everything() -> None:
    # Torch 2.7 to 2.10 free an operator's results by a function that the counter sees, others do not.
    for d in (64, 36):
        q, k, v = inputs(d=d)
        (out, lse), left = made(lambda q=q, k=k, v=v: FWD(q, k, v, 0.3, False))
        assert left in (0, 2), left
        grads, left = made(lambda q=q, k=k, v=v, o=out, e=lse: BWD(o, q, k, v, o, e, 0.3, False, False))
        assert left in (0, 3), left
        references = [StorageWeakRef(x.untyped_storage()) for x in (q, k, v, out, lse, *grads)]
        del q, k, v, out, lse, grads
        gc.collect()
        assert all(reference.expired() for reference in references)


def case_reason_of_torch_is_told() -> None:
    """What torch says of a failure inside it reaches the message, from torch 2.13 on."""
    q, k, _ = inputs(b=1, sq=1, sk=1, h=1, hk=1, d=8)
    huge = q.expand(1 << 20, 1 << 20, 1 << 10, 8)
    keys = k.expand(1 << 20, 1, 1, 8)
    reason = ": " if VERSION >= (2, 13) else "its log says why"
    raises(lambda: FWD(huge, keys, keys, 1.0, False), "torch could not allocate GPU memory", reason)


def main() -> None:
    answers = {}
    files = (
        torch_cache_cases,
        torch_family_cases,
        torch_fp8_cases,
        torch_general_cases,
        torch_output_cases,
        torch_rotary_cases,
    )
    everything = {name: case for file in files for name, case in vars(file).items()}
    for name, case in {**everything, **globals()}.items():
        if name in sys.argv[2:] or (name.startswith("case_") and len(sys.argv) == 2):
            try:
                case()
                answers[name] = ""
            except Exception:
                answers[name] = traceback.format_exc()
    print(json.dumps(answers))


main()
