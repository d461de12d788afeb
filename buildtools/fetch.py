"""Downloading one published wheel: the file whose sha256 the manifest has, or an error that says which fault it was.

A place is a folder or a URL: of a package index (with a page per project), of an index with a folder for each kind of
wheel, or of a folder with the files. Nothing is written under the wheel's name before it is whole and its hash is
right, and nothing is left where that does not happen.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import html.parser
import http.client
import os
import re
import shutil
import socket
import ssl
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from .choose import PublishedWheel
from .errors import (
    AccessDeniedError,
    AlteredFileError,
    ConnectionFailedError,
    DiskFullError,
    DownloadError,
    FileNotThereError,
    NotAWheelError,
    RedirectError,
    ServerError,
    SilentServerError,
    SlowServerError,
    TargetFolderError,
    TruncatedError,
)

PROJECT = "flash-attn"
_CHUNK = 1 << 16
_PAGE_LIMIT = 1 << 24
_ZIP = b"PK\x03\x04"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_Report = Callable[[str], object]


@dataclass(frozen=True)
class Limits:
    """How long to wait, and how often to try. The defaults are for people; tests have shorter ones.

    `silence_s`: for a connection, for an answer, and between two bytes. `slow_bytes` have to come in every `slow_s`.
    """

    silence_s: float = 20
    slow_s: float = 30
    slow_bytes: int = 300_000
    attempts: int = 3
    pause_s: float = 1


@dataclass(frozen=True)
class Place:
    """Where wheels are: `folder`, or `url` (without the name and password, which are in `authorization`)."""

    folder: Path | None = None
    url: str = ""
    authorization: str = field(default="", repr=False)

    def __str__(self) -> str:
        return str(self.folder) if self.folder else self.url

    @property
    def host(self) -> str:
        return host_of(self.url)


def host_of(url: str) -> str:
    """The host and port of an address, in one way of writing."""
    parts = urllib.parse.urlsplit(url)
    return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


def parse_places(text: str) -> list[Place]:
    """The places that FLASH_ATTN_WHEELS names: URLs and folders, separated by white space."""
    # The name of a folder that is there may hold spaces.
    words = [text] if Path(text).is_dir() else text.split()
    return [_place(word) for word in words]


def _place(text: str) -> Place:
    parts = urllib.parse.urlsplit(text)
    if parts.scheme == "file":
        return Place(folder=Path(urllib.request.url2pathname(parts.path)))
    if parts.scheme not in ("http", "https"):
        return Place(folder=Path(text).absolute())
    user, at, host = parts.netloc.rpartition("@")
    path = parts.path if parts.path.endswith("/") else parts.path + "/"
    url = urllib.parse.urlunsplit((parts.scheme, host, path, "", ""))
    token = base64.b64encode(urllib.parse.unquote(user).encode()).decode()
    return Place(url=url, authorization=f"Basic {token}" if at else "")


def fetch(
    wheel: PublishedWheel,
    places: Sequence[Place],
    folder: Path,
    *,
    limits: Limits = Limits(),
    report: _Report | None = None,
) -> Path:
    """Put `wheel` into `folder`, from the first of `places` that has it. A DownloadError says why it could not be.

    Only "not there" leads on to the next place: anything else is a fault that somebody has to know of.
    """
    report = report or (lambda line: None)
    path = folder / wheel.filename
    if _is(path, wheel):
        report(f"{path} is there already")
        return path
    _check_room(wheel, folder)
    missing = []
    for place in places:
        try:
            if place.folder:
                _copy(wheel, place.folder, path)
            else:
                _Client(wheel, place, {other.host for other in places if other.url}, limits, report).download(path)
        except FileNotThereError as error:
            missing.append(error.what)
            continue
        report(f"{path}: {wheel.size} bytes, sha256 {wheel.sha256} as published")
        return path
    raise FileNotThereError(
        "; ".join(missing) or f"{wheel.filename} has no place to be downloaded from",
        fix="see that FLASH_ATTN_WHEELS names the place of the wheels of this version",
    )


def read_text(place: Place, name: str, *, limits: Limits = Limits()) -> bytes:
    """The file `name` directly in `place`, such as its manifest; FileNotThereError if it has none."""
    if place.folder:
        try:
            return (place.folder / name).read_bytes()
        except OSError as error:
            raise FileNotThereError(f"{place.folder} has no readable {name}: {error.strerror}") from None
    client = _Client(None, place, {place.host}, limits, lambda line: None)
    return bytes(client.retried(lambda: client.page(place.url + name)))


# --- the target folder ---------------------------------------------------------------------------------------------


def _is(path: Path, wheel: PublishedWheel) -> bool:
    try:
        if path.stat().st_size != wheel.size:
            return False
        return hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256
    except OSError:
        return False


def _check_room(wheel: PublishedWheel, folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise _target_error(error, folder, wheel) from None
    if free < wheel.size:
        raise _no_room(folder, wheel, f"{free} bytes are free")


def _target_error(error: OSError, folder: Path, wheel: PublishedWheel) -> DownloadError:
    if error.errno in _FULL:
        return _no_room(folder, wheel, error.strerror or "")
    return TargetFolderError(
        f"{folder} cannot be written: {error.strerror or error}",
        why=f"{wheel.filename} is to be put there",
        fix="choose a folder that this user can write",
    )


def _no_room(folder: Path, wheel: PublishedWheel, found: str) -> DiskFullError:
    return DiskFullError(
        f"{folder} has no room for {wheel.filename}: it has {wheel.size} bytes, {found}",
        fix="make room, or set TMPDIR to a folder on another disk (pip builds wheels there)",
    )


class _Target:
    """A file that gets its name only when it is whole."""

    def __init__(self, path: Path, wheel: PublishedWheel) -> None:
        self.path, self.wheel = path, wheel
        self.digest, self.size = hashlib.sha256(), 0

    @contextmanager
    def opened(self) -> Iterator[_Target]:
        folder = self.path.parent
        self.temporary: Path | None = None
        try:
            self.file = self._open(folder)
        except OSError as error:
            raise _target_error(error, folder, self.wheel) from None
        try:
            yield self
        finally:
            os.close(self.file)
            if self.temporary is not None:
                self.temporary.unlink(missing_ok=True)

    def _open(self, folder: Path) -> int:
        # A file without a name is gone with its process, even if that is killed.
        if hasattr(os, "O_TMPFILE") and Path("/proc/self/fd").is_dir():
            try:
                return os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o666)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                    raise
        _remove_abandoned(folder)
        self.temporary = folder / f".{self.path.name}.{os.getpid()}.part"
        return os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def write(self, data: bytes) -> None:
        self.digest.update(data)
        self.size += len(data)
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self.file, view) :]
        except OSError as error:
            raise _target_error(error, self.path.parent, self.wheel) from None

    def publish(self, where: str) -> None:
        """Give the file its name, if it is the published one."""
        found = self.digest.hexdigest()
        if found != self.wheel.sha256 or self.size != self.wheel.size:
            raise _altered(self.wheel, where, f"sha256 {found}, {self.size} bytes")
        try:
            if self.temporary is None:
                self.temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.part")
                self.temporary.unlink(missing_ok=True)
                # With a folder of its own for the (absolute) source, or os.link would link the symbolic link itself.
                os.link(f"/proc/self/fd/{self.file}", self.temporary, src_dir_fd=self.file, follow_symlinks=True)
            os.replace(self.temporary, self.path)  # over the same wheel of another process, or a damaged one
            self.temporary = None
        except OSError as error:
            raise _target_error(error, self.path.parent, self.wheel) from None


def _remove_abandoned(folder: Path) -> None:
    """Parts of processes that were killed."""
    for part in folder.glob(".flash_attn-*.part"):
        number = part.name.split(".")[-2]
        if number.isdigit() and not Path("/proc", number).exists():
            part.unlink(missing_ok=True)


def _altered(wheel: PublishedWheel, where: str, found: str) -> AlteredFileError:
    return AlteredFileError(
        f"{where} is not the {wheel.filename} that was published: {found}",
        why=f"that one has sha256 {wheel.sha256}, {wheel.size} bytes; nothing of it is kept",
        fix="tell whoever runs that server, and take the wheel from another place (FLASH_ATTN_WHEELS)",
    )


# --- from a folder -------------------------------------------------------------------------------------------------


def find_in_folder(folder: Path, wheel: PublishedWheel) -> Path | None:
    """In the folder itself, or where the folder of a package index has it."""
    for inside in (Path(), Path(PROJECT), Path(wheel.kind, PROJECT)):
        if (folder / inside / wheel.filename).is_file():
            return folder / inside / wheel.filename
    return None


def _copy(wheel: PublishedWheel, folder: Path, path: Path) -> None:
    source = find_in_folder(folder, wheel)
    if source is None:
        there = sorted(item.name for item in folder.glob("**/flash_attn-*.whl")) if folder.is_dir() else []
        found = f"has {', '.join(there[:3])}{' ...' if len(there) > 3 else ''}" if there else "has no flash_attn wheel"
        found = found if folder.is_dir() else "is no folder"
        raise FileNotThereError(f"{folder} does not have {wheel.filename}: it {found}")
    try:
        file = source.open("rb")
    except OSError as error:
        raise AccessDeniedError(f"{source} cannot be read: {error.strerror}") from None
    with file, _Target(path, wheel).opened() as target:
        start = file.read(_CHUNK)
        _check_start(start, "", str(source), wheel)
        while start:
            target.write(start)
            start = file.read(_CHUNK)
        target.publish(str(source))


def _check_start(start: bytes, kind: str, where: str, wheel: PublishedWheel) -> None:
    if not start.startswith(_ZIP):
        shown = re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", start[:400].decode("utf-8", "replace"))).strip()
        raise NotAWheelError(
            f"{where} is no wheel{f', but {kind}' if kind else ''}: it begins with {shown[:80]!r}",
            why=f"{wheel.filename} was asked for; a login page or a proxy may have answered instead of the server",
            fix="open that address in a browser, or take the wheel from another place (FLASH_ATTN_WHEELS)",
        )


# --- over HTTP -----------------------------------------------------------------------------------------------------


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows to the hosts that the user named, and never from https to http."""

    def __init__(self, hosts: set[str]) -> None:
        self.hosts = hosts

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        check_host(newurl, req.full_url, self.hosts)
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is not None and host_of(newurl) != host_of(req.full_url):
            request.remove_header("Authorization")  # the password is for the first host alone
        return request


