"""Wheels and sdists, written so that equal contents give equal bytes.

Names are sorted, times are SOURCE_DATE_EPOCH (a fixed day if unset), owners and permissions do not depend on the
user or the umask, and no path outside the tree is recorded.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import sbom
from .archive import FILE_NAME, write_atomically
from .errors import ManifestError, VariableError, WheelError
from .kernels import parse_table, read_toml
from .manifest import MANIFEST_NAME, read_manifest
from .matrix import load_matrix
from .metadata import Project
from .sources import PACKAGE_FOLDER, TABLE_NAME, SourceTree

DEFAULT_EPOCH = 1577836800  # 2020-01-01; a zip file cannot say anything before 1980
_EARLIEST = 315532800
_GENERATOR = "flash_attn buildtools"
_PACKAGE_SUFFIXES = (".py", ".pyi", ".typed")
# A module beside the package, by the name that FlashAttention-3's users import.
TOP_LEVEL = "flash_attn_interface.py"
# What an editable install puts into the source folder of the package.
GENERATED = ("libflash_attn.so", FILE_NAME, "build_info.json")
_SDIST_SUFFIXES = (
    ".cpp", ".css", ".cu", ".cuh", ".h", ".hcl", ".in", ".js", ".json", ".map", ".md", ".png", ".py", ".pyi", ".svg",
    ".toml", ".txt", ".typed", ".yml",
)  # fmt: skip
_SDIST_NAMES = ("Dockerfile", "LICENSE")
# What the sdist lists and no wheel is made from.
_NO_SOURCES = ("benchmarks", "docker", "noxfile.py", "setup.py", "tests")


@dataclass(frozen=True)
class Made:
    """How a wheel was made, beside what its build_info.json says: row of the matrix, torch headers, container image."""

    row: str = ""
    headers: str = ""
    image: str = ""


def source_date_epoch(environ: Mapping[str, str]) -> int:
    """The time that is written into archives, in seconds since 1970."""
    text = environ.get("SOURCE_DATE_EPOCH", "").strip()
    if not text:
        return DEFAULT_EPOCH
    if not (text.isascii() and text.isdigit()):
        raise VariableError(f"SOURCE_DATE_EPOCH={text} is not a number of seconds", fix="unset it, or write digits")
    return max(int(text), _EARLIEST)


def package_files(root: Path) -> dict[str, bytes]:
    """{name in the wheel: contents} of the Python package in the source tree, without what a build puts there."""
    package = root / "flash_attn"
    top_level = {TOP_LEVEL: (root / TOP_LEVEL).read_bytes()}
    return top_level | {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.suffix in _PACKAGE_SUFFIXES and path.is_file() and not _is_generated(path.relative_to(package))
    }


def runtime_files(project: Project) -> dict[str, bytes]:
    """What the installed package compiles with at first use: modules of buildtools, kernel table and kernel sources."""
    modules = {
        f"flash_attn/_buildtools/{name}.py": (project.root / "buildtools" / f"{name}.py").read_bytes()
        for name in project.runtime
    }
    return {**modules, **kernel_source_files(project.root)}


def kernel_source_files(root: Path) -> dict[str, bytes]:
    """The kernel table, as JSON for Pythons that read no TOML, and the sources and headers that it names."""
    data = read_toml(root / "kernels.toml")
    tree = SourceTree(root / "csrc")
    texts: dict[str, str] = {}
    for source in sorted({row.source for row in parse_table(data).rows}):
        texts.update(tree.closure(source))
    # Not sorted: the order of a row's constants is that of its macros.
    files = {TABLE_NAME: json.dumps(data, indent=1) + "\n"}
    files |= {tree.name_below_csrc(name): text for name, text in texts.items()}
    return {f"flash_attn/{PACKAGE_FOLDER}/{name}": text.encode() for name, text in files.items()}


def _is_generated(path: Path) -> bool:
    return path.parts[0] in ("_buildtools", PACKAGE_FOLDER, *GENERATED) or "__pycache__" in path.parts


def dist_info(project: Project, tag: str) -> dict[str, bytes]:
    """{name: contents} of the dist-info folder, RECORD excepted."""
    folder = f"{project.file_name}.dist-info"
    purelib = "true" if tag.endswith("-any") else "false"
    wheel = f"Wheel-Version: 1.0\nGenerator: {_GENERATOR}\nRoot-Is-Purelib: {purelib}\nTag: {tag}\n"
    files = {f"{folder}/METADATA": project.metadata().encode(), f"{folder}/WHEEL": wheel.encode()}
    if project.entry_points():
        files[f"{folder}/entry_points.txt"] = project.entry_points().encode()
    for path in project.licenses:
        files[f"{folder}/licenses/{path.name}"] = path.read_bytes()
    return files


def write_wheel(
    folder: Path, project: Project, tag: str, files: Mapping[str, bytes], epoch: int, made: Made | None = None
) -> str:
    """Write the wheel of `files` (without dist-info) into `folder` and return its file name.

    `made`: for the bill of materials, which a wheel of the project always has.
    """
    info = dist_info(project, tag)
    if made is not None:
        info[f"{project.file_name}.dist-info/sboms/{sbom.FILE_NAME}"] = bill(project, files, made)
    ordered = [(name, files[name]) for name in sorted(files)] + sorted(info.items())
    record_name = f"{project.file_name}.dist-info/RECORD"
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in ordered) + f"{record_name},,\n"
    stamp = time.gmtime(epoch)[:6]
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in [*ordered, (record_name, record.encode())]:
            member = zipfile.ZipInfo(name, stamp)
            member.create_system = 3  # Unix, for the permissions
            member.external_attr = (0o100755 if name.endswith(".so") else 0o100644) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, data, compresslevel=9)
    name = f"{project.file_name}-{tag}.whl"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / name, buffer.getvalue())
    return name


def bill(project: Project, files: Mapping[str, bytes], made: Made) -> bytes:
    """The bill of materials of a wheel that holds `files`."""
    info = json.loads(files["flash_attn/build_info.json"])
    nvrtc, hashes = "", []
    if info["kernel_set"]:
        version = info["kernel_set"]["compiler"].removeprefix("nvrtc ")
        kernel_sets = load_matrix(project.root / "matrix.toml").kernel_sets.values()
        nvrtc = next((item.requirement for item in kernel_sets if item.version == version), "")
        hashes = sbom.locked_hashes(project.root / sbom.LOCK, nvrtc, version) if nvrtc else []
    return sbom.bill(
        str(project.fields["name"]),
        project.version,
        info,
        sources(project),
        row=made.row,
        headers=made.headers,
        image=made.image,
        nvrtc=nvrtc,
        nvrtc_hashes=hashes,
    )


def sources(project: Project) -> dict[str, bytes]:
    """{path in the source tree: contents} of everything that a wheel is made from."""
    entries = [entry for entry in project.sdist if entry not in _NO_SOURCES]
    return {path.relative_to(project.root).as_posix(): path.read_bytes() for path in _listed(project, entries)}


def write_sdist(folder: Path, project: Project, epoch: int) -> str:
    """Write the sdist into `folder` and return its file name."""
    base = project.file_name
    members = {f"{base}/PKG-INFO": (project.metadata().encode(), 0o644)}
    for path in sdist_files(project):
        mode = 0o755 if path.stat().st_mode & 0o100 else 0o644
        members[f"{base}/{path.relative_to(project.root).as_posix()}"] = (path.read_bytes(), mode)
    buffer = io.BytesIO()
    with (
        gzip.GzipFile(filename="", mode="wb", fileobj=buffer, mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name, (data, mode) in sorted(members.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mtime, member.mode = len(data), epoch, mode
            archive.addfile(member, io.BytesIO(data))
    name = f"{base}.tar.gz"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / name, buffer.getvalue())
    return name


def sdist_files(project: Project) -> list[Path]:
    """What pyproject.toml's [tool.buildtools] lists: files, and what its folders hold but for caches and results."""
    result = _listed(project, project.sdist)
    manifest = project.root / MANIFEST_NAME
    if manifest.is_file():
        version = read_manifest(manifest).version
        if version != project.base_version:
            raise ManifestError(
                f"{manifest} lists the wheels of {version}, and this sdist is of {project.base_version}",
                fix=f"`python -m buildtools manifest` writes it for the wheels in dist/; or delete {MANIFEST_NAME}",
            )
        result.append(manifest)
    return sorted(result)


def _listed(project: Project, entries: Iterable[str]) -> list[Path]:
    result = []
    for entry in entries:
        path = project.root / entry
        if path.is_file():
            result.append(path)
        elif path.is_dir():
            result += [item for item in sorted(path.rglob("*")) if _belongs(item, project.root)]
        else:
            raise WheelError(f"{entry} is not there", why="pyproject.toml lists it for the sdist")
    return result


def _belongs(path: Path, root: Path) -> bool:
    parts = path.relative_to(root).parts
    if parts[0] == "flash_attn" and _is_generated(Path(*parts[1:])):
        return False
    hidden = any(part.startswith(".") or part == "__pycache__" for part in parts)
    return not hidden and path.is_file() and (path.suffix in _SDIST_SUFFIXES or path.name in _SDIST_NAMES)


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
