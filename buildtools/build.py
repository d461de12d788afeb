"""A build from start to end: tables, subset, archs, compiler, graph, result.

The command line and the PEP 517 backend both call `build`.
"""

from __future__ import annotations

import json
import os
import platform as platform_module
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import archs as arch_names
from . import ninja_graph
from .archive import FILE_NAME, read, write_atomically
from .archs import Arch
from .choose import TorchVersion
from .errors import ArchError, BuildError, NvrtcNotFoundError, PlatformError, TorchVersionError
from .facts import InstalledTorch, installed_torch
from .host import LIBRARY, HostCompiler, find_host_compiler, host_edges, platform_tag
from .jobs import expected_peaks, job_limit
from .kernel_compiler import cache_folder
from .kernels import Kernel, KernelTable, Row, load_table
from .matrix import MACHINES, HostLibrary, KernelSet, Matrix, load_matrix
from .metadata import load_project
from .nvrtc import FoundNvrtc, find_nvrtc, load_nvrtc
from .torch_headers import find_torch_include
from .variables import Variables, read_variables

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Compiler:
    """A kernel compiler that was found: `name` is what the archive records, such as "nvrtc 12.9.86"."""

    path: Path
    where: str
    version: str
    supported: frozenset[int]

    @property
    def name(self) -> str:
        return f"nvrtc {self.version}"


@dataclass(frozen=True)
class Result:
    """What a build made. `compiled`: how many edges of the graph ran; 0 if nothing had changed."""

    folder: Path
    kernel_set: Path
    host_library: Path
    info: Path  # build_info.json
    platform: str  # of the wheel's tag
    compiler: Compiler
    kernels: tuple[Kernel, ...]
    compiled: int


def build(
    root: Path = ROOT,
    *,
    kernel_set: str = "",
    compiler: Compiler | None = None,
    row: HostLibrary | None = None,
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
    quiet: bool = False,
) -> Result:
    """Build kernel set and host library of the tables in `root`, as the variables in `environ` ask.

    `folder`: of all builds; by default FLASH_ATTN_BUILD_DIR or build/. With the name of a `kernel_set`, that set is
    built by the very compiler that it pins; without, as from source: the default set, by the first compiler that is
    found. A `compiler` is used instead of either. `row`: of the host library; by default the stable one.
    """
    variables = read_variables(environ)
    table, matrix = load_tables(root)
    project = load_project(root)
    wanted = matrix.kernel_set(kernel_set) if kernel_set else matrix.default_kernel_set
    folder = kernel_set_folder(folder or build_folder(root, variables), matrix, wanted)
    make_build_folder(folder)
    notes = list(variables.notes)
    row = row or host_row(matrix)
    include = find_torch_include(row, environ, sys.path)
    host_compiler = find_host_compiler(environ, matrix.tools.minimum_gxx, folder / "gxx.json")
    compiler = compiler or find_compiler(folder, environ, wanted if kernel_set else None)
    rows = table.select(variables.kernels, variables.head_dims)
    kernels = table.kernels(rows, choose_archs(table, rows, wanted, variables, compiler, notes))
    if not kernels:
        raise ArchError(
            f"{compiler.name} of {compiler.where} can compile for none of the archs of kernel set "
            f"{wanted.name}: {arch_names.format_archs(wanted.archs)}",
            fix=f"`pip install {wanted.pin}`, or name others in FLASH_ATTN_CUDA_ARCHS",
        )
    host = host_edges(root, folder, host_compiler, project.base_version, environ, row, include)
    graph = ninja_graph.write_graph(folder, root, root / "csrc", kernels, compiler.name, host)
    names = [kernel.name for kernel in kernels]
    peaks = expected_peaks(folder / "resources.json", compiler.name, names, matrix.tools.job_peak_mib)
    # A file of the host library takes less than any kernel: below 100 MiB.
    limit = job_limit(variables.max_jobs, [*peaks, *[min(peaks)] * len(host.builds)])
    notes += (
        cuda_notes(compiler, installed_torch(environ, sys.path), matrix.default_kernel_set) if not kernel_set else []
    )
    if not quiet:
        for note in notes:
            print(f"note: {note}", file=sys.stderr)
        print(
            f"{len(kernels)} kernels with {compiler.name} of {compiler.where}, host library with {host_compiler.name}; "
            f"{limit.jobs} at once ({limit.reason})",
            file=sys.stderr,
            flush=True,
        )
    compiled = ninja_graph.run_graph(graph, root, limit.jobs, edge_environment(root, environ, compiler), quiet=quiet)
    info = folder / "build_info.json"
    if compiled or not _is_newer(info, folder / LIBRARY, folder / FILE_NAME):
        platform, why_not = platform_tag(folder / LIBRARY, row.platform)
        if why_not and not quiet:
            print(f"note: {why_not}; the wheel is tagged {platform}, for machines like this one", file=sys.stderr)
        host_facts = host_info(row, host_compiler, platform)
        kernels_facts = kernel_set_info(folder / FILE_NAME)
        write_atomically(info, build_info_text(project.base_version, kernels_facts, host_facts))
    return Result(
        folder=folder,
        kernel_set=folder / FILE_NAME,
        host_library=folder / LIBRARY,
        info=info,
        platform=json.loads(info.read_text(encoding="utf-8"))["host"]["platform"],
        compiler=compiler,
        kernels=tuple(kernels),
        compiled=compiled,
    )


