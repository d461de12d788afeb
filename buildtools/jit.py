"""Kernels compiled at first use: one row of the table for one GPU, by the code that builds the kernel set.

The installed package has this module as flash_attn._buildtools.jit, the table and the kernel sources in
flash_attn/_kernels_src. Standard library only, no torch, no GPU. A result is an archive of one kernel, which the host
library reads like the kernel set; `cache` keeps it.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from . import archive, compile, nvrtc
from .archs import Arch
from .cache import Cache
from .errors import (
    ArchError,
    ArchiveError,
    BuildError,
    JitDisabledError,
    NvrtcNotFoundError,
    SharedMemoryError,
    SourceError,
    SubsetError,
    nearest,
)
from .kernels import Family, Kernel, KernelTable, Row, load_table, parse_table
from .sources import PACKAGE_FOLDER, TABLE_NAME, SourceTree, digest
from .variables import boolean

SWITCH = "FLASH_ATTN_JIT"


@dataclass(frozen=True)
class Target:
    """A GPU: `capability` is 10 * major + minor. None: not known, and not held against any kernel."""

    capability: int
    shared_bytes: int | None = None
    driver_cuda: tuple[int, int] | None = None


@dataclass(frozen=True)
class Request:
    """What a call needs: a kernel of any of `families` (the fastest first) with at least this head dim."""

    op: str
    dtype: str
    mask: str
    head_dim: int
    families: tuple[str, ...]


@dataclass(frozen=True)
class Compiler:
    """A loaded NVRTC. `supported`: the capabilities that it can name."""

    library: nvrtc.Nvrtc
    where: str
    version: str
    supported: frozenset[int]

    @property
    def name(self) -> str:
        """As the archive records it."""
        return f"nvrtc {self.version}"


@dataclass(frozen=True)
class Product:
    """An archive of one kernel. `origin`: "compiled", "cache" or "memory". `uncached`: why it could not be kept."""

    kernel: Kernel
    data: bytes
    origin: str
    seconds: float
    uncached: str = ""


def load_sources(package: Path) -> tuple[KernelTable, SourceTree]:
    """Table and kernel sources of the installed package in the folder `package`, or of its source tree."""
    folder = package / PACKAGE_FOLDER
    if (folder / TABLE_NAME).is_file():
        try:
            data = json.loads((folder / TABLE_NAME).read_text(encoding="utf-8"))
        except ValueError as error:
            raise SourceError(f"{folder / TABLE_NAME} is damaged: {error}", fix="install the package again") from None
        return parse_table(data, TABLE_NAME), SourceTree(folder)
    root = package.parent
    if (root / "kernels.toml").is_file() and (root / "csrc" / "kernels").is_dir():
        return load_table(root / "kernels.toml"), SourceTree(root / "csrc")
    raise SourceError(
        f"the kernel sources are missing from {package}",
        why=f"kernels are compiled from {PACKAGE_FOLDER}/, which every wheel has",
        fix="install the package again",
    )


def check_enabled(environ: Mapping[str, str]) -> None:
    """JitDisabledError where FLASH_ATTN_JIT is off; VariableError where it is neither on nor off."""
    if boolean(environ, SWITCH) is False:
        raise JitDisabledError(f"{SWITCH}={environ[SWITCH]} forbids it", fix=f"unset {SWITCH}")


# --- which kernel -------------------------------------------------------------------------------------------------


def candidates(
    table: KernelTable, request: Request, target: Target, supported: Iterable[int] | None, refusals: list[str]
) -> Iterator[Kernel]:
    """The kernels that serve the request on the GPU, best first; why others do not is added to `refusals`.

    The order is the host library's: the lowest cost, the fastest family, machine code for the GPU itself, for an older
    minor of it, then PTX. `supported`: the capabilities that the compiler knows, or None for all.
    """
    rows = [
        row
        for row in table.rows
        if (row.op, row.dtype, row.mask) == (request.op, request.dtype, request.mask)
        and row.family in request.families
        and row.head_dim >= request.head_dim
    ]
    rows.sort(key=lambda row: request.families.index(row.family))
    for row in sorted(rows, key=lambda row: _cost(request, row.family, row.head_dim)):
        for arch in target_archs(table, table.families[row.family], target.capability, supported):
            try:
                kernel = table.kernel(row, arch)
            except (SharedMemoryError, ArchError) as error:
                refusals.append(error.what)
                continue
            if target.shared_bytes is not None and kernel.smem_bytes > target.shared_bytes:
                refusals.append(
                    f"kernel {kernel.key} for arch {arch} needs {kernel.smem_bytes} bytes of shared memory, and the "
                    f"GPU has {target.shared_bytes}"
                )
                continue
            yield kernel


def _cost(request: Request, family: str, head_dim: int) -> int:
    """In no unit. A faster family is worth a third more of padding, as in csrc/host/dispatch.cpp."""
    return head_dim * (4 if family == request.families[-1] else 3)


def target_archs(table: KernelTable, family: Family, capability: int, supported: Iterable[int] | None) -> list[Arch]:
    """What the family can be compiled for so that a GPU of this capability runs it, best first."""
    if capability < family.min_capability:
        return []
    named = {limits.arch.number for limits in table.archs.values() if not limits.arch.ptx}
    known = named if supported is None else named & set(supported)
    same_major = [n for n in known if n // 10 == capability // 10 and n <= capability]
    archs = [
        arch
        for number in sorted(same_major, reverse=True)
        for arch in sorted(family.built_for([Arch(number)]), key=lambda arch: arch.suffix, reverse=True)
        if not arch.suffix or number == capability
    ]
    older = [n for n in (known if supported is None else supported) if family.min_capability <= n <= capability]
    return archs + family.built_for([Arch(max(older), ptx=True)] if older else [])


def check_target(table: KernelTable, families: Sequence[str], target: Target, supported: Iterable[int]) -> None:
    """ArchError where none of the families can be compiled for the GPU."""
    there = [table.families[name] for name in families if name in table.families]
    if not any(target_archs(table, family, target.capability, supported) for family in there):
        lowest = min((family.min_capability for family in there), default=0)
        raise ArchError(
            f"no kernel can be compiled for compute capability {_dotted(target.capability)}",
            why=f"the kernels need {_dotted(lowest)} or newer, and the compiler knows "
            f"{', '.join(map(_dotted, sorted(supported)))}",
        )


def nothing_serves(table: KernelTable, request: Request, target: Target, refusals: Sequence[str]) -> BuildError:
    """The error where there is no candidate."""
    like = [r for r in table.rows if (r.op, r.dtype, r.mask) == (request.op, request.dtype, request.mask)]
    head_dims = sorted({row.head_dim for row in like})
    wanted = f"{request.op} {request.dtype} {request.mask} with head_dim {request.head_dim}"
    if not any(row.head_dim >= request.head_dim and row.family in request.families for row in like):
        has = f"it has head dims {', '.join(map(str, head_dims))}" if head_dims else "it has none of that kind"
        return SubsetError(f"the kernel table has no kernel for {wanted}", why=has)
    return ArchError(
        f"no kernel for {wanted} can be compiled for compute capability {_dotted(target.capability)}",
        why="; ".join(refusals) or "neither its machine code nor its PTX is known to the table and the compiler",
    )


def runs_on(arch: str, capability: int) -> bool:
    """Whether a GPU runs the image of an archive's `arch`, by the host library's rule."""
    ptx = arch.startswith("ptx")
    exact = arch.endswith("a")
    number = int(arch.removeprefix("ptx").removesuffix("a"))
    if exact:
        return number == capability
    return number <= capability and (ptx or number // 10 == capability // 10)


def fastest_first(table: KernelTable, families: Iterable[str]) -> tuple[str, ...]:
    """The names as the host library orders them: a family for newer GPUs only is the faster one there."""
    return tuple(sorted(families, key=lambda name: (-table.families[name].min_capability, name)))


def in_kernel_set(kernel_set: archive.Archive | None, request: Request, target: Target) -> archive.Record | None:
    """The record that serves the request on the GPU, so that nothing is compiled for it."""
    found, lowest = None, 0
    for record in kernel_set.records if kernel_set else ():
        op, family, dtype, _, mask = record.key.split("-")
        if (op, dtype, mask) != (request.op, request.dtype, request.mask) or family not in request.families:
            continue
        fits = target.shared_bytes is None or record.smem_bytes <= target.shared_bytes
        if record.head_dim < request.head_dim or not fits or not runs_on(record.arch, target.capability):
            continue
        cost = _cost(request, family, record.head_dim)
        if found is None or cost < lowest:
            found, lowest = record, cost
    return found


# --- compiling ----------------------------------------------------------------------------------------------------

_compilers: dict[Path, Compiler] = {}
_compilers_lock = threading.Lock()


def find_compiler(
    environ: Mapping[str, str], search_path: Sequence[str], driver_cuda: tuple[int, int] | None
) -> Compiler:
    """The first NVRTC whose code the driver can load; each library is loaded once."""

    def use(found: nvrtc.FoundNvrtc) -> Compiler:
        with _compilers_lock:
            known = _compilers.get(found.path)
            if known is None:
                library = nvrtc.load_nvrtc(found)
                known = Compiler(library, found.where, library.full_version(), frozenset(library.supported_archs()))
                _compilers[found.path] = known
        if driver_cuda is not None and known.library.version[0] > driver_cuda[0]:
            raise NvrtcNotFoundError(
                f"NVRTC {known.version} at {found.path} makes code that the driver does not load: it serves CUDA "
                f"{driver_cuda[0]}.{driver_cuda[1]}",
                fix=f"update the driver, or `pip install nvidia-cuda-nvrtc-cu{driver_cuda[0]}`",
            )
        return known

    # Nothing is isolated at run time: this process's own path is the target environment's.
    own = {key: value for key, value in environ.items() if key not in ("PYTHONPATH", "PYTHONNOUSERSITE")}
    return nvrtc.find_nvrtc(own, search_path, use)


class Jit:
    """The run-time compiler of one installed package; safe from several threads."""

    def __init__(self, package: Path, environ: Mapping[str, str], search_path: Sequence[str]) -> None:
        self.environ = environ
        self.search_path = search_path
        self.table, self.tree = load_sources(package)
        self.cache = Cache.of(environ)
        self._tree_lock = threading.Lock()

    def find(self, request: Request, target: Target) -> Product:
        """The request's kernel from the cache, or compiled and put there. BuildError says why there is none."""
        refusals: list[str] = []
        if boolean(self.environ, SWITCH) is False:
            kernel = next(candidates(self.table, request, target, None, refusals), None)
            raise self._disabled(kernel) if kernel else nothing_serves(self.table, request, target, refusals)
        try:
            compiler = find_compiler(self.environ, self.search_path, target.driver_cuda)
        except NvrtcNotFoundError:
            # What another run has compiled serves all the same.
            for kernel in candidates(self.table, request, target, None, refusals):
                for name in self.cache.like(f"{self._stem(kernel)}.", target.driver_cuda):
                    data = self.cache.read(name, functools.partial(check_product, kernel))
                    if data is not None:
                        return Product(kernel, data, "cache", 0.0)
            raise
        for kernel in candidates(self.table, request, target, compiler.supported, refusals):
            return self.product(kernel, compiler)
        raise nothing_serves(self.table, request, target, refusals)

    def product(self, kernel: Kernel, compiler: Compiler) -> Product:
        """The archive of one kernel, from the cache or compiled. Several processes and threads compile it once."""
        started = time.perf_counter()
        name = f"{self._stem(kernel)}.{compiler.name.replace(' ', '-')}"
        check = functools.partial(check_product, kernel)
        entry = self.cache.get(name, check, lambda: self._compile(kernel, compiler))
        return Product(kernel, entry.data, entry.origin, time.perf_counter() - started, entry.uncached)

    def _compile(self, kernel: Kernel, compiler: Compiler) -> bytes:
        compiled = compile.compile_kernel(compiler.library, kernel, self._texts(kernel))
        return archive.pack(compiler.name, [(compile.record_of(kernel, compiled.report), compiled.image)])

    def _texts(self, kernel: Kernel) -> dict[str, str]:
        with self._tree_lock:
            return self.tree.closure(kernel.source)

    def _stem(self, kernel: Kernel) -> str:
        """Names an entry by all that its bytes depend on, but for the compiler's version, which follows."""
        content = {
            "format": archive.VERSION,
            "kernel": compile.kernel_to_json(kernel),
            "options": compile.compile_options(kernel),
            "sources": digest(self._texts(kernel)),
        }
        text = json.dumps(content, sort_keys=True)
        return f"{kernel.name}.{hashlib.sha256(text.encode()).hexdigest()[:24]}"

    def _disabled(self, kernel: Kernel) -> JitDisabledError:
        number = kernel.arch.number
        return JitDisabledError(
            f"{SWITCH}={self.environ[SWITCH]} forbids to compile {kernel.key} for arch {kernel.arch}",
            fix=f"unset {SWITCH}, or install a flash-attn that was built with FLASH_ATTN_CUDA_ARCHS={_dotted(number)} "
            f"and head dim {kernel.head_dim}",
        )


