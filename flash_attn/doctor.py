"""``python -m flash_attn doctor``: what is installed, what it was built for, and what clashes.

Three steps, apart so that each can be tested: :func:`collect` reads the facts of this machine, :func:`diagnose` (pure)
finds what clashes among them, :func:`render` writes both for people. It works without torch, and says so.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ._driver import DriverFacts, read_driver
from ._installed import BUILD_INFO_NAME, KERNEL_SET_NAME, PACKAGE, buildtools, read_build_info
from ._torch import PROBLEM as TORCH_PROBLEM

__all__ = [
    "EXIT_CODES",
    "SCHEMA",
    "Clash",
    "Facts",
    "Install",
    "JitFacts",
    "KernelSetFacts",
    "TorchFacts",
    "collect",
    "diagnose",
    "exit_code",
    "main",
    "render",
]

# Of the JSON object: raised where a key goes or changes its meaning, not where one is added.
SCHEMA = 1

# The kinds of clashes, causes before what follows from them: the first one found decides the exit code.
EXIT_CODES = {"installation": 3, "platform": 4, "torch": 5, "library": 6, "kernels": 7, "driver": 8, "gpu": 9}

_OLDEST_CUDA = 12


@dataclass(frozen=True)
class TorchFacts:
    """``version`` is None where torch is not installed; ``problem`` says why it cannot be imported. ``cuda`` is None in
    a build without CUDA."""

    version: str | None
    cuda: str | None
    hip: str | None
    cxx11_abi: bool | None
    problem: str | None = None


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
class JitFacts:
    """Compiling at first use: ``problem`` says why it is not possible, ``cache_problem`` why nothing would be kept."""

    problem: str | None = None
    nvrtc: str | None = None
    nvrtc_path: str | None = None
    nvrtc_where: str | None = None
    cache_folder: str | None = None
    cache_problem: str | None = None
    cache_entries: int = 0
    cache_bytes: int = 0


@dataclass(frozen=True)
class Install:
    """A copy of the package on Python's path, or what pip has recorded: ``kind`` "package" or "record"."""

    kind: str
    path: str
    version: str | None


@dataclass(frozen=True)
class Facts:
    """Everything that :func:`diagnose` looks at.

    ``gpu_answers[i]`` is the host library's (supported, reason), ``gpu_archs[i]`` which archs of the kernel set the GPU
    can run. ``installs`` are in the order of Python's path: the first package is the one that is imported.
    """

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
    gpu_archs: tuple[tuple[str, ...], ...] = ()
    library_missing: dict[str, str] = field(default_factory=dict)
    jit: JitFacts = JitFacts()
    installs: tuple[Install, ...] = ()


@dataclass(frozen=True)
class Clash:
    """What keeps the installation from working here. ``kind`` is one of :data:`EXIT_CODES`."""

    kind: str
    text: str


# --- facts --------------------------------------------------------------------------------------------------------


def collect(package: Path | None = None) -> Facts:
    """The facts of this process and machine; ``package`` is the folder of the installed package."""
    from . import __version__

    package = package or PACKAGE
    driver = read_driver()
    torch = read_torch()
    kernel_set = read_kernel_set(package / KERNEL_SET_NAME)
    library_problem, library_version, answers = _read_library(driver)
    return Facts(
        version=__version__,
        package=str(package),
        python=platform.python_version(),
        machine=f"{sys.platform} {platform.machine()}",
        glibc=_glibc(),
        torch=torch,
        driver=driver,
        build_info=read_build_info(package),
        library_problem=library_problem,
        library_version=library_version,
        kernel_set=kernel_set,
        gpu_answers=answers,
        gpu_archs=tuple(_archs_for(kernel_set.archs, gpu.capability) for gpu in driver.gpus),
        library_missing=missing_names(library_problem or ""),
        jit=read_jit(package, driver),
        installs=read_installs(package, sys.path),
    )


