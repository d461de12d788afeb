"""Exact attention for PyTorch: fast on NVIDIA GPUs, and the same results (slowly) from a reference on the CPU.

    import flash_attn
    out = flash_attn.flash_attn_func(q, k, v, causal=True)

Importing needs neither a GPU, a driver nor a CUDA build of torch. ``flash_attn.supported("cuda:0")`` says whether a
device can be used and why; ``python -m flash_attn doctor`` lists what is installed and what clashes.
"""

from ._torch import PROBLEM as _TORCH_PROBLEM

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

if _TORCH_PROBLEM is None:
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
else:
    # `python -m flash_attn doctor` has to work here, to say so. Everything else raises when it is used.
    def __getattr__(name: str) -> object:
        if name not in __all__:  # a module, among others
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        raise ImportError(f"flash_attn.{name} needs torch: {_TORCH_PROBLEM}. `python -m flash_attn doctor` says more.")
