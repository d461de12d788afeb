"""One row of the matrix: its host library and its wheel, made without compiling a kernel; torch's headers."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from dataclasses import replace
from email.parser import Parser
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ
from host_support import kernel

from buildtools import archive, rows, torch_headers
from buildtools.build import kernel_set_folder, load_tables
from buildtools.errors import HostCompilerError, TableError, TorchHeadersError, WheelError
from buildtools.matrix import KernelSet, load_matrix
from buildtools.sbom import LOCK, locked_hashes
from buildtools.variables import read_variables

MATRIX = load_matrix(ROOT / "matrix.toml")
OLD, NEW = MATRIX.host_libraries["torch2.6-abi0"], MATRIX.host_libraries["torch2.9-abi1"]


def kernel_set(
    folder: Path,
    compiler: str = "nvrtc 12.9.86",
    leave_out: str = "",
    kernel_set: KernelSet = MATRIX.default_kernel_set,
) -> Path:
    """A kernel set file with every kernel of the project's own table, its images a few bytes each."""
    table = load_tables(ROOT)[0]
    records = []
    for row in table.rows:
        archs = [arch for arch in table.families[row.family].archs if arch in kernel_set.archs]
        records += [kernel(row.key, str(arch)) for arch in archs if leave_out not in (row.key, str(arch))]
    path = folder / archive.FILE_NAME
    path.write_bytes(archive.pack(compiler, records))
    return path


def torch_folder(folder: Path, version: str) -> Path:
    """What an installed torch of that version looks like to who looks for its headers."""
    header = folder / "torch" / "include" / "torch" / "csrc" / "api" / "include" / "torch" / "version.h"
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in parts))
    return folder


# --- host libraries ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A build folder, so that each row's host library is compiled once for all tests."""
    return tmp_path_factory.mktemp("hosts")


@pytest.mark.parametrize("name", ["torch2.7-abi1", "torch2.8-abi1", "torch2.9-abi1"])
def test_library_of_a_torch_with_c_functions_needs_no_headers(hosts, name):
    for built in hosts.glob(f"rows/{name}*"):
        shutil.rmtree(built)
    result = rows.build_host(name, folder=hosts, environ=clean_environ())
    assert result.compiled > 0
    assert 0 < result.cpu_s <= MATRIX.budgets.host_library_cpu_s
    assert result.path.stat().st_size <= MATRIX.budgets.host_library_kib * 1024
    assert result.platform == result.row.platform
    listing = subprocess.run(["nm", "-D", str(result.path)], check=True, capture_output=True, text=True).stdout
    needed = {line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.split()[-2] in "Uw"}
    assert "aoti_torch_library_impl" in needed
    assert not needed & {"torch_library_impl", "torch_get_const_data_ptr", "torch_get_mutable_data_ptr"}
    assert not [symbol for symbol in needed if re.search("c10|at::|_ZN5torch", symbol)]
    assert rows.build_host(name, folder=hosts, environ=clean_environ()).compiled == 0


def test_abi_is_the_one_that_is_forced():
    force = read_variables(clean_environ(FORCE_CXX11_ABI="1"))
    wheel = rows.find_wheel(MATRIX, "torch2.6-abi0", force)
    assert wheel.host_library.cxx11_abi
    assert wheel.host_library.label == "torch2.6.cxx11abi1"
    stable = rows.find_wheel(MATRIX, "default", read_variables(clean_environ(FORCE_CXX11_ABI="0")))
    assert stable.host_library == MATRIX.wheels["default"].host_library


def test_compiler_is_the_one_of_the_rows_processor(tmp_path):
    """CXX is taken where it compiles for that processor; a native one must not make a library of another."""
    other = MATRIX.host_libraries["stable-aarch64"]
    cross = tmp_path / "cross"
    cross.write_text('#!/bin/sh\ncase "$1" in -dumpmachine) echo aarch64-linux-gnu;; -dump*) echo 12;; esac\n')
    cross.chmod(0o755)
    chosen = rows.row_compiler(other, clean_environ(CXX=str(cross)), (9,), tmp_path / "cache")
    assert chosen.command == (str(cross),)
    native = clean_environ(CXX="g++", PATH=str(tmp_path))
    with pytest.raises(HostCompilerError, match=r"aarch64-linux-gnu-g\+\+ is not on PATH"):
        rows.row_compiler(other, native, (9,), tmp_path / "other")