def read_torch() -> TorchFacts:
    """Of the torch that this process imports, or else of the one that is installed. Never raises."""
    if TORCH_PROBLEM is None:
        torch = importlib.import_module("torch")
        abi = bool(torch.compiled_with_cxx11_abi())
        return TorchFacts(str(torch.__version__), torch.version.cuda, torch.version.hip, abi)
    try:
        version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return TorchFacts(version, None, None, None, TORCH_PROBLEM)


def _read_library(driver: DriverFacts) -> tuple[str | None, str | None, tuple[tuple[bool, str], ...]]:
    """(why it is not loaded, its version, what it says of each GPU)."""
    if TORCH_PROBLEM is not None:
        why = f"the host library was not loaded: {TORCH_PROBLEM}."
        return why, None, tuple((False, why) for _ in driver.gpus)
    from . import _library, _ops, _support

    library = _ops.HOST_LIBRARY
    answers = tuple(_support.driver_supports(gpu.index) for gpu in driver.gpus)
    return library.failure[1] if library.failure else None, _library.library_version(library), answers


def missing_names(message: str) -> dict[str, str]:
    """What the loader's ``message`` says it did not find: some of {"symbol": ..., "library": ..., "version": ...}."""
    patterns = {
        "symbol": r"undefined symbol: (\S+?)[,.]?(?:\s|$)",
        "library": r"(\S+): cannot open shared object file",
        "version": r"version [`\']([^`\']+)[`\'] not found",
    }
    found = {name: re.search(pattern, message) for name, pattern in patterns.items()}
    return {name: match[1] for name, match in found.items() if match}


def _archs_for(archs: Sequence[str], capability: tuple[int, int]) -> tuple[str, ...]:
    """Those of the kernel set's archs that a GPU of this capability runs."""
    try:
        runs_on = buildtools("jit").runs_on
    except ImportError:
        return ()
    return tuple(arch for arch in archs if runs_on(arch, 10 * capability[0] + capability[1]))


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
        archive, errors = buildtools("archive"), buildtools("errors")
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


def read_jit(package: Path, driver: DriverFacts) -> JitFacts:
    """What compiling at first use would do here. Loads NVRTC and writes an empty file; never raises."""
    from . import _jit

    try:
        cache_module, errors, jit = buildtools("cache"), buildtools("errors"), buildtools("jit")
    except ImportError as error:
        return JitFacts(problem=f"{error}")
    cache = cache_module.Cache.of(os.environ)
    facts: dict[str, Any] = {
        "cache_folder": None if cache.folder is None else str(cache.folder),
        "cache_problem": cache.problem() or None,
        "cache_entries": len(cache.names()),
        "cache_bytes": cache.size_bytes(),
    }
    try:
        compiler = jit.find_compiler(os.environ, _jit.search_path(), driver.cuda)
        facts |= {
            "nvrtc": compiler.version,
            "nvrtc_path": str(compiler.library.path),
            "nvrtc_where": compiler.where,
        }
        jit.check_enabled(os.environ)
        jit.load_sources(package)
    except errors.BuildError as error:
        facts["problem"] = jit.sentence(error)
    return JitFacts(**facts)


def read_installs(package: Path, path: Sequence[str]) -> tuple[Install, ...]:
    """The copies of the package on ``path``, the one in use first, and pip's records of it."""
    folders = [Path(entry or os.curdir).resolve() / package.name for entry in path]
    copies = [package, *(folder.resolve() for folder in folders if (folder / "__init__.py").is_file())]
    packages = [Install("package", str(copy), _version_of(copy)) for copy in dict.fromkeys(copies)]
    records: dict[str, Install] = {}
    for found in importlib.metadata.distributions(name="flash-attn", path=list(path)):
        where = str(Path(str(found.locate_file(""))).resolve())
        records.setdefault(f"{where} {found.version}", Install("record", where, found.version))
    return (*packages, *records.values())


def _version_of(package: Path) -> str | None:
    try:
        text = (package / "__init__.py").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    return match[1] if match else None


# --- conclusions --------------------------------------------------------------------------------------------------