def _is_newer(path: Path, *others: Path) -> bool:
    """False too where `path` is missing: a build may have been killed just before it was written."""
    return path.is_file() and path.stat().st_mtime_ns >= max(other.stat().st_mtime_ns for other in others)


def host_row(matrix: Matrix, torch: InstalledTorch | None = None, cxx11_abi: bool | None = None) -> HostLibrary:
    """The host library that a build on this machine is of: the one for `torch`, or the stable one if that is None.

    `cxx11_abi`: of a library for one torch, instead of what that torch says. TorchVersionError where there is no
    library for this torch.
    """
    machine = platform_module.machine()
    if machine not in MACHINES:
        raise PlatformError(f"no host library can be built on {machine}", why=f"the machines are {', '.join(MACHINES)}")
    rows = sorted(matrix.host_libraries.values(), key=lambda row: row.machine != machine)  # this machine's first
    row = next(row for row in rows if row.per_torch is None)
    version = TorchVersion.parse(torch.version) if torch else None
    if torch and version and version.release < torch_minor(row):
        single = [row for row in rows if row.per_torch == version.release[:2]]
        if not single:
            minors = sorted({row.per_torch for row in rows if row.per_torch})
            raise TorchVersionError(
                f"flash_attn is not for torch {torch.version}, which is in {torch.where}",
                why=f"it is for torch {', '.join(f'{major}.{minor}' for major, minor in minors)} and {row.torch}",
                fix="install one of these; the torch that is installed is never changed",
            )
        row = single[0]
        abi = torch.cxx11_abi if cxx11_abi is None else cxx11_abi
        row = row if abi is None else replace(row, cxx11_abi=abi)
    # No wheel may be published for this processor, but its library can be built all the same.
    return replace(row, machine=machine, platform=row.platform.replace(row.machine, machine))


def torch_minor(row: HostLibrary) -> tuple[int, int]:
    """The oldest torch that a host library is for, such as (2, 10)."""
    major, minor = re.findall(r"\d+", row.torch)[:2]
    return int(major), int(minor)


def kernel_set_info(path: Path) -> dict[str, Any]:
    archive = read(path)
    return {"compiler": archive.compiler, "archs": archive.archs, "keys": archive.keys, "sha256": archive.sha256}


def host_info(row: HostLibrary, compiler: HostCompiler, platform: str) -> dict[str, Any]:
    return {
        "kind": row.abi,
        "torch": row.torch,
        "platform": platform,
        "cxx11_abi": row.cxx11_abi,
        "compiler": compiler.name,
    }