def test_unknown_row_names_the_nearest():
    with pytest.raises(TableError, match=r'no row "torch2\.6"[\s\S]*did you mean "torch2\.6-abi0"'):
        rows.build_host("torch2.6", environ=clean_environ())


# --- wheels ------------------------------------------------------------------------------------------------------


def test_wheel_is_a_kernel_set_and_a_host_library(hosts, tmp_path):
    kernels = kernel_set(tmp_path)
    environ = clean_environ()
    path = rows.build_row_wheel("torch2.9-abi1", tmp_path / "out", kernel_set=kernels, folder=hosts, environ=environ)
    assert path.name == "flash_attn-2.9.0+torch2.9.cxx11abi1-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path) as wheel:
        info = json.loads(wheel.read("flash_attn/build_info.json"))
        metadata = Parser().parsestr(wheel.read("flash_attn-2.9.0+torch2.9.cxx11abi1.dist-info/METADATA").decode())
        assert wheel.read("flash_attn/flash_attn.kernels") == kernels.read_bytes()
        (library,) = hosts.glob("rows/torch2.9-*/libflash_attn.so")
        assert wheel.read("flash_attn/libflash_attn.so") == library.read_bytes()
        assert "flash_attn/_buildtools/archive.py" in wheel.namelist()
    assert metadata.get_all("Requires-Dist") == ["torch==2.9.*"]
    assert metadata["Version"] == "2.9.0+torch2.9.cxx11abi1"
    host = info["host"]
    assert (host["kind"], host["torch"], host["cxx11_abi"]) == ("torch", "==2.9.*", True)
    assert info["kernel_set"]["sha256"] == archive.read(kernels).sha256
    again = rows.build_row_wheel("torch2.9-abi1", tmp_path / "b", kernel_set=kernels, folder=hosts, environ=environ)
    assert again.read_bytes() == path.read_bytes()


def test_wheel_of_the_stable_row_has_no_label(hosts, tmp_path):
    environ = clean_environ()
    kernels = kernel_set(tmp_path)
    path = rows.build_row_wheel("default", tmp_path / "out", kernel_set=kernels, folder=hosts, environ=environ)
    assert path.name == "flash_attn-2.9.0-py3-none-manylinux_2_28_x86_64.whl"
    labelled = rows.row_project(
        ROOT, MATRIX, MATRIX.wheels["torch2.4-abi0"], read_variables(clean_environ(FLASH_ATTN_LOCAL_VERSION="mine"))
    )
    assert labelled.version == "2.9.0+torch2.4.cxx11abi0.mine"


def test_a_wheel_of_another_kernel_set_has_its_name_as_label(hosts, tmp_path):
    """By that it is on a page of the index of its own; it holds the same host library as the default wheel."""
    environ = clean_environ()
    with pytest.raises(WheelError, match=r"kernel_sets/cu13[\s\S]*buildtools build --kernel-set cu13"):
        rows.build_row_wheel("cu13", tmp_path, folder=hosts, environ=environ)
    cu13 = MATRIX.kernel_set("cu13")
    folder = kernel_set_folder(hosts, MATRIX, cu13)
    folder.mkdir(parents=True)
    kernel_set(folder, f"nvrtc {cu13.version}", kernel_set=cu13)
    kernel_set(hosts)
    path = rows.build_row_wheel("cu13", tmp_path / "out", folder=hosts, environ=environ)
    default = rows.build_row_wheel("default", tmp_path / "out", folder=hosts, environ=environ)
    assert path.name == "flash_attn-2.9.0+cu13-py3-none-manylinux_2_28_x86_64.whl"
    with zipfile.ZipFile(path) as wheel, zipfile.ZipFile(default) as other:
        name = "flash_attn/libflash_attn.so"
        assert wheel.read(name) == other.read(name)
        info = json.loads(wheel.read("flash_attn/build_info.json"))
        assert b"Requires-Dist: torch>=2.10\n" in wheel.read("flash_attn-2.9.0+cu13.dist-info/METADATA")
        bill = json.loads(wheel.read("flash_attn-2.9.0+cu13.dist-info/sboms/flash_attn.cdx.json"))
    assert "110" in info["kernel_set"]["archs"]
    compiler = next(item for item in bill["components"] if item["name"] == "nvrtc")
    assert compiler["purl"] == f"pkg:pypi/nvidia-cuda-nvrtc@{cu13.version}"
    assert len(compiler["properties"]) == len(locked_hashes(ROOT / LOCK, cu13.requirement, cu13.version)) > 0


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "none.kernels", "is not there"),
        (lambda folder: kernel_set(folder, compiler="nvrtc 13.0.48"), r"compiled by nvrtc 13\.0\.48, the table says"),
        (lambda folder: kernel_set(folder, leave_out="120"), "it is for .* the table says"),
        (lambda folder: kernel_set(folder, leave_out="fwd-sm80-bf16-d64-full"), "differ in fwd-sm80-bf16-d64-full"),
    ],
)
def test_kernel_set_is_the_tables(tmp_path, make, message):
    """A wheel never holds other kernels than its row says."""
    with pytest.raises(WheelError, match=message):
        rows.build_row_wheel("default", tmp_path, kernel_set=make(tmp_path), folder=tmp_path, environ=clean_environ())
    assert not list(tmp_path.glob("*.whl"))


