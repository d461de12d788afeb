"""The page for people at the root of a package index: pick torch, Python, system and GPU, get the command and wheel.

It says for people what the index's pages and wheels.json say: everything comes from the wheels' METADATA and
build_info.json and from matrix.toml, and which wheel is right, or why none is, from `choose`. It is one static file
that loads nothing else, and all of it can be read without scripts: the choice only picks from what is written there.

The root is the folder above the simple APIs (`<kind>/`), which no client of PEP 503 asks for a page.
"""

from __future__ import annotations

import base64
import email.parser
import hashlib
import html
import json
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .choose import FIRST_DRIVERS, PublishedWheel
from .kernels import DTYPES
from .manifest import Manifest
from .matrix import Matrix
from .page_choice import Choice, planned_wheels, questions

if TYPE_CHECKING:
    from .index import Distribution


class Markup(str):
    """HTML that is not escaped again."""


_HERE = Path(__file__).resolve().parent
_ICON = Markup(
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32" fill="currentColor" aria-hidden="true">'
    '<rect x="1" y="1" width="9" height="9" rx="2"/><rect x="1" y="12" width="9" height="9" rx="2"/>'
    '<rect x="12" y="12" width="9" height="9" rx="2"/><rect x="1" y="23" width="9" height="8" rx="2"/>'
    '<rect x="12" y="23" width="9" height="8" rx="2"/><rect x="23" y="23" width="8" height="8" rx="2"/></svg>'
)


def element(name: str, /, *children: str, **attributes: str) -> Markup:
    """An element; every child and attribute that is no Markup is escaped. `class_` is class, `data_x` data-x."""
    opening = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(value)}"' for key, value in attributes.items()
    )
    return Markup(f"<{name}{opening}>{_join(children)}</{name}>")


def _join(children: Iterable[str]) -> Markup:
    return Markup("".join(child if isinstance(child, Markup) else html.escape(child) for child in children))


# --- what there is ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """A wheel of the page. `info`: its build_info.json, or None; `requires`: its Requires-Dist on torch."""

    file: Distribution
    info: dict[str, Any] | None
    requires: str

    @property
    def url(self) -> str:
        """From the page."""
        return f"{self.file.kind}/{self.file.name}/{self.file.path.name}"

    @property
    def kernel_set(self) -> dict[str, Any]:
        return (self.info or {}).get("kernel_set") or {}

    @property
    def host(self) -> dict[str, Any]:
        return (self.info or {}).get("host") or {}

    @property
    def kind(self) -> str:
        """Of the host library: "stable" or "torch"."""
        return str(self.host.get("kind", ""))

    @property
    def order(self) -> tuple[Any, ...]:
        """Newest version first, in it the stable ABI, then the newest torch; the default kernel set before others."""
        torch = tuple(-int(number) for number in re.findall(r"\d+", self.requires))
        return (
            _Reversed(self.file.version.public),
            self.kind != "stable",
            torch,
            self.file.version.local or "",
            self.file.path.name,
        )


class _Reversed(str):
    def __lt__(self, other: str) -> bool:
        from packaging.version import Version

        return Version(self) > Version(other)


def read_entry(distribution: Distribution) -> Entry:
    info = None
    with zipfile.ZipFile(distribution.path) as wheel:
        if "flash_attn/build_info.json" in wheel.namelist():
            info = json.loads(wheel.read("flash_attn/build_info.json"))
    headers = email.parser.BytesParser().parsebytes(distribution.metadata or b"", headersonly=True)
    needs = [line for line in headers.get_all("Requires-Dist") or [] if re.match(r"torch\b", line)]
    return Entry(distribution, info, ", ".join(needs))


# --- the page --------------------------------------------------------------------------------------------------------


