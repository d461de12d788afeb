"""Fixtures of the packaging tests: real pip in real virtual environments, and what it installs."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import pytest  # noqa: E402
from packaging_support import ROOT, Environment, build_hook  # noqa: E402


@pytest.fixture(scope="session")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's sdist."""
    return build_hook("build_sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    """An empty virtual environment whose pip knows no index but the ones it is given."""
    return Environment.make(tmp_path / "environment")


@pytest.fixture(scope="session")
def used_environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The same for all tests that install nothing: to make it and to start its pip for the first time takes seconds."""
    return Environment.make(tmp_path_factory.mktemp("used") / "environment")


@pytest.fixture(scope="session")
def empty_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's wheel as SKIP_CUDA_BUILD makes it: all of its metadata, nothing compiled."""
    return build_hook("build_wheel", ROOT, tmp_path_factory.mktemp("wheel"), SKIP_CUDA_BUILD="1")
