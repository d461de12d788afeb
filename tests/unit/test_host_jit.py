"""Kernels that the kernel set lacks: the host library's questions, and the answers of the real compiler."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import processes
import pytest
from host_support import H200, HELPERS, ROOT, VERSION, fake_driver, fake_torch_gpu, kernel, library, pack

from buildtools import archive
from buildtools.metadata import load_project
from buildtools.wheel import package_files, runtime_files

CASES = re.findall(r"^def (case_\w+)", (HELPERS / "jit_cases.py").read_text(), re.MULTILINE)
# On 10.3 none of the kernels in the wheel runs.
B300 = "10.3:232448:NVIDIA B300"


def beside_library(data: bytes) -> Path:
    """A folder with the host library and this kernel set, as in a wheel."""
    folder = Path(tempfile.mkdtemp(dir=processes.folder()))
    shutil.copy(library(), folder / "libflash_attn.so")
    (folder / "flash_attn.kernels").write_bytes(data)
    return folder


def run(folder: Path, arguments: list[str], *, devices: str, path: str = "", **environ: str) -> str:
    settings = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATT", "PYTHONPATH"))}
    settings |= {
        "LD_PRELOAD": str(fake_torch_gpu()),
        "LD_LIBRARY_PATH": str(fake_driver()),
        "FAKE_CUDA_DEVICES": devices,
        "FAKE_CUDA_LOG": str(folder / "driver.log"),
        **({"PYTHONPATH": path} if path else {}),
        **environ,
    }
    # Away from the source tree, which "-c" would put before the installed package.
    command = [sys.executable, "-X", "faulthandler", *arguments]
    result = subprocess.run(command, env=settings, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    """What came of every case, all run by one process."""
    built = [kernel(f"fwd-sm80-{dtype}-d64-full", "90") for dtype in ("fp16", "bf16")]
    elsewhere = [kernel("fwd-sm80-fp16-d64-causal", "120")]
    folder = beside_library(archive.pack("nvrtc 12.9.86", built + elsewhere))
    script = [str(HELPERS / "jit_cases.py"), str(folder / "libflash_attn.so"), str(HELPERS.parent)]
    found: dict[str, str] = json.loads(run(folder, script, devices=H200))
    return found


@pytest.mark.parametrize("case", CASES)
def test_questions(answers: dict[str, str], case: str) -> None:
    assert answers[case] == ""


# ---- With NVRTC ----

CALLS = """
import ctypes, json, sys, time
import torch
from flash_attn import _jit, _ops

torch.ops.load_library(sys.argv[1])
library = ctypes.CDLL(sys.argv[1])
_jit.register(library)
reason = ctypes.create_string_buffer(4096)
result = {"supported": [library.flash_attn_supported(0, reason, ctypes.c_size_t(4096)), reason.value.decode()]}
x = torch.zeros(1, 2, 1, int(sys.argv[2]), dtype=torch.bfloat16)
lse = torch.zeros(1, 1, 2)
times = []
for call in (lambda: _ops.FWD(x, x, x, 1.0, True), lambda: _ops.BWD(x, x, x, x, x, lse, 1.0, True, False)):
    started = time.perf_counter()
    try:
        call()
    except RuntimeError as error:
        result["error"] = str(error)
        break
    times.append(time.perf_counter() - started)
