"""Tests against other packages: transformers, and Triton's interpreter, both of which have to be installed.

`nox -s models` installs them. A pytest that lacks one refuses, in one line, rather than skip.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

# Before Triton is imported, which torch does at times.
os.environ["TRITON_INTERPRET"] = "1"

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "kernels")]


def pytest_configure():
    missing = [name for name in ("transformers", "triton") if importlib.util.find_spec(name) is None]
    if missing:
        raise pytest.UsageError(f"tests/models: {' and '.join(missing)} not installed; run `nox -s models`")


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)
