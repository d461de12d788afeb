"""Several processes, if pytest-xdist is asked for them (`-n`), run the tests as one does."""

from __future__ import annotations

import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parent / "unit"))
import processes


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tells a process of pytest-xdist which folder it shares with the others."""
    node.workerinput["folder"] = str(processes.folder())


def pytest_configure(config: pytest.Config) -> None:
    """Makes a process of pytest-xdist one of the run."""
    if hasattr(config, "workerinput"):
        processes.join(Path(config.workerinput["folder"]))
        # It ignores SIGINT, and so would everything that tests start, some of it to interrupt it.
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """While a test marked `alone` runs, no other process runs one."""
    with processes.running(alone=item.get_closest_marker("alone") is not None):
        return (yield)
