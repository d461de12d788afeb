"""One row of the matrix alone: its host library, and its wheel with a kernel set that is already compiled."""

from __future__ import annotations

import os
import platform as platform_module
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from . import archs, ninja_graph
from .archive import FILE_NAME, read
from .build import (
    ROOT,
    build_folder,
    build_info_text,
    host_info,
    kernel_set_folder,
    kernel_set_info,
    load_tables,
    make_build_folder,
)
from .errors import TableError, WheelError, nearest
from .host import LIBRARY, HostCompiler, find_host_compiler, host_edges, platform_tag
from .jobs import job_limit
from .kernels import KernelTable
from .matrix import HostLibrary, Matrix, Wheel
from .metadata import Project, load_project
from .sbom import IMAGE_VARIABLE
from .torch_headers import find_torch_include, include_version
from .variables import Variables, read_variables
from .wheel import Made, package_files, runtime_files, source_date_epoch, write_wheel


@dataclass(frozen=True)
class HostResult:
    """A built host library. `cpu_s`: what the compilers took; `compiled`: edges that ran, 0 if nothing had changed."""

    row: HostLibrary
    path: Path
    platform: str
    compiler: HostCompiler
    cpu_s: float
    compiled: int
    headers: str = ""  # the torch version whose headers it was compiled with


def find_wheel(matrix: Matrix, name: str, variables: Variables) -> Wheel:
    """The wheel called `name`, with FORCE_CXX11_ABI's ABI where it is of a per-torch row."""
    if name not in matrix.wheels:
        raise TableError(
            f'matrix.toml has no row "{name}"',
            fix=f"{nearest(name, matrix.wheels)}the rows are {', '.join(matrix.wheels)}",
        )
    wheel = matrix.wheels[name]
    return replace(wheel, host_library=with_forced_abi(wheel.host_library, variables))


def with_forced_abi(row: HostLibrary, variables: Variables) -> HostLibrary:
    """`row` with the C++ ABI that FORCE_CXX11_ABI asks for. The stable ABI holds no C++, so it stays as it is."""
    if row.per_torch is None or variables.force_cxx11_abi is None:
        return row
    return replace(row, cxx11_abi=variables.force_cxx11_abi)


