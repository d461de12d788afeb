"""The facts that a choice needs, read from this machine and the environment that is installed into.

torch is never imported: its version is in a text file, its C++ ABI in the name of a symbol. A choice takes some tens
of milliseconds, most of it one start of Python.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .choose import Facts, known_cxx11_abi
from .nvrtc import target_search_path

_CHECK_FAIL = b"_ZN3c106detail14torchCheckFailEPKcS2_jRK"  # c10::detail::torchCheckFail(.., std::string const&)
_STRINGS = {b"Ss": False, b"NSt7__cxx11": True}  # std::string, mangled with either ABI
_PROC_VERSION = Path("/proc/driver/nvidia/version")
_Load = Callable[[str], Any]


@dataclass(frozen=True)
class InstalledTorch:
    """What a torch says of itself. `cuda` is the CUDA version that it was built with, `where` its site-packages."""

    version: str
    cxx11_abi: bool | None
    cuda: str | None
    where: Path


@dataclass(frozen=True)
class Driver:
    version: str | None = None
    cuda: tuple[int, int] | None = None
    gpus: tuple[int, ...] = ()


def read_facts(environ: Mapping[str, str], search_path: Sequence[str], force_cxx11_abi: bool | None = None) -> Facts:
    """The facts of this machine. `force_cxx11_abi`: what FORCE_CXX11_ABI says instead of torch."""
    torch = installed_torch(environ, search_path)
    driver = read_driver()
    abi = torch.cxx11_abi if torch and force_cxx11_abi is None else force_cxx11_abi
    return Facts(
        system=sys.platform,
        machine=platform.machine(),
        python=sys.version_info[:2],
        libc=read_libc(),
        torch=torch.version if torch else None,
        cxx11_abi=abi,
        driver=driver.version,
        cuda=driver.cuda,
        gpus=driver.gpus,
    )


# --- torch -------------------------------------------------------------------------------------------------------


def installed_torch(environ: Mapping[str, str], search_path: Sequence[str]) -> InstalledTorch | None:
    """The torch of the environment that is installed into, or None if it has none or cannot be seen from here.

    pip runs a build with its own folders in PYTHONPATH, but with the Python of that environment, which is asked for
    its folders. uv gives a build a Python of its own: no torch is found then, except without isolation.
    """
    isolated = "PYTHONPATH" in environ or "PYTHONNOUSERSITE" in environ
    folders = [*(target_search_path(environ) if isolated else []), *search_path]
    return find_torch(dict.fromkeys(filter(None, folders)))


def find_torch(folders: Iterable[str]) -> InstalledTorch | None:
    for folder in map(Path, folders):
        text = _read(folder / "torch" / "version.py")
        version = re.search(r"^__version__\s*(?::[^=]*)?=\s*['\"]([^'\"]+)", text, re.MULTILINE)
        name = version[1] if version else _metadata_version(folder)
        if name:
            cuda = re.search(r"^cuda\s*(?::[^=]*)?=\s*['\"]([0-9.]+)", text, re.MULTILINE)
            abi = symbol_cxx11_abi(folder / "torch" / "lib" / "libc10.so")
            abi = known_cxx11_abi(name) if abi is None else abi
            return InstalledTorch(name, abi, cuda[1] if cuda else None, folder)
    return None


def _metadata_version(folder: Path) -> str | None:
    """For a torch without torch/version.py, as in some distributions' packages."""
    if folder.is_dir():
        for path in sorted(folder.glob("torch-*.dist-info/METADATA")):
            found = re.search(r"^Version: *(\S+)", _read(path), re.MULTILINE)
            if found:
                return found[1]
    return None


def symbol_cxx11_abi(library: Path) -> bool | None:
    """_GLIBCXX_USE_CXX11_ABI of a libc10.so: how the type of a string is written in the name of a function."""
    try:
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            for string, abi in _STRINGS.items():
                if content.find(_CHECK_FAIL + string) >= 0:
                    return abi
    except (OSError, ValueError):  # not there, or empty
        pass
    return None


# --- the machine ---------------------------------------------------------------------------------------------------


def read_libc() -> tuple[str, int, int] | None:
    """("glibc", 2, 36) or ("musl", 1, 2) of the running Python; None on another system."""
    if sys.platform != "linux":
        return None
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):
        text = ""
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", text)
    if found:
        return ("glibc", int(found[1]), int(found[2]))
    # musl has no such name, and tells its version only where its loader is run; that it is there is enough.
    return ("musl", 1, 2) if any(Path("/lib").glob("ld-musl-*")) else None


def read_driver(load: _Load = ctypes.CDLL, proc: Path = _PROC_VERSION) -> Driver:
    """The driver and its GPUs. Never raises: a machine without them can install too.

    NVML answers in milliseconds; libcuda starts every GPU first and is asked only where there is no NVML.
    """
    for ask, name in ((_ask_nvml, "libnvidia-ml.so.1"), (_ask_cuda, "libcuda.so.1")):
        try:
            driver = ask(load(name))
        except (OSError, AttributeError):  # not there, or too old to have a function
            continue
        if driver is not None:
            return Driver(driver.version or _proc_version(proc), driver.cuda, driver.gpus)
    return Driver(_proc_version(proc))


def _ask_nvml(nvml: Any) -> Driver | None:
    if nvml.nvmlInit_v2() != 0:
        return None
    text, number, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
    try:
        version = text.value.decode(errors="replace") if nvml.nvmlSystemGetDriverVersion(text, len(text)) == 0 else None
        served = nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(number)) == 0
        gpus = set()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0:
            for index in range(count.value):
                device, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
                if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                    continue
                if nvml.nvmlDeviceGetCudaComputeCapability(device, ctypes.byref(major), ctypes.byref(minor)) == 0:
                    gpus.add(10 * major.value + minor.value)
        return Driver(version, _cuda_version(number.value) if served else None, tuple(sorted(gpus)))
    finally:
        nvml.nvmlShutdown()


def _ask_cuda(cuda: Any) -> Driver | None:
    number, count = ctypes.c_int(), ctypes.c_int()
    served = cuda.cuDriverGetVersion(ctypes.byref(number)) == 0
    gpus = set()
    if cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for device in range(count.value):
            capability = []
            for attribute in (75, 76):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
                value = ctypes.c_int()
                cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
                capability.append(value.value)
            gpus.add(10 * capability[0] + capability[1])
    return Driver(None, _cuda_version(number.value) if served else None, tuple(sorted(gpus)))


def _cuda_version(number: int) -> tuple[int, int]:
    return number // 1000, number % 1000 // 10


def _proc_version(path: Path) -> str | None:
    """580.159.04 of "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Tue ..."."""
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", _read(path).partition("\n")[0])
    return found[1] if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
