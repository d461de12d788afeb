"""Where the Triton kernels are used, and what is said where Triton is missing."""

from __future__ import annotations

import importlib
from typing import Any

from torch import Tensor, bfloat16, float16, float32

__all__ = ["kernels_of", "runs_kernel"]

KERNEL_DTYPES = (float16, bfloat16, float32)


def runs_kernel(x: Tensor) -> bool:
    """Whether ``x`` is for a Triton kernel. Everything else is a few operations of torch."""
    return x.is_cuda and x.dtype in KERNEL_DTYPES


def kernels_of(module: str) -> Any:
    """A module of kernels next to this one, imported at the first use: nothing else needs Triton."""
    try:
        return importlib.import_module(f"{__package__}.{module}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise ImportError(
            "This operation on CUDA tensors needs Triton, which comes with CUDA builds of torch for Linux and is not "
            "installed here: pip install triton. On CPU tensors, and under torch.compile, it needs none."
        ) from error