def build_info_text(version: str, kernel_set: dict[str, Any] | None, host: dict[str, Any] | None) -> bytes:
    """build_info.json: what a wheel holds and what it was made with. No date and no path."""
    info = {"version": version, "kernel_set": kernel_set, "host": host, "cuda_build": kernel_set is not None}
    return (json.dumps(info, indent=2) + "\n").encode()


def build_folder(root: Path, variables: Variables) -> Path:
    """FLASH_ATTN_BUILD_DIR, or build/ beside the tables."""
    return Path(variables.build_dir).absolute() if variables.build_dir else root / "build"


def kernel_set_folder(folder: Path, matrix: Matrix, kernel_set: KernelSet) -> Path:
    """Where below the build folder a kernel set is built: the default one in it, so that from source it is the same."""
    return folder if kernel_set == matrix.default_kernel_set else folder / "kernel_sets" / kernel_set.name


def make_build_folder(folder: Path) -> None:
    """Make `folder`; BuildError if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(folder, os.W_OK) else "no permission"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise BuildError(
            f"the build folder {folder} cannot be written: {reason}",
            fix="set FLASH_ATTN_BUILD_DIR to a folder that can",
        )


def edge_environment(root: Path, environ: Mapping[str, str], compiler: Compiler) -> dict[str, str]:
    """What the commands of the graph find in their environment instead of on their command line."""
    return {
        **environ,
        "PYTHONPATH": str(Path(__file__).resolve().parent.parent),
        "FLASH_ATTN_EDGE_PYTHON": sys.executable,
        "FLASH_ATTN_EDGE_NVRTC": str(compiler.path),
        "FLASH_ATTN_EDGE_CSRC": str(root / "csrc"),
    }


def find_compiler(folder: Path, environ: Mapping[str, str], pinned_by: KernelSet | None = None) -> Compiler:
    """The first NVRTC that is found, or the one that a kernel set pins.

    What it can do is asked once and kept in `folder`, as long as the file stays the same.
    """
    note = folder / "nvrtc.json"
    if pinned_by is None:
        return find_nvrtc(environ, sys.path, lambda found: _ask(found, note))

    def exact(found: FoundNvrtc) -> Compiler:
        compiler = _ask(found, note)
        if compiler.version != pinned_by.version:
            raise NvrtcNotFoundError(f"{compiler.name} of {found.where} is not it")
        return compiler

    try:
        return find_nvrtc(environ, [str(cache_folder(pinned_by, environ)), *sys.path], exact)
    except NvrtcNotFoundError as error:
        raise NvrtcNotFoundError(
            f"nvrtc {pinned_by.version}, which compiles the kernel set {pinned_by.name}, is not here",
            why=error.why or error.what,
            fix=f"`python -m buildtools compiler --kernel-set {pinned_by.name}` fetches it",
        ) from None


def _ask(found: FoundNvrtc, cache: Path) -> Compiler:
    stat = found.path.stat()
    identity = [str(found.path), stat.st_size, stat.st_mtime_ns]
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
        if known["identity"] == identity:
            return _compiler(found, known["version"], known["supported"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not asked yet, or the note is damaged
    library = load_nvrtc(found)
    version, supported = library.full_version(), library.supported_archs()
    note = json.dumps({"identity": identity, "version": version, "supported": supported})
    ninja_graph.write_if_changed(cache, note)
    return _compiler(found, version, supported)


def _compiler(found: FoundNvrtc, version: str, supported: list[int]) -> Compiler:
    return Compiler(found.path, found.where, version, frozenset(supported))


def cuda_notes(compiler: Compiler, torch: InstalledTorch | None, kernel_set: KernelSet) -> list[str]:
    """A line where the compiler and the torch that is installed are of two CUDA majors: both, and what it means."""
    if torch is None or torch.cuda is None or torch.cuda.split(".")[0] == compiler.version.split(".")[0]:
        return []
    both = (
        f"the kernels are compiled by {compiler.name} ({compiler.where}, {compiler.path}), and torch {torch.version} "
        f"({torch.where}) is for CUDA {torch.cuda}"
    )
    major = compiler.version.split(".")[0]
    if int(major) < int(torch.cuda.split(".")[0]):
        return [f"{both}: nothing has to be done, the driver that torch needs runs these kernels too"]
    return [
        f"{both}: these kernels need a driver for CUDA {major} or newer; for an older one set FLASH_ATTN_NVRTC to the "
        f"folder of an NVRTC of torch's CUDA (`pip install {kernel_set.pin}` has one of CUDA "
        f"{kernel_set.version.split('.')[0]})"
    ]


def choose_archs(
    table: KernelTable,
    rows: list[Row],
    kernel_set: KernelSet,
    variables: Variables,
    compiler: Compiler,
    notes: list[str],
) -> dict[str, list[Arch]]:
    """{family: archs} for the families of `rows`: what the variables ask for, or the kernel set's archs.

    ArchError if an arch that the user named cannot be built; one that only the table names is left out with a note.
    """
    families = [table.families[name] for name in sorted({row.family for row in rows})]
    if variables.cuda_archs is None:
        unsupported = [arch for arch in kernel_set.archs if arch.number not in compiler.supported]
        if unsupported:
            notes.append(
                f"{compiler.name} of {compiler.where} cannot compile for {arch_names.format_archs(unsupported)}; "
                f"those archs are left out ({kernel_set.pin} has them)"
            )
        usable = [arch for arch in kernel_set.archs if arch.number in compiler.supported]
        return {family.name: [arch for arch in family.archs if arch in usable] for family in families}
    asked = arch_names.parse_archs(
        variables.cuda_archs,
        variable=variables.cuda_archs_from,
        all_archs=kernel_set.archs,
        native=arch_names.native_archs,
    )
    lowest = min(family.min_capability for family in families)
    old = [arch for arch in asked if arch.number < lowest]
    wanted = [arch for arch in asked if arch.number >= lowest]
    written = f"{variables.cuda_archs_from}={variables.cuda_archs}"
    if old and (variables.cuda_archs_from == "FLASH_ATTN_CUDA_ARCHS" or not wanted):
        raise ArchError(
            f"{written}: no kernel can be built for {arch_names.format_archs(old)}",
            why=f"the kernels need compute capability {lowest // 10}.{lowest % 10} (arch {lowest}) or newer",
            fix="name only such archs in FLASH_ATTN_CUDA_ARCHS",
        )
    if old:  # TORCH_CUDA_ARCH_LIST is set for all of a machine's projects
        notes.append(f"{written}: {arch_names.format_archs(old)} is below {lowest} and left out")
    for arch in wanted:
        table.limits(arch)
        if arch.number not in compiler.supported:
            numbers = ", ".join(str(number) for number in sorted(compiler.supported) if number >= lowest)
            raise ArchError(
                f"{written}: {compiler.name} of {compiler.where} cannot compile for {arch}",
                why=f"it knows {numbers}",
                fix="name one of these, or set FLASH_ATTN_NVRTC to the folder of a newer NVRTC",
            )
    result = {family.name: family.built_for(wanted) for family in families}
    for arch in wanted:
        if not any(arch in built or arch.number in {a.number for a in built} for built in result.values()):
            raise ArchError(
                f"{written}: no kernel family of this selection is built for {arch}",
                why="; ".join(f"{family.name} is for {arch_names.format_archs(family.archs)}" for family in families),
                fix="widen FLASH_ATTN_KERNELS, or name other archs",
            )
    return result


def load_tables(root: Path = ROOT) -> tuple[KernelTable, Matrix]:
    """Both tables of a source tree."""
    table = load_table(root / "kernels.toml")
    return table, load_matrix(root / "matrix.toml", table)