def diagnose(facts: Facts) -> tuple[list[Clash], list[str]]:
    """(clashes, notes): what keeps this installation from working here, and what is only worth knowing."""
    clashes: list[Clash] = []
    notes: list[str] = []
    info = facts.build_info or {}
    has_cuda = bool(info.get("cuda_build", True))
    _diagnose_installs(facts, clashes)
    if facts.build_info is None:
        clashes.append(
            Clash(
                "installation",
                f"{BUILD_INFO_NAME} is missing or unreadable in {facts.package}: this is a source tree that was not "
                "built, or an incomplete installation. Install the package: pip install flash-attn.",
            )
        )
    if not has_cuda:
        text = "built without CUDA kernels (SKIP_CUDA_BUILD): only CPU tensors work. Install a wheel that has them."
        if facts.driver.gpus:
            clashes.append(Clash("installation", text))
        else:
            notes.append(text)
    _diagnose_torch(facts, clashes)
    if has_cuda and facts.build_info is not None:
        _diagnose_library(facts, info, clashes)
        _diagnose_kernel_set(facts, info, clashes)
        _diagnose_jit(facts, notes)
    _diagnose_driver(facts, clashes, notes)
    if has_cuda and facts.library_problem is None:
        for gpu, (answer, reason) in zip(facts.driver.gpus, facts.gpu_answers, strict=True):
            if not answer:
                clashes.append(Clash("gpu", f"GPU {gpu.index} ({gpu.name}) cannot be used: {reason}"))
    return sorted(clashes, key=lambda clash: EXIT_CODES[clash.kind]), notes


def exit_code(clashes: Sequence[Clash]) -> int:
    """0 where nothing clashes, else the code of the first cause."""
    return min((EXIT_CODES[clash.kind] for clash in clashes), default=0)


_REINSTALL = "Uninstall flash-attn until pip finds none, then install it again."


def _diagnose_installs(facts: Facts, clashes: list[Clash]) -> None:
    packages = [install for install in facts.installs if install.kind == "package"]
    records = [install for install in facts.installs if install.kind == "record"]
    if len(packages) > 1:
        used, *hidden = (f"{install.path} ({install.version or 'of an unknown version'})" for install in packages)
        clashes.append(
            Clash(
                "installation",
                f"flash_attn is {len(packages)} times on Python's path: {used} is imported and hides "
                f"{', '.join(hidden)}. {_REINSTALL} If the first is a source tree, run Python in another folder.",
            )
        )
    if len(records) > 1:
        listed = ", ".join(f"{install.version} in {install.path}" for install in records)
        clashes.append(Clash("installation", f"pip has {len(records)} records of flash-attn: {listed}. {_REINSTALL}"))
    elif len(packages) == 1 and records and _public(records[0].version or "") != _public(facts.version):
        clashes.append(
            Clash(
                "installation",
                f"pip has flash-attn {records[0].version} in {records[0].path}, the Python files are of "
                f"{facts.version}: files of two installations are mixed. {_REINSTALL}",
            )
        )


def _diagnose_library(facts: Facts, info: dict[str, Any], clashes: list[Clash]) -> None:
    if facts.library_problem is not None and facts.torch.problem is None:
        named = ", ".join(f"{name} {value}" for name, value in facts.library_missing.items())
        clashes.append(Clash("library", facts.library_problem + (f" Missing: {named}." if named else "")))
    elif facts.library_version is not None and _public(facts.library_version) != _public(facts.version):
        clashes.append(
            Clash(
                "installation",
                f"the host library is of flash_attn {facts.library_version}, the Python files are of {facts.version}: "
                f"files of two installations are mixed. {_REINSTALL}",
            )
        )
    tag = re.fullmatch(
        r"(?:many)?linux(?:_(\d+)_(\d+))?_(x86_64|aarch64)", str((info.get("host") or {}).get("platform"))
    )
    if tag is None:
        return
    needed = (int(tag[1]), int(tag[2])) if tag[1] else None
    if needed is not None and (facts.glibc is None or facts.glibc < needed):
        found = "none" if facts.glibc is None else _dotted(facts.glibc)
        text = f"the host library needs glibc {_dotted(needed)} or newer, found {found}."
        clashes.append(Clash("platform", text))
    if facts.machine != f"linux {tag[3]}":
        text = f"the host library is for linux {tag[3]}, this machine is {facts.machine}."
        clashes.append(Clash("platform", text))


