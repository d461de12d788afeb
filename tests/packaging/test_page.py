"""The page for people at the root of an index: all of it is there without scripts, and it loads nothing."""

from __future__ import annotations

import base64
import hashlib
import html.parser
import itertools
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging_support import clean_environ, make_wheel
from page_support import MATRIX, VERSION, make_row_index, make_row_wheel
from test_index import get

from buildtools.choose import FIRST_DRIVERS, Facts, choose
from buildtools.index import HTML_TYPE, JSON_TYPE, main, serving, write_index
from buildtools.manifest import read_manifest
from buildtools.page import Markup, element

VOID = {"br", "link", "meta"}
PLATFORM = "manylinux_2_28_x86_64"


class Page(html.parser.HTMLParser):
    """A page's elements as (tag, attributes, text); ValueError where they do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[tuple[str, dict[str, str], list[str]]] = []
        self.elements: list[tuple[str, dict[str, str], list[str]]] = []
        self.feed(text)
        self.close()
        if self.open:
            raise ValueError(f"not closed: {[item[0] for item in self.open]}")

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        if len(set(names)) != len(names):
            raise ValueError(f"{tag} has an attribute twice: {names}")
        item = (tag, {name: value or "" for name, value in attrs}, list[str]())
        self.elements.append(item)
        if tag not in VOID:
            self.open.append(item)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, []))

    def handle_endtag(self, tag: str) -> None:
        found = self.open.pop()[0] if self.open else None
        if found != tag:
            raise ValueError(f"</{tag}> closes <{found}>")

    def handle_data(self, data: str) -> None:
        for _, _, text in self.open:
            text.append(data)

    def all(self, tag: str, **attributes: str) -> list[tuple[dict[str, str], str]]:
        return [
            (found, "".join(text)) for name, found, text in self.elements
            if name == tag and all(found.get(key.rstrip("_")) == value for key, value in attributes.items())
        ]  # fmt: skip


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path, Page]:
    """The files, the index and the page of all x86-64 rows of the matrix."""
    folder = tmp_path_factory.mktemp("page")
    files = make_row_index(folder)
    return files, folder / "index", Page((folder / "index/index.html").read_text())


def test_every_wheel_is_there_without_scripts(rows: tuple[list[Path], Path, Page]) -> None:
    files, index, page = rows
    table = {attributes["id"]: text for attributes, text in page.all("tr") if "id" in attributes}
    links = {attributes["href"] for attributes, _ in page.all("a")}
    assert len(table) == len(files) - 1
    for file in files:
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        (link,) = [link for link in links if link.endswith(f"/{file.name}#sha256={digest}")]
        assert (index / link.partition("#")[0]).read_bytes() == file.read_bytes()
        if file.suffix == ".whl":
            (row,) = [text for text in table.values() if digest in text]
            kind = file.name.split("-")[1].partition("+")[2] or "stable"
            assert f"pip install flash-attn=={VERSION} --index-url INDEX/{kind}/" in row
            kernel_set = MATRIX.kernel_sets.get(kind, MATRIX.default_kernel_set)
            major = int(kernel_set.version.partition(".")[0])
            made = (f"nvrtc {kernel_set.version}", f"driver ≥ {FIRST_DRIVERS[major]}")
            for held in ("sm_80", "sm_90", "PTX 80", "d64", "d128", "bf16 and fp16", "8 kernels", *made):
                assert held in row
            assert ("sm_110" in row) == (kind == "cu13")
            assert "g++ 12.2.0" in row
            assert f"{file.stat().st_size / 1e6:.2f} MB" in row
    assert list(table) == [f"wheel-{number}" for number in range(len(table))]
    assert "torch ≥ 2.10" in table["wheel-0"]
    assert "sm_110" in table["wheel-1"]
    assert "torch 2.9" in table["wheel-2"]


def test_it_loads_nothing(rows: tuple[list[Path], Path, Page]) -> None:
    _, index, page = rows
    text = (index / "index.html").read_text()
    allowed = {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert set(re.findall(r"https?://[^\s\"'<>]+", text)) <= allowed
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|\bimport\(", text)
    for tag, attributes, _ in page.elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        if tag == "link":
            assert attributes["href"].startswith("data:")
    ((policy, _),) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"].startswith("default-src 'none'; ")
    assert "unsafe" not in policy["content"]


def test_the_script_and_the_style_are_those_that_the_policy_names(rows: tuple[list[Path], Path, Page]) -> None:
    page = rows[2]
    ((policy, _),) = page.all("meta", **{"http-equiv": "Content-Security-Policy"})
    code = [text for attributes, text in page.all("script") if "type" not in attributes]
    for text in (*code, page.all("style")[0][1]):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy["content"]


def test_it_can_be_used_with_a_screen_reader(rows: tuple[list[Path], Path, Page]) -> None:
    page = rows[2]
    assert page.all("html")[0][0]["lang"] == "en"
    labelled = {attributes["for"] for attributes, text in page.all("label") if text}
    assert {attributes["id"] for attributes, _ in page.all("select")} == labelled
    assert len(labelled) == 4
    for attributes, text in page.all("th"):
        assert attributes["scope"] in ("row", "col")
        assert text
    identifiers = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(set(identifiers)) == len(identifiers)
    for attributes, _ in page.all("a"):
        assert not attributes["href"].startswith("#") or attributes["href"][1:] in identifiers
    assert page.all("div", id="answer")[0][0]["aria-live"] == "polite"
    assert "hidden" in page.all("section", id="chooser")[0][0]  # until the script can fill it


def answers(page: Page) -> Iterator[tuple[tuple[str, ...], Any, list[str]]]:
    """For each combination: the values that are picked, the answer, and the page's texts."""
    data = json.loads(page.all("script", id="answers")[0][1])
    options: list[list[str]] = []
    for tag, attributes, _ in page.elements:
        if tag == "select":
            options.append([])
        elif tag == "option":
            options[-1].append(attributes["value"])
    combinations = list(itertools.product(*options))
    assert len(combinations) == len(data["choices"])
    for combination, number in zip(combinations, data["choices"], strict=True):
        yield combination, data["answers"][number], data["texts"]


