"""What the tests of the host library share: building it as the package build does, and a machine without a GPU.

``host/fake_cuda.cpp`` stands in for the driver and ``host/fake_torch_gpu.cpp`` for a torch with CUDA; both act on real
calls of the real library.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from processes import once

from buildtools import archive
from buildtools.host import COMPILE_FLAGS, HostCompiler, host_edges

ROOT = Path(__file__).resolve().parents[2]
HELPERS = Path(__file__).resolve().parent / "host"
VERSION = "2.9.0"
GXX = HostCompiler(("g++",), "g++")

# Devices for FAKE_CUDA_DEVICES: capability, shared memory of a block, name.
H200 = "9.0:232448:NVIDIA H200"
RTX4090 = "8.9:101376:NVIDIA GeForce RTX 4090"


def build_library(root: Path, folder: Path) -> Path:
    """Build the host library of the tree ``root`` in ``folder`` (below ``root``) by the commands of the real build."""
    folder.mkdir(parents=True, exist_ok=True)
    edges = host_edges(root, folder, GXX, VERSION, {})
    for rule, outputs, inputs, _, _ in sorted(edges.builds, key=lambda edge: ["cxx", "stub", "link"].index(edge[0])):
        command = edges.rules[rule]["command"].replace("$out", " ".join(outputs)).replace("$in", " ".join(inputs))
        subprocess.run(command.replace("$$", "$"), shell=True, cwd=root, check=True)
    return folder / "libflash_attn.so"


def copy_tree(folder: Path) -> Path:
    """The sources of the host library alone, copied to ``folder``."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "csrc" / "host", folder / "csrc" / "host")
    shutil.copy(ROOT / "csrc" / "params.h", folder / "csrc" / "params.h")
    return folder


@functools.cache
def library() -> Path:
    """The host library, built once."""

    def build(folder: Path) -> None:
        tree = copy_tree(folder / "tree")
        build_library(tree, tree / "build")

    return once("host_library", build) / "tree" / "build" / "libflash_attn.so"


def compile_cpp(sources: Sequence[Path], output: Path, *options: str) -> Path:
    """Compile and link with the host library's flags (less the optimisation) plus ``options``."""
    flags = [flag for flag in COMPILE_FLAGS if flag not in ("-O2", "-fvisibility=hidden")]
    version = f'-DFLASH_ATTN_VERSION="{VERSION}"'
    command = ["g++", *flags, "-O1", "-Werror", version, *map(str, sources), "-o", str(output), *options]
    subprocess.run(command, cwd=ROOT, check=True)
    return output


@functools.cache
def fake_driver() -> Path:
    """The folder with the fake libcuda.so.1."""
    sources = [HELPERS / "fake_cuda.cpp"]
    return once("driver", lambda folder: compile_cpp(sources, folder / "libcuda.so.1", "-shared"))


@functools.cache
def fake_torch_gpu() -> Path:
    """The library to preload so that CPU tensors pass for CUDA tensors."""
    sources, name = [HELPERS / "fake_torch_gpu.cpp"], "libfake_torch_gpu.so"
    return once("torch_gpu", lambda folder: compile_cpp(sources, folder / name, "-shared", "-ldl")) / name


@functools.cache
def sanitizer_flags() -> tuple[str, ...]:
    """The address and undefined-behaviour sanitizers, where this compiler has their libraries."""
    flags = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer", "-g")
    probe = ["g++", *flags, "-x", "c++", "-", "-o", "/dev/null"]
    found = subprocess.run(probe, input="int main() {}", text=True, capture_output=True, check=False)
    return flags if found.returncode == 0 else ()


@functools.cache
def command_line() -> Path:
    """``host_cli``, the torch-free part of the library driven from standard input."""
    sources = [path for path in sorted((ROOT / "csrc" / "host").glob("*.cpp")) if not path.name.startswith("torch_")]
    sources.insert(0, HELPERS / "host_cli.cpp")
    options = ("-ldl", "-pthread", *sanitizer_flags())
    return once("command_line", lambda folder: compile_cpp(sources, folder / "host_cli", *options)) / "host_cli"


def image(record: archive.Record) -> bytes:
    """What the fake driver takes for a compiled kernel."""
    return f"fake {record.key} {record.arch} {record.block_m} {record.block_n} {record.split}".encode() + b"\0"


