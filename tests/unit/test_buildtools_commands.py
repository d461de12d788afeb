"""``python -m buildtools``: what is wrong with an argument is told in a line, without a traceback."""

from __future__ import annotations

from pathlib import Path

import pytest

from buildtools.__main__ import main


@pytest.mark.parametrize(
    "arguments",
    [
        ["release", "budget", "{}/none.whl"],
        ["release", "files", "{}/none.whl"],
        ["release", "compare", "{}", "--listing", "{}/none"],
        ["show", "{}/none"],
        ["verify", "{}/none.whl"],
        ["report", "--out", "{}/none"],
    ],
)
def test_a_file_that_is_not_there(arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "files").mkdir()
    assert main([argument.format(tmp_path) for argument in arguments]) != 0
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert "none" in err


@pytest.mark.parametrize("text", ["{", "[]", '{"kernels": {}}'])
def test_a_report_that_is_broken(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resources.json").write_text(text)
    assert main(["report", "--out", str(tmp_path)]) == 1
    assert "is no report of a build" in capsys.readouterr().err


def test_a_report_of_no_kernels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "resources.json").write_text('{"kernels": {}, "compiler": "nvrtc 12.9.86"}')
    assert main(["report", "--out", str(tmp_path)]) == 0
    assert "0 kernels, nvrtc 12.9.86: 0.0 CPU-s" in capsys.readouterr().out
