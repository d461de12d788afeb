"""One wheel that pip downloads, unpacked into a cache folder: a pinned compiler, the headers of a torch."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def cache_folder(name: str, environ: Mapping[str, str]) -> Path:
    """The folder `name` below $XDG_CACHE_HOME or ~/.cache."""
    return Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", name)


def download(
    requirement: str, folder: Path, environ: Mapping[str, str], options: Sequence[str] = (), members: str = ""
) -> str:
    """Unpack to `folder` what the wheel has below `members`; why pip could not, and otherwise nothing.

    `requirement` is a line of a requirements file: with hashes in it, pip checks them.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Beside the folder: temporary folders are often in memory, and a compiler or a torch is large.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder.parent) as scratch:
        file = Path(scratch, "requirements.txt")
        file.write_text(requirement + "\n", "utf-8")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", *options]
        command += ["--no-cache-dir", "--dest", scratch, "--requirement", str(file)]
        result = subprocess.run(
            command, env=dict(environ), stderr=subprocess.PIPE, encoding="utf-8", errors="replace", check=False
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if result.returncode != 0 or len(wheels) != 1:
            return result.stderr.strip() or "it wrote no wheel"
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(Path(scratch, "site"), [name for name in wheel.namelist() if name.startswith(members)])
        try:
            os.rename(Path(scratch, "site"), folder)
        except OSError:  # another process was faster
            if not folder.is_dir():
                raise
    return ""
