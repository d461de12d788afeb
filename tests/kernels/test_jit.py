"""Kernels that an installation lacks are compiled at the first call, for this GPU: with a copy of the installed package
whose kernel set has head dim 64 alone.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from kernel_set import DTYPES, EVERY_KERNEL, KERNELS
from oracle import expected, mismatches

import flash_attn
from flash_attn._buildtools import archive

# (batch, seqlen, heads): few scores, which the base family has, and as many as a faster one is taken for.
SIZES = {"small": (1, 70, 2), "large": (2, 1024, 4)}

CALLS = """
import json, os, sys, torch
from flash_attn import flash_attn_func, supported
head_dim, batch, seqlen, heads, dtype, path = json.loads(sys.argv[1])
generator = torch.Generator("cuda").manual_seed(1)
def step(head_dim):
    # CPU time, of this process and of compilers that it may start: the clock on the wall counts what else runs.
    before = sum(os.times()[:4])
    q, k, v, dout = (
        torch.randn(batch, seqlen, heads, head_dim, generator=generator, device="cuda").to(getattr(torch, dtype))
        for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out, lse = flash_attn_func(*leaves, causal=True, return_lse=True)
    torch.cuda.synchronize()
    between = sum(os.times()[:4])
    grads = torch.autograd.grad(out, leaves, dout)
    torch.cuda.synchronize()
    names = ("q", "k", "v", "dout", "out", "lse", "dq", "dk", "dv")
    tensors = dict(zip(names, (q, k, v, dout, out, lse, *grads)))
    return [between - before, sum(os.times()[:4]) - between], {n: x.detach().cpu() for n, x in tensors.items()}
step(64)
seconds, tensors = step(head_dim)
torch.save(tensors, path)
print(json.dumps({"seconds": seconds, "supported": supported("cuda")}))
"""


@pytest.fixture(scope="module")
def head_dim_64_alone(tmp_path_factory):
    """A folder for PYTHONPATH."""
    folder = tmp_path_factory.mktemp("head-dim-64")
    package = Path(flash_attn.__file__).parent
    shutil.copytree(package, folder / "flash_attn", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "flash_attn" / archive.FILE_NAME
    whole = archive.read(path)
    kept = [(r, image) for r, image in zip(whole.records, whole.images, strict=True) if r.head_dim == 64]
    path.write_bytes(archive.pack(whole.compiler, kept))
    return folder


def call(folder, cache, arguments, **variables):
    kept = ("FLASH_ATTN_FAMILY", "FLASH_ATTN_NVRTC")
    environment = {k: v for k, v in os.environ.items() if k in kept or not k.startswith("FLASH_ATTN_")}
    environment |= {"PYTHONPATH": str(folder), "FLASH_ATTN_CACHE_DIR": str(cache), **variables}
    command = [sys.executable, "-c", CALLS, json.dumps(arguments)]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)


def files(folder):
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("size", SIZES)
def test_a_head_dim_that_was_not_built_is_compiled_at_the_first_call(head_dim_64_alone, tmp_path, size):
    """Field case 27."""
    dtype = next(name for name, value in DTYPES.items() if value == KERNELS[0].dtype)
    full_name = str(DTYPES[dtype]).removeprefix("torch.")
    cache, results = tmp_path / "cache", tmp_path / "results.pt"
    arguments = [128, *SIZES[size], full_name, str(results)]
    done = call(head_dim_64_alone, cache, arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["supported"][0] is True
    # Of one kernel. Where other processes have the second thread of each core, CPU time is up to twice as much.
    # The load averages of a machine that has just become busy lag behind: what runs now counts as well.
    running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0])
    busy = max(os.getloadavg()[0], running) > (os.cpu_count() or 1) / 4
    assert max(report["seconds"]) < (4.0 if busy else 2.0)
    tensors = {name: x.cuda() for name, x in torch.load(results).items()}
    exact, allowed = expected(*(tensors[n] for n in ("q", "k", "v")), 128**-0.5, True, tensors["dout"])
    assert not mismatches({n: tensors[n] for n in exact}, exact, allowed)

    compiled = files(cache)
    assert compiled
    done = call(head_dim_64_alone, cache, arguments)
    assert done.returncode == 0, done.stderr
    assert files(cache) == compiled, "the second process compiled again"


def test_a_head_dim_that_was_not_built_without_a_compiler(head_dim_64_alone, tmp_path):
    """Field case 23: the missing key, what was built, and how to add it."""
    arguments = [72, *SIZES["small"], str(KERNELS[0].dtype).removeprefix("torch."), str(tmp_path / "results.pt")]
    done = call(head_dim_64_alone, tmp_path / "cache", arguments, FLASH_ATTN_JIT="0")
    assert done.returncode == 1
    text = done.stderr
    assert "not built" in text
    assert "head_dim 72 needs it" in text
    assert "FLASH_ATTN_HEAD_DIMS" in text
    assert any(kernel.key in text for kernel in EVERY_KERNEL if kernel.op == "fwd" and kernel.head_dim == 64)
