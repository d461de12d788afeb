"""Which bytes of two wheels differ."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from packaging_support import make_wheel

from buildtools.compare import check, compare_wheels, main
from buildtools.errors import WheelDifferenceError


def rewrite(source: Path, folder: Path, changes: dict[str, str], *, level: int | None = None) -> Path:
    """A copy of a wheel with some members replaced, added, or (by an empty text) left out."""
    folder.mkdir()
    path = folder / source.name
    with (
        zipfile.ZipFile(source) as wheel,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=level) as copy,
    ):
        for name in sorted({*wheel.namelist(), *changes}):
            text = changes[name] if name in changes else wheel.read(name).decode()
            if text:
                copy.writestr(zipfile.ZipInfo(name), text)
    return path


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "first")


def test_the_same_bytes(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = make_wheel(tmp_path / "second")
    other.write_bytes(wheel.read_bytes())
    assert main([str(wheel), str(other)]) == 0
    assert "the wheels are the same, byte for byte" in capsys.readouterr().out


def test_a_member_that_may_differ_and_one_that_may_not(wheel: Path, tmp_path: Path) -> None:
    other = rewrite(wheel, tmp_path / "second", {"attention_probe.py": "x = 1\n"})
    comparison = compare_wheels(wheel, other)
    assert comparison.different == ("attention_probe.py",)
    assert "DIFFERENT  attention_probe.py" in str(comparison)
    check(comparison, frozenset({"attention_probe.py"}))
    with pytest.raises(WheelDifferenceError, match=r"differs in attention_probe\.py"):
        check(comparison, frozenset({"RECORD"}))


def test_a_member_of_one_wheel_alone(wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = rewrite(wheel, tmp_path / "second", {"attention_probe.py": "", "added.py": "x = 1\n"})
    comparison = compare_wheels(wheel, other)
    assert comparison.only_first == ("attention_probe.py",)
    assert comparison.only_second == ("added.py",)
    assert main([str(wheel), str(other), "--allow", "added.py"]) == WheelDifferenceError.exit_code
    assert "differs in attention_probe.py" in capsys.readouterr().err


def test_the_same_members_in_another_zip_file_are_not_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    comparison = compare_wheels(wheel, rewrite(wheel, tmp_path / "second", {}))
    assert comparison.same_contents
    assert not comparison.identical
    with pytest.raises(WheelDifferenceError, match="the zip file itself"):
        check(comparison, frozenset({"attention_probe.py"}))
