"""A static package index: HTML (PEP 503) and JSON (PEP 691, 700) pages with sha256 and core metadata (PEP 658).

    python -m buildtools.index write dist/*.whl dist/*.tar.gz --output dist/index
    python -m buildtools.index serve dist/index

writes `dist/index/<kind>/<project>/` for each kind of wheel, where the kind is the wheel's local version label, or
`stable` for a wheel without one. Each `dist/index/<kind>/` is an index of its own, to be given to `--index-url`.
There is one page per kind because pip picks between two local labels of one version by the order of the labels and
not by what fits the environment; a page on which that could happen is refused. `dist/index/wheels.json` lists the
wheels of the newest version for `python -m flash_attn wheels`, and `dist/index/index.html` is the page for people.

The files are static and the pages the same bytes for the same wheels: any file server will do, and gives the HTML.
`serve` also answers with JSON to a client that prefers it, as pip does.
"""

from __future__ import annotations

import argparse
import contextlib
import email.parser
import email.policy
import hashlib
import html
import http.server
import json
import shutil
import sys
import threading
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from .errors import BuildError, IndexPageError, ManifestError
from .manifest import MANIFEST_NAME, Manifest, read_wheel
from .matrix import load_matrix
from .page import page_text

_MATRIX = Path(__file__).resolve().parent.parent / "matrix.toml"  # tells the page which wheels are not there
STABLE = "stable"
JSON_TYPE = "application/vnd.pypi.simple.v1+json"
HTML_TYPE = "application/vnd.pypi.simple.v1+html"


@dataclass(frozen=True)
class Distribution:
    """One file of the index, and what its pages say about it."""

    path: Path
    name: NormalizedName
    version: Version
    sha256: str
    size: int
    requires_python: str | None
    tags: frozenset[str]  # "py3-none-manylinux_2_28_x86_64"; empty for a source distribution
    metadata: bytes | None  # the wheel's METADATA file

    @property
    def kind(self) -> str:
        return self.version.local or STABLE

    @property
    def metadata_sha256(self) -> str | None:
        return None if self.metadata is None else hashlib.sha256(self.metadata).hexdigest()


def read_distribution(path: Path) -> Distribution:
    """Reads a wheel or an sdist; a wheel whose METADATA does not agree with its file name is refused."""
    metadata = requires_python = None
    tags: frozenset[str] = frozenset()
    try:
        if path.suffix == ".whl":
            name, version, _, tag_set = parse_wheel_filename(path.name)
            tags = frozenset(str(tag) for tag in tag_set)
            metadata = _wheel_metadata(path)
            headers = email.parser.BytesParser(policy=email.policy.compat32).parsebytes(metadata, headersonly=True)
            found = f"{canonicalize_name(headers['Name'] or '')} {headers['Version']}"
            if found != f"{name} {version}":
                raise IndexPageError(
                    f"{path.name} is {name} {version} by its file name and {found} by its METADATA",
                    why="pip trusts both, and fails or reinstalls for ever where they differ",
                    fix="build the wheel again instead of renaming it",
                )
            requires_python = headers["Requires-Python"]
        else:
            name, version = parse_sdist_filename(path.name)
    except (InvalidWheelFilename, InvalidSdistFilename) as error:
        raise IndexPageError(
            f"{path.name} is no distribution: {error}", fix="give the index wheels and source distributions only"
        ) from error
    content = path.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    return Distribution(path, name, version, digest, len(content), requires_python, tags, metadata)


