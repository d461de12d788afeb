"""Kernel sources as NVRTC gets them: text in memory, by names that hold no path of this machine."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path

from .errors import SourceError, nearest

# Where the installed package has them, below a folder like csrc, and its table beside it.
PACKAGE_FOLDER = "_kernels_src"
TABLE_NAME = "kernels.json"
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+(?:"(?P<quoted>[^"\n]+)"|<(?P<system>[^>\n]+)>)', re.MULTILINE)


class SourceTree:
    """Reads csrc/kernels; each file is read and scanned for includes once.

    An include is written relative to csrc/kernels ("common/ptx.cuh") or to csrc ("params.h").
    """

    def __init__(self, csrc: Path) -> None:
        self.csrc = csrc
        self._text: dict[str, str] = {}
        self._includes: dict[str, tuple[str, ...]] = {}

    def closure(self, source: str) -> dict[str, str]:
        """{name: text} of `source` (first) and of every header that it includes, directly or not (sorted)."""
        headers: set[str] = set()
        pending = [source]
        while pending:
            name = pending.pop()
            for include in self._scan(name):
                if include not in headers and include != source:
                    headers.add(include)
                    pending.append(include)
        return {name: self._text[name] for name in [source, *sorted(headers)]}

    def name_below_csrc(self, name: str) -> str:
        """Where a file that is included as `name` lies: "kernels/common/ptx.cuh", "params.h"."""
        path = self._path(name)
        if path is None:
            raise SourceError(f"csrc/kernels/{name} is not there")
        return path.relative_to(self.csrc).as_posix()

    def _scan(self, name: str) -> tuple[str, ...]:
        if name in self._includes:
            return self._includes[name]
        text = self._read(name)
        includes = []
        for match in _INCLUDE.finditer(text):
            if match["system"]:
                raise SourceError(
                    f"csrc/kernels/{name} includes <{match['system']}>",
                    why="kernels are compiled with no CUDA or C++ header at hand, only NVRTC itself",
                    fix="declare what is needed in csrc/kernels/common",
                )
            include = match["quoted"]
            if self._path(include) is None:
                raise SourceError(
                    f'csrc/kernels/{name} includes "{include}", which is not there',
                    fix=f"{nearest(include, self._headers())}write it relative to csrc/kernels or csrc",
                )
            includes.append(include)
        self._text[name] = text
        self._includes[name] = tuple(includes)
        return self._includes[name]

    def _read(self, name: str) -> str:
        path = self._path(name)
        if path is None:
            raise SourceError(f"csrc/kernels/{name} is not there", why="kernels.toml names it as a source")
        return path.read_text(encoding="utf-8")

    def _path(self, name: str) -> Path | None:
        for folder in (self.csrc / "kernels", self.csrc):
            if (folder / name).is_file():
                return folder / name
        return None

    def _headers(self) -> list[str]:
        folder = self.csrc / "kernels"
        return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*.*h"))] + ["params.h"]


def digest(sources: Mapping[str, str]) -> dict[str, str]:
    """{name: sha256} of the texts."""
    return {name: hashlib.sha256(text.encode()).hexdigest() for name, text in sources.items()}
