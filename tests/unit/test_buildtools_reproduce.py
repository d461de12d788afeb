"""`python -m buildtools reproduce`: two builds in other surroundings, and what is said where they differ."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from buildtools_support import HOST, clean_environ, make_tree

from buildtools.errors import BuildError, WheelDifferenceError
from buildtools.reproduce import FIRST, SECOND, can_be_elsewhere

SUBSET = ("--head-dims", "64", "--archs", "80")


def reproduce(tree: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "buildtools", "reproduce", *SUBSET, *arguments]
    return subprocess.run(command, cwd=tree, env=clean_environ(**environ), capture_output=True, text=True, check=False)


def test_the_surroundings_have_nothing_in_common() -> None:
    assert FIRST.variables.keys() <= SECOND.variables.keys()
    assert all(FIRST.variables[name] != SECOND.variables[name] for name in FIRST.variables)
    assert (FIRST.folder, FIRST.umask, FIRST.date, FIRST.hook) != (
        SECOND.folder,
        SECOND.umask,
        SECOND.date,
        SECOND.hook,
    )
    assert abs(FIRST.date - SECOND.date) > 10**8


def test_a_wheel_is_the_same_twice(tmp_path: Path) -> None:
    """By `python -m buildtools` and by the PEP 517 hook; the session's own settings reach neither."""
    out = tmp_path / "out"
    result = reproduce(make_tree(tmp_path / "tree"), "--out", str(out), SOURCE_DATE_EPOCH="1700000000")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "kernels: FLASH_ATTN_HEAD_DIMS=64 FLASH_ATTN_CUDA_ARCHS=80" in result.stdout
    assert ("user and host" in result.stdout) == can_be_elsewhere() or "but one user and host" in result.stdout
    (line,) = (line for line in result.stdout.splitlines() if line.startswith("default "))
    assert line.endswith(" the same")
    first, second = sorted(out.rglob("wheels/**/*.whl"))
    assert first.read_bytes() == second.read_bytes()


def test_a_difference_fails_and_is_explained(tmp_path: Path) -> None:
    """The time of compilation in the library, which no setting takes out."""
    tree = make_tree(tmp_path / "tree")
    clock = 'extern "C" __attribute__((visibility("default"))) const char* built() { return __TIME__; }\n'
    (tree / "csrc/host/exports.cpp").write_text(HOST + clock)
    result = reproduce(tree, PATH="/usr/bin:/bin")  # without diffoscope
    assert result.returncode == WheelDifferenceError.exit_code, result.stdout + result.stderr
    assert "OTHER: " in result.stdout
    assert "flash_attn/libflash_attn.so: " in result.stdout
    assert "bytes differ, from offset 0x" in result.stdout
    assert "flash_attn.kernels" not in result.stdout


def test_a_row_without_its_compiler_is_skipped_and_said(tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    result = reproduce(tree, PATH=str(tmp_path))
    assert result.returncode == BuildError.exit_code
    assert "skipped: no C++ compiler: g++ is not on PATH" in result.stdout
    assert "no row could be built" in result.stderr


@pytest.mark.parametrize("arguments", [("--row", "torch9.9"), ("--row", "defualt")])
def test_an_unknown_row_is_an_error(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    result = reproduce(make_tree(tmp_path / "tree"), *arguments)
    assert 'matrix.toml has no row "' in result.stderr
    assert result.returncode == 11
