"""``python -m flash_attn doctor``: what is installed, what it was built for, and what clashes.

Three steps, apart so that each can be tested: :func:`collect` reads the facts of this machine, :func:`diagnose` (pure)
finds what clashes among them, :func:`render` writes both for people.
"""

from __future__ import annotations

import importlib
import json
import platform
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import _library, _ops, _support
from ._driver import DriverFacts, read_driver

__all__ = ["Facts", "KernelSetFacts", "TorchFacts", "collect", "diagnose", "main", "render"]

# Cubins of one CUDA major run on every driver of that major or a later one.
OLDEST_DRIVER_CUDA = (12, 0)


@dataclass(frozen=True)
class TorchFacts:
    """``cuda`` is None in a build without CUDA."""

    version: str
    cuda: str | None
    hip: str | None
    cxx11_abi: bool


@dataclass(frozen=True)
class KernelSetFacts:
    """What the archive's own index says; ``problem`` if it is missing or cannot be read."""

    compiler: str | None = None
    archs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    kernels: int = 0
    size_bytes: int = 0
    sha256: str | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Facts:
    """Everything that :func:`diagnose` looks at. ``gpu_answers[i]`` is the host library's (supported, reason)."""

    version: str
    package: str
    python: str
    machine: str
    glibc: tuple[int, int] | None
    torch: TorchFacts
    driver: DriverFacts
    build_info: dict[str, Any] | None
    library_problem: str | None
    library_version: str | None
    kernel_set: KernelSetFacts
    gpu_answers: tuple[tuple[bool, str], ...]


def collect(package: Path | None = None) -> Facts:
    """The facts of this process and machine; ``package`` is the folder of the installed package."""
    from . import __version__

    package = package or Path(__file__).resolve().parent
    driver = read_driver()
    library = _ops.HOST_LIBRARY
    return Facts(
        version=__version__,
        package=str(package),
        python=platform.python_version(),
        machine=f"{sys.platform} {platform.machine()}",
        glibc=_glibc(),
        torch=TorchFacts(torch.__version__, torch.version.cuda, torch.version.hip, torch.compiled_with_cxx11_abi()),
        driver=driver,
        build_info=_library.read_build_info(package),
        library_problem=library.failure[1] if library.failure else None,
        library_version=_library.library_version(library),
        kernel_set=read_kernel_set(package / _library.KERNEL_SET_NAME),
        gpu_answers=tuple(_support.driver_supports(gpu.index) for gpu in driver.gpus),
    )


def _glibc() -> tuple[int, int] | None:
    name, version = platform.libc_ver()
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if name == "glibc" and match else None


def read_kernel_set(path: Path) -> KernelSetFacts:
    """The index of the kernel set at ``path``. Never raises."""
    if not path.is_file():
        return KernelSetFacts(problem=f"{path.name} is missing from {path.parent}")
    try:
        # Copied into the wheel when it is built: the builder and the run time read the archive by the same code.
        archive = importlib.import_module("flash_attn._buildtools.archive")
        errors = importlib.import_module("flash_attn._buildtools.errors")
    except ImportError as error:
        return KernelSetFacts(problem=f"{path.name} cannot be read: {error}")
    try:
        content = archive.read(path)
    except errors.BuildError as error:
        return KernelSetFacts(problem=str(error), size_bytes=path.stat().st_size)
    return KernelSetFacts(
        compiler=content.compiler,
        archs=tuple(content.archs),
        keys=tuple(content.keys),
        kernels=len(content.records),
        size_bytes=path.stat().st_size,
        sha256=content.sha256,
    )


def diagnose(facts: Facts) -> tuple[list[str], list[str]]:
    """(clashes, notes): what keeps this installation from working here, and what is only worth knowing."""
    clashes: list[str] = []
    notes: list[str] = []
    info = facts.build_info or {}
    has_cuda = bool(info.get("cuda_build", True))
    if facts.build_info is None:
        clashes.append(
            f"{_library.BUILD_INFO_NAME} is missing or unreadable in {facts.package}: this is a source tree that was "
            "not built, or an incomplete installation. Install the package: pip install flash-attn."
        )
    if not has_cuda:
        (clashes if facts.driver.gpus else notes).append(
            "built without CUDA kernels (SKIP_CUDA_BUILD): only CPU tensors work. Install a wheel that has them."
        )
    elif facts.build_info is not None:
        _diagnose_library(facts, info, clashes)
        _diagnose_kernel_set(facts, info, clashes)
    _diagnose_torch(facts, clashes)
    _diagnose_driver(facts, clashes, notes)
    if has_cuda and facts.library_problem is None:
        for gpu, (answer, reason) in zip(facts.driver.gpus, facts.gpu_answers, strict=True):
            if not answer:
                clashes.append(f"GPU {gpu.index} ({gpu.name}) cannot be used: {reason}")
    return clashes, notes


def _diagnose_library(facts: Facts, info: dict[str, Any], clashes: list[str]) -> None:
    if facts.library_problem is not None:
        clashes.append(facts.library_problem)
    elif facts.library_version is not None and _public(facts.library_version) != _public(facts.version):
        clashes.append(
            f"the host library is of flash_attn {facts.library_version}, the Python files are of {facts.version}: "
            "files of two installations are mixed. Uninstall flash-attn until pip finds none, then install it again."
        )
    tag = re.fullmatch(r"manylinux_(\d+)_(\d+)_(\w+)", str((info.get("host") or {}).get("platform")))
    if tag is None:
        return
    needed = (int(tag[1]), int(tag[2]))
    if facts.glibc is None or facts.glibc < needed:
        found = "none" if facts.glibc is None else _dotted(facts.glibc)
        clashes.append(f"the host library needs glibc {_dotted(needed)} or newer, found {found}.")
    if not facts.machine.endswith(tag[3]):
        clashes.append(f"the host library is for {tag[3]}, this machine is {facts.machine}.")


