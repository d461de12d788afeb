"""`python -m buildtools verify`: a published wheel built again, and every way in which it may not be the same."""

from __future__ import annotations

import base64
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ, make_tree

from buildtools import archive
from buildtools.archs import parse_arch
from buildtools.compile import Report, record_of
from buildtools.errors import AlteredWheelError, NotVerifiedError, WheelDifferenceError
from buildtools.kernels import load_table
from buildtools.verify import _archs_asked_for

KERNELS, LIBRARY = "flash_attn/flash_attn.kernels", "flash_attn/libflash_attn.so"
SUBSET = {"FLASH_ATTN_CUDA_ARCHS": "80", "FLASH_ATTN_HEAD_DIMS": "64", "SOURCE_DATE_EPOCH": "1700000000"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tree(tmp_path_factory.mktemp("verify") / "tree")


@pytest.fixture(scope="module")
def wheel(tree: Path) -> Path:
    """A published wheel: of the PEP 517 hook, with a subset, a label and a date of its own."""
    code = "from buildtools import backend; print(backend.build_wheel('dist'))"
    environ = clean_environ(**SUBSET, FORCE_BUILD="1", FLASH_ATTN_LOCAL_VERSION="mine")
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=True)
    return tree / "dist" / result.stdout.strip()


def verify(tree: Path, path: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "buildtools", "verify", str(path), "--out", str(tree / "again")]
    environ = clean_environ(**environ)
    return subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)


def rewritten(wheel: Path, folder: Path, name: str, change: Callable[[bytes], bytes], *, record: bool = True) -> Path:
    """A copy of the wheel with one member changed, and RECORD made to agree if `record`."""
    path = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as copy:
        old = source.read(name)
        new = change(old)
        for item in source.infolist():
            data = new if item.filename == name else source.read(item)
            if item.filename.endswith("/RECORD") and record:
                data = data.replace(_digest(old), _digest(new))
            copy.writestr(item, data)
    return path


def _digest(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")


def flip(at: int) -> Callable[[bytes], bytes]:
    return lambda data: data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def test_a_wheel_of_the_hook_is_verified_to_the_byte(tree: Path, wheel: Path) -> None:
    """The subset, the label and the date come from the wheel, whatever the environment says."""
    assert wheel.name.startswith("flash_attn-2.9.0+mine-")
    result = verify(tree, wheel, FLASH_ATTN_HEAD_DIMS="128", FLASH_ATTN_LOCAL_VERSION="other")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "the wheel that was built here is the same file, byte for byte" in result.stdout
    assert f"same          {KERNELS}" in result.stdout


def test_a_flipped_byte_of_a_cubin_is_named_by_its_kernel(tree: Path, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as source:
        content = source.read(KERNELS)
    kernels = archive.unpack(content)
    index = [record.key for record in kernels.records].index("fwd-sm80-bf16-d64-full")
    altered = rewritten(wheel, tmp_path, KERNELS, flip(content.index(kernels.images[index]) + 100))
    result = verify(tree, altered)
    assert result.returncode == WheelDifferenceError.exit_code
    assert f"DIFFERENT     {KERNELS}: kernel fwd-sm80-bf16-d64-full for 80: 1 bytes differ, from offset 0x64 on" in (
        result.stdout
    )
    assert "bwd-sm80" not in result.stderr


def test_a_flipped_byte_of_the_library_is_named(tree: Path, wheel: Path, tmp_path: Path) -> None:
    result = verify(tree, rewritten(wheel, tmp_path, LIBRARY, flip(0x1234)))
    assert result.returncode == WheelDifferenceError.exit_code
    assert f"DIFFERENT     {LIBRARY}: 1 bytes differ, from offset 0x1234 on" in result.stdout


def test_an_altered_member_is_found_without_a_build(tree: Path, wheel: Path, tmp_path: Path) -> None:
    result = verify(tree, rewritten(wheel, tmp_path, LIBRARY, flip(99), record=False))
    assert result.returncode == AlteredWheelError.exit_code
    assert f"{LIBRARY} (its sha256 is not the one in RECORD)" in result.stderr


def test_a_flipped_byte_of_the_file_is_named_by_its_member(tree: Path, wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as source:
        at = source.getinfo(LIBRARY).header_offset + 200
    path = tmp_path / wheel.name
    path.write_bytes(flip(at)(wheel.read_bytes()))
    result = verify(tree, path)
    assert result.returncode == AlteredWheelError.exit_code
    assert f"was altered after it was built: {LIBRARY} (" in result.stderr
    assert KERNELS not in result.stderr


def test_what_is_no_wheel(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "flash_attn-2.9.0-py3-none-any.whl"
    path.write_text("<html>not found</html>")
    result = verify(tree, path)
    assert result.returncode == AlteredWheelError.exit_code
    assert "cannot be read as a wheel" in result.stderr


def test_other_sources_are_no_verification(wheel: Path, tmp_path: Path) -> None:
    tree = make_tree(tmp_path / "tree")
    (tree / "csrc/params.h").write_text("#pragma once\nstruct Params { float* x; int y; };\n")
    result = verify(tree, wheel)
    assert result.returncode == NotVerifiedError.exit_code
    assert "was built from sources with sha256" in result.stderr


def test_another_host_compiler_leaves_its_members_out(tree: Path, wheel: Path, tmp_path: Path) -> None:
    """A wheel of g++ 99: its kernels are verified all the same."""
    altered = rewritten(wheel, tmp_path, LIBRARY, flip(99))
    bill = "flash_attn-2.9.0+mine.dist-info/sboms/flash_attn.cdx.json"
    with zipfile.ZipFile(wheel) as source:
        name = next(item for item in source.namelist() if item.endswith("/RECORD"))
        version = source.read("flash_attn/build_info.json").decode().partition("g++ ")[2].partition('"')[0]
    other = tmp_path / "other"
    other.mkdir()
    altered = rewritten(altered, other, bill, lambda data: data.replace(version.encode(), b"99.0.0"))
    result = verify(tree, altered)
    assert result.returncode == NotVerifiedError.exit_code, result.stdout + result.stderr
    assert f"not compared  {LIBRARY}: it was compiled by g++ 99.0.0, and here is g++ {version}" in result.stdout
    assert f"not compared  {name}" in result.stdout
    assert f"same          {KERNELS}" in result.stdout


@pytest.mark.parametrize("asked", ["90", "80;90", "90;90a", "90a", "80;100"])
def test_archs_of_a_subset_are_asked_for_as_they_were(asked: str) -> None:
    """With the project's own table: 90 brings 90a with it for one family, and 90a is for all of them."""
    table = load_table(ROOT / "kernels.toml")
    rows = table.select(head_dims=[64])

    def records(archs: str) -> list[archive.Record]:
        wanted = [parse_arch(arch) for arch in archs.split(";")]
        kernels = table.kernels(rows, {name: family.built_for(wanted) for name, family in table.families.items()})
        return [record_of(kernel, Report()) for kernel in kernels]

    found = records(asked)
    assert records(";".join(_archs_asked_for(found, table))) == found
