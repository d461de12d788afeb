"""NVRTC through ctypes: finding the library, and turning CUDA C++ text into a cubin.

Only the library is needed: no toolkit, no header, no GPU, no driver.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from .errors import BuildError, KernelCompileError, NvrtcNotFoundError

_LIBRARY = re.compile(r"libnvrtc\.so\.(?P<major>[0-9]+)(?:\.[0-9.]+)?")
MINIMUM_VERSION = (12, 1)  # PTX 8.1, for red of four floats
SYSTEM_ROOT = Path("/")  # tests have another
_T = TypeVar("_T")


@dataclass(frozen=True)
class FoundNvrtc:
    """A library file and the place it was found through, for messages."""

    path: Path
    where: str


class Nvrtc:
    """A loaded NVRTC library."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # NVRTC loads its builtins by file name when it compiles; once they are loaded, that name resolves to them.
            for builtins in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
            self._library = ctypes.CDLL(str(path))
            self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        except (OSError, AttributeError) as error:
            raise NvrtcNotFoundError(f"{path} cannot be loaded: {error}", fix=_HOW_TO_GET) from None

    @property
    def version(self) -> tuple[int, int]:
        """(major, minor), which is all that the library tells."""
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)), "nvrtcVersion")
        return major.value, minor.value

    def full_version(self) -> str:
        """The version with its build, such as "12.9.86", read from the heading of the PTX it writes."""
        ptx, _ = self.compile("version", "", {}, ["--gpu-architecture=compute_80"])
        found = re.search(rb"\bV([0-9]+\.[0-9]+\.[0-9]+)", ptx)
        major, minor = self.version
        return found[1].decode() if found else f"{major}.{minor}"

    def supported_archs(self) -> list[int]:
        """The compute capabilities, as 10 * major + minor, that this compiler can name."""
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)), "nvrtcGetNumSupportedArchs")
        values = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(values), "nvrtcGetSupportedArchs")
        return list(values)

    def compile(self, name: str, source: str, headers: Mapping[str, str], options: Sequence[str]) -> tuple[bytes, str]:
        """(cubin, log), or (PTX text with its NUL, log) where the options name a virtual architecture.

        `headers` are what `source` may include, by the name it uses. KernelCompileError carries the compiler's log.
        """
        program = ctypes.c_void_p()
        texts = _strings(headers.values())
        names = _strings(headers)
        self._check(
            self._library.nvrtcCreateProgram(
                ctypes.byref(program), source.encode(), name.encode(), len(headers), texts, names
            ),
            "nvrtcCreateProgram",
        )
        try:
            status = self._library.nvrtcCompileProgram(program, len(options), _strings(options))
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace").strip()
            if status != 0:
                raise KernelCompileError(log or f"nvrtcCompileProgram: {self._message(status)}")
            ptx = any(option.startswith("--gpu-architecture=compute_") for option in options)
            return self._fetch(program, "PTX" if ptx else "CUBIN"), log
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        self._check(getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)), f"nvrtcGet{what}Size")
        buffer = ctypes.create_string_buffer(size.value)
        self._check(getattr(self._library, f"nvrtcGet{what}")(program, buffer), f"nvrtcGet{what}")
        return buffer.raw

    def _check(self, status: int, function: str) -> None:
        if status != 0:
            raise KernelCompileError(f"{function} of {self.path.name}: {self._message(status)}")

    def _message(self, status: int) -> str:
        return str(self._library.nvrtcGetErrorString(status).decode())


