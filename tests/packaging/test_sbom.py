"""The bill of materials in every wheel (PEP 770)."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from packaging_support import ROOT, WheelFile

from buildtools import sbom
from buildtools.errors import WheelError
from buildtools.metadata import load_project
from buildtools.wheel import DEFAULT_EPOCH, Made, package_files, sources, write_wheel

INFO = {
    "version": "2.9.0",
    "kernel_set": {"compiler": "nvrtc 12.9.86", "archs": ["90"], "keys": ["fwd"], "sha256": "ab" * 32},
    "host": {"kind": "torch", "torch": "==2.6.*", "compiler": "g++ 12.2.0"},
    "cuda_build": True,
}
IMAGE = f"quay.io/pypa/manylinux_2_28_x86_64@sha256:{'0' * 64}"


def wheel(folder: Path, made: Made) -> WheelFile:
    files = {**package_files(ROOT), "flash_attn/build_info.json": json.dumps(INFO).encode()}
    project = replace(load_project(ROOT), label="torch2.6")
    return WheelFile.read(folder / write_wheel(folder, project, "py3-none-any", files, DEFAULT_EPOCH, made))


def bill_of(file: WheelFile) -> bytes:
    (name,) = (name for name in file.names if "/sboms/" in name)
    assert name == f"{file.path.name.partition('-py3')[0]}.dist-info/sboms/{sbom.FILE_NAME}"
    assert name in file.record
    return file.read_member(name)


def test_it_names_compilers_headers_image_and_sources(tmp_path: Path) -> None:
    content = bill_of(wheel(tmp_path, Made("torch2.6-abi0", "2.6.0", IMAGE)))
    data = json.loads(content)
    assert (data["bomFormat"], data["specVersion"]) == ("CycloneDX", "1.6")
    assert {item["name"]: item["version"] for item in data["components"]} == {
        "nvrtc": "12.9.86",
        "g++": "12.2.0",
        "torch": "2.6.0",
        IMAGE.partition("@")[0]: IMAGE.partition("@")[2],
    }
    nvrtc = data["components"][0]
    assert nvrtc["purl"] == "pkg:pypi/nvidia-cuda-nvrtc-cu12@12.9.86"
    lock = (ROOT / sbom.LOCK).read_text()
    assert nvrtc["properties"]
    assert all(f"--hash=sha256:{item['value']}" in lock for item in nvrtc["properties"])
    assert sbom.read_bill(content) == sbom.Recorded(
        compiler="nvrtc 12.9.86",
        host_compiler="g++ 12.2.0",
        headers="2.6.0",
        image=IMAGE,
        row="torch2.6-abi0",
        sources=sbom.sources_digest(sources(load_project(ROOT))),
    )


def test_a_wheel_without_kernels_has_one_too(empty_wheel: Path) -> None:
    recorded = sbom.read_bill(bill_of(WheelFile.read(empty_wheel)))
    assert not recorded.compiler
    assert recorded.sources == sbom.sources_digest(sources(load_project(ROOT)))


def test_equal_inputs_give_equal_bytes_and_others_do_not(tmp_path: Path) -> None:
    bills = [bill_of(wheel(tmp_path / str(i), made)) for i, made in enumerate((Made("a"), Made("a"), Made("b")))]
    assert bills[0] == bills[1]
    assert bills[0] != bills[2]
    assert str(ROOT).encode() not in bills[0]
    assert os.uname().nodename.encode() not in bills[0]


def test_what_wheels_are_made_from() -> None:
    names = set(sources(load_project(ROOT)))
    assert {"kernels.toml", "csrc/host/dispatch.cpp", "buildtools/wheel.py", "flash_attn/__init__.py"} <= names
    assert "wheels.json" not in names
    assert not [name for name in names if name.startswith(("tests/", "docker/", "benchmarks/"))]


def test_a_lock_for_another_version_says_nothing(tmp_path: Path) -> None:
    lock = ROOT / sbom.LOCK
    assert sbom.locked_hashes(lock, "nvidia-cuda-nvrtc-cu12", "12.8.0") == []
    assert sbom.locked_hashes(tmp_path / "none.txt", "nvidia-cuda-nvrtc-cu12", "12.9.86") == []


def test_a_damaged_bill_is_an_error() -> None:
    with pytest.raises(WheelError, match=r"flash_attn\.cdx\.json is damaged"):
        sbom.read_bill(b"{}")
