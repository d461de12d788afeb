"""The other tests where a family is forced that the dispatcher takes for large problems alone.

A family is chosen once in a process's life, so these are processes of their own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_set import EVERY_KERNEL, FORCED_FAMILY, faster_families

TESTS = Path(__file__).resolve().parent
FAMILIES = [] if FORCED_FAMILY else faster_families()
# Triton's kernels have no family, and FP8's are of one.
OTHERS = ("test_each_kernel.py", "test_fp8.py", "test_triton.py", Path(__file__).name)
FILES = sorted(path.name for path in TESTS.glob("test_*.py") if path.name not in OTHERS)
HEAD_DIMS = [(f, d) for f in FAMILIES for d in sorted({k.head_dim for k in EVERY_KERNEL if k.family == f})]


def run(family, folder, *arguments):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={TESTS}", *arguments]
    environment = {**os.environ, "FLASH_ATTN_FAMILY": family}
    environment.pop("FLASH_ATTN_TEST_SHARD", None)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.mark.parametrize(("family", "head_dim"), HEAD_DIMS)
def test_each_kernel(family, head_dim, tmp_path):
    run(family, tmp_path, str(TESTS / "test_each_kernel.py"), "-k", f"{family}- and d{head_dim}-")


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("family", FAMILIES)
def test_file(family, file, tmp_path):
    run(family, tmp_path, str(TESTS / file))
