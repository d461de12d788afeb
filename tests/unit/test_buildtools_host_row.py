"""Which host library a build from source is of: the one for the torch that is there, and its C++ ABI."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from buildtools_support import ROOT

from buildtools.build import host_row
from buildtools.errors import PlatformError, TorchVersionError
from buildtools.facts import InstalledTorch
from buildtools.matrix import load_matrix

MATRIX = load_matrix(ROOT / "matrix.toml")


def torch(version: str, abi: bool | None = None) -> InstalledTorch:
    return InstalledTorch(version, abi, "12.4", Path("/site"))


@pytest.fixture(params=["x86_64", "aarch64"], autouse=True)
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(platform, "machine", lambda: request.param)
    return request.param


@pytest.mark.parametrize("version", [None, "2.10.0", "2.13.0+cu130", "2.10.0a0+git1", "3.0.0", "unreadable"])
def test_the_stable_one(machine: str, version: str | None) -> None:
    row = host_row(MATRIX, version and torch(version, True), cxx11_abi=False)
    assert row == MATRIX.host_libraries[f"stable-{machine}"]


@pytest.mark.parametrize(
    ("found", "forced", "abi"),
    [
        (torch("2.6.0+cu124", False), None, False),
        (torch("2.6.0+cu126", True), None, True),
        (torch("2.6.0a0+ecf3bae40a.nv25.1", True), None, True),  # its own headers are compiled with
        (torch("2.6.0", None), None, False),  # as PyPI's
        (torch("2.6.0", True), False, False),
        (torch("2.6.0", False), True, True),
    ],
)
def test_the_one_for_an_older_torch(machine: str, found: InstalledTorch, forced: bool | None, abi: bool) -> None:
    """On either processor, wherever wheels are published for it."""
    row = host_row(MATRIX, found, forced)
    assert (row.per_torch, row.cxx11_abi, row.machine) == ((2, 6), abi, machine)
    assert row.platform == f"manylinux_2_28_{machine}"


@pytest.mark.parametrize("version", ["2.3.1", "1.13.1+cu117"])
def test_an_older_torch_than_any_row(version: str) -> None:
    with pytest.raises(TorchVersionError) as error:
        host_row(MATRIX, torch(version))
    assert error.value.what == f"flash_attn is not for torch {version}, which is in /site"
    assert error.value.why == "it is for torch 2.4, 2.5, 2.6, 2.7, 2.8, 2.9 and >=2.10"


def test_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(PlatformError, match="riscv64"):
        host_row(MATRIX)
