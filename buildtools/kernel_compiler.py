"""The NVRTC that a kernel set pins, fetched into a cache folder, whatever compilers this machine has.

A build from source takes the first NVRTC that it finds; the wheels of the matrix are made by the one that is pinned.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from . import pip_download
from .errors import NvrtcNotFoundError
from .matrix import KernelSet
from .sbom import LOCK, locked_hashes


def cache_folder(kernel_set: KernelSet, environ: Mapping[str, str]) -> Path:
    """Where `fetch` puts the compiler, as in a site-packages."""
    name = f"{kernel_set.requirement}-{kernel_set.version}"
    return pip_download.cache_folder("flash_attn_compilers", environ) / name


def fetch(kernel_set: KernelSet, root: Path, environ: Mapping[str, str]) -> Path:
    """Download the pinned wheel by pip, checked against the lock file in `root`, and return the folder it is in."""
    folder = cache_folder(kernel_set, environ)
    if folder.is_dir():
        return folder
    hashes = locked_hashes(root / LOCK, kernel_set.requirement, kernel_set.version)
    if not hashes:
        raise NvrtcNotFoundError(
            f"{LOCK} has no hash of {kernel_set.pin}",
            why="a compiler is not fetched unchecked",
            fix="run `nox -s update-pins`",
        )
    requirement = " ".join([kernel_set.pin, *(f"--hash=sha256:{digest}" for digest in hashes)])
    if why := pip_download.download(requirement, folder, environ):
        raise NvrtcNotFoundError(
            f"pip could not download {kernel_set.pin}",
            why=why,
            fix="see that pip reaches an index, or set FLASH_ATTN_NVRTC to a folder with that very version",
        )
    return folder