def kernel(key: str, arch: str, **changes: Any) -> tuple[archive.Record, bytes]:
    """A record of the test archives and its image; the backward of head dim 128 is split."""
    head_dim = int(key.split("-d")[1].split("-")[0])
    fields: dict[str, Any] = {
        "key": key,
        "arch": arch,
        "head_dim": head_dim,
        "block_m": 16 if key.startswith("decode-sm80") else 64,
        "block_n": 32,
        "threads": 128,
        "smem_bytes": 65536,
        "registers": 128,
        "split": int(key.startswith("bwd-sm80") and head_dim == 128),
    }
    record = archive.Record(**{**fields, **changes})
    return record, image(record)


ALL_KEYS = tuple(
    f"{op}-sm80-{dtype}-d{head_dim}-{mask}"
    for op in ("fwd", "bwd")
    for dtype in ("fp16", "bf16")
    for head_dim in (64, 128)
    for mask in ("full", "causal", "general")
)
ALL_ARCHS = ("80", "86", "90", "100", "120", "ptx80")


def pack(keys: Sequence[str] = ALL_KEYS, archs: Sequence[str] = ALL_ARCHS, **changes: Any) -> bytes:
    """A kernel set with every key for every arch."""
    return archive.pack("nvrtc 12.9.86", [kernel(key, arch, **changes) for key in keys for arch in archs])


CACHE_KEYS = tuple(
    f"{op}-{dtype}-{head_dim}-general"
    for op, head_dims in (("decode-sm80", ("d64", "d128")), ("rotary-sm80", ("d256",)))
    for dtype in ("fp16", "bf16")
    for head_dim in head_dims
)


def fast_kernels() -> list[tuple[archive.Record, bytes]]:
    """The family with tensor maps, for 9.0 alone: the forward, and the backward but for general masks."""
    keys = [key.replace("sm80", "sm90") for key in ALL_KEYS if key.startswith("fwd-") or not key.endswith("-general")]
    return [kernel(key, "90a", threads=384, block_m=128) for key in keys]


def fp8_kernels() -> list[tuple[archive.Record, bytes]]:
    """The FP8 forward, and what rounds to FP8, for 9.0 alone; of head dim 256 no more than the causal forward."""
    kinds = [("fwd", "full"), ("fwd", "causal"), ("fwd", "general"), ("round", "general")]
    keys = [f"{op}-sm90-e4m3-d{head_dim}-{mask}" for head_dim in (64, 128) for op, mask in kinds]
    keys.append("fwd-sm90-e4m3-d256-causal")
    return [kernel(key, "90a", threads=384, block_m=128) for key in keys]


def every_kernel() -> bytes:
    """A kernel set with every op and family."""
    general = [kernel(key, arch) for key in ALL_KEYS + CACHE_KEYS for arch in ALL_ARCHS]
    return archive.pack("nvrtc 12.9.86", fast_kernels() + fp8_kernels() + general)


@dataclass
class Machine:
    """A folder with ``host_cli``, its kernel set, and a fake driver that sees ``devices``."""

    folder: Path
    devices: str = H200
    environ: Mapping[str, str] | None = None
    driver: bool = True

    @property
    def log_path(self) -> Path:
        return self.folder / "driver.log"

    def write_kernels(self, data: bytes) -> None:
        (self.folder / "flash_attn.kernels").write_bytes(data)

    def run(self, *commands: str) -> list[str]:
        """The answers to ``commands``, given to one process."""
        program = self.folder / "host_cli"
        if not program.exists():
            os.link(command_line(), program)
        self.log_path.unlink(missing_ok=True)
        environ = {
            "PATH": os.environ["PATH"],
            "FAKE_CUDA_DEVICES": self.devices,
            "FAKE_CUDA_LOG": str(self.log_path),
            # Kernels stay loaded until the process ends, which is no leak.
            "ASAN_OPTIONS": "detect_leaks=0",
            **({"LD_LIBRARY_PATH": str(fake_driver())} if self.driver else {}),
            **(self.environ or {}),
        }
        result = subprocess.run(
            [str(program)], input="\n".join(commands) + "\n", env=environ, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        answers = result.stdout.splitlines()
        assert len(answers) == len(commands), result.stdout
        return answers

    def log(self, word: str = "") -> list[dict[str, str]]:
        """The driver's log of the last run: a dict for each line that begins with ``word``."""
        if not self.log_path.exists():
            return []
        lines = [line.split() for line in self.log_path.read_text().splitlines()]
        return [dict(item.split("=", 1) for item in line[1:]) for line in lines if not word or line[0] == word]
