"""What the installed wheel holds, by its own index: the tests are made from it, so that a new kernel is tested too."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

import flash_attn
from flash_attn._buildtools import archive

BASE_FAMILY = "sm80"  # has every feature and serves every GPU, and small problems where no family is forced
FORCED_FAMILY = os.environ.get("FLASH_ATTN_FAMILY") or None

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}  # of every op


@dataclass(frozen=True)
class Kernel:
    """One key: ``{op}-{family}-{dtype}-d{head_dim}-{mask}``."""

    key: str
    op: str
    family: str
    dtype: torch.dtype
    head_dim: int
    mask: str

    @property
    def causal(self):
        return self.mask == "causal"


def parse(key):
    op, family, dtype, head_dim, mask = key.split("-")
    dtype = torch.float8_e4m3fn if dtype == "e4m3" else DTYPES[dtype]
    return Kernel(key, op, family, dtype, int(head_dim.removeprefix("d")), mask)


_KEYS = archive.read(Path(flash_attn.__file__).parent / "flash_attn.kernels").keys
EVERY_KERNEL = [parse(key) for key in _KEYS if "-e4m3-" not in key]
FP8_KERNELS = [parse(key) for key in _KEYS if key.startswith("fwd-") and "-e4m3-" in key]  # with descale factors
ROUND_KERNELS = [parse(key) for key in _KEYS if key.startswith("round-")]  # to FP8
# Those of attention with a scale and a causal mask, and those with every other feature.
KERNELS = [k for k in EVERY_KERNEL if k.op in ("fwd", "bwd") and k.mask in ("full", "causal")]
GENERAL = [k for k in EVERY_KERNEL if k.op in ("fwd", "bwd") and k.mask == "general"]


def served(kernels):
    """Those that small problems get in this process."""
    return [kernel for kernel in kernels if kernel.family == (FORCED_FAMILY or BASE_FAMILY)]


def faster_families():
    """The families that are for this very GPU; what they lack, and small problems, the base family does."""
    here = "sm{}{}".format(*torch.cuda.get_device_capability())
    return sorted({kernel.family for kernel in EVERY_KERNEL if kernel.family == here} - {BASE_FAMILY})


def largest_head_dim(op, dtype, mask):
    """The largest head dim that was built, 0 if none. ``mask`` is the key's, or whether it is causal."""
    mask = {False: "full", True: "causal"}.get(mask, mask)
    fitting = (k.head_dim for k in EVERY_KERNEL if (k.op, k.dtype, k.mask) == (op, dtype, mask))
    return max(fitting, default=0)


def variants(op):
    """The (dtype, causal) pairs that ``op`` was built for."""
    return sorted({(k.dtype, k.causal) for k in KERNELS if k.op == op}, key=str)