def build_host(
    name: str, *, root: Path = ROOT, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> HostResult:
    """Build the host library of the row `name` in its own folder below `folder`. Compiles no kernel."""
    variables = read_variables(environ)
    _, matrix = load_tables(root)
    row = find_wheel(matrix, name, variables).host_library
    folder = (folder or build_folder(root, variables)) / "rows" / f"{row.name}.cxx11abi{int(row.cxx11_abi)}"
    make_build_folder(folder)
    compiler = row_compiler(row, environ, matrix.tools.minimum_gxx, folder / "gxx.json")
    include = find_torch_include(row, environ, sys.path)
    edges = host_edges(root, folder, compiler, load_project(root).base_version, environ, row, include)
    graph = ninja_graph.write_graph(folder, root, root / "csrc", [], "", edges)
    limit = job_limit(variables.max_jobs, matrix.tools.job_peak_mib)
    before = _children_cpu_s()
    compiled = ninja_graph.run_graph(graph, root, limit.jobs, environ, quiet=True)
    cpu_s = _children_cpu_s() - before
    platform, why_not = platform_tag(folder / LIBRARY, row.platform)
    if why_not:
        print(f"note: {why_not}; it is tagged {platform}, for machines like this one", file=sys.stderr)
    version = include_version(include) if include else None
    headers = ".".join(map(str, version or ()))
    return HostResult(row, folder / LIBRARY, platform, compiler, cpu_s, compiled, headers)


def row_compiler(row: HostLibrary, environ: Mapping[str, str], minimum: tuple[int, ...], cache: Path) -> HostCompiler:
    """The compiler for the row's processor: CXX where it is for that one, else its g++, a cross compiler's elsewhere.

    It has to be g++: an exception that another compiler's C++ runtime throws into libtorch ends the process.
    """
    default = "g++" if row.machine == platform_module.machine() else f"{row.machine}-linux-gnu-g++"
    chosen = environ.get("CXX", "")
    if chosen and not _target(chosen).startswith(f"{row.machine}-"):
        environ = {key: value for key, value in environ.items() if key != "CXX"}
    return find_host_compiler(environ, minimum, cache, default)


def _target(command: str) -> str:
    """What a compiler compiles for, such as x86_64-linux-gnu; empty if it does not say, which the probe will tell."""
    try:
        return subprocess.run(
            [*shlex.split(command), "-dumpmachine"], capture_output=True, text=True, check=False
        ).stdout.strip()
    except OSError:
        return ""


def _children_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def build_row_wheel(
    name: str,
    output: Path,
    *,
    kernel_set: Path | None = None,
    root: Path = ROOT,
    folder: Path | None = None,
    environ: Mapping[str, str] = os.environ,
) -> Path:
    """Write the wheel of the row `name` into `output`: its host library and a kernel set, which is not made here.

    `kernel_set`: its file; by default that of the last build of the row's kernel set in `folder`.
    """
    variables = read_variables(environ)
    table, matrix = load_tables(root)
    wheel = find_wheel(matrix, name, variables)
    kernels = (
        kernel_set or kernel_set_folder(folder or build_folder(root, variables), matrix, wheel.kernel_set) / FILE_NAME
    )
    _check_kernel_set(kernels, wheel, table, variables)
    host = build_host(name, root=root, folder=folder, environ=environ)
    project = row_project(root, matrix, wheel, variables)
    facts = host_info(host.row, host.compiler, host.platform)
    files = {
        **package_files(root),
        **runtime_files(project),
        f"flash_attn/{FILE_NAME}": kernels.read_bytes(),
        f"flash_attn/{LIBRARY}": host.path.read_bytes(),
        "flash_attn/build_info.json": build_info_text(project.base_version, kernel_set_info(kernels), facts),
    }
    made = Made(name, host.headers, environ.get(IMAGE_VARIABLE, ""))
    tag = f"py3-none-{host.platform}"
    return output / write_wheel(output, project, tag, files, source_date_epoch(environ), made)


def row_project(root: Path, matrix: Matrix, wheel: Wheel, variables: Variables) -> Project:
    """The project's metadata as this row's wheel has it: its torch, and a local version label that tells it apart."""
    label = ".".join(filter(None, (matrix.label(wheel), variables.local_version)))
    project = load_project(root, label)
    requirement = f"torch{wheel.host_library.torch}"
    others = [item for item in project.fields.get("dependencies", ()) if not item.startswith("torch")]
    return replace(project, fields={**project.fields, "dependencies": [requirement, *others]})


def _check_kernel_set(path: Path, wheel: Wheel, table: KernelTable, variables: Variables) -> None:
    """The file is what the table calls the wheel's kernel set: its compiler, archs and kernels."""
    how = (
        f"`python -m buildtools build --kernel-set {wheel.kernel_set.name}` makes it; or name a file with --kernel-set"
    )
    if not path.is_file():
        raise WheelError(f"{path} is not there", why="a row's wheel holds a compiled kernel set", fix=how)
    archive = read(path)
    wanted = wheel.kernel_set
    rows = table.select(variables.kernels, variables.head_dims)
    built = {arch for row in rows for arch in table.families[row.family].archs if arch in wanted.archs}
    clashes = []
    if archive.compiler != f"nvrtc {wanted.version}":
        clashes.append(f"it was compiled by {archive.compiler}, the table says nvrtc {wanted.version}")
    if set(archive.archs) != {str(arch) for arch in built} and variables.cuda_archs is None:
        clashes.append(f"it is for {' '.join(archive.archs)}, the table says {archs.format_archs(sorted(built))}")
    if missing := {row.key for row in rows} ^ set(archive.keys):
        clashes.append(f"it and the table differ in {', '.join(sorted(missing))}")
    if clashes:
        raise WheelError(f"{path} is not the kernel set {wanted.name}: {'; '.join(clashes)}", fix=how)
