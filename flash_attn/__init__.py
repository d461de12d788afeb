"""Exact attention for PyTorch: fast on NVIDIA GPUs, and the same results (slowly) from a reference on the CPU.

    import flash_attn
    out = flash_attn.flash_attn_func(q, k, v, causal=True)

Importing needs neither a GPU, a driver nor a CUDA build of torch. ``flash_attn.supported("cuda:0")`` says whether a
device can be used and why; ``python -m flash_attn doctor`` lists what is installed and what clashes.
"""

from ._support import supported
from .flash_attn_interface import (
    flash_attn_combine,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__version__ = "2.9.0"

__all__ = [
    "__version__",
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "supported",
]
