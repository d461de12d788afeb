"""What lies in the package's folder, read without torch."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

__all__ = [
    "BUILD_INFO_NAME",
    "HOST_LIBRARY_NAME",
    "KERNEL_SET_NAME",
    "PACKAGE",
    "buildtools",
    "read_build_info",
    "release",
    "torch_matches",
]

PACKAGE = Path(__file__).resolve().parent
HOST_LIBRARY_NAME = "libflash_attn.so"
KERNEL_SET_NAME = "flash_attn.kernels"
BUILD_INFO_NAME = "build_info.json"


def buildtools(module: str) -> Any:
    """A module that the builder and the run time share: of ``flash_attn._buildtools``, or of the source tree."""
    try:
        return importlib.import_module(f"flash_attn._buildtools.{module}")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("flash_attn._buildtools") or not (PACKAGE.parent / "kernels.toml").is_file():
            raise
    return importlib.import_module(f"buildtools.{module}")


def read_build_info(package: Path) -> dict[str, Any] | None:
    """The contents of ``build_info.json`` in ``package``, or None where it is absent or no JSON object."""
    try:
        info = json.loads((package / BUILD_INFO_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return info if isinstance(info, dict) else None


def release(version: str) -> tuple[int, ...]:
    """The numeric release of a version: ``2.13.0a0+git1234`` -> (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def torch_matches(requirement: str, version: str) -> bool:
    """Whether torch ``version`` meets ``requirement``: ``>=2.10`` or ``==2.6.*`` (the two forms that wheels have)."""
    operator, wanted = requirement[:2], release(requirement[2:])
    found = release(version)
    return found[: len(wanted)] == wanted if operator == "==" else found >= wanted