def check_host(url: str, source: str, hosts: set[str]) -> None:
    """RedirectError if `source` leads to a host that is none of `hosts`, or from https to http."""
    new, old = urllib.parse.urlsplit(url), urllib.parse.urlsplit(source)
    if host_of(url) not in hosts:
        raise RedirectError(
            f"{source} leads to another host: {new.scheme}://{new.netloc}",
            why="no connection is made to a host that was not named",
            fix=f'if that host is right, name it too: FLASH_ATTN_WHEELS="{old.scheme}://{old.netloc}/... '
            f'{new.scheme}://{new.netloc}/"',
        )
    if old.scheme == "https" and new.scheme != "https":
        raise RedirectError(
            f"{source} leads to {url}, which is not encrypted",
            fix="take the wheel from another place (FLASH_ATTN_WHEELS)",
        )


class _Links(html.parser.HTMLParser):
    """{file name: address} of a page of a package index."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.page, self.links = page, dict[str, str]()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        href = dict(attributes).get("href")
        if tag == "base" and href:
            self.page = urllib.parse.urljoin(self.page, href)
        if tag == "a" and href:
            url = urllib.parse.urldefrag(urllib.parse.urljoin(self.page, href)).url
            self.links[urllib.parse.unquote(urllib.parse.urlsplit(url).path.rpartition("/")[2])] = url


class _Client:
    def __init__(
        self, wheel: PublishedWheel | None, place: Place, hosts: set[str], limits: Limits, report: _Report
    ) -> None:
        self._wheel, self.place, self.hosts, self.limits, self.report = wheel, place, hosts, limits, report
        context = ssl.create_default_context()
        for name in ("PIP_CERT", "REQUESTS_CA_BUNDLE"):  # certificates that the user gave to pip
            if os.path.isfile(os.environ.get(name, "")):
                context.load_verify_locations(os.environ[name])
        https = urllib.request.HTTPSHandler(context=context)
        self.opener = urllib.request.build_opener(https, _Redirects(hosts))

    @property
    def wheel(self) -> PublishedWheel:
        assert self._wheel is not None
        return self._wheel

    def download(self, path: Path) -> None:
        url = self.retried(self.find)
        self.report(f"downloading {self.wheel.filename} ({self.wheel.size / 1e6:.1f} MB) from {url}")
        self.retried(lambda: self.store(url, path))

    def retried(self, action: Callable[[], Any]) -> Any:
        """What `action` returns, tried again after faults that may pass."""
        for attempt in range(1, self.limits.attempts + 1):
            try:
                return action()
            except DownloadError as error:
                if not error.transient or attempt == self.limits.attempts:
                    tries = f" ({attempt} attempts)" if attempt > 1 else ""
                    raise type(error)(error.what + tries, why=error.why, fix=error.fix) from None
                self.report(f"{error.what}; attempt {attempt + 1} of {self.limits.attempts} follows")
                time.sleep(self.limits.pause_s * attempt)
        raise AssertionError

    def find(self) -> str:
        """The wheel's address: what a page of the index links to, or else the file in the folder itself."""
        for inside in (f"{PROJECT}/", f"{self.wheel.kind}/{PROJECT}/"):
            page = urllib.parse.urljoin(self.place.url, inside)
            try:
                text = self.page(page)
            except (FileNotThereError, AccessDeniedError):  # some stores deny what they do not have
                continue
            links = _Links(page)
            links.feed(text.decode("utf-8", "replace"))
            if self.wheel.filename in links.links:
                check_host(links.links[self.wheel.filename], page, self.hosts)
                return links.links[self.wheel.filename]
        return urllib.parse.urljoin(self.place.url, urllib.parse.quote(self.wheel.filename))

    def page(self, url: str) -> bytes:
        with self.answer(url, "text/html, */*;q=0.1") as answer:
            content = bytearray()
            for chunk in self.chunks(answer, url):
                content += chunk
                if len(content) > _PAGE_LIMIT:
                    raise NotAWheelError(f"{url} is no page of a package index: it is larger than {_PAGE_LIMIT} bytes")
            return bytes(content)

    def store(self, url: str, path: Path) -> None:
        wheel = self.wheel
        with self.answer(url, "*/*") as answer, _Target(path, wheel).opened() as target:
            shown = _Progress(wheel.size, self.report)
            start: bytes | None = b""
            for chunk in self.chunks(answer, url):
                if start is not None:
                    start += chunk
                    if len(start) < len(_ZIP):
                        continue
                    _check_start(start, answer.headers.get_content_type(), url, wheel)
                    chunk, start = start, None
                target.write(chunk)
                if target.size > wheel.size:
                    raise _altered(wheel, url, f"more than {wheel.size} bytes")
                shown.at(target.size)
            announced = answer.headers.get("Content-Length", "")
            expected = int(announced) if announced.isdigit() else wheel.size
            arrived = target.size + len(start or b"")
            if arrived < expected:
                raise TruncatedError(
                    f"{url} ended after {arrived} of {expected} bytes",
                    why="the server or a proxy cut it short; nothing of it is kept",
                )
            if start is not None:  # a whole file of less than the four bytes
                _check_start(start, answer.headers.get_content_type(), url, wheel)
            target.publish(url)

    @contextmanager
    def answer(self, url: str, accept: str) -> Iterator[Any]:
        headers = {
            "Accept": accept,
            "Accept-Encoding": "identity",
            "User-Agent": "flash-attn",
            "Cache-Control": "no-cache",
        }
        if self.place.authorization and host_of(url) == self.place.host:
            headers["Authorization"] = self.place.authorization
        request = urllib.request.Request(url, headers=headers)
        answer = self._within_time(lambda: self.opener.open(request, timeout=self.limits.silence_s), url)
        with answer:
            yield answer

    def chunks(self, answer: Any, url: str) -> Iterator[bytes]:
        """The body as it comes; an error where it stops coming, or comes too slowly."""
        since, arrived = time.monotonic(), 0
        while True:
            try:
                chunk: bytes = answer.read1(_CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise self._fault(error, url) from None
            if not chunk:
                return
            yield chunk
            arrived += len(chunk)
            elapsed = time.monotonic() - since
            if elapsed >= self.limits.slow_s:
                if arrived < self.limits.slow_bytes:
                    raise SlowServerError(
                        f"{url} sends {arrived / elapsed:.0f} bytes a second",
                        why=f"at less than {self.limits.slow_bytes / self.limits.slow_s:.0f} it would take hours",
                        fix="try again later, or take the wheel from another place (FLASH_ATTN_WHEELS)",
                    )
                since, arrived = time.monotonic(), 0

    def _within_time(self, action: Callable[[], Any], url: str) -> Any:
        """`action` in a thread: a name server or a header that comes byte by byte knows no time-out of a socket."""
        result: list[Any] = []

        def run() -> None:
            try:
                result.append(action())
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(self.limits.silence_s * 1.2)
        if not result:
            raise self._fault(TimeoutError(), url)
        if isinstance(result[0], BaseException):
            raise self._fault(result[0], url) from None
        return result[0]

    def _fault(self, error: BaseException, url: str) -> BaseException:
        """`error` as the kind of fault that it is."""
        if isinstance(error, urllib.error.HTTPError):
            error.close()
            return _status_fault(error.code, error.reason, url)
        if isinstance(error, urllib.error.URLError) and isinstance(error.reason, BaseException):
            error = error.reason
        if isinstance(error, DownloadError) or not isinstance(error, (OSError, http.client.HTTPException)):
            return error
        if isinstance(error, TimeoutError):
            return SilentServerError(
                f"{url}: nothing came for {self.limits.silence_s:g} s",
                why="the server, a proxy or a firewall accepts connections and does not answer",
                fix="see that the address can be reached, or take the wheel from another place (FLASH_ATTN_WHEELS)",
            )
        if isinstance(error, http.client.IncompleteRead):
            return TruncatedError(f"{url} ended after {len(error.partial)} bytes of a part", why="it was cut short")
        text = str(error) or type(error).__name__
        why = "there is no such host, or no network" if isinstance(error, socket.gaierror) else ""
        return ConnectionFailedError(
            f"{url}: {text}",
            why=why or "the connection failed or broke off",
            fix="see that the network and HTTPS_PROXY are right; without network, set FLASH_ATTN_WHEELS to a folder",
        )


def _status_fault(status: int, reason: str, url: str) -> DownloadError:
    what = f"{url} answers {status} {' '.join(reason.split())}"
    if status in (404, 410):
        return FileNotThereError(what)
    if status in (401, 403, 407):
        return AccessDeniedError(
            what,
            why="the server does not give it to you",
            fix="see that FLASH_ATTN_WHEELS is right: https://USER:PASSWORD@...",
        )
    fix = "try again later, or take the wheel from another place (FLASH_ATTN_WHEELS)"
    if status in (408, 429) or status >= 500:
        return ServerError(what, fix=fix)
    if 300 <= status < 400:
        return RedirectError(what, fix=fix)
    return NotAWheelError(what, why="that is not how a file is sent", fix=fix)


class _Progress:
    """A bar where a person is looking, and a line every few seconds elsewhere."""

    def __init__(self, total: int, report: _Report, stream: IO[str] | None = None, every_s: float = 5) -> None:
        self.total, self.report, self.stream, self.every_s = total, report, stream or sys.stderr, every_s
        self.started = self.shown = time.monotonic()

    def at(self, done: int) -> None:
        now = time.monotonic()
        bar = self.stream.isatty()
        if now - self.shown < (0.1 if bar else self.every_s) and not (bar and done >= self.total):
            return
        self.shown = now
        rate = done / max(now - self.started, 1e-6)
        left = (self.total - done) / max(rate, 1)
        text = f"{done / 1e6:.1f} of {self.total / 1e6:.1f} MB, {rate / 1e6:.2f} MB/s, {left:.0f} s left"
        if not bar:
            self.report(text)
            return
        filled = 30 * done // self.total
        self.stream.write(f"\r[{'#' * filled}{' ' * (30 - filled)}] {text}   {chr(10) if done >= self.total else ''}")
        self.stream.flush()
