"""Every row of the matrix built twice, in two surroundings that have nothing in common but the inputs."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .build import ROOT, find_compiler, load_tables
from .compare import compare_wheels, explain
from .errors import BuildError, WheelDifferenceError
from .matrix import HostLibrary, Wheel
from .metadata import load_project
from .rows import find_wheel, row_compiler
from .torch_headers import cache_folder, find_torch_include
from .variables import read_variables
from .verify import FROM_THE_WHEEL
from .wheel import sdist_files

# Runs a command as another user on a host of another name, which needs no rights: only namespaces.
_ELSEWHERE = (
    "unshare", "--user", "--map-root-user", "--uts", "sh", "-c",
    'hostname elsewhere && exec unshare --user --map-user=4242 --map-group=4242 "$@"', "sh",
)  # fmt: skip
# Variables of the session that the two builds do not get; a subset of the kernels stays.
_SUBSET = ("FLASH_ATTN_KERNELS", "FLASH_ATTN_HEAD_DIMS", "FLASH_ATTN_CUDA_ARCHS")
_NOT_PASSED = ({*FROM_THE_WHEEL} - {*_SUBSET}) | {"LANG", "LANGUAGE", "PWD", "OLDPWD", "PYTHONPATH", "LOGNAME"}


@dataclass(frozen=True)
class Surroundings:
    """What must not change a wheel. `elsewhere`: another user and host, if possible; `date`: of every file."""

    folder: str
    elsewhere: bool
    umask: int
    date: int
    hook: bool  # by the PEP 517 hook, where it builds that row; otherwise by `python -m buildtools`
    variables: Mapping[str, str]


FIRST = Surroundings(
    "a", False, 0o022, 1_000_000_000, False,
    {"TZ": "UTC", "LC_ALL": "C", "PYTHONHASHSEED": "0", "MAX_JOBS": "1", "USER": "first"},
)  # fmt: skip
SECOND = Surroundings(
    "another folder/with a longer name", True, 0o077, 2_000_000_000, True,
    {"TZ": "Asia/Kathmandu", "LC_ALL": "C.UTF-8", "PYTHONHASHSEED": "4242", "MAX_JOBS": "2", "USER": "second",
     "COLUMNS": "40", "EDITOR": "true"},
)  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """One row. `skipped`: why it could not be built at all; else the two wheels."""

    row: str
    skipped: str = ""
    wheels: tuple[Path, Path] | None = None

    @property
    def digests(self) -> tuple[str, str]:
        first, second = self.wheels or ()  # type: ignore[misc]
        return _sha256(first), _sha256(second)


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def reproduce(
    names: list[str], folder: Path, *, root: Path = ROOT, environ: Mapping[str, str] = os.environ
) -> list[Outcome]:
    """Builds the rows `names` twice below `folder`. A row whose compiler or headers are not here is skipped."""
    variables = read_variables(environ)
    matrix = load_tables(root)[1]
    wheels, skipped = [], {}
    for name in names:
        wheel = find_wheel(matrix, name, variables)
        try:
            find_compiler(folder, environ, wheel.kernel_set)
            row_compiler(wheel.host_library, environ, matrix.tools.minimum_gxx, folder / "gxx.json")
            find_torch_include(wheel.host_library, environ, sys.path)
        except BuildError as error:
            skipped[name] = error.what
        if name not in skipped:
            wheels.append(wheel)
    if not wheels:
        return [Outcome(name, skipped[name]) for name in names]
    sources = folder / "sources"
    copy_sources(root, sources, FIRST.date)  # nobody edits them while the two builds run
    first, second = (_build(wheels, folder, place, sources, environ) for place in (FIRST, SECOND))
    return [
        Outcome(name, skipped[name]) if name in skipped else Outcome(name, wheels=(first[name], second[name]))
        for name in names
    ]


def _build(
    wheels: list[Wheel], folder: Path, place: Surroundings, root: Path, environ: Mapping[str, str]
) -> dict[str, Path]:
    """{row: its wheel}, built in a copy of the sources and in the surroundings `place`."""
    base = folder / place.folder
    tree, home, out = base / "tree", base / "home", base / "wheels"
    copy_sources(root, tree, place.date)
    environ = {key: value for key, value in environ.items() if key not in _NOT_PASSED and not key.startswith("LC_")}
    environ |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache"), "FORCE_BUILD": "1", **place.variables}
    for wheel in wheels:
        _copy_headers(wheel.host_library, environ)
    for made in (home, out):
        made.mkdir(parents=True, exist_ok=True)
    prefix = _ELSEWHERE if place.elsewhere and can_be_elsewhere() else ()
    for kernel_set in {wheel.kernel_set.name: wheel.kernel_set for wheel in wheels}.values():
        compiler = find_compiler(base, os.environ, kernel_set).path.parent
        command = [sys.executable, "-m", "buildtools", "build", "--quiet", "--kernel-set", kernel_set.name]
        _run([*prefix, *command], tree, {**environ, "FLASH_ATTN_NVRTC": str(compiler)}, place.umask)
    result = {}
    for wheel in wheels:
        target = out / wheel.name
        if place.hook and wheel.name == next(iter(load_tables(root)[1].wheels)):
            code = "import sys; from buildtools import backend; backend.build_wheel(sys.argv[1])"
            command = [sys.executable, "-c", code, str(target)]
        else:
            command = [sys.executable, "-m", "buildtools", "wheel", "--row", wheel.name, "--out", str(target)]
        _run([*prefix, *command], tree, environ, place.umask)
        (result[wheel.name],) = target.glob("*.whl")
    return result


def copy_sources(root: Path, tree: Path, date: int) -> None:
    """The sources, as the sdist has them."""
    project = load_project(root)
    for entry in project.sdist:
        if (root / entry).is_dir():
            (tree / entry).mkdir(parents=True, exist_ok=True)
    for path in sdist_files(project):
        copy = tree / path.relative_to(root)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, copy)
        os.utime(copy, (date, date))


def _copy_headers(row: HostLibrary, environ: dict[str, str]) -> None:
    """Torch's headers are an input: each build has its own copy, in its own folder."""
    include = find_torch_include(row, os.environ, sys.path)
    if include is not None:
        environ.pop("FLASH_ATTN_TORCH", None)
        shutil.copytree(include, cache_folder(row, environ) / "torch" / "include", dirs_exist_ok=True)


