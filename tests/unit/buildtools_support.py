"""A source tree that is like the project's, but compiles in a second: for the tests of buildtools."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

TABLE = """\
version = 1

[archs]
80 = { smem = 166912 }
86 = { smem = 101376 }
89 = { smem = 101376, like = "86" }
90 = { smem = 232448 }
90a = { smem = 232448, like = "90" }
ptx80 = { smem = 101376 }

[families.sm80]
folder = "sm80"
min_capability = 80
archs = ["80", "90", "ptx80"]
any_arch = true

[[kernel]]
op = "fwd"
family = "sm80"
source = "fwd.cu"
entry_points = ["flash_fwd"]
dtypes = ["bf16"]
head_dims = [64, 128]
masks = ["full"]
smem = "(block_m + 2 * stages * block_n) * head_dim * 2"

[kernel.tiles]
64 = { block_m = 64, block_n = 64, warps = 4, stages = 1, min_blocks = 1 }
128 = { block_m = 64, block_n = 64, warps = 4, stages = 2, min_blocks = 1 }

[[kernel.overrides]]
head_dims = [128]
archs = ["86", "ptx80"]
tiles = { stages = 1 }

[[kernel]]
op = "bwd"
family = "sm80"
source = "bwd.cu"
entry_points = ["flash_bwd", "flash_bwd_preprocess"]
dtypes = ["bf16"]
head_dims = [64]
masks = ["causal"]
smem = "block_m * head_dim * 2"

[kernel.tiles]
64 = { block_m = 64, block_n = 64, warps = 8, stages = 1, min_blocks = 1 }
"""

MATRIX = """\
version = 1

[kernel_sets.cu12]
requirement = "nvidia-cuda-nvrtc-cu12"
version = "12.9.86"
archs = ["80", "90", "ptx80"]

[host_libraries.stable-x86_64]
abi = "stable"
torch = ">=2.10"
cxx11_abi = true
machine = "x86_64"
platform = "manylinux_2_28_x86_64"

[wheels.default]
kernel_set = "cu12"
host_library = "stable-x86_64"

[budgets]
wheel_kib = 40000
host_library_kib = 256
host_library_cpu_s = 15

[tools]
ninja = "ninja>=1.11"
minimum_gxx = "9"
job_peak_mib = 400

[images]

[requirements]
build = ["build"]
tools = ["pytest"]
release = ["twine"]
"""

# What the table and the compiler tell a kernel, checked where it is compiled.
FWD = """\
#include "common/twice.cuh"
static_assert(FA_SMEM_BYTES == (FA_BLOCK_M + 2 * FA_STAGES * FA_BLOCK_N) * FA_HEAD_DIM * 2, "smem");
static_assert(FA_BF16 == 1 && FA_MASK == 0, "row");
extern "C" __global__ void __launch_bounds__(32 * FA_WARPS, FA_MIN_BLOCKS) flash_fwd(Params p) {
  p.x[threadIdx.x] = twice(p.x[threadIdx.x]);
}
"""
BWD = """\
#include "params.h"
extern "C" __global__ void flash_bwd(Params p) { p.x[threadIdx.x] += FA_MASK; }
extern "C" __global__ void flash_bwd_preprocess(Params p) { p.x[threadIdx.x] = 0; }
"""
HOST = """\
extern "C" __attribute__((visibility("default"))) const char* flash_attn_version() { return FLASH_ATTN_VERSION; }
"""


def make_tree(folder: Path) -> Path:
    """Tables, kernels and a host library of a few lines in `folder`, beside the project's buildtools and metadata."""
    for name, text in {
        "kernels.toml": TABLE,
        "matrix.toml": MATRIX,
        "csrc/params.h": "#pragma once\nstruct Params { float* x; };\n",
        "csrc/kernels/common/twice.cuh": (
            '#pragma once\n#include "params.h"\n__device__ inline float twice(float x) { return 2 * x; }\n'
        ),
        "csrc/kernels/sm80/fwd.cu": FWD,
        "csrc/kernels/sm80/bwd.cu": BWD,
        "csrc/host/exports.cpp": HOST,
        "flash_attn/__init__.py": '"""A package of one file."""\n',
        "flash_attn/py.typed": "",
        "flash_attn_interface.py": '"""A module beside the package."""\n',
    }.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("pyproject.toml", "README.md", "LICENSE", "setup.py", "noxfile.py"):
        shutil.copy(ROOT / name, folder / name)
    for name in ("tests", "benchmarks", "docker"):
        (folder / name).mkdir(exist_ok=True)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "buildtools", folder / "buildtools", ignore=ignore, dirs_exist_ok=True)
    return folder


def clean_environ(**more: str) -> dict[str, str]:
    """The environment without any variable that steers a build, and with `more`."""
    steering = ("FLASH_ATT", "FORCE_", "SKIP_CUDA", "TORCH_CUDA", "MAX_JOBS", "NVCC_", "CXX", "LDFLAGS", "SOURCE_DATE")
    clean = {key: value for key, value in os.environ.items() if not key.startswith(steering)}
    return {**clean, **more}
