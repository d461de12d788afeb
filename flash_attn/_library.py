"""The compiled half of the package: where it lies, what it was built from, and loading it into torch.

Three files lie beside this one in an installed wheel: ``libflash_attn.so`` (the host library), ``flash_attn.kernels``
(the kernel set) and ``build_info.json`` (what both were made from). Any of them may be absent (a wheel built with
``SKIP_CUDA_BUILD``, a source tree): importing the package still works, and what is wrong is told by the first call on a
GPU, by ``flash_attn.supported`` and by ``python -m flash_attn doctor``.
"""

from __future__ import annotations

import ctypes
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import _jit
from ._installed import BUILD_INFO_NAME, HOST_LIBRARY_NAME, KERNEL_SET_NAME, read_build_info, torch_matches
from .errors import FlashAttnError, HostLibraryError, HostLibraryWarning, NotBuiltError

__all__ = [
    "BUILD_INFO_NAME",
    "HOST_LIBRARY_NAME",
    "KERNEL_SET_NAME",
    "HostLibrary",
    "library_version",
    "load",
    "mismatch",
    "read_build_info",
    "torch_matches",
]


@dataclass(frozen=True)
class HostLibrary:
    """The outcome of :func:`load`: a handle, or the class and text of the error that the first call on a GPU raises."""

    handle: ctypes.CDLL | None
    failure: tuple[type[FlashAttnError], str] | None


def mismatch(host: dict[str, Any], version: str, abi: bool) -> str | None:
    """Why a host library cannot work with torch ``version`` and its C++ ABI, as far as its build info tells.

    Asked before the library is loaded, whose own answer would be a mangled symbol, or a crash. A per-torch library is
    for releases alone: what a pre-release or a build from git exports is anybody's guess.
    """
    requirement = str(host.get("torch", ""))
    per_torch = host.get("kind") == "torch"
    fits = not requirement or torch_matches(requirement, version)
    if per_torch:
        release = re.fullmatch(r"[\d.]+(\+(?!git).*)?", version)
        fits = fits and release is not None and host.get("cxx11_abi") == abi
    if fits:
        return None
    wanted = requirement[2:].removesuffix(".*") + ("" if requirement.startswith("==") else " or newer")
    if not per_torch:
        return f"built for torch {wanted}; found torch {version}"
    wanted_abi = int(bool(host.get("cxx11_abi")))
    return f"built for torch {wanted}, C++ ABI {wanted_abi}; found torch {version}, C++ ABI {int(abi)}"


def load(package: Path) -> HostLibrary:
    """Load the host library in ``package`` into torch, which registers its CUDA operators. Never raises."""
    path = package / HOST_LIBRARY_NAME
    info = read_build_info(package)
    if info is not None and not info.get("cuda_build", True):
        return _failed(
            NotBuiltError,
            "this flash_attn was built without CUDA kernels (SKIP_CUDA_BUILD was set), so only CPU tensors work. "
            "Install a wheel that has them, or build again without SKIP_CUDA_BUILD.",
        )
    if not path.is_file():
        where = "this is the source tree, which was not built" if info is None else "the installation is incomplete"
        return _failed(
            NotBuiltError,
            f"flash_attn's host library {HOST_LIBRARY_NAME} is missing from {package}: {where}. "
            "Install the package (pip install flash-attn, or pip install . in the source tree); CPU tensors work "
            "without it.",
        )
    host = (info or {}).get("host") or {}
    problem = mismatch(host, torch.__version__, torch.compiled_with_cxx11_abi())
    if problem is None:
        try:
            ops: Any = torch.ops
            ops.load_library(str(path))
            handle = ctypes.CDLL(str(path))
            _jit.register(handle, package)
            return HostLibrary(handle, None)
        except (OSError, AttributeError) as error:  # AttributeError: a symbol that every library of this version has
            problem = f"the loader says: {error}"
    torch_wanted = f"torch{host['torch']}" if host.get("torch") else "another torch"
    text = (
        f"flash_attn's host library does not work with this torch: {problem}. Install the flash_attn wheel for this "
        f"torch, or {torch_wanted}; CPU tensors work as it is. `python -m flash_attn doctor` lists what clashes."
    )
    warnings.warn(text, HostLibraryWarning, stacklevel=2)
    return _failed(HostLibraryError, text)


def library_version(library: HostLibrary) -> str | None:
    """The version that the host library says it is of; None if it is not loaded."""
    if library.handle is None:
        return None
    function = library.handle.flash_attn_version
    function.restype = ctypes.c_char_p
    text: bytes = function()
    return text.decode()


def _failed(kind: type[FlashAttnError], text: str) -> HostLibrary:
    return HostLibrary(None, (kind, text))
