"""The PEP 517 and PEP 660 hooks. They need the standard library only, never torch, and metadata needs no compiler.

`build_wheel` first looks for a published wheel (prebuilt.py) and compiles where there is none.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import BuildError, NvrtcNotFoundError, PlatformError
from .metadata import Project, load_project
from .variables import Variables, read_variables

if TYPE_CHECKING:
    from .matrix import HostLibrary
    from .prebuilt import Plan
    from .wheel import Made

_ROOT = Path(__file__).resolve().parent.parent
_Hook = TypeVar("_Hook", bound=Callable[..., Any])
_Settings = dict[str, Any] | None


def _reported(hook: _Hook) -> _Hook:
    """A BuildError ends the hook's process with its text and exit code, not with a traceback."""

    @functools.wraps(hook)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        try:
            return hook(*arguments, **options)
        except BuildError as error:
            print(f"error: {error}", file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from None

    return wrapper  # type: ignore[return-value]


@_reported
def get_requires_for_build_sdist(config_settings: _Settings = None) -> list[str]:
    return []


@_reported
def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """Nothing for a published wheel; else ninja, and the pinned NVRTC where none is found. Never torch."""
    variables = read_variables(os.environ)
    if variables.skip_cuda_build or not _can_compile_here():
        return []  # pip asks on every system before it reads metadata; build_wheel says what is wrong
    return [] if _plan(variables).wheel else _requires_for_compiling(variables)


@_reported
def get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    """What compiling needs: an editable install is of the sources that are here."""
    variables = read_variables(os.environ)
    return [] if variables.skip_cuda_build or not _can_compile_here() else _requires_for_compiling(variables)


def _requires_for_compiling(variables: Variables) -> list[str]:
    from .build import load_tables
    from .nvrtc import find_nvrtc, load_nvrtc

    _, matrix = load_tables(_ROOT)
    requirements = [matrix.tools.ninja]
    try:
        find_nvrtc(os.environ, sys.path, load_nvrtc)
    except NvrtcNotFoundError:
        if variables.nvrtc:
            raise
        requirements.append(matrix.default_kernel_set.pin)
    return requirements


@_reported
def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: _Settings = None) -> str:
    """The dist-info folder, from pyproject.toml alone: on any system, with nothing installed.

    One thing is taken from the environment: where the wheel is going to be one for an older torch, published or
    compiled, its requirement is that torch, and not a newer one, which pip would then install over it.
    """
    variables = read_variables(os.environ)
    project = _project(variables)
    if not variables.skip_cuda_build:
        with contextlib.suppress(BuildError):  # build_wheel says it
            wheel = _plan(variables).wheel
            project = _requiring(project, wheel.variant.requirement if wheel else _requirement(variables))
    return _write_metadata(Path(metadata_directory), project)


@_reported
def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: _Settings = None) -> str:
    variables = read_variables(os.environ)
    project = _project(variables)
    if not variables.skip_cuda_build:
        with contextlib.suppress(BuildError):
            project = _requiring(project, _requirement(variables))
    return _write_metadata(Path(metadata_directory), project)


def _requirement(variables: Variables) -> str:
    """Of torch, of what is compiled here; empty where nothing can be."""
    return f"torch{_host_row(variables)[0].torch}" if _can_compile_here() else ""


def _requiring(project: Project, torch: str) -> Project:
    """The project with another requirement of torch, unless that is empty."""
    if not torch:
        return project
    others = [item for item in project.fields["dependencies"] if not item.startswith("torch")]
    return replace(project, fields={**project.fields, "dependencies": [torch, *others]})


def _host_row(variables: Variables) -> tuple[HostLibrary, dict[str, str]]:
    """The host library for the torch of the environment that is installed into, and a variable for its headers.

    The stable one where there is no torch, or none is seen, as under uv's isolation.
    """
    from .build import host_row, load_tables
    from .facts import installed_torch

    torch = installed_torch(os.environ, sys.path)
    row = host_row(load_tables(_ROOT)[1], torch, variables.force_cxx11_abi)
    headers = {"FLASH_ATTN_TORCH": str(torch.where / "torch")} if torch and row.headers else {}
    return row, headers | {key: os.environ[key] for key in headers if os.environ.get(key)}


def _write_metadata(folder: Path, project: Project) -> str:
    from .wheel import dist_info

    for name, data in dist_info(project, "py3-none-any").items():
        if not name.endswith("/WHEEL"):  # the tag is known when the library is built
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    return f"{project.file_name}.dist-info"


@_reported
def build_wheel(wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None) -> str:
    """The published wheel for this environment; where there is none, compile what is not compiled yet and write one."""
    from .wheel import package_files, runtime_files, source_date_epoch, write_wheel

    epoch = source_date_epoch(os.environ)
    variables = read_variables(os.environ)
    project = _project(variables)
    environ: Mapping[str, str] = os.environ
    if not variables.skip_cuda_build:
        plan = _plan(variables)
        if plan.wheel is not None:
            from .prebuilt import obtain

            return obtain(plan, Path(wheel_directory), report=_say).name
        environ = _environ_after(plan, variables)
    project, tag, built = _built_files(project, variables, environ)
    files = {**package_files(project.root), **runtime_files(project), **built}
    return write_wheel(Path(wheel_directory), project, tag, files, epoch, _made(variables, environ))


