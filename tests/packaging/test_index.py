"""The static index, read by real pip over loopback HTTP."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from packaging_support import PLATFORM, make_wheel

from buildtools.errors import IndexPageError
from buildtools.index import HTML_TYPE, JSON_TYPE, main, read_distribution, serving, write_index


def get(url: str, accept: str) -> tuple[str, bytes]:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read()


def test_pages_name_hash_metadata_and_requires_python(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path / "dist")
    (root,) = write_index([wheel], tmp_path / "index")
    assert root == tmp_path / "index/stable"
    page = (root / "attention-probe/index.html").read_text()
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    metadata = (root / f"attention-probe/{wheel.name}.metadata").read_bytes()
    assert f'href="{wheel.name}#sha256={digest}"' in page
    assert 'data-requires-python="&gt;=3.10"' in page
    assert f'data-core-metadata="sha256={hashlib.sha256(metadata).hexdigest()}"' in page
    content = json.loads((root / "attention-probe/index.json").read_text())
    assert content["versions"] == ["1.0"]
    (file,) = content["files"]
    assert file["hashes"] == {"sha256": digest}
    assert file["size"] == wheel.stat().st_size
    assert file["core-metadata"] == {"sha256": hashlib.sha256(metadata).hexdigest()}


def test_the_same_files_give_the_same_pages(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path / "dist", version) for version in ("1.0", "1.1", "1.10")]
    first = write_index(wheels, tmp_path / "a")[0] / "attention-probe"
    second = write_index(reversed(wheels), tmp_path / "b")[0] / "attention-probe"
    for page in ("index.html", "index.json"):
        assert (first / page).read_bytes() == (second / page).read_bytes()
    assert json.loads((first / "index.json").read_text())["versions"] == ["1.0", "1.1", "1.10"]


def test_each_local_label_has_a_page_of_its_own(tmp_path: Path) -> None:
    wheels = [make_wheel(tmp_path / "dist", version) for version in ("1.0", "1.0+torch2.6", "1.0+torch2.7")]
    roots = write_index(wheels, tmp_path / "index")
    assert [root.name for root in roots] == ["stable", "torch2.6", "torch2.7"]
    for root in roots:
        assert len(list((root / "attention-probe").glob("*.whl"))) == 1


def test_two_wheels_for_one_environment_on_one_page_are_refused(tmp_path: Path) -> None:
    first = make_wheel(tmp_path / "dist")
    second = make_wheel(tmp_path / "dist", tag="py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64")
    with pytest.raises(IndexPageError, match=r"are both 1\.0 for py3-none-manylinux_2_17_x86_64"):
        write_index([first, second], tmp_path / "index")
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("name", ["attention_probe-1.0.whl", "attention_probe-1.0-py3-none-any.zip", "readme.txt"])
def test_what_is_no_distribution_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(IndexPageError, match="is no distribution"):
        read_distribution(tmp_path / name)


def test_a_wheel_whose_metadata_disagrees_with_its_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IndexPageError, match=r"attention-probe 1\.0 by its file name and attention-probe 1\.0\+cu12"):
        read_distribution(make_wheel(tmp_path, inside="1.0+cu12"))


def test_a_wheel_that_is_no_zip_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / f"attention_probe-1.0-{PLATFORM}.whl"
    path.write_text("<html>not found</html>")
    assert main(["write", str(path), "--output", str(tmp_path / "index")]) == IndexPageError.exit_code
    assert "is not a zip file" in capsys.readouterr().err


def test_the_server_answers_with_what_the_client_prefers(tmp_path: Path) -> None:
    write_index([make_wheel(tmp_path / "dist")], tmp_path / "index")
    with serving(tmp_path / "index/stable") as url:
        for path in ("", "attention-probe/"):
            kind, body = get(url + path, f"{JSON_TYPE}, text/html;q=0.1")
            assert kind == JSON_TYPE
            assert json.loads(body)["meta"]["api-version"] == "1.1"
            kind, body = get(url + path, f"{HTML_TYPE}, text/html;q=0.1")
            assert kind == HTML_TYPE
            assert body.startswith(b"<!DOCTYPE html>")
            assert get(url + path, "*/*")[0] == "text/html"


@pytest.mark.parametrize("accept", ["json", "html"])
def test_pip_downloads_and_checks_the_hash(tmp_path: Path, accept: str) -> None:
    wheel = make_wheel(tmp_path / "dist")
    (root,) = write_index([wheel], tmp_path / "index")
    with serving(tmp_path / "index") as url:
        folder = url if accept == "json" else f"{(tmp_path / 'index').as_uri()}/"
        command = [sys.executable, "-m", "pip", "download", "attention-probe", "--isolated", "--no-cache-dir"]
        command += ["--dest", str(tmp_path / "got"), "--index-url", f"{folder}stable/", "--only-binary=:all:"]
        subprocess.run(command, check=True, timeout=60)
        assert (tmp_path / "got" / wheel.name).read_bytes() == wheel.read_bytes()

        # Field case 43: one flipped byte is refused and leaves nothing behind.
        served = root / "attention-probe" / wheel.name
        content = bytearray(served.read_bytes())
        content[len(content) // 3] ^= 1
        served.write_bytes(content)
        command[command.index("--dest") + 1] = str(tmp_path / "flipped")
        result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60)
        assert result.returncode != 0
        assert "HASH" in result.stderr.upper()
        assert not list((tmp_path / "flipped").glob("*.whl"))
