"""``python -m flash_attn warm``: fill the cache with the kernels that calls would otherwise compile at first use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ._driver import DriverFacts, read_driver
from ._installed import KERNEL_SET_NAME, PACKAGE, buildtools
from ._jit import search_path

__all__ = ["main"]

# A compiler takes some hundred MB.
_MOST_JOBS = 8


def main(
    archs: Sequence[str],
    kernels: Sequence[str],
    head_dims: Sequence[int],
    *,
    jobs: int | None = None,
    write: Callable[[str], object] = print,
) -> int:
    """Compile for ``archs`` (by default this machine's GPUs) the rows of the kernel table that are selected.

    What the wheel or the cache has is left alone. Returns 0, or the exit code of the first kind of failure.
    """
    errors = buildtools("errors")
    try:
        return _warm(archs, list(kernels) or None, list(head_dims) or None, jobs, write)
    except errors.BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return int(error.exit_code)


def _warm(
    archs: Sequence[str],
    kernels: list[str] | None,
    head_dims: list[int] | None,
    jobs: int | None,
    write: Callable[[str], object],
) -> int:
    jit, errors = buildtools("jit"), buildtools("errors")
    jit.check_enabled(os.environ)
    if jobs is not None and jobs < 1:
        raise errors.VariableError(f"--jobs {jobs} is not a positive integer", fix="such as --jobs 4, or leave it out")
    driver = read_driver()
    targets = _targets(archs, driver)
    compiler_object = jit.Jit(PACKAGE, os.environ, search_path())
    if problem := compiler_object.cache.problem():
        raise errors.CacheError(
            f"nothing can be kept: {problem}", fix="set FLASH_ATTN_CACHE_DIR to a folder that can be written"
        )
    # A named arch may be of another machine: this one's driver is of no account.
    compiler = jit.find_compiler(os.environ, search_path(), None if archs else driver.cuda)
    rows = jit.select(compiler_object.table, kernels, head_dims)
    kernel_set = buildtools("archive").read(path) if (path := PACKAGE / KERNEL_SET_NAME).is_file() else None
    write(f"NVRTC {compiler.version} ({compiler.library.path}), cache {compiler_object.cache.folder}")

    table = compiler_object.table
    families = jit.fastest_first(table, {row.family for row in rows})
    requests = dict.fromkeys(jit.Request(row.op, row.dtype, row.mask, row.head_dim, families) for row in rows)
    wanted: list[Any] = []
    in_wheel = 0
    for target in targets:
        jit.check_target(table, families, target, compiler.supported)
        for request in requests:
            if jit.in_kernel_set(kernel_set, request, target) is not None:
                in_wheel += 1
                continue
            refusals: list[str] = []
            kernel = next(jit.candidates(table, request, target, compiler.supported, refusals), None)
            if kernel is None:
                write(f"left out: {jit.nothing_serves(table, request, target, refusals).what}")
            elif kernel not in wanted:
                wanted.append(kernel)
    return _compile(compiler_object, compiler, wanted, in_wheel, jobs, write)


def _targets(archs: Sequence[str], driver: DriverFacts) -> list[Any]:
    """The GPUs to compile for: the named ones, or those of this machine."""
    jit, errors = buildtools("jit"), buildtools("errors")
    if archs:
        parsed = [buildtools("archs").parse_arch(word) for text in archs for word in text.replace(";", ",").split(",")]
        if any(arch.ptx for arch in parsed):
            raise errors.ArchError(
                f"--arch {' '.join(archs)} names PTX", fix="name the GPU's compute capability, such as 90 or 9.0"
            )
        return [jit.Target(number) for number in dict.fromkeys(arch.number for arch in parsed)]
    if driver.problem is not None:
        raise errors.ArchError(driver.problem, fix="name the GPUs to compile for, such as --arch 9.0")
    capabilities = dict.fromkeys(10 * gpu.capability[0] + gpu.capability[1] for gpu in driver.gpus)
    return [jit.Target(capability, driver_cuda=driver.cuda) for capability in capabilities]


def _compile(
    compiler_object: Any,
    compiler: Any,
    kernels: Sequence[Any],
    in_wheel: int,
    jobs: int | None,
    write: Callable[[str], object],
) -> int:
    errors = buildtools("errors")
    counts = {"compiled": 0, "cache": 0}
    failures: list[Any] = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1

    def one(kernel: Any) -> Any:
        try:
            return compiler_object.product(kernel, compiler)
        except errors.BuildError as error:
            return error

    # Threads are enough: NVRTC works outside of Python's global lock.
    with ThreadPoolExecutor(jobs or min(cores, _MOST_JOBS)) as pool:
        for kernel, result in zip(kernels, pool.map(one, kernels), strict=True):
            if isinstance(result, errors.BuildError):
                failures.append(result)
                write(f"{kernel.name}: FAILED: {result}")
            elif result.uncached:
                failures.append(errors.CacheError(result.uncached))
                write(f"{kernel.name}: compiled, and not kept: {result.uncached}")
            else:
                counts[result.origin] += 1
                took = f"compiled in {result.seconds:.1f} s" if result.origin == "compiled" else "in the cache"
                write(f"{kernel.name}: {took}")
    summary = [f"{counts['compiled']} compiled", f"{counts['cache']} in the cache", f"{in_wheel} in the wheel"]
    if failures:
        summary.append(f"{len(failures)} failed")
    write(", ".join(summary))
    return int(failures[0].exit_code) if failures else 0