def _diagnose_kernel_set(facts: Facts, info: dict[str, Any], clashes: list[Clash]) -> None:
    if facts.kernel_set.problem is not None:
        text = f"the kernels cannot be used: {facts.kernel_set.problem}. Install the package again."
        clashes.append(Clash("kernels", text))
        return
    expected = (info.get("kernel_set") or {}).get("sha256")
    if expected and expected != facts.kernel_set.sha256:
        clashes.append(
            Clash(
                "kernels",
                f"{KERNEL_SET_NAME} is not the file that was built: its sha256 is {facts.kernel_set.sha256}, "
                f"{BUILD_INFO_NAME} says {expected}. Install the package again.",
            )
        )


def _diagnose_jit(facts: Facts, notes: list[str]) -> None:
    """Not being able to compile clashes with nothing by itself: a GPU that needs it is told of by its own answer."""
    if facts.jit.problem is not None:
        notes.append(f"kernels that are not in the wheel cannot be compiled at first use: {facts.jit.problem}")
    elif facts.jit.cache_problem is not None:
        notes.append(
            f"kernels that are compiled at first use are compiled again by each process: {facts.jit.cache_problem}. "
            "Set FLASH_ATTN_CACHE_DIR to a folder that can be written."
        )


def _diagnose_torch(facts: Facts, clashes: list[Clash]) -> None:
    torch, driver = facts.torch, facts.driver
    requirement = str(((facts.build_info or {}).get("host") or {}).get("torch") or "torch>=2.10")
    if torch.problem is not None:
        wanted = f"torch{requirement.removeprefix('torch')}"
        fix = f'Install it: pip install "{wanted}".' if torch.version is None else "Install it again."
        clashes.append(Clash("torch", f"{torch.problem}, and flash_attn is for PyTorch. {fix}"))
    if not driver.gpus or torch.problem is not None:
        return
    if torch.hip is not None:
        text = f"torch {torch.version} was built for ROCm, and the GPU is NVIDIA's: install a CUDA build."
        clashes.append(Clash("torch", text))
    elif torch.cuda is None:
        clashes.append(
            Clash(
                "torch",
                f"torch {torch.version} was built without CUDA, and there is a GPU: install a CUDA build of torch to "
                "use it. The same flash_attn wheel serves both.",
            )
        )
    elif driver.cuda is not None and (major := int(torch.cuda.partition(".")[0])) > driver.cuda[0]:
        clashes.append(
            Clash(
                "driver",
                f"torch {torch.version} was built for CUDA {torch.cuda}, and the NVIDIA driver{_version(driver)} "
                f"serves CUDA {_dotted(driver.cuda)}: update the driver{_first_driver(major)}, or "
                f"install a torch for CUDA {driver.cuda[0]}.",
            )
        )


def _diagnose_driver(facts: Facts, clashes: list[Clash], notes: list[str]) -> None:
    driver = facts.driver
    if driver.problem is not None:
        # Without a GPU nothing contradicts anything; a driver that is there and does not start is another matter.
        text = f"{driver.problem}. CPU tensors run the reference implementation."
        if driver.broken:
            clashes.append(Clash("driver", text))
        else:
            notes.append(text)
    if driver.cuda is None:
        return
    compiler = re.search(r"(\d+)\.(\d+)", facts.kernel_set.compiler or "")
    major = int(compiler[1]) if compiler else _OLDEST_CUDA
    if driver.cuda[0] < major:
        clashes.append(
            Clash(
                "driver",
                f"the NVIDIA driver{_version(driver)} serves CUDA {_dotted(driver.cuda)}, and the kernels were "
                f"compiled for CUDA {major}: update the driver{_first_driver(major)}.",
            )
        )
    elif (
        compiler
        and driver.cuda < (int(compiler[1]), int(compiler[2]))
        and any("ptx" in a for a in facts.kernel_set.archs)
    ):
        notes.append(
            f"the PTX in the wheel needs a driver for CUDA {compiler[1]}.{compiler[2]} or newer, since it was made by "
            f"that compiler, and this one serves {_dotted(driver.cuda)}: a GPU that has no cubin here gets its kernels "
            "compiled at first use, if at all."
        )


