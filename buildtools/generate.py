"""What is derived from the tables and kept in the repository: the bake file and README's table of wheels.

`python -m buildtools generate` writes them and `--check` fails where one is not what the tables say now. The workflows'
matrix is not kept anywhere: they ask `python -m buildtools rows`.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from .archive import write_atomically
from .build import ROOT, load_tables
from .errors import GeneratedFileError, TableError, nearest
from .matrix import Matrix, Wheel

BAKE = "docker/docker-bake.json"
README = "README.md"
_BEGIN = "<!-- wheels: written by `python -m buildtools generate` from matrix.toml -->\n"
_END = "<!-- wheels end -->\n"
_DOCKER_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_RUNNERS = {"x86_64": "ubuntu-24.04", "aarch64": "ubuntu-24.04-arm"}


def target_name(wheel: Wheel) -> str:
    """The wheel's name as bake allows it: without periods."""
    return wheel.name.replace(".", "_")


def baked(matrix: Matrix) -> list[Wheel]:
    """The wheels that are built in containers: those for a platform that has an image."""
    return [wheel for wheel in matrix.wheels.values() if wheel.host_library.platform in matrix.images]


def bake_file(matrix: Matrix) -> str:
    """docker-bake.json: one target a wheel, whose file lands in dist/bake; `sources` is the sdist in dist."""
    targets: dict[str, Any] = {}
    for wheel in baked(matrix):
        image = matrix.images[wheel.host_library.platform]
        targets[target_name(wheel)] = {
            "context": "docker",
            "contexts": {"sources": "dist"},
            "target": "out",
            "platforms": [f"linux/{_DOCKER_MACHINES[wheel.host_library.machine]}"],
            "args": {
                "BASE_IMAGE": image.image,
                "PYTHON": image.python,
                "KERNEL_SET": wheel.kernel_set.name,
                "ROW": wheel.name,
            },
            "output": ["type=local,dest=dist/bake"],
        }
    data = {"group": {"default": {"targets": list(targets)}}, "target": targets}
    return json.dumps(data, indent=2) + "\n"


def table(matrix: Matrix) -> str:
    """README's table of wheels, in Markdown."""
    lines = ["| wheel | torch | C++ ABI | platform | kernels |", "| --- | --- | --- | --- | --- |"]
    for wheel in matrix.wheels.values():
        host, kernels = wheel.host_library, wheel.kernel_set
        abi = f"cxx11abi{int(host.cxx11_abi)}" if host.per_torch else "any (stable ABI)"
        built = f"{kernels.name} (NVRTC {kernels.version}): {', '.join(map(str, kernels.archs))}"
        lines.append(f"| `{wheel.name}` | {host.torch} | {abi} | {host.platform} | {built} |")
    return "\n".join(lines) + "\n"


def workflow_rows(matrix: Matrix, only: str = "") -> list[dict[str, str]]:
    """The matrix of wheels.yml; `only`: one row, for a run of it alone."""
    rows = [
        {"row": wheel.name, "target": target_name(wheel), "runner": _RUNNERS[wheel.host_library.machine]}
        for wheel in baked(matrix)
    ]
    names = [row["row"] for row in rows]
    if only and only not in names:
        raise TableError(f'no row "{only}" is built in a container', fix=f"{nearest(only, names)}{', '.join(names)}")
    return [row for row in rows if only in ("", row["row"])]


def generated(root: Path) -> dict[str, str]:
    """{path: text} of every generated file, as the tables say it now."""
    matrix = load_tables(root)[1]
    readme = (root / README).read_text(encoding="utf-8")
    pattern = re.compile(re.escape(_BEGIN) + ".*?" + re.escape(_END), re.DOTALL)
    if len(pattern.findall(readme)) != 1:
        raise GeneratedFileError(f"{README} has not one place for the table of wheels", fix=f"write\n{_BEGIN}{_END}")
    return {BAKE: bake_file(matrix), README: pattern.sub(lambda _: _BEGIN + table(matrix) + _END, readme)}


def check(root: Path = ROOT) -> None:
    """GeneratedFileError names the files that are not what the tables say."""
    stale = []
    for name, text in generated(root).items():
        path = root / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(name)
    if stale:
        raise GeneratedFileError(
            f"{', '.join(stale)}: not what matrix.toml says", fix="run `python -m buildtools generate` and commit it"
        )


def main(options: argparse.Namespace, root: Path = ROOT) -> int:
    if options.check:
        check(root)
        return 0
    for name, text in generated(root).items():
        write_atomically(root / name, text.encode())
        print(name)
    return 0


def print_rows(options: argparse.Namespace, root: Path = ROOT) -> int:
    print(json.dumps({"include": workflow_rows(load_tables(root)[1], options.row)}))
    return 0
