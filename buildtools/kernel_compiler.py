"""The NVRTC that a kernel set pins, fetched into a cache folder, whatever compilers this machine has.

A build from source takes the first NVRTC that it finds; the wheels of the matrix are made by the one that is pinned.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path

from .errors import NvrtcNotFoundError
from .matrix import KernelSet
from .sbom import LOCK, locked_hashes


def cache_folder(kernel_set: KernelSet, environ: Mapping[str, str]) -> Path:
    """Where `fetch` puts the compiler, as in a site-packages: below $XDG_CACHE_HOME or ~/.cache."""
    base = environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base, "flash_attn_compilers", f"{kernel_set.requirement}-{kernel_set.version}")


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
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder: temporary folders are often in memory, and a compiler is large.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        lock = Path(scratch, "requirements.txt")
        lock.write_text(" ".join([kernel_set.pin, *(f"--hash=sha256:{digest}" for digest in hashes)]) + "\n", "utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--require-hashes", "--no-cache-dir", "--dest", scratch, "--requirement", str(lock)]
        result = subprocess.run(command, env=dict(environ), stderr=subprocess.PIPE, text=True, check=False)
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            raise NvrtcNotFoundError(
                f"pip could not download {kernel_set.pin}",
                why=result.stderr.strip() or "it wrote no wheel",
                fix="see that pip reaches an index, or set FLASH_ATTN_NVRTC to a folder with that very version",
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(scratch, "site"))
        try:
            os.rename(Path(scratch, "site"), folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return folder