def _diagnose_kernel_set(facts: Facts, info: dict[str, Any], clashes: list[str]) -> None:
    if facts.kernel_set.problem is not None:
        clashes.append(f"the kernels cannot be used: {facts.kernel_set.problem}. Install the package again.")
        return
    expected = (info.get("kernel_set") or {}).get("sha256")
    if expected and expected != facts.kernel_set.sha256:
        clashes.append(
            f"{_library.KERNEL_SET_NAME} is not the file that was built: its sha256 is {facts.kernel_set.sha256}, "
            f"{_library.BUILD_INFO_NAME} says {expected}. Install the package again."
        )


def _diagnose_torch(facts: Facts, clashes: list[str]) -> None:
    if not facts.driver.gpus:
        return
    if facts.torch.hip is not None:
        clashes.append(
            f"torch {facts.torch.version} was built for ROCm, and the GPU is NVIDIA's: install a CUDA build."
        )
    elif facts.torch.cuda is None:
        clashes.append(
            f"torch {facts.torch.version} was built without CUDA, and there is a GPU: install a CUDA build of torch "
            "to use it. The same flash_attn wheel serves both."
        )


def _diagnose_driver(facts: Facts, clashes: list[str], notes: list[str]) -> None:
    driver = facts.driver
    if driver.problem is not None:
        # Without a GPU nothing contradicts anything; a driver that is there and does not start is another matter.
        (clashes if driver.broken else notes).append(f"{driver.problem}. CPU tensors run the reference implementation.")
    if driver.cuda is None:
        return
    if driver.cuda < OLDEST_DRIVER_CUDA:
        clashes.append(
            f"the NVIDIA driver serves CUDA {_dotted(driver.cuda)}, and the kernels need {_dotted(OLDEST_DRIVER_CUDA)}"
            " or newer: update the driver."
        )
    compiler = re.search(r"(\d+)\.(\d+)", facts.kernel_set.compiler or "")
    if (
        compiler
        and driver.cuda < (int(compiler[1]), int(compiler[2]))
        and any("ptx" in a for a in facts.kernel_set.archs)
    ):
        notes.append(
            f"a GPU that has no cubin here needs a driver for CUDA {compiler[1]}.{compiler[2]} or newer, since the PTX "
            f"was made by that compiler; this one serves {_dotted(driver.cuda)}."
        )


def _public(version: str) -> str:
    """A version without its local label: 2.9.0+cu13 -> 2.9.0."""
    return version.partition("+")[0]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def render(facts: Facts, clashes: list[str], notes: list[str]) -> str:
    """The report as text, one fact a line."""
    lines = [
        ("flash_attn", f"{facts.version}, in {facts.package}"),
        ("python", f"{facts.python}, {facts.machine}" + (f", glibc {_dotted(facts.glibc)}" if facts.glibc else "")),
        ("torch", _torch_line(facts.torch)),
        ("driver", _driver_line(facts.driver)),
    ]
    for gpu, (answer, reason) in zip(facts.driver.gpus, facts.gpu_answers, strict=True):
        capability = _dotted(gpu.capability)
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        answer_text = f"supported: {reason}" if answer else "not supported"
        lines.append((f"GPU {gpu.index}", f"{gpu.name}, compute capability {capability}, {memory}; {answer_text}"))
    state = "loaded" if facts.library_problem is None else "not loaded"
    lines.append(("host library", f"{state}{_built_for((facts.build_info or {}).get('host'))}"))
    lines += _kernel_lines(facts.kernel_set)
    lines += [("note", note) for note in notes]
    lines += [("CLASH", clash) for clash in clashes]
    if not clashes:
        lines.append(("result", "nothing clashes"))
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def _torch_line(facts: TorchFacts) -> str:
    cuda = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.hip}" if facts.hip else "no CUDA"
    return f"{facts.version}, {cuda}, _GLIBCXX_USE_CXX11_ABI={int(facts.cxx11_abi)}"


def _driver_line(facts: DriverFacts) -> str:
    parts = [facts.version or "version unknown"] if facts.cuda or facts.version else []
    if facts.cuda:
        parts.append(f"serves CUDA {_dotted(facts.cuda)} and older")
    if facts.problem:
        parts.append(facts.problem)
    return ", ".join(parts)


def _built_for(host: dict[str, Any] | None) -> str:
    if not host:
        return ""
    abi = "stable ABI" if host.get("kind") == "stable" else "ABI of that torch alone"
    return f"; for torch {host.get('torch')} ({abi}), {host.get('platform')}, built by {host.get('compiler')}"


def _kernel_lines(facts: KernelSetFacts) -> list[tuple[str, str]]:
    if facts.problem is not None:
        return [("kernels", facts.problem)]
    size = f"{facts.size_bytes / 1e6:.1f} MB"
    return [
        ("kernels", f"{len(facts.keys)} kernels in {facts.kernels} images, {size}, compiled by {facts.compiler}"),
        ("archs", " ".join(facts.archs)),
        *(("keys" if index == 0 else "", key) for index, key in enumerate(facts.keys)),
    ]


def main(*, as_json: bool = False, write: Callable[[str], object] = print) -> int:
    """Print the report; 0 if nothing clashes, else 1."""
    facts = collect()
    clashes, notes = diagnose(facts)
    if as_json:
        write(json.dumps({**asdict(facts), "clashes": clashes, "notes": notes}, indent=2, sort_keys=True))
    else:
        write(render(facts, clashes, notes))
    return 1 if clashes else 0