def can_be_elsewhere() -> bool:
    """Whether this system lets a process have namespaces of its own; containers often do not."""
    try:
        return subprocess.run([*_ELSEWHERE, "true"], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def _run(command: list[str], tree: Path, environ: Mapping[str, str], umask: int) -> None:
    result = subprocess.run(
        command, cwd=tree, env=dict(environ), umask=umask,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if result.returncode != 0:
        raise BuildError(f"a build exited with {result.returncode}", why=result.stdout.strip())


def table(outcomes: list[Outcome]) -> str:
    """One line for each row: its wheel, size and the two hashes."""
    lines = [f"{'row':16} {'bytes':>9}  sha256 of the first and of the second"]
    for outcome in outcomes:
        if outcome.wheels is None:
            lines.append(f"{outcome.row:16} {'-':>9}  skipped: {outcome.skipped}")
            continue
        first, second = outcome.digests
        same = "the same" if first == second else f"OTHER: {second}"
        lines.append(f"{outcome.row:16} {outcome.wheels[0].stat().st_size:>9}  {first} {same}")
    return "\n".join(lines)


def explanation(first: Path, second: Path) -> str:
    """Why two wheels differ: by diffoscope where it is installed, else by member, kernel and byte."""
    diffoscope = shutil.which("diffoscope")
    if diffoscope:
        command = [diffoscope, "--max-report-size=20000", str(first), str(second)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    import zipfile

    comparison = compare_wheels(first, second)
    lines = [f"only in one: {name}" for name in (*comparison.only_first, *comparison.only_second)]
    with zipfile.ZipFile(first) as one, zipfile.ZipFile(second) as other:
        for name in comparison.different:
            lines += [f"{name}: {reason}" for reason in explain(name, one.read(name), other.read(name))]
    return "\n".join(lines or ["the members are the same; the zip files differ in order, dates or modes"])


@contextlib.contextmanager
def _working_folder(chosen: Path | None) -> Iterator[Path]:
    if chosen is not None:
        shutil.rmtree(chosen, ignore_errors=True)
        chosen.mkdir(parents=True)
        yield chosen.absolute()
        return
    with tempfile.TemporaryDirectory(prefix="flash_attn_reproduce_") as folder:
        yield Path(folder)


def main(options: argparse.Namespace, root: Path = ROOT) -> int:
    environ = dict(os.environ)
    for name, value in (("FLASH_ATTN_HEAD_DIMS", options.head_dims), ("FLASH_ATTN_CUDA_ARCHS", options.archs)):
        if value:
            environ[name] = value
    rows = list(load_tables(root)[1].wheels)
    names = rows if options.all else options.row or rows[:1]
    subset = [f"{key}={environ[key]}" for key in _SUBSET if environ.get(key)]
    with _working_folder(options.out) as folder:
        outcomes = reproduce(names, folder, root=root, environ=environ)
        user = "user and host" if can_be_elsewhere() else "but one user and host, since namespaces are not allowed here"
        print(f"kernels: {' '.join(subset) or 'the whole table'}")
        print(f"differing: folder, home, file dates, umask, time zone, locale, hash seed, jobs, build command, {user}")
        print(table(outcomes), flush=True)
        differing = [item for item in outcomes if item.wheels and item.digests[0] != item.digests[1]]
        for outcome in differing:
            if outcome.wheels:
                print(f"\n{outcome.row}:\n{explanation(*outcome.wheels)}")
    if not any(outcome.wheels for outcome in outcomes):
        raise BuildError("no row could be built", why="; ".join(f"{item.row}: {item.skipped}" for item in outcomes))
    if differing:
        raise WheelDifferenceError(
            f"built twice, {', '.join(item.row for item in differing)} is not the same twice",
            why="a wheel that cannot be built again cannot be verified",
            fix="the members above say where; look for paths, dates, file order and compiler versions",
        )
    return 0