def _wheel_metadata(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as wheel:
            members = [
                name for name in wheel.namelist() if name.count("/") == 1 and name.endswith(".dist-info/METADATA")
            ]
            if len(members) == 1:
                return wheel.read(members[0])
            problem = f"holds {len(members)} METADATA files"
    except zipfile.BadZipFile as error:
        problem = f"is not a zip file ({error})"
    raise IndexPageError(f"{path.name} {problem}", why="a wheel holds exactly one", fix="build the wheel again")


def _check_page(kind: str, distributions: Iterable[Distribution]) -> None:
    """No two wheels of a page may compete for one environment: pip would choose by label order."""
    taken: dict[tuple[str, str], Distribution] = {}
    for distribution in distributions:
        for tag in sorted(distribution.tags):
            other = taken.setdefault((distribution.version.public, tag), distribution)
            if other is not distribution:
                raise IndexPageError(
                    f"{other.path.name} and {distribution.path.name} are both {distribution.version.public} for {tag}",
                    why=f'on one page ("{kind}") pip would choose between them by label, not by environment',
                    fix="give each kind of wheel a local version label (FLASH_ATTN_LOCAL_VERSION) of its own",
                )


def write_index(files: Iterable[Path], output: Path, *, url: str = "") -> list[Path]:
    """Writes the indexes of `files` under `output`, replacing what was there; returns the folder of each kind.

    `url` is where `output` will be, for the commands of the page for people.
    """
    pages: dict[str, dict[NormalizedName, list[Distribution]]] = defaultdict(lambda: defaultdict(list))
    for distribution in map(read_distribution, files):
        pages[distribution.kind][distribution.name].append(distribution)
    if not pages:
        raise IndexPageError("there is nothing to put into the index", fix="name at least one wheel or sdist")
    for kind, projects in pages.items():
        for distributions in projects.values():
            distributions.sort(key=lambda d: (d.version, d.path.name))
            _check_page(kind, distributions)
    shutil.rmtree(output, ignore_errors=True)
    for kind, projects in sorted(pages.items()):
        _write_kind(output / kind, projects)
    distributions = [item for projects in pages.values() for found in projects.values() for item in found]
    manifest = _write_manifest(output, distributions)
    page = page_text(distributions, manifest, load_matrix(_MATRIX), url=url)
    (output / "index.html").write_text(page, encoding="utf-8")
    return [output / kind for kind in sorted(pages)]


def _write_manifest(output: Path, distributions: Iterable[Distribution]) -> Manifest | None:
    """The list of published wheels, by which one for another machine is chosen; those without kernels are not on it."""
    wheels = []
    for distribution in distributions:
        if distribution.metadata is not None:
            with contextlib.suppress(ManifestError):
                wheels.append(read_wheel(distribution.path))
    if not wheels:
        return None
    newest = max((wheel.version.partition("+")[0] for wheel in wheels), key=Version)
    manifest = Manifest(newest, tuple(wheel for wheel in wheels if wheel.version.partition("+")[0] == newest))
    (output / MANIFEST_NAME).write_text(manifest.text(), encoding="utf-8")
    return manifest


def _write_kind(root: Path, projects: dict[NormalizedName, list[Distribution]]) -> None:
    root.mkdir(parents=True)
    names = sorted(projects)
    _write_page(root, "Simple index", [f'<a href="{name}/">{name}</a>' for name in names])
    _write_json(root, {"meta": {"api-version": "1.1"}, "projects": [{"name": name} for name in names]})
    for name in names:
        folder = root / name
        folder.mkdir()
        for distribution in projects[name]:
            shutil.copyfile(distribution.path, folder / distribution.path.name)
            if distribution.metadata is not None:
                (folder / f"{distribution.path.name}.metadata").write_bytes(distribution.metadata)
        _write_page(folder, f"Links for {name}", [_anchor(distribution) for distribution in projects[name]])
        _write_json(folder, _project_json(name, projects[name]))


def _anchor(distribution: Distribution) -> str:
    attributes = {"href": f"{distribution.path.name}#sha256={distribution.sha256}"}
    if distribution.requires_python:
        attributes["data-requires-python"] = distribution.requires_python
    if digest := distribution.metadata_sha256:
        # PEP 714: the first name is the right one, the second is what clients before it read.
        attributes["data-core-metadata"] = attributes["data-dist-info-metadata"] = f"sha256={digest}"
    rendered = " ".join(f'{key}="{html.escape(value)}"' for key, value in attributes.items())
    return f"<a {rendered}>{html.escape(distribution.path.name)}</a>"


def _project_json(name: str, distributions: list[Distribution]) -> dict[str, Any]:
    files = []
    for distribution in distributions:
        file: dict[str, Any] = {
            "filename": distribution.path.name,
            "url": distribution.path.name,
            "hashes": {"sha256": distribution.sha256},
            "size": distribution.size,
        }
        if distribution.requires_python:
            file["requires-python"] = distribution.requires_python
        if digest := distribution.metadata_sha256:
            file["core-metadata"] = {"sha256": digest}
        files.append(file)
    versions = [str(version) for version in sorted({distribution.version for distribution in distributions})]
    return {"meta": {"api-version": "1.1"}, "name": name, "versions": versions, "files": files}


def _write_page(folder: Path, title: str, anchors: list[str]) -> None:
    lines = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        f'<head><meta charset="utf-8"><meta name="pypi:repository-version" content="1.1"><title>{title}</title></head>',
        "<body>",
        f"<h1>{title}</h1>",
        *(f"{anchor}<br>" for anchor in anchors),
        "</body>",
        "</html>",
    ]
    (folder / "index.html").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _write_json(folder: Path, content: dict[str, Any]) -> None:
    (folder / "index.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Static files; a folder is answered with its JSON page where the client prefers that."""

    protocol_version = "HTTP/1.1"
    _page_type: str | None = None

    def send_head(self) -> Any:
        accepted = self.headers.get("Accept", "")
        folder = self.path.split("?")[0]
        place = Path(self.translate_path(folder))
        if folder.endswith("/") and (place / "index.html").is_file():
            wants_json = JSON_TYPE in accepted and (place / "index.json").is_file()  # the page for people has none
            self.path = folder + ("index.json" if wants_json else "index.html")
            self._page_type = JSON_TYPE if wants_json else HTML_TYPE if HTML_TYPE in accepted else "text/html"
        return super().send_head()

    def guess_type(self, path: Any) -> str:
        return self._page_type or super().guess_type(path)

    def handle_one_request(self) -> None:
        self._page_type = None
        super().handle_one_request()


@contextlib.contextmanager
def serving(folder: Path, *, host: str = "127.0.0.1", port: int = 0, quiet: bool = True) -> Iterator[str]:
    """Serves `folder` from a thread while the context lasts, and gives its URL; port 0 takes a free one."""

    class Handler(_Handler):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, directory=str(folder), **keywords)

        def log_message(self, format: str, *arguments: Any) -> None:
            if not quiet:
                super().log_message(format, *arguments)

    with http.server.ThreadingHTTPServer((host, port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"http://{host}:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m buildtools.index", description="write or serve a package index")
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write the static index of wheels and sdists")
    write.add_argument("files", nargs="+", type=Path)
    write.add_argument("--output", type=Path, required=True)
    write.add_argument("--url", default="", help="where the folder will be, such as https://your.index/")
    serve = commands.add_parser("serve", help="serve a folder on loopback until interrupted")
    serve.add_argument("folder", type=Path)
    serve.add_argument("--port", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        if options.command == "write":
            for root in write_index(options.files, options.output, url=options.url):
                print(root)
        else:
            with serving(options.folder, port=options.port, quiet=False) as url, contextlib.suppress(KeyboardInterrupt):
                for root in sorted(path for path in options.folder.iterdir() if path.is_dir()):
                    print(f"pip install flash-attn --index-url {url}{root.name}/", flush=True)
                threading.Event().wait()
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
