"""Builds a published wheel again from the inputs that it records, and compares the two member by member."""

from __future__ import annotations

import base64
import calendar
import csv
import hashlib
import io
import json
import os
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from . import sbom
from .archive import FILE_NAME, Record, unpack
from .build import ROOT, Compiler, build, find_compiler, load_tables
from .compare import explain
from .errors import (
    AlteredWheelError,
    BuildError,
    NotVerifiedError,
    NvrtcNotFoundError,
    WheelDifferenceError,
    WheelError,
)
from .host import LIBRARY
from .kernels import KernelTable
from .matrix import Wheel
from .metadata import load_project
from .rows import build_row_wheel, find_wheel, row_compiler
from .variables import read_variables
from .wheel import sources

# Variables that change what is built; a rebuild gets them from the wheel's own records.
FROM_THE_WHEEL = (
    "FLASH_ATTN_CUDA_ARCHS", "TORCH_CUDA_ARCH_LIST", "FLASH_ATTN_KERNELS", "FLASH_ATTN_HEAD_DIMS", "FORCE_CXX11_ABI",
    "FLASH_ATTENTION_FORCE_CXX11_ABI", "FLASH_ATTN_LOCAL_VERSION", "SOURCE_DATE_EPOCH", "FLASH_ATTN_BUILD_DIR",
    sbom.IMAGE_VARIABLE, "SKIP_CUDA_BUILD", "FLASH_ATTENTION_SKIP_CUDA_BUILD",
)  # fmt: skip


@dataclass(frozen=True)
class Published:
    """A wheel whose members are what its RECORD says."""

    path: Path
    members: Mapping[str, bytes]
    date: tuple[int, int, int, int, int, int]
    info: dict[str, Any]  # build_info.json
    bill: sbom.Recorded


@dataclass(frozen=True)
class Verdict:
    """`different` and `left_out` are {member: why}; `left_out` could not be compared here."""

    same: tuple[str, ...]
    different: Mapping[str, list[str]]
    left_out: Mapping[str, str]
    identical: bool  # the whole files are

    def text(self) -> str:
        lines = [f"  same          {name}" for name in self.same]
        lines += [f"  not compared  {name}: {why}" for name, why in self.left_out.items()]
        for name, reasons in self.different.items():
            lines += [f"  DIFFERENT     {name}: {reason}" for reason in reasons]
        if self.identical:
            lines.append("the wheel that was built here is the same file, byte for byte")
        elif not self.different and not self.left_out:
            lines.append("every member is the same; the zip files differ, as another version of zlib makes them")
        return "\n".join(lines)


def read_published(path: Path) -> Published:
    """AlteredWheelError names the members that cannot be read or are not what RECORD says."""
    members, damaged = {}, {}
    try:
        with zipfile.ZipFile(path) as wheel:
            date = min((item.date_time for item in wheel.infolist()), default=(1980, 1, 1, 0, 0, 0))
            for name in wheel.namelist():
                try:
                    members[name] = wheel.read(name)
                except (zipfile.BadZipFile, zlib.error, OSError, NotImplementedError) as error:
                    damaged[name] = str(error)
    except (zipfile.BadZipFile, OSError) as error:
        raise AlteredWheelError(f"{path} cannot be read as a wheel: {error}") from None
    record = next((data for name, data in members.items() if name.endswith(".dist-info/RECORD")), b"")
    listed = {row[0]: row[1] for row in csv.reader(io.StringIO(record.decode(errors="replace"))) if len(row) == 3}
    if record:
        for name, data in members.items():
            digest = "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            if not name.endswith(".dist-info/RECORD") and listed.get(name) != digest:
                damaged[name] = "its sha256 is not the one in RECORD" if name in listed else "RECORD does not list it"
        damaged |= dict.fromkeys(listed.keys() - members.keys() - damaged.keys(), "RECORD lists it")
    if damaged:
        raise AlteredWheelError(
            f"{path.name} was altered after it was built: "
            + "; ".join(f"{name} ({why})" for name, why in sorted(damaged.items())),
            why="a wheel's RECORD lists the sha256 of everything in it",
            fix="do not install it; get it again, and tell whoever gave it to you",
        )
    try:
        info = json.loads(members["flash_attn/build_info.json"])
        (bill,) = (data for name, data in members.items() if name.endswith(f"/sboms/{sbom.FILE_NAME}"))
        if not info["cuda_build"]:
            raise ValueError("it was built with SKIP_CUDA_BUILD and holds nothing that was compiled")
        return Published(path, members, date, info, sbom.read_bill(bill))
    except (KeyError, ValueError, TypeError) as error:
        raise WheelError(f"{path.name} does not record how it was built: {error!s}") from None