def _made(variables: Variables, environ: Mapping[str, str]) -> Made:
    """The row of the matrix that a build from source is of, and the image that it runs in."""
    from .build import load_tables
    from .sbom import IMAGE_VARIABLE
    from .torch_headers import find_torch_include, include_version
    from .wheel import Made

    if variables.skip_cuda_build:
        return Made()
    row, headers = _host_row(variables)
    names = [wheel.name for wheel in load_tables(_ROOT)[1].wheels.values() if wheel.host_library.name == row.name]
    include = find_torch_include(row, {**environ, **headers}, sys.path)
    version = include_version(include) if include else None
    return Made(next(iter(names), ""), ".".join(map(str, version or ())), environ.get(IMAGE_VARIABLE, ""))


@_reported
def build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Compile, put the results into the source tree's package, and write a wheel that points there."""
    from .archive import write_atomically
    from .wheel import GENERATED, source_date_epoch, write_wheel

    variables = read_variables(os.environ)
    project, tag, built = _built_files(_project(variables), variables, os.environ)
    package = project.root / "flash_attn"
    for name in GENERATED:  # an earlier build's may be of another kind
        (package / name).unlink(missing_ok=True)
    for name, data in built.items():
        write_atomically(project.root / name, data)
    runtime = package / "_buildtools"
    if runtime.is_dir() and not runtime.is_symlink():
        shutil.rmtree(runtime)
    runtime.unlink(missing_ok=True)
    runtime.symlink_to(Path("..", "buildtools"))
    pointer = {"__editable__.flash_attn.pth": f"{project.root}\n".encode()}
    return write_wheel(Path(wheel_directory), project, tag, pointer, source_date_epoch(os.environ))


@_reported
def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    from .wheel import source_date_epoch, write_sdist

    # Without a label: an sdist is what wheels of any label are built from.
    return write_sdist(Path(sdist_directory), load_project(_ROOT), source_date_epoch(os.environ))


def _project(variables: Variables) -> Project:
    return load_project(_ROOT, variables.local_version)


def _plan(variables: Variables) -> Plan:
    from .prebuilt import make_plan

    return make_plan(_ROOT, os.environ, variables, sys.path)


def _environ_after(plan: Plan, variables: Variables) -> Mapping[str, str]:
    """Says why there is no published wheel and what happens next; the environment to compile in.

    After a miss that is for the GPUs that are there, and otherwise for what the variables or the table say.
    """
    if plan.decision is None:
        if variables.wheels:
            _say(f"FLASH_ATTN_WHEELS is not used: {plan.because}")
        return os.environ
    _say(f"{plan.decision.text()}\n  {plan.because}")
    _check_platform()
    environ: Mapping[str, str] = os.environ
    gpus = _gpus_to_build_for(plan.decision.facts.gpus) if variables.cuda_archs is None else ""
    if gpus:
        environ = {**os.environ, "FLASH_ATTN_CUDA_ARCHS": gpus}
    target = f"the GPUs that are here ({gpus})" if gpus else variables.cuda_archs or "every supported GPU"
    _say(f"next: compiling from source, for {target}; FLASH_ATTN_NO_BUILD=1 stops here instead")
    return environ


def _gpus_to_build_for(capabilities: tuple[int, ...]) -> str:
    """A value of FLASH_ATTN_CUDA_ARCHS, without the GPUs that no kernel is for while there are others."""
    from .build import load_tables

    lowest = min(family.min_capability for family in load_tables(_ROOT)[0].families.values())
    return ";".join(str(gpu) for gpu in capabilities if gpu >= lowest) or ";".join(map(str, capabilities))


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _built_files(
    project: Project, variables: Variables, environ: Mapping[str, str]
) -> tuple[Project, str, dict[str, bytes]]:
    """(the project as the wheel's metadata has it, its tag, {name in the wheel: contents}) of what is compiled."""
    from .build import build_info_text

    if variables.skip_cuda_build:
        print("SKIP_CUDA_BUILD: this wheel has no kernels; only CPU tensors will work", file=sys.stderr)
        files = {"flash_attn/build_info.json": build_info_text(project.base_version, None, None)}
        return project, "py3-none-any", files
    _check_platform()
    from .build import build

    row, headers = _host_row(variables)
    if row.per_torch:
        _say(f"the host library is for torch {row.torch.strip('=.*')} with C++ ABI {int(row.cxx11_abi)}, which is here")
    result = build(project.root, row=row, environ={**environ, **headers})
    files = {
        f"flash_attn/{path.name}": path.read_bytes() for path in (result.kernel_set, result.host_library, result.info)
    }
    return _requiring(project, f"torch{row.torch}"), f"py3-none-{result.platform}", files


def _can_compile_here() -> bool:
    return sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64")


def _check_platform() -> None:
    if not _can_compile_here():
        raise PlatformError(
            f"flash_attn cannot be compiled on {sys.platform} {platform.machine()}",
            why="its host library is for Linux on x86_64 or aarch64",
            fix="set SKIP_CUDA_BUILD=1 for a package that runs CPU tensors only",
        )