def check_product(kernel: Kernel, data: bytes) -> None:
    """ArchiveError unless `data` is the archive of that one kernel."""
    content = archive.unpack(data, kernel.name)
    found = [(record.key, record.arch) for record in content.records]
    if found != [(kernel.key, str(kernel.arch))]:
        raise ArchiveError(f"an archive of {kernel.name} holds {found}")


def select(table: KernelTable, patterns: Sequence[str] | None, head_dims: Sequence[int] | None) -> list[Row]:
    """The rows to compile in advance. SubsetError names the option that is wrong."""
    try:
        return table.select(patterns, head_dims)
    except SubsetError as error:
        options = {"FLASH_ATTN_KERNELS": "--kernels", "FLASH_ATTN_HEAD_DIMS": "--head-dims"}
        what, fix = error.what, error.fix.partition("`python -m buildtools table`")[0].rstrip("; ")
        for variable, option in options.items():
            what = what.replace(variable, option)
        keys = [row.key for row in table.rows]
        return_fix = fix or f"{nearest(patterns[0] if patterns else '', keys)}keys are like {keys[0]}"
        raise SubsetError(what, why=error.why, fix=return_fix) from None


def sentence(error: BuildError) -> str:
    """An error as sentences on one line, for a message that goes on before and after it."""
    text = f"{error.what} ({error.why})." if error.why else f"{error.what}."
    return f"{text} {error.fix[0].upper()}{error.fix[1:]}." if error.fix else text


def _dotted(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