def page_text(
    distributions: Iterable[Distribution], manifest: Manifest | None, matrix: Matrix, *, url: str = ""
) -> str:
    """The page's HTML. `url`: where the index will be, if that is known; `manifest`: the wheels to choose from."""
    files = sorted(distributions, key=lambda file: file.path.name)
    entries = sorted((read_entry(file) for file in files if file.metadata is not None), key=lambda entry: entry.order)
    sdists = [file for file in files if file.metadata is None]
    published = {wheel.filename: wheel for wheel in manifest.wheels} if manifest else {}
    wheels = [published[entry.file.path.name] for entry in entries if entry.file.path.name in published]
    name, version = files[0].name, manifest.version if manifest else ""
    address = element("span", f"{url.rstrip('/')}/" if url else "INDEX/", class_="index-url")
    planned = planned_wheels(matrix, wheels)
    choice = Choice(questions([*wheels, *planned]), wheels, planned) if wheels else None
    numbers = {entry.file.path.name: str(number) for number, entry in enumerate(entries)}
    style, script = (_HERE / "page.css").read_text("utf-8"), (_HERE / "page.js").read_text("utf-8")
    body = [
        element("a", "Skip to the table of wheels", href="#wheels", class_="skip"),
        element("header", _ICON, element("div", element("h1", name, " ", element("small", version)), _lead(wheels))),
        element(
            "main",
            *_chooser(choice),
            *_wheel_table(entries, address, bool(url)),
            *_none_table(choice),
            *_source(sdists),
        ),
        element("footer", element("p", *_footer(manifest))),
    ]
    if choice:
        data = _script_data(choice, [numbers[wheel.filename] for wheel in wheels])
        body += [element("script", data, type="application/json", id="answers"), element("script", Markup(script))]
    sources = f"style-src {_digest(style)}; script-src {_digest(script)}; img-src data:"
    policy = html.escape(f"default-src 'none'; {sources}; base-uri 'none'; form-action 'none'")
    icon = "data:image/svg+xml;base64," + base64.b64encode(_ICON.replace("currentColor", "#128c7e").encode()).decode()
    head = [
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">',
        '<meta name="color-scheme" content="light dark">',
        element("title", f"{name} {version}: wheels" if version else f"{name}: wheels"),
        f'<link rel="icon" href="{icon}">',
        f"<style>{style}</style>",
    ]
    lines = ["<!DOCTYPE html>", '<html lang="en">', "<head>", *head, "</head>", "<body>", *body, "</body>", "</html>"]
    return "\n".join(lines) + "\n"


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


# PEP 592, to a client that is given this page as --find-links: it would choose between the labels by their order.
_NOT_AN_INDEX = "this page is for people: each folder beside it is a package index"

# What the script copies from a wheel's row into the answer: its name there, and where it is in the row.
_FACTS = (
    ("Wheel", ".file"), ("SHA-256", ".hash"), ("Size", ".size > span"), ("For", ".for > *"), ("Holds", ".holds > *"),
    ("Made by", ".made"),
)  # fmt: skip


def _script_data(choice: Choice, numbers: Sequence[str]) -> Markup:
    """All answers and all texts, each once, and for each choice the number of its answer."""
    texts: dict[str, int] = {}
    answers: dict[str, int] = {}
    choices = []
    for answer in choice.found.values():
        if "wheel" in answer:
            packed: Any = int(numbers[answer["wheel"]])  # its row of the table
        else:
            parts = ([answer["nearest"]], answer["reasons"], answer["advice"])
            packed = [[texts.setdefault(text, len(texts)) for text in part] for part in parts] + [int(answer["source"])]
        choices.append(answers.setdefault(json.dumps(packed), len(answers)))
    data = {"texts": list(texts), "answers": list(map(json.loads, answers)), "choices": choices, "facts": _FACTS}
    # Nothing in it can end the element that it is in.
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c").replace("&", "\\u0026"))


def _lead(wheels: Sequence[PublishedWheel]) -> Markup:
    if not wheels:
        return element("p", "The files of this package index.", class_="lead")
    text = "Exact attention for PyTorch on NVIDIA GPUs. Say what you have: here are the command and the wheel for it."
    return element("p", text, class_="lead")


def _chooser(choice: Choice | None) -> list[Markup]:
    if choice is None:
        return []
    fields = []
    for question in choice.asked:
        options = []
        for number, option in enumerate(question.options):
            more = {"data_before": option.before} if option.before else {}
            more |= {"selected": ""} if number == question.start else {}
            options.append(element("option", option.label, value=option.value, **more))
        label = element("label", question.label, for_=f"pick-{question.name}")
        select = element("select", *options, id=f"pick-{question.name}", name=question.name, autocomplete="off")
        fields.append(element("div", label, select))
    form = element("form", *fields, aria_label="What you have")
    answer = element("div", id="answer", class_="answer", role="region", aria_live="polite", aria_label="Your wheel")
    return [element("section", form, answer, id="chooser", class_="chooser", hidden="")]  # the script shows it


def _wheel_table(entries: Sequence[Entry], address: Markup, known: bool) -> list[Markup]:
    rows = [_wheel_row(number, entry, address) for number, entry in enumerate(entries)]
    where = [] if known else [element("p", "INDEX/ is the address of this page.", class_="note without-script")]
    caption = (
        "pip checks each file against its SHA-256. On your machine, python -m flash_attn wheels says which one fits."
    )
    heads = ("For", "Holds", "Made by", "Size", "File, SHA-256 and command")
    return [element("h2", "All wheels", id="wheels"), *where, _table("wheels", caption, heads, rows)]


def _table(name: str, caption: str, heads: Sequence[str], rows: Sequence[Markup]) -> Markup:
    head = element("tr", *(element("th", text, scope="col", role="columnheader") for text in heads), role="row")
    return element(
        "table", element("caption", caption), element("thead", head, role="rowgroup"),
        element("tbody", *rows, role="rowgroup"), class_=name, role="table",
    )  # fmt: skip


def _cell(label: str, *children: str, class_: str = "") -> Markup:
    return element("td", *children, role="cell", data_label=label, **({"class_": class_} if class_ else {}))