def test_every_answer_is_what_choose_says(rows: tuple[list[Path], Path, Page]) -> None:
    _, index, page = rows
    wheels = read_manifest(index / "wheels.json").wheels
    row = {name: number for number, (_, name) in enumerate(page.all("a", class_="file")) if name.endswith(".whl")}
    checked = 0
    for (torch, python, system, gpu), answer, texts in answers(page):
        if system != "linux-x86_64" or not re.fullmatch(r"\d\.\d+", torch) or not re.fullmatch(r"\d\.\d+", python):
            continue
        number = int(gpu.replace(".", "")) if gpu != "none" else None
        facts = Facts(
            "linux", "x86_64", (3, int(python[2:])), ("glibc", 2, 28), f"{torch}.0", torch >= "2.7",
            gpus=(number,) if number else (),
        )  # fmt: skip
        decision = choose(facts, wheels)
        if decision.wheel:
            assert answer == row[decision.wheel.filename]
        else:
            assert texts[answer[0][0]] == decision.rejected[0].wheel.filename
            assert [texts[text] for text in answer[1]] == list(decision.rejected[0].reasons)
        checked += 1
    assert checked > 100


def find(page: Page, **wanted: str) -> tuple[Any, list[str], list[str], bool]:
    """The answer to a combination: the wheel's row or None, reasons, advice, whether it compiles there."""
    picked = {"torch": "2.10+", "python": "3.12", "system": "linux-x86_64", "gpu": "9.0", **wanted}
    for combination, answer, texts in answers(page):
        if combination == tuple(picked.values()):
            if isinstance(answer, int):
                return answer, [], [], False
            return None, [texts[n] for n in answer[1]], [texts[n] for n in answer[2]], bool(answer[3])
    raise KeyError(picked)


@pytest.mark.parametrize(
    ("wanted", "reason", "advice", "compiles"),
    [
        ({"system": "linux-aarch64"}, "it is for x86_64, this machine is aarch64", "the row stable-aarch64", True),
        ({"system": "windows"}, "it is for Linux, this is win32", "in WSL 2", False),
        ({"system": "macos"}, "it is for Linux, this is darwin", "no NVIDIA GPUs for macOS", False),
        ({"system": "linux-old"}, "found glibc 2.17", "another operating system: Linux x86-64", False),
        ({"system": "linux-musl"}, "found musl 1.2", "another operating system: Linux x86-64", False),
        ({"torch": "2.3-"}, "it is for torch 2.4 alone, found 2.3.0", "another PyTorch: 2.10 or newer", False),
        ({"torch": "3.0+"}, "torch 3 is newer", "another PyTorch: 2.10 or newer", False),
        ({"torch": "2.6-abi1"}, "_GLIBCXX_USE_CXX11_ABI=0, this torch has 1", "another PyTorch: 2.10 or newer", False),
        ({"python": "3.9-"}, "it needs Python 3.10 or newer, found 3.9", "another Python: 3.10", False),
        ({"gpu": "7.0"}, "it has no kernel for compute capability 7.0", "another GPU: 9.0", False),
        ({"torch": "2.6", "system": "linux-aarch64"}, "this machine is aarch64", "it compiles from source", False),
        ({"system": "windows", "gpu": "7.0"}, "this is win32", "no single change is enough", False),
    ],
)  # fmt: skip
def test_what_has_no_wheel_says_why_and_what_to_do(
    rows: tuple[list[Path], Path, Page], wanted: dict[str, str], reason: str, advice: str, compiles: bool
) -> None:
    """Field case 16."""
    wheel, reasons, advised, source = find(rows[2], **wanted)
    assert wheel is None
    assert any(reason in text for text in reasons), reasons
    assert any(advice in text for text in advised), advised
    assert source == compiles
    if len(wanted) == 1:  # said without scripts too
        assert any(reason in text for _, text in rows[2].all("td"))