# --- torch's headers ---------------------------------------------------------------------------------------------


def test_headers_are_looked_for_in_variable_cache_and_environment(tmp_path):
    cache = clean_environ(XDG_CACHE_HOME=str(tmp_path / "cache"))
    site = torch_folder(tmp_path / "site", "2.6.1")
    assert torch_headers.find_torch_include(OLD, cache, ["", str(site)]) == site / "torch" / "include"
    cached = torch_folder(tmp_path / "cache" / "flash_attn_headers" / "torch-2.6.0", "2.6.0")
    assert torch_headers.find_torch_include(OLD, cache, [str(site)]) == cached / "torch" / "include"
    for named in (site, site / "torch", site / "torch" / "include"):
        environ = {**cache, "FLASH_ATTN_TORCH": str(named)}
        assert torch_headers.find_torch_include(OLD, environ, []) == site / "torch" / "include"
    assert torch_headers.find_torch_include(NEW, cache, []) is None


def test_headers_of_another_torch_are_not_taken(tmp_path):
    environ = clean_environ(XDG_CACHE_HOME=str(tmp_path / "cache"))
    site = torch_folder(tmp_path / "site", "2.13.0")
    with pytest.raises(TorchHeadersError, match=r"no headers of torch 2\.6: the Python environment has 2\.13\.0"):
        torch_headers.find_torch_include(OLD, environ, [str(site)])
    torch_folder(tmp_path / "other", "2.6.0")
    environ["FLASH_ATTN_TORCH"] = str(site)  # what is named is not passed over in silence
    with pytest.raises(TorchHeadersError, match=r"FLASH_ATTN_TORCH has 2\.13\.0[\s\S]*headers --row torch2\.6-abi0"):
        torch_headers.find_torch_include(OLD, environ, [str(tmp_path / "other")])
    environ["FLASH_ATTN_TORCH"] = str(tmp_path)
    with pytest.raises(TorchHeadersError, match="FLASH_ATTN_TORCH has none"):
        torch_headers.find_torch_include(OLD, environ, [])


def test_headers_are_kept_of_a_downloaded_wheel_and_nothing_else(tmp_path):
    """pip's real download, from a folder with a small wheel that calls itself torch."""
    source = torch_folder(tmp_path / "source", "2.6.0")
    wheel = tmp_path / "links" / "torch-2.6.0-cp311-cp311-manylinux1_x86_64.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as file:
        for path in sorted(source.rglob("*.h")):
            file.write(path, path.relative_to(source))
        file.writestr("torch/lib/libtorch.so", "large")
        file.writestr("torch-2.6.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 2.6.0\n")
        file.writestr("torch-2.6.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: cp311-cp311-manylinux1_x86_64\n")
        file.writestr("torch-2.6.0.dist-info/RECORD", "")
    environ = clean_environ(XDG_CACHE_HOME=str(tmp_path / "cache"), PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    environ["PIP_FIND_LINKS"] = str(wheel.parent)
    include = torch_headers.fetch(OLD, environ)
    assert torch_headers.include_version(include) == (2, 6, 0)
    assert torch_headers.find_torch_include(OLD, environ, []) == include
    kept = [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()]
    assert kept == ["version.h"]
    assert [path.name for path in (tmp_path / "cache" / "flash_attn_headers").iterdir()] == ["torch-2.6.0"]
    shutil.rmtree(wheel.parent)
    assert torch_headers.fetch(OLD, environ) == include  # from the cache
    missing = replace(OLD, headers="2.6.9")
    with pytest.raises(TorchHeadersError, match=r"could not download torch 2\.6\.9"):
        torch_headers.fetch(missing, environ)
