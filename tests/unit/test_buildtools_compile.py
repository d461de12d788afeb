"""One kernel: sources gathered, NVRTC found, compiled, and its log read. A real NVRTC, tiny kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ, make_tree

from buildtools.archs import parse_arch
from buildtools.compile import (
    check_resources,
    compile_kernel,
    kernel_from_json,
    kernel_to_json,
    parse_log,
    record_of,
    report_from_json,
    report_to_json,
)
from buildtools.errors import KernelCompileError, NvrtcNotFoundError, ResourceError, SourceError
from buildtools.kernels import AllowedSpills, Kernel, load_table
from buildtools.nvrtc import FoundNvrtc, Nvrtc, find_nvrtc, load_nvrtc
from buildtools.sources import SourceTree


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    return find_nvrtc(clean_environ(), sys.path, load_nvrtc)


@pytest.fixture
def tree(tmp_path) -> Path:
    return make_tree(tmp_path / "a tree")


def kernel_of(tree: Path, key: str, arch: str = "80") -> Kernel:
    table = load_table(tree / "kernels.toml")
    return table.kernel(next(row for row in table.rows if row.key == key), parse_arch(arch))


FWD, BWD = "fwd-sm80-bf16-d64-full", "bwd-sm80-bf16-d64-causal"


# --- sources -----------------------------------------------------------------------------------------------------


def test_closure_holds_what_is_included_and_nothing_else(tree):
    sources = SourceTree(tree / "csrc")
    assert list(sources.closure("sm80/fwd.cu")) == ["sm80/fwd.cu", "common/twice.cuh", "params.h"]
    assert list(sources.closure("sm80/bwd.cu")) == ["sm80/bwd.cu", "params.h"]


def test_headers_that_include_each_other_end(tree):
    header = tree / "csrc/kernels/common/twice.cuh"
    header.write_text('#pragma once\n#include "common/other.cuh"\n')
    header.with_name("other.cuh").write_text('#pragma once\n  #  include "common/twice.cuh"\n')
    closure = SourceTree(tree / "csrc").closure("sm80/fwd.cu")
    assert list(closure) == ["sm80/fwd.cu", "common/other.cuh", "common/twice.cuh"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('#include "common/twise.cuh"', r'includes "common/twise.cuh", which is not there[\s\S]*"common/twice.cuh"'),
        ("#include <cuda_bf16.h>", "includes <cuda_bf16.h>"),
    ],
)
def test_include_that_cannot_be_had(tree, line, message):
    (tree / "csrc/kernels/sm80/fwd.cu").write_text(line)
    with pytest.raises(SourceError, match=message):
        SourceTree(tree / "csrc").closure("sm80/fwd.cu")


def test_source_that_is_not_there(tree):
    with pytest.raises(SourceError, match=r"csrc/kernels/sm80/fwd2\.cu is not there"):
        SourceTree(tree / "csrc").closure("sm80/fwd2.cu")


def test_own_kernels_need_no_header_of_cuda():
    table = load_table(ROOT / "kernels.toml")
    sources = SourceTree(ROOT / "csrc")
    for source in {row.source for row in table.rows}:
        assert "params.h" in sources.closure(source)


# --- compiling ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "elf_arch"), [("80", 80), ("86", 86), ("90a", 90)])
def test_cubin_is_for_the_arch_asked_for(tree, nvrtc, arch, elf_arch):
    kernel = kernel_of(tree, FWD, arch)
    compiled = compile_kernel(nvrtc, kernel, SourceTree(tree / "csrc").closure(kernel.source))
    assert compiled.image[:4] == b"\x7fELF"
    flags = int.from_bytes(compiled.image[48:52], "little")  # e_flags: the arch in its low byte
    assert flags & 0xFF == elf_arch
    entry = compiled.report.entries["flash_fwd"]
    assert entry.registers > 0
    assert compiled.report.spills == 0


def test_ptx_is_text_with_its_nul(tree, nvrtc):
    kernel = kernel_of(tree, BWD, "ptx80")
    compiled = compile_kernel(nvrtc, kernel, SourceTree(tree / "csrc").closure(kernel.source))
    assert b".target sm_80" in compiled.image
    assert compiled.image.endswith(b"\0")
    assert compiled.image.count(b"\0") == 1
    assert compiled.report.entries == {}


def test_bytes_depend_on_nothing_but_text_and_options(tree, nvrtc, tmp_path, monkeypatch):
    kernel = kernel_of(tree, FWD)
    first = compile_kernel(nvrtc, kernel, SourceTree(tree / "csrc").closure(kernel.source)).image
    other = make_tree(tmp_path / "another" / "tree")
    # A file of a header's name in the current folder must not be taken for it.
    (tmp_path / "params.h").write_text("#error wrong params.h")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    second = compile_kernel(nvrtc, kernel, SourceTree(other / "csrc").closure(kernel.source)).image
    assert first == second
    assert str(tmp_path).encode() not in first


def test_error_names_the_kernel_and_holds_the_compilers_message(tree, nvrtc):
    kernel = kernel_of(tree, FWD)
    texts = SourceTree(tree / "csrc").closure(kernel.source)
    texts["common/twice.cuh"] += "\nint oops = undeclared;\n"
    with pytest.raises(KernelCompileError) as caught:
        compile_kernel(nvrtc, kernel, texts)
    message = str(caught.value)
    assert f"kernel {FWD} does not compile for arch 80" in message
    assert 'common/twice.cuh(5): error: identifier "undeclared" is undefined' in message
    assert f"python -m buildtools compile {FWD} --arch 80" in message


@pytest.mark.parametrize("arch", ["80", "ptx80"])
def test_missing_entry_point_is_named(tree, nvrtc, arch):
    kernel = kernel_of(tree, BWD, arch)
    texts = SourceTree(tree / "csrc").closure(kernel.source)
    texts[kernel.source] = texts[kernel.source].replace("flash_bwd_preprocess", "flash_bwd_prepare")
    with pytest.raises(KernelCompileError, match=r"sm80/bwd\.cu has no entry point flash_bwd_preprocess"):
        compile_kernel(nvrtc, kernel, texts)


def test_without_a_log(tree, nvrtc):
    """As NVRTC answers out of the driver's cache, in a process that has a GPU."""

    class Cached:
        def compile(self, *arguments):
            return nvrtc.compile(*arguments)[0], ""

    kernel = kernel_of(tree, BWD)
    texts = SourceTree(tree / "csrc").closure(kernel.source)
    compiled = compile_kernel(Cached(), kernel, texts)
    assert compiled.image == compile_kernel(nvrtc, kernel, texts).image
    assert not compiled.report.entries
    assert record_of(kernel, compiled.report).registers == 0


