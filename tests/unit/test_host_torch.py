"""The built host library inside a real torch: loaded by a CPU-only one, and its operators run on a pretended GPU."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import processes
import pytest
from host_support import H200, HELPERS, ROOT, VERSION, every_kernel, fake_driver, fake_torch_gpu, library

CASES = [
    case
    for name in (
        "torch_cases.py",
        "torch_general_cases.py",
        "torch_cache_cases.py",
        "torch_family_cases.py",
        "torch_fp8_cases.py",
        "torch_output_cases.py",
        "torch_rotary_cases.py",
    )
    for case in re.findall(r"^def (case_\w+)", (HELPERS / name).read_text(), re.MULTILINE)
]


def installed() -> Path:
    """A folder with the library and a kernel set, as in a wheel."""
    folder = Path(tempfile.mkdtemp(dir=processes.folder()))
    shutil.copy(library(), folder / "libflash_attn.so")
    (folder / "flash_attn.kernels").write_bytes(every_kernel())
    return folder / "libflash_attn.so"


def run(arguments: list[str], **environ: str) -> str:
    settings = {**os.environ, **environ}
    result = subprocess.run(
        [sys.executable, *arguments], env=settings, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()[-1]


def run_cases(*cases: str, **environ: str) -> dict[str, str]:
    """What came of ``cases``, or of every one, all run by one process on a pretended GPU of 7 multiprocessors."""
    found: dict[str, str] = json.loads(
        run(
            [str(HELPERS / "torch_cases.py"), str(installed()), *cases],
            LD_PRELOAD=str(fake_torch_gpu()),
            LD_LIBRARY_PATH=str(fake_driver()),
            FAKE_CUDA_DEVICES=H200,
            FAKE_CUDA_COMPUTE="1",
            FAKE_CUDA_MULTIPROCESSORS="7",
            **environ,
        )
    )
    return found


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    return run_cases()


@pytest.mark.parametrize("case", CASES)
def test_operators(answers: dict[str, str], case: str) -> None:
    assert answers[case] == ""


def test_direct_ways() -> None:
    """The package itself: what the functions hand to an operator before they check it."""
    library_of = installed()
    package = library_of.parent / "flash_attn"
    shutil.copytree(ROOT / "flash_attn", package, ignore=shutil.ignore_patterns("*.so", "*.kernels", "build_info.json"))
    for name in ("libflash_attn.so", "flash_attn.kernels"):
        (library_of.parent / name).rename(package / name)
    found = run(
        [str(HELPERS / "direct_ways.py")],
        PYTHONPATH=str(package.parent),
        LD_PRELOAD=str(fake_torch_gpu()),
        LD_LIBRARY_PATH=str(fake_driver()),
        FAKE_CUDA_DEVICES=H200,
        FAKE_CUDA_COMPUTE="1",
    )
    assert found == "all is well"


LOAD = """
import ctypes, json, sys, torch
library = torch.library.Library("flash_attn", "DEF")
library.define("fwd(Tensor q, Tensor k, Tensor v, float softmax_scale, bool causal) -> (Tensor, Tensor)")
library.define("bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
               "bool causal, bool deterministic) -> (Tensor, Tensor, Tensor)")
library.define("fwd_general(Tensor q) -> (Tensor, Tensor)")
library.define("bwd_general(Tensor q) -> ()")
library.define("fwd_fp8(Tensor q) -> (Tensor, Tensor)")
library.define("decode(Tensor q) -> (Tensor, Tensor)")
library.define("kvcache(Tensor q) -> (Tensor, Tensor)")
library.define("append(Tensor q) -> ()")
library.define("rotary(Tensor q) -> ()")
library.define("fwd_rounded(Tensor q) -> Tensor")
library.define("fwd.output(Tensor q) -> Tensor")
library.define("fwd_general.output(Tensor q) -> Tensor")
library.define("fwd_fp8.output(Tensor q) -> Tensor")
library.define("decode.output(Tensor q) -> Tensor")
library.define("kvcache.output(Tensor q) -> Tensor")
operators = ("fwd", "bwd", "fwd_general", "bwd_general", "fwd_fp8", "decode", "kvcache", "append", "rotary",
             "fwd_rounded", "fwd_general.output", "fwd.output", "fwd_fp8.output", "decode.output", "kvcache.output")
torch.ops.load_library(sys.argv[1])
c = ctypes.CDLL(sys.argv[1])
c.flash_attn_version.restype = ctypes.c_char_p
reason, error = ctypes.create_string_buffer(1024), ctypes.create_string_buffer(1024)
has = torch._C._dispatch_has_kernel_for_dispatch_key
print(json.dumps({
    "version": c.flash_attn_version().decode(),
    "count": c.flash_attn_device_count(error, ctypes.c_size_t(1024)),
    "error": error.value.decode(),
    "supported": c.flash_attn_supported(0, reason, ctypes.c_size_t(1024)),
    "reason": reason.value.decode(),
    "capability": c.flash_attn_capability(0),
    "kernels": [has(f"flash_attn::{op}", key) for op in operators for key in ("CUDA", "CPU")],
}))
"""


def test_loads_without_gpu_and_driver() -> None:
    """Any torch can load the library; without a driver the reason says so."""
    found = json.loads(run(["-c", LOAD, str(installed())], CUDA_VISIBLE_DEVICES="", LD_LIBRARY_PATH=""))
    assert found["version"] == VERSION
    assert found["kernels"] == [True, False] * 15
    assert found["capability"] == -1
    assert found["supported"] == 0
    # On a machine with a driver but no visible GPU the driver itself is the one to complain.
    assert "NVIDIA driver" in found["error"] or found["count"] == 0
    assert "NVIDIA driver" in found["reason"] or "no device 0" in found["reason"]


def test_loads_with_a_driver() -> None:
    found = json.loads(run(["-c", LOAD, str(installed())], LD_LIBRARY_PATH=str(fake_driver()), FAKE_CUDA_DEVICES=H200))
    assert (found["count"], found["error"], found["capability"], found["supported"]) == (1, "", 90, 1)
    assert "all 59 kernels run" in found["reason"]


# ---- The choice of a family ----

_FORWARD = "full|causal|bf16|head_dim|several|transposed|packed|rows_|no_|nothing|window|chunk|softcap|sink|used|value"
FORWARD_CASES = [case for case in CASES if re.match(f"case_({_FORWARD})", case) and case != "case_no_map"]


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_forced_family(family: str) -> None:
    """Either one's forward is right, whatever the size: the other tests' small problems all go to the last."""
    cases = [*FORWARD_CASES, "check_family"]
    assert run_cases(*cases, FLASH_ATTN_FAMILY=family) == dict.fromkeys(cases, "")
