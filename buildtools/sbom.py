"""The bill of materials in a wheel's dist-info (PEP 770): with what its compiled parts were made, as CycloneDX 1.6.

It holds no time, no path and no serial number, so that equal inputs give equal bytes; `verify` reads it back.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import WheelError

FILE_NAME = "flash_attn.cdx.json"
LOCK = "docker/requirements-nvrtc.txt"  # the compilers of all kernel sets
IMAGE_VARIABLE = "FLASH_ATTN_IMAGE"
_PROPERTY = "flash_attn:"


@dataclass(frozen=True)
class Recorded:
    """What the bill of a wheel says. Empty: it was not recorded, or there was none."""

    compiler: str  # of the kernels: "nvrtc 12.9.86"
    host_compiler: str  # "g++ 12.2.0"
    headers: str  # the torch version whose headers were used
    image: str  # of the container, by digest
    row: str  # of matrix.toml
    sources: str  # sha256 of what `sources_digest` covers


def sources_digest(files: Mapping[str, bytes]) -> str:
    """sha256 of {path in the source tree: contents}: of one line for each file, in the order of their names."""
    lines = (f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def locked_hashes(lock: Path, requirement: str, version: str) -> list[str]:
    """The sha256 of each wheel of `requirement` that the lock file allows; none where it locks another version."""
    try:
        text = lock.read_text(encoding="utf-8")
    except OSError:
        return []  # an sdist whose docker folder was left out
    pin = re.escape(f"{requirement}=={version}")
    found = re.search(rf"^{pin}\s(?P<hashes>(?:.*\\\n)*.*)", text, re.MULTILINE)
    return sorted(re.findall(r"--hash=sha256:([0-9a-f]{64})", found["hashes"])) if found else []


def bill(
    name: str,
    version: str,
    info: Mapping[str, Any],
    sources: Mapping[str, bytes],
    *,
    row: str = "",
    headers: str = "",
    image: str = "",
    nvrtc: str = "",
    nvrtc_hashes: list[str] | None = None,
) -> bytes:
    """The file's bytes. `info` is build_info.json; `nvrtc` the requirement that pins the kernels' compiler."""
    wheel = f"pkg:pypi/{name}@{version}"
    digest = sources_digest(sources)
    components = []
    if info.get("kernel_set"):
        compiler, _, number = str(info["kernel_set"]["compiler"]).partition(" ")
        component = _component("application", compiler, number, "compiled flash_attn/flash_attn.kernels")
        if nvrtc:
            component["purl"] = f"pkg:pypi/{nvrtc}@{number}"
        if nvrtc_hashes:
            component["properties"] = [_named("locked-wheel-sha256", value) for value in nvrtc_hashes]
        components.append(component)
    if info.get("host"):
        compiler, _, number = str(info["host"]["compiler"]).partition(" ")
        components.append(_component("application", compiler, number, "compiled flash_attn/libflash_attn.so"))
        if headers:
            torch = _component("library", "torch", headers, "the headers of flash_attn/libflash_attn.so")
            components.append({**torch, "purl": f"pkg:pypi/torch@{headers}"})
    if image:
        base, _, tag = image.partition("@")
        component = _component("container", base, tag, "in which everything was compiled")
        components.append({**component, "purl": f"pkg:docker/{base}@{tag}"} if tag else component)
    properties = [_named("sources-sha256", digest)]
    if row:
        properties.append(_named("row", row))
    if info.get("kernel_set"):
        properties.append(_named("kernel-set-sha256", info["kernel_set"]["sha256"]))
    main = {"type": "library", "bom-ref": wheel, "name": name, "version": version, "purl": wheel}
    data: dict[str, Any] = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"component": {**main, "properties": properties}},
        "components": components,
        "dependencies": [{"ref": wheel, "dependsOn": [component["bom-ref"] for component in components]}],
    }
    # A name made of the contents: it differs where they do, and only there.
    content = json.dumps(data, sort_keys=True)
    data["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}"
    return (json.dumps(data, indent=1, sort_keys=True) + "\n").encode()


def _component(kind: str, name: str, version: str, description: str) -> dict[str, Any]:
    reference = f"{name}@{version}"
    return {"type": kind, "bom-ref": reference, "name": name, "version": version, "description": description}


def _named(name: str, value: str) -> dict[str, str]:
    return {"name": f"{_PROPERTY}{name}", "value": value}


def read_bill(content: bytes) -> Recorded:
    """WheelError for what is no bill of this project."""
    try:
        data = json.loads(content)
        properties = {item["name"]: item["value"] for item in data["metadata"]["component"]["properties"]}
        named = {item["name"]: item["version"] for item in data["components"]}
        host = next((f"{name} {named[name]}" for name in ("g++", "clang++") if name in named), "")
        images = [f"{item['name']}@{item['version']}" for item in data["components"] if item["type"] == "container"]
        return Recorded(
            compiler=f"nvrtc {named['nvrtc']}" if "nvrtc" in named else "",
            host_compiler=host,
            headers=named.get("torch", ""),
            image="".join(images).rstrip("@"),
            row=properties.get(f"{_PROPERTY}row", ""),
            sources=properties[f"{_PROPERTY}sources-sha256"],
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WheelError(f"the bill of materials {FILE_NAME} is damaged: {error!s}") from None
