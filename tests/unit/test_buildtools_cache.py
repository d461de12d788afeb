"""The cache of kernels compiled at first use: whole entries or none, whoever is killed, and whatever the folder is."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from buildtools_support import ROOT

from buildtools import cache as cache_module
from buildtools.cache import Cache, cache_folder
from buildtools.errors import ArchiveError

NAME = "fwd.90.0123.nvrtc-12.9.86"
DATA = b"what was compiled" * 100


def accept(data: bytes) -> None:
    if data != DATA:
        raise ArchiveError("other contents")


def never() -> bytes:
    raise AssertionError("made again")


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    """A Python that runs `code` after the definitions of this file's first lines."""
    head = f"""
import fcntl, os, sys, time
sys.path.insert(0, {str(ROOT)!r})
from buildtools import cache as cache_module
from buildtools.cache import Cache
NAME, DATA = {NAME!r}, {DATA!r}
cache = Cache({str(folder)!r} and __import__("pathlib").Path({str(folder)!r}))
"""
    return subprocess.Popen([sys.executable, "-c", head + code], stdout=subprocess.PIPE, text=True)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"FLASH_ATTN_CACHE_DIR": "/here", "XDG_CACHE_HOME": "/x", "HOME": "/home/a"}, "/here"),
        ({"XDG_CACHE_HOME": "/x", "HOME": "/home/a"}, "/x/flash_attn"),
        ({"XDG_CACHE_HOME": "relative", "HOME": "/home/a"}, "/home/a/.cache/flash_attn"),
        ({"HOME": "/home/a"}, "/home/a/.cache/flash_attn"),
        ({"HOME": ""}, None),
        ({}, None),
    ],
)
def test_the_folder(environ: dict[str, str], folder: str | None) -> None:
    assert cache_folder(environ) == (None if folder is None else Path(folder))


def test_made_once_and_kept(tmp_path: Path) -> None:
    first = Cache(tmp_path / "new" / "folder")
    assert first.get(NAME, accept, lambda: DATA).origin == "compiled"
    assert first.get(NAME, accept, never).origin == "memory"
    second = Cache(tmp_path / "new" / "folder")
    entry = second.get(NAME, accept, never)
    assert (entry.data, entry.origin, entry.uncached) == (DATA, "cache", "")
    assert second.names() == [NAME]
    assert os.listdir(second.folder) == [f"{NAME}.kernel"]
    assert second.size_bytes() == len(DATA) + 65
    assert second.problem() == ""