print(json.dumps({**result, "times": times}))
"""


def test_doctor_on_machines_with_gpus(installed: Path, tmp_path: Path) -> None:
    """Field cases 17 and 26: the driver, each GPU's capability, what the wheel was built for, and which clash."""
    package = tmp_path / "flash_attn"
    shutil.copytree(installed / "flash_attn", package)
    built = beside_library(pack(archs=("80", "90")))
    for name in ("libflash_attn.so", "flash_attn.kernels"):
        shutil.copy(built / name, package / name)
    facts = {"kind": "stable", "torch": ">=2.10", "platform": f"linux_{platform.machine()}", "compiler": "g++"}
    info = {"version": VERSION, "cuda_build": True, "host": facts, "kernel_set": None}
    (package / "build_info.json").write_text(json.dumps(info))
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATT", "PYTHONPATH"))}
    environ |= {
        "LD_LIBRARY_PATH": str(fake_driver()),
        "FAKE_CUDA_DEVICES": f"{B300};7.5:65536:NVIDIA GeForce RTX 2080",
        "FLASH_ATTN_CACHE_DIR": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "flash_attn", "doctor", "--json"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["driver"]["cuda"] == [12, 4]
    assert [gpu["capability"] for gpu in report["driver"]["gpus"]] == [[10, 3], [7, 5]]
    assert report["kernel_set"]["archs"] == ["80", "90"]
    assert report["gpu_archs"] == [[], []]
    (new, new_reason), (old, old_reason) = report["gpu_answers"]
    assert (new, old) == (True, False)
    assert "they are built for: 80, 90. Kernels for it are compiled at first use, by NVRTC" in new_reason
    assert old_reason.endswith("compute capability 7.5): flash_attn needs compute capability 8.0 or newer.")
    clashes = {clash["kind"]: clash["text"] for clash in report["clashes"]}
    assert clashes["gpu"].startswith("GPU 1 (NVIDIA GeForce RTX 2080) cannot be used: ")
    assert "B300" not in str(report["clashes"])
    # This torch may be one without CUDA, or for a newer one than the driver serves: that is told, too.
    assert set(clashes) <= {"gpu", "torch", "driver"}
    assert done.returncode == report["exit_code"] == min(clash["exit_code"] for clash in report["clashes"])


@pytest.fixture(scope="module")
def installed() -> Path:
    """The folder that holds the package as a wheel has it, but for what is compiled."""
    folder = Path(tempfile.mkdtemp(dir=processes.folder()))
    for name, data in {**package_files(ROOT), **runtime_files(load_project(ROOT))}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def call_all(folder: Path, installed: Path, head_dim: int = 64, devices: str = B300, **environ: str) -> dict:
    arguments = ["-c", CALLS, str(folder / "libflash_attn.so"), str(head_dim)]
    return json.loads(run(folder, arguments, devices=devices, path=str(installed), **environ))


def loaded(folder: Path) -> list[str]:
    lines = (folder / "driver.log").read_text().splitlines()
    return [line for line in lines if line.startswith("load")]


def test_a_gpu_without_a_cubin(installed: Path, tmp_path: Path) -> None:
    """Field cases 26 and 27: told in advance, compiled by the first call, found in the cache by the next process."""
    folder, cache = beside_library(pack(archs=("80", "90"))), str(tmp_path / "cache")
    first = call_all(folder, installed, FLASH_ATTN_CACHE_DIR=cache)
    answer, reason = first["supported"]
    assert answer == 1
    assert re.fullmatch(
        r"NVIDIA B300 \(device 0, compute capability 10.3\): none of the \d+ kernels can run; they are built for: 80, "
        r"90\. Kernels for it are compiled at first use, by NVRTC \d+\.\d+\.\d+ \(.*libnvrtc.*\)\.",
        reason,
    )
    assert "error" not in first
    assert [line.split()[1:3] for line in loaded(folder)] == [
        ["key=fwd-real", "arch=103"],
        ["key=bwd-real", "arch=103"],
    ]
    entries = sorted(path.name for path in Path(cache).iterdir())
    assert [entry.split(".")[:2] for entry in entries] == [
        ["bwd-sm80-bf16-d64-causal", "103"],
        ["fwd-sm80-bf16-d64-causal", "103"],
    ]
    times = [path.stat().st_mtime_ns for path in sorted(Path(cache).iterdir())]
    # The second process compiles nothing, and needs no NVRTC for that.
    nothing = tmp_path / "nothing"
    nothing.mkdir()
    second = call_all(folder, installed, FLASH_ATTN_CACHE_DIR=cache, FLASH_ATTN_NVRTC=str(nothing))
    assert "error" not in second
    assert [path.stat().st_mtime_ns for path in sorted(Path(cache).iterdir())] == times
    assert len(loaded(folder)) == 4
    print("first and second process, seconds for fwd and bwd:", first["times"], second["times"])


def test_switched_off(installed: Path, tmp_path: Path) -> None:
    folder = beside_library(pack(archs=("80", "90")))
    found = call_all(folder, installed, FLASH_ATTN_CACHE_DIR=str(tmp_path / "cache"), FLASH_ATTN_JIT="off")
    assert found["supported"][0] == 0
    assert "FLASH_ATTN_CUDA_ARCHS=10.3" in found["supported"][1]
    assert found["supported"][1].endswith("at first use: FLASH_ATTN_JIT=off forbids it. Unset FLASH_ATTN_JIT.")
    for part in (
        "kernel fwd-sm80-bf16-d64-causal is not built for NVIDIA B300 (device 0, compute capability 10.3)",
        "built for: 80, 90",
        "FLASH_ATTN_JIT=off forbids to compile fwd-sm80-bf16-d64-causal for arch 103",
        "Unset FLASH_ATTN_JIT",
        "FLASH_ATTN_CUDA_ARCHS=10.3",
    ):
        assert part in found["error"]
    assert not (tmp_path / "cache").exists()


def test_a_subset_build(installed: Path, tmp_path: Path) -> None:
    """Field case 23, with a compiler: built for head dim 64 alone, 128 is compiled for exactly this GPU."""
    keys = [f"{op}-sm80-bf16-d64-{mask}" for op in ("fwd", "bwd") for mask in ("full", "causal")]
    folder = beside_library(pack(keys=keys))
    found = call_all(folder, installed, 128, devices=H200, FLASH_ATTN_CACHE_DIR=str(tmp_path))
    assert "error" not in found
    assert [line.split()[1:3] for line in loaded(folder)] == [["key=fwd-real", "arch=90"], ["key=bwd-real", "arch=90"]]
