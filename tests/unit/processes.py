"""What the processes of one test run have in common: pytest-xdist makes several, and without it there is one."""

from __future__ import annotations

import atexit
import fcntl
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

_folder: Path | None = None


def folder() -> Path:
    """The folder of this run, the same in each of its processes; it goes when the run ends."""
    global _folder
    if _folder is None:
        _folder = Path(tempfile.mkdtemp(prefix="flash_attn_tests_"))
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


def join(shared: Path) -> None:
    """Makes this process one of the run whose folder is `shared`."""
    global _folder
    _folder = shared


@contextmanager
def _locked(name: str, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    with (folder() / name).open("a") as file:
        fcntl.flock(file, how)
        try:
            yield
        finally:
            # Closing would not do: a child that was forked in between has the file open, too.
            fcntl.flock(file, fcntl.LOCK_UN)


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder called `name`, filled by `make` in the process that is first to ask; the others wait for it."""
    made, done = folder() / name, folder() / f"{name}.done"
    with _locked(f"{name}.lock"):
        if not done.exists():
            shutil.rmtree(made, ignore_errors=True)  # of a process in which `make` failed
            made.mkdir()
            make(made)
            done.touch()
    return made


@contextmanager
def running(*, alone: bool) -> Iterator[None]:
    """While a test runs in this process; if it is to run `alone`, no other process runs one."""
    with ExitStack() as test:
        # Who waits to be alone keeps the turn, so that no further test begins and it gets its own.
        with _locked("turn"):
            test.enter_context(_locked("test", fcntl.LOCK_EX if alone else fcntl.LOCK_SH))
        yield
