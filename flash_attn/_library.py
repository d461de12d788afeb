"""The compiled half of the package: where it lies, what it was built from, and loading it into torch.

Three files lie beside this one in an installed wheel: ``libflash_attn.so`` (the host library), ``flash_attn.kernels``
(the kernel set) and ``build_info.json`` (what both were made from). Any of them may be absent (a wheel built with
``SKIP_CUDA_BUILD``, a source tree): importing the package still works, and what is wrong is told by the first call on a
GPU, by ``flash_attn.supported`` and by ``python -m flash_attn doctor``.
"""

from __future__ import annotations

import ctypes
import json
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .errors import FlashAttnError, HostLibraryError, HostLibraryWarning, NotBuiltError

__all__ = [
    "BUILD_INFO_NAME",
    "HOST_LIBRARY_NAME",
    "KERNEL_SET_NAME",
    "HostLibrary",
    "library_version",
    "load",
    "read_build_info",
    "torch_matches",
]

HOST_LIBRARY_NAME = "libflash_attn.so"
KERNEL_SET_NAME = "flash_attn.kernels"
BUILD_INFO_NAME = "build_info.json"


@dataclass(frozen=True)
class HostLibrary:
    """The outcome of :func:`load`: a handle, or the class and text of the error that the first call on a GPU raises."""

    handle: ctypes.CDLL | None
    failure: tuple[type[FlashAttnError], str] | None


def read_build_info(package: Path) -> dict[str, Any] | None:
    """The contents of ``build_info.json`` in ``package``, or None where it is absent or no JSON object."""
    try:
        info = json.loads((package / BUILD_INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) else None


def _release(version: str) -> tuple[int, ...]:
    """The numeric release of a version: ``2.13.0a0+git1234`` -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def torch_matches(requirement: str, version: str) -> bool:
    """Whether torch ``version`` meets ``requirement``: ``>=2.10`` or ``==2.6.*`` (the two forms that wheels have)."""
    operator, wanted = requirement[:2], _release(requirement[2:])
    found = _release(version)
    return found[: len(wanted)] == wanted if operator == "==" else found >= wanted


def _mismatch(info: dict[str, Any]) -> str | None:
    """Why the host library cannot work with this torch, as far as its build info tells without loading it."""
    host = info.get("host") or {}
    requirement = host.get("torch")
    if requirement and not torch_matches(requirement, torch.__version__):
        return f"it was built for torch {requirement}, found torch {torch.__version__}"
    abi = torch.compiled_with_cxx11_abi()
    if host.get("kind") != "stable" and host.get("cxx11_abi") not in (None, abi):
        return f"it was built for a torch with _GLIBCXX_USE_CXX11_ABI={int(not abi)}, found one with {int(abi)}"
    return None


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
    mismatch = _mismatch(info) if info is not None else None
    if mismatch is None:
        try:
            ops: Any = torch.ops
            ops.load_library(str(path))
            return HostLibrary(ctypes.CDLL(str(path)), None)
        except OSError as error:
            mismatch = f"the loader says: {error}"
    text = (
        f"flash_attn's host library does not work with this torch: {mismatch}. "
        "Install a flash_attn for this torch, or another torch; `python -m flash_attn doctor` lists what clashes."
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