@pytest.mark.parametrize(
    ("wanted", "row"),
    [({}, 0), ({"torch": "none"}, 0), ({"python": "3.15+"}, 0), ({"gpu": "none"}, 0), ({"gpu": "12.1"}, 0),
     ({"gpu": "11.0"}, 1), ({"torch": "2.9"}, 2), ({"torch": "2.9", "gpu": "11.0"}, 2), ({"torch": "2.6"}, 5)],
)  # fmt: skip
def test_what_has_a_wheel(rows: tuple[list[Path], Path, Page], wanted: dict[str, str], row: int) -> None:
    assert find(rows[2], **wanted)[0] == row


def test_a_published_row_is_no_longer_planned(tmp_path: Path) -> None:
    make_row_index(tmp_path, lambda row: row.host_library.abi == "stable", url="https://wheels.example/a")
    page = Page((tmp_path / "index/index.html").read_text())
    assert find(page, system="linux-aarch64")[0] is not None
    assert "--index-url https://wheels.example/a/stable/" in page.all("pre")[0][1]
    _, reasons, advised, _ = find(page, torch="2.9")
    assert reasons == ["it needs torch 2.10 or newer, found 2.9.0"]
    assert any("the row torch2.9-abi1" in text for text in advised)


def test_the_same_files_give_the_same_page_and_the_root_is_no_index(tmp_path: Path) -> None:
    files = make_row_index(tmp_path, lambda row: row.host_library.abi == "stable")
    first = (tmp_path / "index/index.html").read_bytes()
    write_index(reversed(files), tmp_path / "index")
    assert (tmp_path / "index/index.html").read_bytes() == first
    with serving(tmp_path / "index") as url:
        for accept in (JSON_TYPE, HTML_TYPE, "text/html"):
            assert get(url, accept)[1] == first
        assert json.loads(get(f"{url}stable/", JSON_TYPE)[1])["projects"] == [{"name": "flash-attn"}]
        assert get(f"{url}stable/", "text/html")[1] != first


def test_pip_never_chooses_between_the_labels_of_the_page(rows: tuple[list[Path], Path, Page], tmp_path: Path) -> None:
    """As --find-links, the page gives no wheel, and the folder beside it the one it has."""
    environ = clean_environ()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-index", "--dest", str(tmp_path)]
    command += ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "flash-attn", "--find-links"]
    with serving(rows[1]) as url:
        result = subprocess.run([*command, url], env=environ, capture_output=True, encoding="utf-8", timeout=60)
        assert "No matching distribution found" in result.stderr
        subprocess.run([*command, f"{url}torch2.6.cxx11abi0/flash-attn/"], env=environ, check=True, timeout=60)
    assert [path.name for path in tmp_path.iterdir()] == [
        f"flash_attn-{VERSION}+torch2.6.cxx11abi0-py3-none-{PLATFORM}.whl"
    ]


@pytest.mark.parametrize("torch", ["2.4", "2.9"])
def test_an_index_without_the_stable_wheel(tmp_path: Path, torch: str) -> None:
    make_row_index(tmp_path, lambda row: row.host_library.torch == f"=={torch}.*")
    page = Page((tmp_path / "index/index.html").read_text())
    assert find(page, torch=torch)[0] == 0
    wheel, reasons, advised, _ = find(page)
    assert wheel is None
    assert reasons == [f"it is for torch {torch} alone, found 2.10.0"]
    assert any("the row default " in text for text in advised), advised


def test_an_index_of_other_wheels_has_a_page_without_a_choice(tmp_path: Path, empty_wheel: Path) -> None:
    probe = make_wheel(tmp_path / "dist")
    assert main(["write", str(probe), str(empty_wheel), "--output", str(tmp_path / "index")]) == 0
    page = Page((tmp_path / "index/index.html").read_text())
    assert not page.all("select")
    assert not page.all("script")
    for wheel in (probe, empty_wheel):
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (text,) = [text for _, text in page.all("tr") if digest in text]
        assert "no kernels" in text


def test_what_wheels_say_is_escaped(tmp_path: Path) -> None:
    bad = "</script><img src=x onerror=alert(1)>&\"'"
    wheel = make_row_wheel(tmp_path / "dist", MATRIX.wheels["default"], keys=[f"fwd-sm80-bf16-d64-{bad}"], sha256=bad)
    write_index([wheel], tmp_path / "index", url=f"https://x/{bad}")
    page = Page((tmp_path / "index/index.html").read_text())
    assert not page.all("img")
    assert any(bad in text for _, text in page.all("pre"))
    assert element("p", "<b>", Markup("<i>a</i>"), title='"<') == '<p title="&quot;&lt;">&lt;b&gt;<i>a</i></p>'


def test_the_sdist_can_write_the_page(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {f"buildtools/page{rest}" for rest in (".py", ".css", ".js", "_choice.py")} <= names
