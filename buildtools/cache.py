"""A folder of results by name, for several processes and threads at once, any of which may be killed at any point.

An entry appears whole, by an atomic rename, and begins with the hash of its contents: what is damaged is removed and
made again. Where the folder cannot be used, results are kept in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import ArchiveError

VARIABLE = "FLASH_ATTN_CACHE_DIR"
_NO_FOLDER = f"neither {VARIABLE} nor HOME names a folder"
_SUFFIX = ".kernel"
_TEMPORARY = ".tmp"
_DIGEST_SIZE = 65  # the hash in hexadecimal, and a line feed
_POLL_S = 0.02
# A kernel compiles in seconds: whoever holds a lock for longer is stopped, or on a machine that died.
LOCK_TIMEOUT_S = 60.0
STALE_S = 3600.0


@dataclass(frozen=True)
class Entry:
    """`origin`: "cache", "memory" (of this process), or "compiled" just now. `uncached`: why it could not be kept."""

    data: bytes
    origin: str
    uncached: str = ""


def cache_folder(environ: Mapping[str, str]) -> Path | None:
    """FLASH_ATTN_CACHE_DIR, or flash_attn in the user's cache folder; None where neither is known."""
    chosen = environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the specification has others ignored
        return Path(base, "flash_attn")
    home = environ.get("HOME", "")
    return Path(home, ".cache", "flash_attn") if os.path.isabs(home) else None


class Cache:
    """The entries of one folder; None: none but those in memory."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, bytes] = {}
        self._locks: dict[str, threading.Lock] = {}
        self._guard = threading.Lock()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_locks)

    @classmethod
    def of(cls, environ: Mapping[str, str]) -> Cache:
        return cls(cache_folder(environ))

    def get(self, name: str, check: Callable[[bytes], None], make: Callable[[], bytes]) -> Entry:
        """The entry `name`, made and kept if it is not there. `check` raises ArchiveError for one that is of no use."""
        with self._thread_lock(name):
            data = self._memory.get(name)
            if data is not None:
                return Entry(data, "memory")
            data = self.read(name, check)
            if data is not None:
                return Entry(data, "cache")
            with self._process_lock(name):
                data = self.read(name, check)  # another process may have made it meanwhile
                if data is not None:
                    return Entry(data, "cache")
                data = make()
                uncached = self._keep(name, data)
            # Kept here too: another device of this process will ask for it, and the folder may be emptied.
            self._memory[name] = data
            return Entry(data, "compiled", uncached)

    def read(self, name: str, check: Callable[[bytes], None]) -> bytes | None:
        """The entry `name` from the folder, or None. One that is damaged is removed."""
        if self.folder is None:
            return None
        path = self.folder / f"{name}{_SUFFIX}"
        try:
            content = path.read_bytes()
        except OSError:
            return None
        data = content[_DIGEST_SIZE:]
        try:
            if content[:_DIGEST_SIZE] != _digest(data):
                raise ArchiveError(f"{path} is damaged")
            check(data)
        except ArchiveError:
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        return data

    def like(self, prefix: str, newest_cuda: tuple[int, int] | None) -> list[str]:
        """The names in the folder that begin with `prefix` and go on with a compiler, the newest first.

        Compilers of a major above `newest_cuda` are left out.
        """
        found = []
        for name in self.names():
            version = re.fullmatch(rf"{re.escape(prefix)}nvrtc-([0-9]+)\.([0-9]+)\.([0-9]+)", name)
            if version and (newest_cuda is None or int(version[1]) <= newest_cuda[0]):
                found.append((tuple(map(int, version.groups())), name))
        return [name for _, name in sorted(found, reverse=True)]

    def names(self) -> list[str]:
        """The names of all entries in the folder, sorted."""
        try:
            files = os.listdir(self.folder) if self.folder else []
        except OSError:
            return []
        return sorted(file.removesuffix(_SUFFIX) for file in files if file.endswith(_SUFFIX) and file[0] != ".")

    def size_bytes(self) -> int:
        total = 0
        for name in self.names():
            with contextlib.suppress(OSError):
                total += os.stat(f"{self.folder}/{name}{_SUFFIX}").st_size
        return total

    def problem(self) -> str:
        """Why nothing can be kept in the folder, or an empty string. Changes nothing."""
        if self.folder is None:
            return _NO_FOLDER
        there = next(folder for folder in (self.folder, *self.folder.parents) if folder.exists())
        if not there.is_dir():
            return f"{self.folder} cannot be written: {there} is no folder"
        if not os.access(there, os.W_OK | os.X_OK):
            return f"{self.folder} cannot be written: no permission to write to {there}"
        return ""

    def _keep(self, name: str, data: bytes) -> str:
        """Write an entry; what kept it from being written, or an empty string."""
        if self.folder is None:
            return _NO_FOLDER
        temporary = self._temporary(name)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            self._write_file(temporary, _digest(data) + data)
            os.replace(temporary, self.folder / f"{name}{_SUFFIX}")
        except OSError as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return _reason(self.folder, error)
        return ""

    def _temporary(self, name: str) -> Path:
        """A name that no other process uses, on this machine or on another with the same folder."""
        assert self.folder is not None
        return self.folder / f".{name}.{secrets.token_hex(8)}{_TEMPORARY}"

    @staticmethod
    def _write_file(path: Path, data: bytes) -> Path:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), "wb") as file:
            file.write(data)
        return path

    def _remove_stale(self) -> None:
        """Remove what killed processes left behind."""
        assert self.folder is not None
        for path in self.folder.glob(f".*{_TEMPORARY}"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > STALE_S:
                    path.unlink()

    @contextlib.contextmanager
    def _thread_lock(self, name: str) -> Iterator[None]:
        with self._guard:
            lock = self._locks.setdefault(name, threading.Lock())
        with lock:
            yield

    def _forget_locks(self) -> None:
        """In a forked child: threads that held locks are not there to release them."""
        self._guard = threading.Lock()
        self._locks = {}

    @contextlib.contextmanager
    def _process_lock(self, name: str) -> Iterator[None]:
        """Hold the name among processes, where the folder can be written and its file system has locks.

        The lock only saves work. It goes with its process, and nobody waits for it for ever.
        """
        release = self._acquire(name)
        try:
            yield
        finally:
            release()

    def _lock_path(self, name: str) -> str:
        return f"{self.folder}/.{name}.lock"

    def _acquire(self, name: str) -> Callable[[], None]:
        """Take the lock, if there can be one, and return what gives it back."""
        if self.folder is None or sys.platform == "win32":
            return _nothing
        import fcntl

        path = self._lock_path(name)
        deadline = time.monotonic() + LOCK_TIMEOUT_S
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            return _nothing

        def release() -> None:
            # Removed while it is held. Who waits for this file then finds the entry; who comes later does so first.
            with contextlib.suppress(OSError):
                os.unlink(path)
            # Closing is not enough where another thread has forked meanwhile: the child has the file open, too.
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return release
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(_POLL_S)
                    continue
            except OSError:
                pass  # a file system without locks
            os.close(descriptor)
            return _nothing


def _nothing() -> None:
    """Gives back a lock that was not taken."""


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode() + b"\n"


def _reason(folder: Path, error: OSError) -> str:
    return f"{folder} cannot be written: {error.strerror or error}"
