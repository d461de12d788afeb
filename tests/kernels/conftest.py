"""The kernel tests run on a GPU, against the installed wheel: anything else is refused, in one line.

The random cases: ``FLASH_ATTN_TEST_CASES`` of them (200), from seed ``FLASH_ATTN_TEST_SEED`` (0) on.
``FLASH_ATTN_TEST_SHARD=3/14`` runs every 14th test, from the fourth (0/14 is the first) on.
"""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# `python -m pytest` puts the working directory, hence the source tree, in front of the installed packages.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]


def what_is_missing():
    """Why the tests cannot run here, or None."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if "flash_attn" not in sys.modules and importlib.util.find_spec("flash_attn") is None:
        return "flash_attn is not installed; install the wheel first: pip install dist/flash_attn-*.whl"
    import torch

    import flash_attn

    if Path(flash_attn.__file__).resolve().parent == ROOT / "flash_attn":
        return f"flash_attn is the source tree ({flash_attn.__file__}), and the installed wheel is what is tested"
    supported, reason = flash_attn.supported("cuda")
    if not supported:
        return f"a GPU that the installed wheel supports is needed: {reason}"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} cannot use the GPU"
    return None


def pytest_configure():
    missing = what_is_missing()
    if missing is not None:
        raise pytest.UsageError(f"tests/kernels: {missing}")


def pytest_collection_modifyitems(config, items):
    shard = os.environ.get("FLASH_ATTN_TEST_SHARD")
    if shard:
        number, count = map(int, shard.split("/"))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % count != number])
        items[:] = items[number::count]


@pytest.fixture(scope="session", autouse=True)
def pool():
    """Free memory in torch's allocator, for the tests to poison."""
    from memory import fill_pool

    fill_pool()


@pytest.fixture(autouse=True)
def seeded():
    import torch

    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def modest():
    """What a large test has used is given back: other processes may have the GPU too."""
    yield
    import torch
    from memory import fill_pool

    if torch.cuda.memory_reserved() > 8 * 2**30:
        torch.cuda.empty_cache()
        fill_pool()
