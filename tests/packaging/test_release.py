"""The files of a release: budgets (field case 41), rows, and that what is listed is what exists (field case 42)."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from choice_support import VERSION, make_published
from packaging_support import ROOT

from buildtools.build import load_tables
from buildtools.errors import ManifestError, OverBudgetError
from buildtools.manifest import make_manifest
from buildtools.release import SUMS, check_budgets, check_rows, compare, make_files

MATRIX = load_tables(ROOT)[1]
ROWS = ["default", "torch2.6-abi0"]


@pytest.fixture
def wheels(tmp_path: Path) -> list[Path]:
    folder, platform = tmp_path / "wheels", "manylinux_2_28_x86_64"
    return [
        make_published(folder, platform=platform),
        make_published(folder, "==2.6.*", 0, platform),
    ]


@pytest.fixture
def out(wheels: list[Path], tmp_path: Path) -> Path:
    make_files(wheels, tmp_path / "release", ROWS, ["https://example.org/files/"])
    return tmp_path / "release"


def names(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "files").iterdir())


def test_a_wheel_over_its_budget_fails_with_its_largest_members(wheels: list[Path]) -> None:
    lines = check_budgets(wheels, MATRIX)
    assert [f"of {MATRIX.budgets.wheel_kib} KiB" in line for line in lines] == [True, True]
    small = replace(MATRIX, budgets=replace(MATRIX.budgets, wheel_kib=1))
    with pytest.raises(OverBudgetError) as error:
        check_budgets(wheels[:1], small)
    assert wheels[0].name in str(error.value)
    assert "in it flash_attn/flash_attn.kernels (" in str(error.value)
    assert "budgets.wheel_kib = 1" in str(error.value)


def test_every_row_has_its_wheel(wheels: list[Path]) -> None:
    check_rows(make_manifest(wheels, VERSION), MATRIX, ROWS)
    with pytest.raises(ManifestError, match=r"missing torch2\.6-abi0; not of a row none"):
        check_rows(make_manifest(wheels[:1], VERSION), MATRIX, ROWS)
    with pytest.raises(ManifestError, match=r"missing none; not of a row flash_attn-.*torch2\.6"):
        check_rows(make_manifest(wheels, VERSION), MATRIX, ["default"])


def test_the_sdist_lists_the_wheels_and_the_source_tree_stays_as_it_is(out: Path, wheels: list[Path]) -> None:
    assert not (ROOT / "wheels.json").exists()
    with tarfile.open(out / "files" / f"flash_attn-{VERSION}.tar.gz") as archive:
        member = archive.extractfile(f"flash_attn-{VERSION}/wheels.json")
        assert member is not None
        data = json.loads(member.read())
    assert {item["filename"]: item["sha256"] for item in data["wheels"]} == {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in wheels
    }
    assert data["places"] == ["https://example.org/files/"]
    assert sorted(path.name for path in (out / "index").iterdir() if path.is_dir()) == ["stable", "torch2.6.cxx11abi0"]
    compare(out, names(out))


def test_the_same_wheels_make_the_same_release(out: Path, wheels: list[Path], tmp_path: Path) -> None:
    make_files(wheels[::-1], tmp_path / "again", ROWS, ["https://example.org/files/"])
    assert (out / SUMS).read_bytes() == (tmp_path / "again" / SUMS).read_bytes()


def test_a_file_that_the_server_lacks_or_has_too_many(out: Path) -> None:
    wheel, *others = names(out)
    with pytest.raises(ManifestError, match="is not in the server's list"):
        compare(out, others)
    with pytest.raises(ManifestError, match=r"other\.whl is not in the files; other\.whl is not in the manifest"):
        compare(out, [wheel, *others, "other.whl"])


def test_a_file_that_was_altered_or_lost(out: Path, wheels: list[Path]) -> None:
    listed = names(out)
    path = out / "files" / wheels[0].name
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ManifestError, match=f"is not the file of {SUMS}"):
        compare(out, listed)
    path.unlink()
    with pytest.raises(ManifestError, match="is not in the files"):
        compare(out, listed)