def test_full_version_has_the_build(nvrtc):
    version = nvrtc.full_version()
    assert len(version.split(".")) == 3
    assert tuple(map(int, version.split(".")[:2])) == nvrtc.version
    assert 80 in nvrtc.supported_archs()


def test_kernel_and_report_survive_json(tree, nvrtc):
    for arch in ("80", "90a", "ptx80"):
        kernel = kernel_of(tree, FWD, arch)
        assert kernel_from_json(kernel_to_json(kernel)) == kernel
        report = compile_kernel(nvrtc, kernel, SourceTree(tree / "csrc").closure(kernel.source)).report
        assert report_from_json(report_to_json(report)) == report


# --- the log -----------------------------------------------------------------------------------------------------

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'flash_bwd' for 'sm_90a'
ptxas info    : Function properties for flash_bwd
    48 bytes stack frame, 24 bytes spill stores, 28 bytes spill loads
ptxas info    : Function properties for helper
    16 bytes stack frame, 4 bytes spill stores, 4 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 64 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 84.157 ms
ptxas info    : Compiling entry function 'flash_bwd_preprocess' for 'sm_90a'
ptxas info    : Function properties for flash_bwd_preprocess
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient
"""


def test_log_is_read_per_entry_point():
    report = parse_log(LOG)
    main, pre = report.entries["flash_bwd"], report.entries["flash_bwd_preprocess"]
    assert (main.registers, main.stack, main.spill_stores, main.spill_loads, main.smem) == (255, 64, 28, 32, 1024)
    assert (pre.registers, pre.spill_stores, pre.smem) == (30, 0, 0)
    assert report.spills == 60
    assert len(report.warnings) == 1


def test_empty_log():
    assert parse_log("").entries == {}


def test_spills_and_serialised_wgmma_are_refused_together(tree):
    kernel = kernel_of(tree, BWD)
    with pytest.raises(ResourceError) as caught:
        check_resources([(kernel, parse_log(LOG))])
    message = str(caught.value)
    assert (
        f"{BWD} on arch 80 spills: flash_bwd (255 registers) stores 28 bytes and loads 32; 0 bytes are allowed"
        in message
    )
    assert "serialized" in message


def test_spills_that_the_table_allows(tree):
    from dataclasses import replace

    kernel = replace(kernel_of(tree, BWD), allow_spills=AllowedSpills(60, "measured: no loss"))
    check_resources([(kernel, parse_log(LOG.partition("ptxas info    : (C7510)")[0]))])
    with pytest.raises(ResourceError, match="59 bytes are allowed"):
        check_resources([(replace(kernel, allow_spills=AllowedSpills(59, "x")), parse_log(LOG))])


# --- finding NVRTC -----------------------------------------------------------------------------------------------


@pytest.fixture
def no_toolkit(tmp_path, monkeypatch):
    """A machine where CUDA is not installed."""
    monkeypatch.setattr("buildtools.nvrtc.SYSTEM_ROOT", tmp_path / "no such system")


def find(environ: dict[str, str], search_path: list[str]) -> FoundNvrtc:
    return find_nvrtc(environ, search_path, lambda found: found)


def library(folder: Path, name: str = "libnvrtc.so.12") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(b"not a library")
    (folder / name.replace(".so", ".alt.so")).write_bytes(b"")
    (folder / name.replace("nvrtc", "nvrtc-builtins")).write_bytes(b"")
    return folder / name


@pytest.mark.parametrize(
    ("folder", "name"), [("nvidia/cuda_nvrtc/lib", "libnvrtc.so.12"), ("nvidia/cu13/lib", "libnvrtc.so.13")]
)
def test_found_in_either_layout_of_the_wheels(tmp_path, folder, name):
    path = library(tmp_path / folder, name)
    assert find({}, [str(tmp_path)]).path == path


def test_newest_of_one_folder_and_too_old_ones_passed_over(tmp_path, no_toolkit):
    for name in ("libnvrtc.so.11.2", "libnvrtc.so.12", "libnvrtc.so.13"):
        library(tmp_path / "nvidia/cuda_nvrtc/lib", name)
    assert find({}, [str(tmp_path)]).path.name == "libnvrtc.so.13"
    old = tmp_path / "old"
    library(old / "nvidia/cuda_nvrtc/lib", "libnvrtc.so.11.2")
    with pytest.raises(NvrtcNotFoundError):
        find({}, [str(old)])


@pytest.mark.parametrize("inside", ["", "lib", "lib64"])
def test_variable_goes_first(tmp_path, inside):
    library(tmp_path / "site/nvidia/cuda_nvrtc/lib")
    path = library(tmp_path / "mine" / inside)
    found = find({"FLASH_ATTN_NVRTC": str(tmp_path / "mine")}, [str(tmp_path / "site")])
    assert found == FoundNvrtc(path, "FLASH_ATTN_NVRTC")


def test_variable_that_leads_nowhere_is_an_error(tmp_path):
    library(tmp_path / "site/nvidia/cuda_nvrtc/lib")
    with pytest.raises(NvrtcNotFoundError, match=r"FLASH_ATTN_NVRTC=.*empty holds no usable libnvrtc.so"):
        find({"FLASH_ATTN_NVRTC": str(tmp_path / "empty")}, [str(tmp_path / "site")])


@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH", "CONDA_PREFIX"])
def test_toolkit(tmp_path, variable):
    path = library(tmp_path / "lib64")
    assert find({variable: str(tmp_path)}, []) == FoundNvrtc(path, variable)


def test_toolkit_of_nvcc_on_path(tmp_path):
    path = library(tmp_path / "targets/x86_64-linux/lib")
    nvcc = tmp_path / "bin/nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\n")
    nvcc.chmod(0o755)
    assert find({"PATH": str(nvcc.parent)}, []).path == path


def test_none_anywhere_lists_the_places_and_the_way_out(tmp_path, no_toolkit):
    (tmp_path / "nvidia").mkdir()
    with pytest.raises(NvrtcNotFoundError) as caught:
        find({"PATH": str(tmp_path), "CUDA_HOME": str(tmp_path)}, [str(tmp_path)])
    message = str(caught.value)
    for part in ("the Python environment", "CUDA_HOME", "/usr/local/cuda", "pip install", "FLASH_ATTN_NVRTC"):
        assert part in message


def test_target_environment_goes_before_the_build_requirements(tmp_path, monkeypatch):
    """As under pip's build isolation: this process sees the overlay, a clean child sees the user's environment."""
    overlay = library(tmp_path / "overlay/nvidia/cuda_nvrtc/lib")
    own = library(tmp_path / "target/nvidia/cu13/lib", "libnvrtc.so.13")
    monkeypatch.setattr("buildtools.nvrtc.target_search_path", lambda environ: [str(tmp_path / "target")])
    environ = {"PYTHONPATH": str(tmp_path / "overlay")}
    assert find(environ, [str(tmp_path / "overlay")]) == FoundNvrtc(own, "the Python environment")
    own.unlink()
    assert find(environ, [str(tmp_path / "overlay")]) == FoundNvrtc(overlay, "the build requirements")


def test_target_search_path_is_without_what_isolation_adds(tmp_path):
    from buildtools.nvrtc import target_search_path

    found = target_search_path({**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1"})
    assert str(tmp_path) not in found
    assert any("site-packages" in entry for entry in found)


@pytest.mark.parametrize("folder", ["usr/local/cuda/lib64", "usr/lib64", "usr/lib/x86_64-linux-gnu"])
def test_found_among_the_systems_libraries(tmp_path, monkeypatch, folder):
    monkeypatch.setattr("buildtools.nvrtc.SYSTEM_ROOT", tmp_path)
    path = library(tmp_path / folder)
    assert find({"PATH": ""}, []).path == path


def test_library_that_is_none(tmp_path):
    with pytest.raises(NvrtcNotFoundError, match="cannot be loaded"):
        load_nvrtc(FoundNvrtc(library(tmp_path), "a test"))


def test_library_of_another_kind(tmp_path):
    other = tmp_path / "libnvrtc.so.12"
    libc = next(line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line)
    other.symlink_to(libc)
    with pytest.raises(NvrtcNotFoundError, match="undefined symbol: nvrtc"):
        load_nvrtc(FoundNvrtc(other, "a test"))


def test_library_of_no_use_is_passed_over_but_told(tmp_path, nvrtc, no_toolkit):
    library(tmp_path / "broken/nvidia/cu13/lib", "libnvrtc.so.13")
    good = tmp_path / "good/nvidia/cuda_nvrtc"
    good.mkdir(parents=True)
    (good / "lib").symlink_to(nvrtc.path.parent)
    found = find_nvrtc({}, [str(tmp_path / "broken"), str(tmp_path / "good")], load_nvrtc)
    assert found.path.parent == good / "lib"
    with pytest.raises(NvrtcNotFoundError, match=r"libnvrtc\.so\.13 cannot be loaded"):
        find_nvrtc({}, [str(tmp_path / "broken")], load_nvrtc)


# --- the command line --------------------------------------------------------------------------------------------


def buildtools(tree: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "buildtools", *arguments],
        cwd=tree, env=clean_environ(**environ), capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_compile_command(tree):
    result = buildtools(tree, "compile", FWD, "--arch", "9.0", "--out", "made/x.cubin")
    assert result.returncode == 0, result.stderr
    assert (tree / "made" / "x.cubin").read_bytes()[:4] == b"\x7fELF"
    assert "flash_fwd: " in result.stdout
    assert "registers" in result.stdout


def test_compile_command_suggests_the_nearest_key(tree):
    result = buildtools(tree, "compile", "fwd-sm80-bf16-d64-ful")
    assert result.returncode == 13
    assert f'did you mean "{FWD}"' in result.stderr


def test_table_command_shows_the_subset(tree):
    result = buildtools(tree, "table", FLASH_ATTN_KERNELS="bwd-*")
    assert [line.split()[0] for line in result.stdout.splitlines()] == [BWD]


def test_report_before_any_build(tree):
    result = buildtools(tree, "report")
    assert result.returncode == 1
    assert "python -m buildtools build" in result.stderr
