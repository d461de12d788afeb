"""Wheels of a few bytes for the rows of matrix.toml, and the index and page of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from packaging_support import ROOT

from buildtools.build import build_info_text
from buildtools.index import write_index
from buildtools.matrix import Wheel, load_matrix
from buildtools.metadata import load_project
from buildtools.wheel import DEFAULT_EPOCH, write_wheel

KEYS = [f"{op}-sm80-{dtype}-d{dim}-full" for op in ("fwd", "bwd") for dtype in ("fp16", "bf16") for dim in (64, 128)]
MATRIX = load_matrix(ROOT / "matrix.toml")
VERSION = load_project(ROOT).base_version


def make_row_wheel(folder: Path, row: Wheel, **more: Any) -> Path:
    """The wheel of a row, with a few bytes for kernels; `more` is put into its build_info.json."""
    host = row.host_library
    project = load_project(ROOT, MATRIX.label(row))
    project = replace(project, fields={**project.fields, "dependencies": [f"torch{host.torch}"]})
    archs = [str(arch) for arch in row.kernel_set.archs]
    compiler = f"nvrtc {row.kernel_set.version}"
    kernel_set = {"compiler": compiler, "archs": archs, "keys": KEYS, "sha256": "5" * 64, **more}
    host_info = {
        "kind": host.abi, "torch": host.torch, "platform": host.platform, "cxx11_abi": host.cxx11_abi,
        "compiler": "g++ 12.2.0",
    }  # fmt: skip
    files = {
        "flash_attn/__init__.py": f'__version__ = "{VERSION}"\n'.encode(),
        "flash_attn/libflash_attn.so": host.name.encode(),
        "flash_attn/flash_attn.kernels": bytes(1000),
        "flash_attn/build_info.json": build_info_text(VERSION, kernel_set, host_info),
    }
    folder.mkdir(parents=True, exist_ok=True)
    return folder / write_wheel(folder, project, f"py3-none-{host.platform}", files, DEFAULT_EPOCH)


def make_row_index(
    folder: Path, wanted: Callable[[Wheel], bool] = lambda row: row.host_library.machine == "x86_64", *, url: str = ""
) -> list[Path]:
    """An index, in `folder`/index, of the wheels of the rows that are wanted and of an sdist; the files it is of."""
    files = [make_row_wheel(folder / "dist", row) for row in MATRIX.wheels.values() if wanted(row)]
    files.append(folder / "dist" / f"flash_attn-{VERSION}.tar.gz")
    files[-1].write_bytes(b"sources")
    write_index(files, folder / "index", url=url)
    return files
