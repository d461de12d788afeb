"""Whole builds of a small tree: subsets, what is compiled again after which edit, failures, kills, equal bytes."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from buildtools_support import clean_environ, make_tree

from buildtools import errors
from buildtools.archive import read
from buildtools.build import Result, build

FWD64, FWD128, BWD = "fwd-sm80-bf16-d64-full", "fwd-sm80-bf16-d128-full", "bwd-sm80-bf16-d64-causal"


def run(tree: Path, **environ: str) -> Result:
    return build(tree, environ=clean_environ(**environ), quiet=True)


def images(tree: Path) -> dict[str, int]:
    """{kernel: time of its image}: what was compiled again has another."""
    return {path.name: path.stat().st_mtime_ns for path in (tree / "build/kernels").glob("*.image")}


def compiled_again(tree: Path, before: dict[str, int]) -> set[str]:
    """`key.arch` of the kernels whose image is new since `before`."""
    return {name.removesuffix(".image") for name, time in images(tree).items() if before.get(name) != time}


@pytest.fixture(scope="module")
def built_tree(tmp_path_factory) -> Path:
    """A tree that was built once; tests work on copies of it."""
    tree = make_tree(tmp_path_factory.mktemp("built") / "a tree")
    run(tree)
    return tree


@pytest.fixture
def tree(built_tree, tmp_path) -> Path:
    """A copy, times included: nothing in it has to be compiled."""
    copy = tmp_path / "copy of a tree"
    shutil.copytree(built_tree, copy)
    return copy


def test_complete_build_holds_every_row_for_every_arch(built_tree):
    archive = read(built_tree / "build/flash_attn.kernels")
    assert archive.keys == [BWD, FWD128, FWD64]
    assert archive.archs == ["80", "90", "ptx80"]
    assert len(archive.records) == 9
    record = next(record for record in archive.records if (record.key, record.arch) == (FWD128, "ptx80"))
    assert record.smem_bytes == (64 + 2 * 64) * 128 * 2  # the override of ptx80
    assert record.registers == 0
    assert all(record.registers > 0 for record in archive.records if record.arch != "ptx80")


def test_build_info_says_what_was_made(built_tree):
    info = json.loads((built_tree / "build/build_info.json").read_text())
    archive = read(built_tree / "build/flash_attn.kernels")
    assert info["cuda_build"] is True
    assert info["version"] == "2.9.0"
    assert info["kernel_set"]["sha256"] == archive.sha256
    assert info["kernel_set"]["archs"] == ["80", "90", "ptx80"]
    assert info["kernel_set"]["compiler"].startswith("nvrtc 1")
    assert info["host"]["torch"] == ">=2.10"
    assert str(built_tree) not in json.dumps(info)


def test_resources_of_every_kernel_are_kept(built_tree):
    kernels = json.loads((built_tree / "build/resources.json").read_text())["kernels"]
    assert len(kernels) == 9
    for name, kernel in kernels.items():
        assert kernel["spills"] == 0
        assert kernel["cpu_s"] > 0
        assert kernel["peak_mib"] > 10
        assert bool(kernel["entries"]) == (not name.endswith("ptx80"))


def test_host_library_says_its_version(built_tree):
    import ctypes

    library = built_tree / "build/libflash_attn.so"
    assert str(built_tree).encode() not in library.read_bytes()
    # It needs a libtorch.so, which is only found where torch is loaded: an empty one stands for it here.
    ctypes.CDLL(str(built_tree / "build/host/libtorch.so"), mode=ctypes.RTLD_GLOBAL)
    function = ctypes.CDLL(str(library)).flash_attn_version
    function.restype = ctypes.c_char_p
    assert function() == b"2.9.0"


# --- what is compiled again --------------------------------------------------------------------------------------


def test_nothing_edited_compiles_nothing(tree):
    before = images(tree)
    assert run(tree).compiled == 0
    assert compiled_again(tree, before) == set()


@pytest.mark.alone
def test_nothing_edited_takes_less_than_half_a_second(tree):
    """Python's start included, with the real project's number of kernels in mind: the best of five."""
    times = []
    for _ in range(5):
        start = time.monotonic()
        command = [sys.executable, "-m", "buildtools", "build", "--quiet"]
        result = subprocess.run(command, cwd=tree, env=clean_environ(), capture_output=True, text=True, check=True)
        times.append(time.monotonic() - start)
        assert result.stdout.startswith("0 steps run")
    assert min(times) < 0.5


def test_touching_every_file_compiles_no_kernel(tree):
    before = images(tree)
    for path in [*tree.glob("*.toml"), *(tree / "csrc/kernels").rglob("*.*"), tree / "csrc/params.h"]:
        path.touch()
    assert run(tree).compiled == 0
    assert compiled_again(tree, before) == set()


@pytest.mark.parametrize(
    ("edited", "keys"),
    [
        ("csrc/kernels/sm80/fwd.cu", {FWD64, FWD128}),
        ("csrc/kernels/sm80/bwd.cu", {BWD}),
        ("csrc/kernels/common/twice.cuh", {FWD64, FWD128}),
        ("csrc/params.h", {FWD64, FWD128, BWD}),
        ("csrc/host/exports.cpp", set()),
    ],
)
def test_an_edit_compiles_what_includes_it(tree, edited, keys):
    before = images(tree)
    library = (tree / "build/libflash_attn.so").stat().st_mtime_ns
    path = tree / edited
    path.write_text(path.read_text() + "\n// edited\n")
    run(tree)
    assert {name.partition(".")[0] for name in compiled_again(tree, before)} == keys
    assert ((tree / "build/libflash_attn.so").stat().st_mtime_ns != library) == ("host" in edited)


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("warps = 4, stages = 1,", "warps = 2, stages = 1,", {f"{FWD64}.{arch}" for arch in ("80", "90", "ptx80")}),
        ("tiles = { stages = 1 }", "tiles = { stages = 1, warps = 2 }", {f"{FWD128}.ptx80"}),
        ('archs = ["86", "ptx80"]', 'archs = ["86"]', {f"{FWD128}.ptx80"}),
        ("warps = 8", "warps = 8 ", set()),
    ],
)
def test_a_changed_constant_compiles_the_rows_that_it_touches(tree, old, new, names):
    if 'archs = ["86"]' in new:  # without its override, PTX's tiles of head dim 128 need room
        text = (tree / "kernels.toml").read_text().replace("ptx80 = { smem = 101376 }", "ptx80 = { smem = 166912 }")
        (tree / "kernels.toml").write_text(text)
        assert run(tree).compiled == 0
    before = images(tree)
    text = (tree / "kernels.toml").read_text()
    assert old in text
    (tree / "kernels.toml").write_text(text.replace(old, new))
    run(tree)
    assert compiled_again(tree, before) == names


def test_a_moved_tree_is_not_compiled_again(tree, tmp_path):
    moved = tree.rename(tmp_path / "moved")
    before = images(moved)
    run(moved)
    assert compiled_again(moved, before) == set()


def test_a_new_compiler_compiles_everything(tree):
    before = images(tree)
    note = tree / "build/nvrtc.json"
    data = json.loads(note.read_text())
    note.write_text(json.dumps({**data, "version": "12.9.999"}))
    run(tree)
    assert len(compiled_again(tree, before)) == 9
    assert read(tree / "build/flash_attn.kernels").compiler == "nvrtc 12.9.999"


def test_damaged_notes_are_asked_for_again(tree):
    for name in ("nvrtc.json", "gxx.json"):
        (tree / "build" / name).write_text("{")
    assert run(tree).compiled == 0


def test_subset_and_back_compiles_nothing_twice(tree):
    before = images(tree)
    run(tree, FLASH_ATTN_KERNELS="fwd-*", FLASH_ATTN_HEAD_DIMS="64", FLASH_ATTN_CUDA_ARCHS="90")
    archive = read(tree / "build/flash_attn.kernels")
    assert [(record.key, record.arch) for record in archive.records] == [(FWD64, "90")]
    run(tree)
    assert len(read(tree / "build/flash_attn.kernels").records) == 9
    assert compiled_again(tree, before) == set()


def test_torchs_list_gives_exactly_that_arch(tree):
    run(tree, TORCH_CUDA_ARCH_LIST="9.0")
    archive = read(tree / "build/flash_attn.kernels")
    assert archive.archs == ["90"]
    assert {image[48] for image in archive.images} == {90}  # e_flags of the cubins


def test_show_lists_what_a_kernel_set_holds(tree):
    command = [sys.executable, "-m", "buildtools", "show", "build/flash_attn.kernels"]
    shown = subprocess.run(command, cwd=tree, env=clean_environ(), capture_output=True, text=True, check=True).stdout
    assert "9 kernels" in shown
    assert len(shown.splitlines()) == 10
    assert shown.splitlines()[1].split()[:2] == [BWD, "80"]


def test_compiler_that_has_none_of_the_archs_is_an_error(tree):
    note = tree / "build/nvrtc.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "supported": [75]}))
    with pytest.raises(errors.ArchError, match="none of the archs of kernel set cu12: 80;90;ptx80"):
        run(tree)


# --- equal bytes -------------------------------------------------------------------------------------------------


def test_bytes_do_not_depend_on_folder_jobs_umask_or_time(built_tree, tmp_path):
    other = make_tree(tmp_path / "elsewhere" / "b")
    command = [sys.executable, "-m", "buildtools", "build", "--quiet"]
    environ = clean_environ(MAX_JOBS="1", TZ="Asia/Tokyo", SOURCE_DATE_EPOCH="1700000000", LC_ALL="C")
    subprocess.run(command, cwd=other, env=environ, check=True, capture_output=True, umask=0o077)
    for name in ("flash_attn.kernels", "libflash_attn.so", "build_info.json"):
        digests = {hashlib.sha256((tree / "build" / name).read_bytes()).hexdigest() for tree in (built_tree, other)}
        assert len(digests) == 1, name


# --- failures ----------------------------------------------------------------------------------------------------


def test_failing_kernel_is_named_with_the_compilers_message(tree):
    (tree / "csrc/kernels/sm80/bwd.cu").write_text('#include "params.h"\nint x = y;\n')
    with pytest.raises(errors.KernelCompileError) as caught:
        run(tree, MAX_JOBS="1")
    assert f"kernel {BWD} does not compile for arch" in str(caught.value)
    assert 'sm80/bwd.cu(2): error: identifier "y" is undefined' in str(caught.value)


def test_after_a_failure_the_build_goes_on_from_what_is_finished(tree):
    for name in ("fwd", "bwd"):
        path = tree / f"csrc/kernels/sm80/{name}.cu"
        path.write_text(path.read_text() + "// edited\n" + ("#error\n" if name == "fwd" else ""))
    with pytest.raises(errors.KernelCompileError, match=f"kernel {FWD128} does not compile"):
        run(tree, MAX_JOBS="1")  # the keys are compiled in their order
    fwd = tree / "csrc/kernels/sm80/fwd.cu"
    fwd.write_text(fwd.read_text().replace("#error\n", ""))
    before = images(tree)
    run(tree)
    assert {name.partition(".")[0] for name in compiled_again(tree, before)} == {FWD64, FWD128}


def test_spills_fail_the_build_after_the_report_is_written(tree):
    fwd = tree / "csrc/kernels/sm80/fwd.cu"
    fwd.write_text(
        '#include "params.h"\n#include "common/twice.cuh"\n'
        'extern "C" __global__ void __launch_bounds__(1024, 2) flash_fwd(Params p) {\n'
        "  float x[64];\n#pragma unroll\n  for (int i = 0; i < 64; i++) x[i] = p.x[i * 32 + threadIdx.x];\n"
        "#pragma unroll\n  for (int r = 0; r < 3; r++)\n#pragma unroll\n"
        "    for (int i = 0; i < 64; i++) x[i] = x[i] * x[(i + 7) % 64] + x[(i + 31) % 64];\n"
        "#pragma unroll\n  for (int i = 0; i < 64; i++) p.x[i * 32 + threadIdx.x] = x[i];\n}\n"
    )
    environ = {"FLASH_ATTN_CUDA_ARCHS": "90", "FLASH_ATTN_KERNELS": FWD64}
    with pytest.raises(errors.ResourceError, match=rf"{FWD64} on arch 90 spills: flash_fwd"):
        run(tree, **environ)
    kernels = json.loads((tree / "build/resources.json").read_text())["kernels"]
    assert kernels[f"{FWD64}.90"]["spills"] > 0
    text = (tree / "kernels.toml").read_text()
    allowed = '[[kernel.overrides]]\nallow_spills = { bytes = 9999, reason = "a test" }\n\n[[kernel]]\nop = "bwd"'
    (tree / "kernels.toml").write_text(text.replace('[[kernel]]\nop = "bwd"', allowed))
    run(tree, **environ)


def test_failing_host_library_shows_the_compilers_message(tree):
    (tree / "csrc/host/exports.cpp").write_text("int x = undeclared;\n")
    with pytest.raises(errors.HostCompileError, match=r"exports\.cpp:1:9: error: .*undeclared"):
        run(tree)


def test_no_host_sources(tree):
    (tree / "csrc/host/exports.cpp").unlink()
    with pytest.raises(errors.SourceError, match="csrc/host holds no C"):
        run(tree)


def test_ninja_missing_is_an_error(tree, monkeypatch):
    monkeypatch.setitem(sys.modules, "ninja", None)
    with pytest.raises(errors.NinjaError, match=r"ninja[\s\S]*pip install ninja"):
        run(tree)


def test_no_nvrtc_is_an_error(tree, monkeypatch):
    monkeypatch.setattr("buildtools.nvrtc.SYSTEM_ROOT", tree)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if "site-packages" not in entry])
    with pytest.raises(errors.NvrtcNotFoundError, match="no usable NVRTC"):
        run(tree, PATH="/usr/bin:/bin", CONDA_PREFIX="", CUDA_HOME="", CUDA_PATH="", LD_LIBRARY_PATH="")


def test_build_folder_that_is_a_file(tree):
    shutil.rmtree(tree / "build")
    (tree / "build").write_text("")
    with pytest.raises(errors.BuildError, match="cannot be written"):
        run(tree)


def test_command_line_exits_with_the_class_of_the_error(tree):
    command = [sys.executable, "-m", "buildtools", "build"]
    for environ, code, text in (
        ({"FORCE_BUILD": "maybe"}, 10, "FORCE_BUILD=maybe is neither true nor false"),
        ({"FLASH_ATTN_CUDA_ARCHS": "junk"}, 12, "accepted forms"),
        ({"FLASH_ATTN_HEAD_DIMS": "96"}, 13, "no head dim 96"),
        ({"FLASH_ATTN_NVRTC": "/nowhere"}, 16, "FLASH_ATTN_NVRTC=/nowhere"),
        ({"CXX": "no-such-compiler"}, 20, "no-such-compiler is not on PATH"),
    ):
        result = subprocess.run(
            command, cwd=tree, env=clean_environ(**environ), capture_output=True, text=True, check=False
        )
        assert (result.returncode, result.stderr.count("Traceback")) == (code, 0), result.stderr
        assert text in result.stderr


# --- progress, kills, two at once --------------------------------------------------------------------------------


def start(tree: Path, **environ: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "buildtools", "build"],
        cwd=tree, env=clean_environ(**environ), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_progress_shows_count_elapsed_and_eta(tree):
    shutil.rmtree(tree / "build")
    _, shown = start(tree, FLASH_ATTN_CUDA_ARCHS="80", NVCC_THREADS="4").communicate(timeout=120)
    assert "note: NVCC_THREADS has no effect" in shown
    assert "3 kernels with nvrtc" in shown
    lines = [line for line in shown.splitlines() if line.startswith("[")]
    assert len(lines) == 7
    assert all("elapsed 0:0" in line and "ETA 0:0" in line for line in lines)
    assert lines[-1].startswith("[7/7] ")
    assert any(f"{BWD}.80" in line for line in lines)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_build_goes_on_from_what_is_finished(tree, how):
    shutil.rmtree(tree / "build")
    process = start(tree, MAX_JOBS="1")
    finished: set[str] = set()
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("["):
            finished.add(line.partition("]")[2].split()[0])
        if len(finished) == 3:
            process.send_signal(how)
            break
    process.communicate(timeout=60)
    assert process.returncode != 0
    before = images(tree)
    run(tree)
    assert len(read(tree / "build/flash_attn.kernels").records) == 9
    again = compiled_again(tree, before) & {name.removesuffix(".image") for name in before}
    assert not again & finished
    assert run(tree).compiled == 0


def test_build_killed_just_before_its_end_is_finished_by_the_next(tree):
    info = tree / "build/build_info.json"
    right = info.read_bytes()
    info.write_bytes(right.replace(b"ptx80", b"ptx00"))
    os.utime(info, ns=(0, 0))  # of an earlier build
    assert run(tree).compiled == 0
    assert info.read_bytes() == right
    info.unlink()
    run(tree)
    assert info.read_bytes() == right


def test_two_builds_at_once_share_the_work(tree):
    shutil.rmtree(tree / "build")
    processes = [start(tree) for _ in range(2)]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    steps = sorted(int(out.split()[0]) for out, _ in results)
    assert steps == [0, 13]
