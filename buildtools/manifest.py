"""The list of published wheels: written once from the wheels, shipped in the sdist, checked against every download."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archs import parse_arch
from .choose import PublishedWheel, Variant
from .errors import ArchError, ManifestError

# In the sdist's root, and in the root of a package index.
MANIFEST_NAME = "wheels.json"
_FORMAT = 1
_KEYS = ("filename", "sha256", "size", "torch", "abi", "platform", "python", "kernel_set")
_FILE = re.compile(r"flash_attn-(?P<version>\d[\w.!]*)(?P<local>\+[a-z0-9.]+)?-py3-none-(?P<platform>\w+)\.whl")


@dataclass(frozen=True)
class Manifest:
    """The wheels of one version. `places` are where they were published, each as FLASH_ATTN_WHEELS may name it."""

    version: str
    wheels: tuple[PublishedWheel, ...]
    places: tuple[str, ...] = ()

    def text(self) -> str:
        """The file's text: the same for the same wheels, in whatever order they came."""
        wheels = sorted(self.wheels, key=lambda wheel: wheel.filename)
        data = {"format": _FORMAT, "version": self.version, "places": list(self.places)}
        return json.dumps({**data, "wheels": list(map(_as_json, wheels))}, indent=1) + "\n"


def _as_json(wheel: PublishedWheel) -> dict[str, Any]:
    variant = wheel.variant
    return {
        "filename": wheel.filename,
        "sha256": wheel.sha256,
        "size": wheel.size,
        "torch": variant.requirement.removeprefix("torch"),
        "abi": "stable" if variant.cxx11_abi is None else f"cxx11abi{int(variant.cxx11_abi)}",
        "platform": variant.platform,
        "python": ">={}.{}".format(*variant.python),
        "kernel_set": {
            "compiler": f"nvrtc {'.'.join(map(str, variant.compiler))}",
            "archs": [str(arch) for arch in variant.archs],
        },
    }


def read_manifest(path: Path) -> Manifest:
    try:
        return parse_manifest(path.read_bytes(), str(path))
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror}", fix=_MAKE) from None


def parse_manifest(content: bytes, name: str) -> Manifest:
    """ManifestError names the entry that is not as it has to be."""
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ManifestError(f"{name} is damaged: {error}", fix=_MAKE) from None
    if not isinstance(data, dict) or data.get("format") != _FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ManifestError(f"{name} is of format {found!r}", why=f"this flash_attn reads format {_FORMAT}")
    try:
        wheels = tuple(_wheel(item) for item in data["wheels"])
        version, places = data["version"], tuple(data["places"])
        if not isinstance(version, str) or not all(isinstance(place, str) for place in places):
            raise ValueError("version and places are texts")
        for wheel in wheels:
            if wheel.version.partition("+")[0] != version:
                raise ValueError(f"{wheel.filename} is not of version {version}")
        if len({wheel.filename for wheel in wheels}) != len(wheels):
            raise ValueError("a file is listed twice")
    except (KeyError, TypeError, ValueError, ArchError, ManifestError) as error:
        raise ManifestError(f"{name} is damaged: {error!s}", fix=_MAKE) from None
    return Manifest(version, wheels, places)


def _wheel(item: dict[str, Any]) -> PublishedWheel:
    missing = [key for key in _KEYS if key not in item]
    if missing:
        raise ValueError(f"{item.get('filename', 'an entry')} lacks {', '.join(missing)}")
    found = _FILE.fullmatch(item["filename"])  # so that it can be no path either
    if not found or found["platform"] != item["platform"]:
        raise ValueError(f"{item['filename']!r} is no file name of a wheel of this project for {item['platform']}")
    if not re.fullmatch("[0-9a-f]{64}", item["sha256"]):
        raise ValueError(f"{item['filename']} has no sha256")
    if not isinstance(item["size"], int) or item["size"] <= 0:
        raise ValueError(f"{item['filename']} has no size")
    variant = _variant(item["torch"], item["abi"], item["platform"], item["python"], item["kernel_set"])
    return PublishedWheel(item["filename"], item["sha256"], item["size"], variant)


def _variant(torch: str, abi: str, platform: str, python: str, kernel_set: dict[str, Any]) -> Variant:
    """ValueError for what no wheel of the matrix says."""
    stable = re.fullmatch(r">=(\d+)\.(\d+)", torch)
    single = re.fullmatch(r"==(\d+)\.(\d+)\.\*", torch)
    of_torch = stable if abi == "stable" else single
    if of_torch is None or abi not in ("stable", "cxx11abi0", "cxx11abi1"):
        raise ValueError(f"torch{torch} with ABI {abi} is no host library")
    oldest = re.fullmatch(r">=(\d+)\.(\d+)", python)
    compiler = re.fullmatch(r"nvrtc (\d+(?:\.\d+)+)", kernel_set["compiler"])
    if oldest is None or compiler is None or not kernel_set["archs"]:
        raise ValueError(f"python {python!r} or kernel set {kernel_set!r} is not understood")
    return Variant(
        torch=(int(of_torch[1]), int(of_torch[2])),
        cxx11_abi=None if abi == "stable" else abi == "cxx11abi1",
        compiler=tuple(map(int, compiler[1].split("."))),
        archs=tuple(map(parse_arch, kernel_set["archs"])),
        platform=platform,
        python=(int(oldest[1]), int(oldest[2])),
    )


def read_wheel(path: Path) -> PublishedWheel:
    """What the wheel at `path` says of itself; ManifestError if it is none of this project, or has no kernels."""
    import email.parser  # both only here: a choice from a manifest is quicker without them
    import zipfile

    try:
        content = path.read_bytes()
        with zipfile.ZipFile(path) as wheel:
            info = json.loads(wheel.read("flash_attn/build_info.json"))
            (metadata,) = (wheel.read(name) for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        if not info["cuda_build"]:
            raise ValueError("it was built with SKIP_CUDA_BUILD and has no kernels")
        python = email.parser.BytesParser().parsebytes(metadata, headersonly=True)["Requires-Python"]
        host, found = info["host"], _FILE.fullmatch(path.name)
        if found is None or found["version"] != info["version"]:
            raise ValueError(f"it holds version {info['version']}")
        abi = "stable" if host["kind"] == "stable" else f"cxx11abi{int(host['cxx11_abi'])}"
        variant = _variant(host["torch"], abi, found["platform"], python, info["kernel_set"])
    except (OSError, KeyError, TypeError, ValueError, ArchError, zipfile.BadZipFile) as error:
        raise ManifestError(
            f"{path} is no published wheel: {error!s}", fix="name wheels that this project built"
        ) from None
    return PublishedWheel(path.name, hashlib.sha256(content).hexdigest(), len(content), variant)


def make_manifest(wheels: Iterable[Path], version: str, places: Iterable[str] = ()) -> Manifest:
    """The manifest of wheel files; ManifestError if one is of another version."""
    read = sorted(map(read_wheel, wheels), key=lambda wheel: wheel.filename)
    if not read:
        raise ManifestError("there is no wheel to list", fix="build the wheels first: `nox -s build-wheel`")
    manifest = Manifest(version, tuple(read), tuple(places))
    return parse_manifest(manifest.text().encode(), MANIFEST_NAME)  # whatever is written can be read back


_MAKE = f"`python -m buildtools manifest WHEELS` writes {MANIFEST_NAME} again"