def test_a_failure_is_not_kept(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    with pytest.raises(AssertionError):
        cache.get(NAME, accept, never)
    assert list(tmp_path.iterdir()) == []
    assert cache.get(NAME, accept, lambda: DATA).origin == "compiled"


DAMAGE = {
    "empty": lambda whole: b"",
    "only the hash": lambda whole: whole[:65],
    "cut in the hash": lambda whole: whole[:30],
    "cut": lambda whole: whole[:-1],
    "longer": lambda whole: whole + b"x",
    "a bit of the hash": lambda whole: bytes([whole[0] ^ 1]) + whole[1:],
    "a bit of the data": lambda whole: whole[:500] + bytes([whole[500] ^ 1]) + whole[501:],
    "text": lambda whole: b"<html>" * 100,
    "whole, but of another kind": lambda whole: hashlib.sha256(b"other").hexdigest().encode() + b"\nother",
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_entry_is_made_again(tmp_path: Path, damage: str) -> None:
    Cache(tmp_path).get(NAME, accept, lambda: DATA)
    path = tmp_path / f"{NAME}.kernel"
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    assert Cache(tmp_path).get(NAME, accept, lambda: DATA).origin == "compiled"
    assert Cache(tmp_path).get(NAME, accept, never).data == DATA


def test_a_folder_in_the_place_of_an_entry(tmp_path: Path) -> None:
    (tmp_path / f"{NAME}.kernel").mkdir()
    entry = Cache(tmp_path).get(NAME, accept, lambda: DATA)
    assert entry.data == DATA
    assert "cannot be written" in entry.uncached
    assert [path.name for path in tmp_path.iterdir()] == [f"{NAME}.kernel"]


def test_eight_processes_make_it_once(tmp_path: Path) -> None:
    code = """
def make():
    time.sleep(0.2)
    return DATA
entry = cache.get(NAME, lambda data: None, make)
print(entry.origin, entry.data == DATA)
"""
    processes = [start(code, tmp_path) for _ in range(8)]
    answers = sorted(line_of(process) for process in processes)
    assert [process.wait() for process in processes] == [0] * 8
    assert answers == ["cache True"] * 7 + ["compiled True"]
    assert os.listdir(tmp_path) == [f"{NAME}.kernel"]


def test_eight_threads_make_it_once(tmp_path: Path) -> None:
    for folder in (tmp_path, None):
        cache, made, found = Cache(folder), [], []

        def make(made: list[int] = made) -> bytes:
            made.append(1)
            time.sleep(0.05)
            return DATA

        def get(cache: Cache = cache, found: list[bytes] = found) -> None:
            found.append(cache.get(NAME, accept, make).data)

        threads = [threading.Thread(target=get) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(made), found) == (1, [DATA] * 8)


def test_killed_while_compiling(tmp_path: Path) -> None:
    """The lock goes with its holder, and who waited for it goes on."""
    holder = start(
        'cache.get(NAME, lambda data: None, lambda: print("making", flush=True) or time.sleep(60))', tmp_path
    )
    assert line_of(holder) == "making"
    waiter = start(
        'print("waiting", flush=True); print(cache.get(NAME, lambda data: None, lambda: DATA).origin)', tmp_path
    )
    assert line_of(waiter) == "waiting"
    time.sleep(0.1)
    assert waiter.poll() is None
    holder.send_signal(signal.SIGKILL)
    assert holder.wait() == -signal.SIGKILL
    started = time.monotonic()
    assert line_of(waiter) == "compiled"
    assert time.monotonic() - started < 10
    assert waiter.wait() == 0
    assert os.listdir(tmp_path) == [f"{NAME}.kernel"]


def test_killed_while_writing(tmp_path: Path) -> None:
    """What is half written is no entry, and is removed when it is old."""
    code = """
def hang(source, target):
    print("writing", flush=True)
    time.sleep(60)
cache_module.os.replace = hang
cache.get(NAME, lambda data: None, lambda: DATA)
"""
    writer = start(code, tmp_path)
    assert line_of(writer) == "writing"
    writer.kill()
    writer.wait()
    (left,) = tmp_path.glob(".*.tmp")
    assert Cache(tmp_path).names() == []
    assert Cache(tmp_path).get(NAME, accept, lambda: DATA).origin == "compiled"
    assert left.exists()  # it may be another process's, at work
    old = time.time() - 2 * cache_module.STALE_S
    os.utime(left, (old, old))
    Cache(tmp_path).get("other", accept, lambda: DATA)
    assert not left.exists()


def test_nobody_waits_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that is stopped and not dead: the others do its work."""
    monkeypatch.setattr(cache_module, "LOCK_TIMEOUT_S", 0.1)
    holder = start(
        'cache.get(NAME, lambda data: None, lambda: print("making", flush=True) or time.sleep(60))', tmp_path
    )
    assert line_of(holder) == "making"
    try:
        assert Cache(tmp_path).get(NAME, accept, lambda: DATA).origin == "compiled"
    finally:
        holder.kill()
        holder.wait()
    assert Cache(tmp_path).get(NAME, accept, never).data == DATA


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    entry = Cache(tmp_path).get(NAME, accept, lambda: DATA)
    assert (entry.origin, entry.uncached) == ("compiled", "")


@contextlib.contextmanager
def unprivileged_folder() -> Iterator[Path]:
    """A folder that any user can reach, unlike pytest's."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("state", ["empty", "filled", "missing"])
def test_a_folder_that_cannot_be_written(state: str) -> None:
    """Read where it can be, and otherwise made in memory; root is nobody here, since permissions do not bind root."""
    code = """
if os.getuid() == 0:
    os.setuid(65534)
def check(data):
    assert data == DATA
entry = cache.get(NAME, check, lambda: DATA)
again = cache.get(NAME, check, lambda: 1 / 0)
print(entry.origin, again.origin, entry.data == DATA, entry.uncached, cache.problem(), sep="|")
"""
    with unprivileged_folder() as base:
        folder = base / "cache"
        if state != "missing":
            folder.mkdir(mode=0o755)
        if state == "filled":
            Cache(folder).get(NAME, accept, lambda: DATA)
        os.chmod(folder if state != "missing" else base, 0o555)
        before = sorted(base.rglob("*"))
        process = start(code, folder)
        origin, again, same, uncached, problem = line_of(process).split("|")
        assert process.wait() == 0
        assert same == "True"
        assert sorted(base.rglob("*")) == before
        os.chmod(base, 0o755)
        os.chmod(folder if state != "missing" else base, 0o755)
    if state == "filled":
        assert (origin, again, uncached) == ("cache", "cache", "")
    else:
        assert (origin, again) == ("compiled", "memory")
        assert uncached == f"{folder} cannot be written: Permission denied"
    assert problem.startswith(f"{folder} cannot be written: no permission to write to {base}")


def test_no_folder_at_all() -> None:
    cache = Cache(None)
    entry = cache.get(NAME, accept, lambda: DATA)
    assert entry.uncached == "neither FLASH_ATTN_CACHE_DIR nor HOME names a folder"
    assert cache.get(NAME, accept, never).origin == "memory"
    assert (cache.names(), cache.size_bytes(), cache.problem()) == ([], 0, entry.uncached)


def test_a_file_in_the_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file" / "cache")
    assert "Not a directory" in cache.get(NAME, accept, lambda: DATA).uncached
    assert cache.problem().endswith(f"{tmp_path / 'file'} is no folder")


def test_a_forked_child_waits_for_no_thread_of_its_parent(tmp_path: Path) -> None:
    code = """
import threading
held = threading.Event()
def make():
    held.set()
    time.sleep(0.3)
    return DATA
threading.Thread(target=lambda: cache.get(NAME, lambda data: None, make)).start()
held.wait()
child = os.fork()
if child == 0:
    print(cache.get(NAME, lambda data: None, lambda: DATA).data == DATA, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    process = start(code, tmp_path)
    assert line_of(process) == "True"
    assert process.wait(20) == 0


def test_the_newest_compiler_that_the_driver_takes(tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    for version in ("12.9.86", "12.10.1", "13.1.80", "junk"):
        cache.get(f"stem.nvrtc-{version}", accept, lambda: DATA)
    cache.get("stem2.nvrtc-14.0.0", accept, lambda: DATA)
    assert cache.like("stem.", None) == ["stem.nvrtc-13.1.80", "stem.nvrtc-12.10.1", "stem.nvrtc-12.9.86"]
    assert cache.like("stem.", (12, 4)) == ["stem.nvrtc-12.10.1", "stem.nvrtc-12.9.86"]