def _version(driver: DriverFacts) -> str:
    return f" {driver.version}" if driver.version else ""


def _first_driver(major: int) -> str:
    """`` to 580.65.06 or newer``."""
    first = buildtools("choose").FIRST_DRIVERS.get(major)
    return f" to {first} or newer" if first else ""


def _public(version: str) -> str:
    """A version without its local label: 2.9.0+cu13 -> 2.9.0."""
    return version.partition("+")[0]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


# --- writing ------------------------------------------------------------------------------------------------------


def render(facts: Facts, clashes: Sequence[Clash], notes: Sequence[str]) -> str:
    """The report as text, one fact a line."""
    lines = [
        ("flash_attn", f"{facts.version}, in {facts.package}"),
        ("python", f"{facts.python}, {facts.machine}" + (f", glibc {_dotted(facts.glibc)}" if facts.glibc else "")),
        ("torch", _torch_line(facts.torch)),
        ("driver", _driver_line(facts.driver)),
    ]
    for place, (gpu, (answer, reason)) in enumerate(zip(facts.driver.gpus, facts.gpu_answers, strict=True)):
        capability = _dotted(gpu.capability)
        memory = f"{gpu.memory_bytes / 2**30:.0f} GiB"
        archs = facts.gpu_archs[place] if facts.gpu_archs else ()
        served = f"runs the wheel's {', '.join(archs)}" if archs else "runs none of the wheel's archs"
        answer_text = f"supported: {reason}" if answer else "not supported"
        lines.append(
            (f"GPU {gpu.index}", f"{gpu.name}, compute capability {capability}, {memory}; {served}; {answer_text}")
        )
    state = "loaded" if facts.library_problem is None else "not loaded"
    lines.append(("host library", f"{state}{_built_for((facts.build_info or {}).get('host'))}"))
    lines += _kernel_lines(facts.kernel_set)
    lines += _jit_lines(facts.jit)
    lines += [("note", note) for note in notes]
    lines += [("CLASH", f"[{clash.kind}] {clash.text}") for clash in clashes]
    if not clashes:
        lines.append(("result", "nothing clashes"))
    return "\n".join(f"{label:<13} {text}" for label, text in lines)


def _torch_line(facts: TorchFacts) -> str:
    if facts.problem is not None:
        return f"{facts.version}, {facts.problem}" if facts.version else facts.problem
    cuda = f"CUDA {facts.cuda}" if facts.cuda else f"ROCm {facts.hip}" if facts.hip else "no CUDA"
    return f"{facts.version}, {cuda}, _GLIBCXX_USE_CXX11_ABI={int(bool(facts.cxx11_abi))}"


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


def _jit_lines(facts: JitFacts) -> list[tuple[str, str]]:
    nvrtc = f"{facts.nvrtc}, {facts.nvrtc_path} ({facts.nvrtc_where})" if facts.nvrtc else "not found"
    content = f"{facts.cache_entries} kernels, {facts.cache_bytes / 1e6:.1f} MB"
    state = facts.cache_problem or f"can be written, {content}"
    return [("NVRTC", nvrtc), ("cache", f"{facts.cache_folder}: {state}" if facts.cache_folder else state)]


def main(*, as_json: bool = False, write: Callable[[str], object] = print) -> int:
    """Print the report; the exit code is 0 if nothing clashes, else that of the first cause in :data:`EXIT_CODES`."""
    facts = collect()
    clashes, notes = diagnose(facts)
    code = exit_code(clashes)
    if as_json:
        found = [{**asdict(clash), "exit_code": EXIT_CODES[clash.kind]} for clash in clashes]
        report = {"schema": SCHEMA, **asdict(facts), "clashes": found, "notes": notes, "exit_code": code}
        write(json.dumps(report, indent=2, sort_keys=True))
    else:
        write(render(facts, clashes, notes))
    return code
