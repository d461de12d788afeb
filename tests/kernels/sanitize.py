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
from kernel_set import KERNELS  # noqa: E402
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


def main():
    for kernel in KERNELS:
        for shape in SHAPES:
            run(kernel, *shape)
        torch.cuda.synchronize()
    print(f"{len(KERNELS)} kernels, each on {len(SHAPES)} shapes")


if __name__ == "__main__":
    main()