def verify(
    path: Path, *, root: Path = ROOT, folder: Path | None = None, environ: Mapping[str, str] = os.environ
) -> Verdict:
    """Build the wheel at `path` again in `folder` (default: a temporary one) from the sources in `root`, and compare.

    NotVerifiedError if these are other sources. What another compiler made is left out of the comparison and said.
    """
    published = read_published(path)
    project = load_project(root)
    here = sbom.sources_digest(sources(project))
    if here != published.bill.sources:
        raise NotVerifiedError(
            f"{path.name} was built from sources with sha256 {published.bill.sources}, and these have {here}",
            why="only the same sources can be compared",
            fix=f"verify it in the unpacked sdist, or the release's tag, of {published.info['version']}",
        )
    with tempfile.TemporaryDirectory(prefix="flash_attn_verify_") as temporary:
        folder = folder or Path(temporary) / "build"
        environ = _environment(published, root, environ)
        wheel = find_wheel(load_tables(root)[1], published.bill.row, read_variables(environ))
        folder.mkdir(parents=True, exist_ok=True)
        compiler = _recorded_compiler(published, wheel, folder, environ)
        left_out = _missing_inputs(published, wheel, compiler.name, root, folder, environ)
        made = build(
            root, kernel_set=wheel.kernel_set.name, compiler=compiler, folder=folder, environ=environ, quiet=True
        )
        kernel_set = made.kernel_set
        out = Path(temporary) / "wheel"
        built = build_row_wheel(wheel.name, out, kernel_set=kernel_set, root=root, folder=folder, environ=environ)
        return _compare(published, built, left_out)


