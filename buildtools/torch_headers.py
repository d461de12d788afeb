"""The headers of one torch version, for the host libraries that are compiled with them. Never imports torch.

Looked for in FLASH_ATTN_TORCH, in the environment that is installed into, and in a cache folder, which `fetch` fills
from torch's own wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from . import pip_download
from .errors import TorchHeadersError
from .matrix import HostLibrary
from .nvrtc import target_search_path

# Any wheel of a version has the same headers; this one exists for every version that needs them, on any machine.
_WHEEL = ("--python-version=3.11", "--platform=manylinux1_x86_64", "--platform=manylinux_2_28_x86_64")
_VERSION_HEADERS = ("torch/csrc/api/include/torch/version.h", "torch/headeronly/version.h")


def find_torch_include(row: HostLibrary, environ: Mapping[str, str], search_path: Sequence[str]) -> Path | None:
    """The include folder of the torch that `row` is for; None where it needs none. TorchHeadersError if there is none.

    Any patch release of the row's minor version serves, since they have one ABI; FLASH_ATTN_TORCH must name one.
    """
    minor = row.per_torch
    if not row.headers or minor is None:
        return None
    found = []
    for include, where in _candidates(row, environ, search_path):
        version = include_version(include)
        if version is not None and version[:2] == minor:
            return include
        if version is not None or where == "FLASH_ATTN_TORCH":
            found.append(f"{where} has {'none' if version is None else '.'.join(map(str, version))}")
        if where == "FLASH_ATTN_TORCH":
            break
    wanted = f"torch {minor[0]}.{minor[1]}"
    raise TorchHeadersError(
        f"no headers of {wanted}" + (f": {', '.join(found)}" if found else ""),
        why=f"the host library {row.name} is compiled with them",
        fix=f"`python -m buildtools headers --row {row.name}` fetches them, or set FLASH_ATTN_TORCH to the folder of "
        f"an installed {wanted}",
    )


def include_version(include: Path) -> tuple[int, int, int] | None:
    """The torch version that a folder of headers is of, or None where it is none."""
    for name in _VERSION_HEADERS:
        try:
            text = (include / name).read_text(encoding="utf-8")
        except OSError:
            continue
        parts = [re.search(rf"#define TORCH_VERSION_{part} (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
        if parts[0] and parts[1] and parts[2]:
            return int(parts[0][1]), int(parts[1][1]), int(parts[2][1])
    return None


def _candidates(row: HostLibrary, environ: Mapping[str, str], search_path: Sequence[str]) -> Iterator[tuple[Path, str]]:
    chosen = environ.get("FLASH_ATTN_TORCH")
    if chosen:
        folders = [Path(chosen, "torch", "include"), Path(chosen, "include"), Path(chosen)]
        yield next((folder for folder in folders if include_version(folder)), folders[0]), "FLASH_ATTN_TORCH"
    yield cache_folder(row, environ) / "torch" / "include", "the cache"
    isolated = "PYTHONPATH" in environ or "PYTHONNOUSERSITE" in environ
    for entry in target_search_path(environ) if isolated else search_path:
        if entry:
            yield Path(entry, "torch", "include"), "the Python environment"


def cache_folder(row: HostLibrary, environ: Mapping[str, str]) -> Path:
    """Where `fetch` puts the headers of `row`."""
    return pip_download.cache_folder("flash_attn_headers", environ) / f"torch-{row.headers}"


def fetch(row: HostLibrary, environ: Mapping[str, str]) -> Path:
    """Download the wheel of `row.headers` by pip, keep its headers and nothing else, and return their folder."""
    folder = cache_folder(row, environ)
    include = folder / "torch" / "include"
    if include_version(include) is not None:
        return include
    why = pip_download.download(f"torch=={row.headers}", folder, environ, _WHEEL, "torch/include/")
    if why:
        raise TorchHeadersError(
            f"pip could not download torch {row.headers}",
            why=why,
            fix="see that pip reaches an index, or set FLASH_ATTN_TORCH to the folder of an installed torch",
        )
    return include
