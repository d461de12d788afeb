"""Runs every installed kernel once on small shapes, for compute-sanitizer:

compute-sanitizer --tool memcheck --error-exitcode 1 python tests/kernels/sanitize.py

Each tensor has its own allocation, so that a step outside of one is seen. Results are only looked at for NaN.
"""

import os
import sys
from pathlib import Path

# Before torch is imported: its allocator would put many tensors into one allocation.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import torch  # noqa: E402
from cache_cases import CacheCase  # noqa: E402
from cache_cases import run as run_cache  # noqa: E402
from feature_cases import Case  # noqa: E402
from feature_cases import run as run_feature  # noqa: E402
from kernel_set import EVERY_KERNEL, GENERAL, KERNELS  # noqa: E402
from layouts import contiguous, heads_first, wide_rows  # noqa: E402

from flash_attn import flash_attn_func  # noqa: E402

# (seqlen_q, seqlen_k, head dim taken from the built one, layout)
SHAPES = [(1, 1, 0, contiguous), (5, 2, 0, contiguous), (130, 67, 8, heads_first), (70, 200, 3, wide_rows)]


def run(kernel, seqlen_q, seqlen_k, less, layout):
    """One forward, with its backward if that is the kernel."""
    backward = kernel.op == "bwd"
    sizes = [
        (1, seqlen, heads, kernel.head_dim - less) for seqlen, heads in ((seqlen_q, 2), (seqlen_k, 1), (seqlen_k, 1))
    ]
    tensors = [layout(torch.randn(size).to("cuda", kernel.dtype)).requires_grad_(backward) for size in sizes]
    for deterministic in (False, True) if backward else (False,):
        out = flash_attn_func(*tensors, causal=kernel.causal, deterministic=deterministic)
        found = [out, *(torch.autograd.grad(out.sum(), tensors) if backward else ())]
        if any(x.isnan().any().item() for x in found):
            sys.exit(f"NaN from {kernel.key} with {(seqlen_q, seqlen_k, kernel.head_dim - less, layout.__name__)}")


def run_general(kernel):
    """Every feature, padded and packed."""
    for form, options in (
        ("func", {"window": (20, 5), "softcap": 5.0, "alibi": "BH", "sink": True, "dlse": True}),
        ("varlen_kvpacked", {"causal": True, "chunk": 50, "dropout_p": 0.2, "deterministic": True}),
        ("varlen", {"seqused_k": (60, 0), "leftpad_k": (3, 0), "spare_tokens": 5}),
    ):
        lengths_q, lengths_k = ((70, 70), (90, 90)) if form == "func" else ((70, 9), (90, 33))
        case = Case(
            seed=0,
            form=form,
            dtype=kernel.dtype,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            heads=2,
            heads_kv=1,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            backward=kernel.op == "bwd",
            **options,
        )
        check(kernel, case, run_feature(case))


def run_decode(kernel):
    for options in (
        {"seqlen_q": 1, "num_splits": 3},
        {"seqlen_q": 5, "new": 5, "rotary_dim": 16, "causal": True, "page_size": 16},
        {"seqlen_q": 3, "new": 2, "rotary_dim": 32, "interleaved": True, "batch_idx": True, "leftpad": (2, 5)},
    ):
        case = CacheCase(
            seed=0,
            dtype=kernel.dtype,
            batch=2,
            heads=4,
            heads_kv=1,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            capacity=150,
            lengths=(120, 33),
            **options,
        )
        check(kernel, case, run_cache(case))


def check(kernel, case, wrong):
    if wrong:
        sys.exit("\n".join([kernel.key, str(case), *wrong]))


def main():
    for kernel in KERNELS:
        for shape in SHAPES:
            run(kernel, *shape)
        torch.cuda.synchronize()
    for kernel in GENERAL:
        run_general(kernel)
    for kernel in EVERY_KERNEL:
        if kernel.op == "decode":  # with the rotary kernel, which appends
            run_decode(kernel)
    torch.cuda.synchronize()
    print(f"{len(EVERY_KERNEL)} kernels")


if __name__ == "__main__":
    main()