def _wheel_row(number: int, entry: Entry, address: Markup) -> Markup:
    file, kernels, host = entry.file, entry.kernel_set, entry.host
    abi = {"stable": "stable ABI", "torch": f"C++11 ABI {int(bool(host.get('cxx11_abi')))}"}.get(entry.kind, "")
    platforms = ", ".join(sorted({tag.split("-", 2)[2] for tag in file.tags}))
    python = f"Python {file.requires_python or 'any'}".replace(">=", "≥ ")
    major = re.match(r"nvrtc (\d+)", kernels.get("compiler", ""))
    first = FIRST_DRIVERS.get(int(major[1])) if major else None
    needs = " · ".join(filter(None, (abi, platforms, python, f"driver ≥ {first}" if first else "")))
    torch = entry.requires.replace(">=", " ≥ ").replace("==", " ").replace(".*", "") or f"{file.name} {file.version}"
    compilers = " and ".join(filter(None, (kernels.get("compiler"), host.get("compiler")))) or "not said"
    command = element("code", f"pip install {file.name}=={file.version.public} --index-url ", address, f"{file.kind}/")
    href = f"{entry.url}#sha256={file.sha256}"
    link = element("a", file.path.name, href=href, class_="file", data_yanked=_NOT_AN_INDEX)
    digest = element("span", file.sha256, class_="hash")
    cells = [
        element("th", element("span", torch), element("small", needs), class_="for", scope="row", role="rowheader"),
        _cell("Holds", *_holds(kernels), class_="holds"),
        _cell("Made by", element("span", compilers, class_="made")),
        _cell("Size", element("span", f"{file.size / 1e6:.2f} MB", title=f"{file.size} bytes"), class_="size"),
        _cell("File, SHA-256 and command", link, Markup("<br>"), digest, element("pre", command), class_="files"),
    ]
    return element("tr", *cells, id=f"wheel-{number}", role="row")


def _holds(kernels: dict[str, Any]) -> list[Markup]:
    """Lists of archs and head dims, and a line on the kernels."""
    if not kernels:
        return [element("small", "no kernels")]
    keys = kernels["keys"]
    dims = sorted({int(found[1]) for key in keys if (found := re.search(r"-d(\d+)(?=-|$)", key))})
    kinds = sorted({part for key in keys for part in key.split("-") if part in DTYPES})
    operations = sorted({key.partition("-")[0] for key in keys})
    archs = [f"PTX {arch.removeprefix('ptx')}" if arch.startswith("ptx") else f"sm_{arch}" for arch in kernels["archs"]]
    lists = [element("ul", *(element("li", text) for text in archs), class_="chips", aria_label="GPU architectures")]
    if dims:
        chips = (element("li", f"d{dim}") for dim in dims)
        lists.append(element("ul", *chips, class_="chips", aria_label="Head dims"))
    more = ", ".join(filter(None, (" and ".join(kinds), "/".join(operations), f"{len(keys)} kernels")))
    digest = element("span", f"SHA-256 {kernels['sha256'][:12]}…", title=f"of the kernel set: {kernels['sha256']}")
    return [*lists, element("small", f"{more}, ", digest)]


def _none_table(choice: Choice | None) -> list[Markup]:
    """What has no wheel, whatever else is picked, where the rest is as it is to begin with."""
    rows = []
    for question, option, answer in choice.single_misses() if choice else ():
        advice = [*answer["advice"], *(["it compiles from the sdist below, without nvcc"] if answer["source"] else [])]
        head = element("th", option.label, element("small", question.label), scope="row", role="rowheader")
        reasons = _cell("None, because", "; ".join(answer["reasons"]))
        rows.append(element("tr", head, reasons, _cell("What you can do", "; ".join(advice)), role="row"))
    if not rows:
        return []
    caption = "Each with the nearest wheel's reasons. Other combinations have the reasons of all their parts."
    heads = ("You have", "None, because", "What you can do")
    return [element("h2", "What there is no wheel for", id="none"), _table("none", caption, heads, rows)]


def _source(sdists: Sequence[Distribution]) -> list[Markup]:
    if not sdists:
        return []
    items = []
    for number, file in enumerate(reversed(sdists)):
        named = {"id": "source"} if number == 0 else {}
        url = f"{file.kind}/{file.name}/{file.path.name}#sha256={file.sha256}"
        link = element("a", file.path.name, href=url, class_="file", **named)
        digest = element("span", file.sha256, class_="hash")
        items.append(element("p", link, f" · {file.size / 1e6:.2f} MB", Markup("<br>"), digest))
    text = "Compiles in minutes with g++ alone: pip fetches the kernel compiler, and no nvcc, GPU or torch is used."
    return [element("h2", "Source", id="sources"), element("p", text), *items]


def _footer(manifest: Manifest | None) -> list[str]:
    listing = [element("a", "wheels.json", href="wheels.json"), " is this list for programs. "] if manifest else []
    return [*listing, "Each folder beside this page, such as stable/, is a package index for pip's --index-url."]