def _environment(published: Published, root: Path, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables with which the wheel was built, as far as they change its bytes."""
    result = {key: value for key, value in environ.items() if key not in FROM_THE_WHEEL}
    table, matrix = load_tables(root)
    wheel = find_wheel(matrix, published.bill.row, read_variables(result))
    kernels, host = published.info["kernel_set"], published.info["host"]
    if set(kernels["keys"]) != {row.key for row in table.rows}:
        result["FLASH_ATTN_KERNELS"] = ",".join(kernels["keys"])
    families = {row.family for row in table.rows if row.key in kernels["keys"]}
    usual = {str(arch) for name in families for arch in table.families[name].archs if arch in wheel.kernel_set.archs}
    if set(kernels["archs"]) != usual:
        records = unpack(published.members[f"flash_attn/{FILE_NAME}"]).records
        result["FLASH_ATTN_CUDA_ARCHS"] = ";".join(_archs_asked_for(records, table))
    if wheel.host_library.per_torch and host["cxx11_abi"] != wheel.host_library.cxx11_abi:
        result["FORCE_CXX11_ABI"] = str(int(host["cxx11_abi"]))
        wheel = find_wheel(matrix, wheel.name, read_variables(result))
    version = published.path.name.split("-")[1]
    if label := version.partition("+")[2].removeprefix(matrix.label(wheel)).lstrip("."):
        result["FLASH_ATTN_LOCAL_VERSION"] = label
    if published.bill.image:
        result[sbom.IMAGE_VARIABLE] = published.bill.image
    result["SOURCE_DATE_EPOCH"] = str(calendar.timegm((*published.date, 0, 0, 0)))
    return result


def _archs_asked_for(records: Sequence[Record], table: KernelTable) -> list[str]:
    """What FLASH_ATTN_CUDA_ARCHS has to say for these kernels: "90" brings the 90a code of a family for Hopper with it.

    "90a" itself would compile the families for every arch for it too, so it is left out unless they have it.
    """
    archs = list(dict.fromkeys(record.arch for record in records))
    everywhere = {record.arch for record in records if table.families[record.key.split("-")[1]].any_arch}
    return [arch for arch in archs if arch in everywhere or arch[-1] != "a" or arch[:-1] not in archs]


def _recorded_compiler(published: Published, wheel: Wheel, folder: Path, environ: Mapping[str, str]) -> Compiler:
    """The NVRTC of the version that the wheel records, or where there is none, the first that is found."""
    recorded = replace(wheel.kernel_set, version=published.bill.compiler.removeprefix("nvrtc "))
    try:
        return find_compiler(folder, environ, recorded)
    except NvrtcNotFoundError:
        return find_compiler(folder, environ)


def _missing_inputs(
    published: Published, wheel: Wheel, nvrtc: str, root: Path, folder: Path, environ: Mapping[str, str]
) -> dict[str, str]:
    """{last part of a member's name: why it cannot be compared} where a compiler is another one than was recorded."""
    matrix = load_tables(root)[1]
    result = {}
    if nvrtc != published.bill.compiler:
        result[FILE_NAME] = f"it was compiled by {published.bill.compiler}, and here is {nvrtc}"
    host = row_compiler(wheel.host_library, environ, matrix.tools.minimum_gxx, folder / "gxx.json").name
    if host != published.bill.host_compiler:
        result[LIBRARY] = f"it was compiled by {published.bill.host_compiler}, and here is {host}"
    if result:
        result |= dict.fromkeys(
            ("build_info.json", sbom.FILE_NAME, "RECORD"), "it names the compilers, or their results"
        )
    return result


def _compare(published: Published, built: Path, missing: Mapping[str, str]) -> Verdict:
    with zipfile.ZipFile(built) as wheel:
        ours = {name: wheel.read(name) for name in wheel.namelist()}
    same, different, left_out = [], {}, {}
    for name in sorted(published.members.keys() | ours.keys()):
        theirs, mine = published.members.get(name), ours.get(name)
        if theirs is None or mine is None:
            different[name] = [f"only in the wheel {'built here' if theirs is None else 'that is verified'}"]
        elif theirs == mine:
            same.append(name)
        elif name.rpartition("/")[2] in missing:
            left_out[name] = missing[name.rpartition("/")[2]]
        else:
            different[name] = explain(name, theirs, mine)
    if built.name != published.path.name:
        different["the file name"] = [f"it is {built.name} here"]
    return Verdict(tuple(same), different, left_out, built.read_bytes() == published.path.read_bytes())


def check(verdict: Verdict, name: str) -> None:
    """WheelDifferenceError or NotVerifiedError, unless every member is the same."""
    if verdict.different:
        reasons = "; ".join(f"{member} ({why})" for member, lines in verdict.different.items() for why in lines)
        raise WheelDifferenceError(
            f"{name} is not what its recorded inputs give: {reasons}",
            why="either the wheel was altered, or an input is not recorded",
            fix="do not trust it before the difference is explained",
        )
    if verdict.left_out:
        reasons = "; ".join(f"{member} ({why})" for member, why in verdict.left_out.items())
        raise NotVerifiedError(
            f"{name} is verified but for {reasons}",
            fix="verify it with the compilers that it names, in the image of matrix.toml",
        )


def main(path: Path, folder: Path | None) -> int:
    verdict = verify(path, folder=folder)
    print(verdict.text())
    try:
        check(verdict, path.name)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0