def _strings(values: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    items = [value.encode() for value in values]
    return (ctypes.c_char_p * len(items))(*items)


# --- finding it --------------------------------------------------------------------------------------------------

_HOW_TO_GET = (
    "`pip install nvidia-cuda-nvrtc-cu12` (no CUDA toolkit and no GPU are needed), or set FLASH_ATTN_NVRTC to the "
    "folder that holds libnvrtc.so.12 or newer"
)


def find_nvrtc(environ: Mapping[str, str], search_path: Sequence[str], use: Callable[[FoundNvrtc], _T]) -> _T:
    """`use(found)` of the first usable library of: FLASH_ATTN_NVRTC, the target environment, a toolkit, `search_path`.

    A library for which `use` raises NvrtcNotFoundError is passed over, except one that FLASH_ATTN_NVRTC names. Under
    build isolation `search_path`, this process's own, holds the build requirements and a subprocess is asked for the
    target environment's. NvrtcNotFoundError lists the places, and why what was there is of no use.
    """
    chosen = environ.get("FLASH_ATTN_NVRTC")
    if chosen:
        for folder in (Path(chosen), Path(chosen, "lib64"), Path(chosen, "lib")):
            path = _library_in(folder)
            if path:
                return use(FoundNvrtc(path, "FLASH_ATTN_NVRTC"))
        raise NvrtcNotFoundError(
            f"FLASH_ATTN_NVRTC={chosen} holds no usable libnvrtc.so",
            why=f"neither it nor its lib64 and lib folders have libnvrtc.so.{MINIMUM_VERSION[0]} or newer",
            fix="correct it, or unset it to have the library looked for",
        )
    places: list[str] = []
    reasons: list[str] = []
    for folder, where in _candidates(environ, search_path):
        path = _library_in(folder)
        if path:
            try:
                return use(FoundNvrtc(path, where))
            except NvrtcNotFoundError as error:
                reasons.append(error.what)
        if where not in places:
            places.append(where)
    why = f"it compiles the kernels; looked in {', '.join(places)}"
    raise NvrtcNotFoundError(
        f"no usable NVRTC library (libnvrtc.so.{MINIMUM_VERSION[0]} or newer)",
        why="; ".join([why, *reasons]),
        fix=_HOW_TO_GET,
    )


def _candidates(environ: Mapping[str, str], search_path: Sequence[str]) -> Iterator[tuple[Path, str]]:
    isolated = "PYTHONPATH" in environ or "PYTHONNOUSERSITE" in environ
    own = [entry for entry in search_path if entry]
    target = target_search_path(environ) if isolated else own
    for entry in target:
        yield from _wheel_folders(Path(entry), "the Python environment")
    yield from _toolkit_folders(environ)
    if isolated:
        for entry in own:
            yield from _wheel_folders(Path(entry), "the build requirements")


def _wheel_folders(site: Path, where: str) -> Iterator[tuple[Path, str]]:
    """Where NVIDIA's wheels put it: nvidia/cuda_nvrtc/lib up to CUDA 12, nvidia/cu13/lib from then on."""
    nvidia = site / "nvidia"
    if nvidia.is_dir():
        newest_first = sorted(nvidia.glob("cu[0-9]*/lib"), reverse=True)
        for folder in [*newest_first, nvidia / "cuda_nvrtc" / "lib"]:
            yield folder, where


def _toolkit_folders(environ: Mapping[str, str]) -> Iterator[tuple[Path, str]]:
    roots = [(environ[name], name) for name in ("CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX") if environ.get(name)]
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    if nvcc:
        roots.append((str(Path(nvcc).resolve().parent.parent), "the toolkit of nvcc on PATH"))
    roots.append((str(SYSTEM_ROOT / "usr/local/cuda"), "/usr/local/cuda"))
    for root, where in roots:
        for folder in ("lib64", "lib", *_targets(Path(root))):
            yield Path(root, folder), where
    for entry in environ.get("LD_LIBRARY_PATH", "").split(os.pathsep):
        if entry:
            yield Path(entry), "LD_LIBRARY_PATH"
    for system in (SYSTEM_ROOT / "usr/lib64", *sorted((SYSTEM_ROOT / "usr/lib").glob("*-linux-gnu"))):
        yield system, "the system's libraries"


def _targets(root: Path) -> list[str]:
    return [str(folder.relative_to(root)) for folder in sorted(root.glob("targets/*-linux/lib"))]


def _library_in(folder: Path) -> Path | None:
    """The newest libnvrtc.so.N of `folder` that is new enough."""
    found: list[tuple[int, int, Path]] = []
    if folder.is_dir():
        for path in folder.glob("libnvrtc.so.*"):
            match = _LIBRARY.fullmatch(path.name)
            if match and int(match["major"]) >= MINIMUM_VERSION[0]:
                found.append((int(match["major"]), -len(path.name), path))
    return max(found)[2] if found else None


def target_search_path(environ: Mapping[str, str]) -> list[str]:
    """sys.path as the environment being installed into has it: without what build isolation adds."""
    clean = {
        key: value for key, value in environ.items() if key not in ("PYTHONPATH", "PYTHONNOUSERSITE", "PYTHONHOME")
    }
    try:
        result = subprocess.run(
            [sys.executable, "-c", "import sys; print('\\n'.join(sys.path[1:]))"],
            env=clean, capture_output=True, text=True, timeout=30, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in result.stdout.splitlines() if line]


def load_nvrtc(found: FoundNvrtc) -> Nvrtc:
    """The library, or NvrtcNotFoundError if it is older than what the kernels need."""
    library = Nvrtc(found.path)
    try:
        version = library.version
    except BuildError as error:
        raise NvrtcNotFoundError(f"{found.path} does not work: {error.what}", fix=_HOW_TO_GET) from None
    if version < MINIMUM_VERSION:
        raise NvrtcNotFoundError(
            f"NVRTC {version[0]}.{version[1]} of {found.where} is older than {MINIMUM_VERSION[0]}.{MINIMUM_VERSION[1]}",
            fix=_HOW_TO_GET,
        )
    return library
