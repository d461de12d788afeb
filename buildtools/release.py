"""What a release consists of: its files, checked against budgets, the matrix and the manifest that its sdist carries.

python -m buildtools release files dist/bake --out release   # checks wheels, adds the sdist that lists them
python -m buildtools release compare release --listing FILE  # names that a server lists, one a line
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from .build import ROOT, load_tables
from .errors import ManifestError, OverBudgetError
from .manifest import MANIFEST_NAME, Manifest, make_manifest, read_manifest
from .matrix import Matrix
from .metadata import load_project
from .reproduce import copy_sources
from .wheel import DEFAULT_EPOCH, write_sdist

SUMS = "SHA256SUMS"
_LARGEST = 5


def check_budgets(wheels: Iterable[Path], matrix: Matrix) -> list[str]:
    """A line with the size of each wheel; OverBudgetError names the largest members of those that are too large."""
    lines, over = [], []
    for path in wheels:
        kib = path.stat().st_size / 1024
        lines.append(f"{path.name}: {kib:.0f} of {matrix.budgets.wheel_kib} KiB")
        if kib > matrix.budgets.wheel_kib:
            over.append(f"{path.name} has {kib:.0f} KiB, in it {', '.join(_largest(path))}")
    if over:
        raise OverBudgetError(
            "; ".join(over),
            why=f"matrix.toml: budgets.wheel_kib = {matrix.budgets.wheel_kib}",
            fix="leave kernels out, or raise the budget in a commit that says why",
        )
    return lines


def _largest(path: Path) -> list[str]:
    """The largest members of a wheel, by what they add to its size."""
    with zipfile.ZipFile(path) as wheel:
        members = sorted(wheel.infolist(), key=lambda item: -item.compress_size)[:_LARGEST]
    return [f"{item.filename} ({item.compress_size / 1024:.0f} KiB)" for item in members]


def check_rows(manifest: Manifest, matrix: Matrix, rows: Iterable[str]) -> None:
    """ManifestError unless there is exactly one wheel for each of `rows`, and none for anything else."""
    found = {
        (
            wheel.variant.requirement.removeprefix("torch"),
            wheel.variant.cxx11_abi,
            wheel.variant.platform,
            wheel.variant.compiler,
        ): wheel.filename
        for wheel in manifest.wheels
    }
    missing = []
    for row in rows:
        host, kernels = matrix.wheels[row].host_library, matrix.wheels[row].kernel_set
        abi, compiler = host.cxx11_abi if host.per_torch else None, tuple(map(int, kernels.version.split(".")))
        if not found.pop((host.torch, abi, host.platform, compiler), None):
            missing.append(row)
    if missing or found:
        raise ManifestError(
            f"the wheels are not those of the matrix: missing {', '.join(missing) or 'none'}; "
            f"not of a row {', '.join(found.values()) or 'none'}",
            fix="run the rows that are missing again: each is a job, and a target of docker/docker-bake.json",
        )


def make_files(wheels: list[Path], out: Path, rows: list[str], places: Iterable[str], root: Path = ROOT) -> list[str]:
    """Write into `out` the wheels, the sdist that lists them, SHA256SUMS and the index; the lines to print."""
    from .index import write_index  # needs `packaging`, which the rest does not

    matrix = load_tables(root)[1]
    project = load_project(root)
    lines = check_budgets(wheels, matrix)
    manifest = make_manifest(wheels, project.base_version, places)
    check_rows(manifest, matrix, rows)
    shutil.rmtree(out, ignore_errors=True)
    files = out / "files"
    files.mkdir(parents=True)
    for path in wheels:
        shutil.copyfile(path, files / path.name)
    with tempfile.TemporaryDirectory(prefix="flash_attn_release_") as folder:
        tree = Path(folder) / project.file_name
        # Of a copy, so that the source tree gets no manifest, which its later sdists would carry.
        copy_sources(root, tree, DEFAULT_EPOCH)
        (tree / MANIFEST_NAME).write_text(manifest.text(), encoding="utf-8")
        sdist = write_sdist(files, load_project(tree), DEFAULT_EPOCH)
    names = sorted(path.name for path in files.iterdir())
    sums = "".join(f"{_sha256(files / name)}  {name}\n" for name in names)
    (out / SUMS).write_text(sums, encoding="utf-8")
    (out / MANIFEST_NAME).write_text(manifest.text(), encoding="utf-8")
    write_index([files / name for name in names], out / "index")
    compare(out, names)
    return [*lines, f"{files / sdist}: lists {len(manifest.wheels)} wheels"]


def compare(out: Path, listed: Iterable[str]) -> None:
    """ManifestError unless the files that exist, those that are `listed`, SHA256SUMS and the manifest all agree."""
    files = {path.name: path for path in (out / "files").iterdir()}
    manifest = read_manifest(out / MANIFEST_NAME)
    lines = (out / SUMS).read_text(encoding="utf-8").splitlines()
    sums = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    sdists = {name for name in files if name.endswith(".tar.gz")}
    named = {
        "the files": set(files),
        "the manifest and one sdist": {wheel.filename for wheel in manifest.wheels} | sdists,
        SUMS: set(sums),
        "the server's list": set(listed),
    }
    clashes = [
        f"{name} is not in {where}"
        for where, names in named.items()
        for name in sorted(set().union(*named.values()) - names)
    ]
    clashes += [
        f"{name} is not the file of {SUMS}" for name in files if sums.get(name) not in (None, _sha256(files[name]))
    ]
    digests = {wheel.filename: wheel.sha256 for wheel in manifest.wheels}
    clashes += [
        f"{name} is not the file of the manifest" for name in digests if sums.get(name, digests[name]) != digests[name]
    ]
    if len(sdists) != 1:
        clashes.append(f"there are {len(sdists)} sdists")
    if clashes:
        raise ManifestError(
            "; ".join(clashes), why="a release is exactly the files that its sdist lists", fix="publish it again"
        )


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(options: argparse.Namespace, root: Path = ROOT) -> int:
    matrix = load_tables(root)[1]
    if options.action == "budget":
        print("\n".join(check_budgets(_wheels(options.wheels), matrix)))
    elif options.action == "files":
        from .generate import baked

        version = load_project(root).base_version
        if options.tag is not None and options.tag != f"v{version}":
            raise ManifestError(f"the tag is {options.tag} and the version {version}", fix=f"tag v{version}")
        rows = options.row or [wheel.name for wheel in baked(matrix)]
        print("\n".join(make_files(_wheels(options.wheels), options.out, rows, options.place, root)))
    else:
        text = options.listing.read_text(encoding="utf-8") if options.listing else sys.stdin.read()
        listed = [line for line in text.split() if line not in (SUMS, MANIFEST_NAME)]
        compare(options.out, listed)
        print(json.dumps(sorted(listed)))
    return 0


def _wheels(paths: Iterable[Path]) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        found += sorted(path.rglob("flash_attn-*.whl")) if path.is_dir() else [path]
    return found
