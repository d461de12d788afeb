"""How many compilers may run at once: from the cores and the memory that this process may really use.

Everything is read below `root`, so that a test can lay out the /proc and /sys of any machine.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.8  # of the memory that is available
_MIB = 1 << 20


@dataclass(frozen=True)
class JobLimit:
    """`jobs` to run at once, and in words what decided it."""

    jobs: int
    reason: str


def job_limit(
    max_jobs: int | None, peaks_mib: float | Sequence[float], *, root: Path = Path("/"), cores: int | None = None
) -> JobLimit:
    """min(MAX_JOBS or cores, as many jobs as fit into 80 % of the memory available), at least 1.

    `peaks_mib`: the peak memory of every job, or of each of them; then the largest are those that run at once.
    `cores`: what the scheduler gives this process (the default asks it); a cgroup's quota lowers it.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reason = _cores(cores)
    quota = cpu_quota(root)
    if quota is not None and quota < cores:
        cores = max(1, int(quota))
        reason = f"the cgroup's {_cores(quota)}"
    jobs = cores
    if max_jobs is not None:
        jobs, reason = max_jobs, f"MAX_JOBS={max_jobs}"
    available = available_memory(root)
    if available is not None:
        each = [peaks_mib] * jobs if isinstance(peaks_mib, (int, float)) else sorted(peaks_mib, reverse=True)
        by_memory = _fitting(each[:jobs], available * SHARE / _MIB)
        if by_memory < min(jobs, len(each)):
            jobs = by_memory
            a_job = f"{each[0]:.0f} MiB a job" if each[0] == each[jobs - 1] else f"up to {each[0]:.0f} MiB a job"
            reason = f"{available // _MIB} MiB of memory, {SHARE:.0%} of it used, {a_job}"
    return JobLimit(jobs, reason)


def _cores(number: float) -> str:
    return f"{number:g} core{'' if number == 1 else 's'}"


def _fitting(peaks_mib: Sequence[float], budget_mib: float) -> int:
    """How many of the jobs, from the first on, fit into the budget together; at least 1."""
    return max(1, sum(total <= budget_mib for total in itertools.accumulate(peaks_mib)))


def expected_peaks(resources: Path, compiler: str, kernels: Iterable[str], estimate_mib: float) -> list[float]:
    """The peak memory in MiB that compiling each kernel is expected to take.

    It is the largest one that the last build, which left `resources` (resources.json), measured for a kernel of its
    kind by the same compiler, and `estimate_mib` where there is none.
    """
    measured: dict[str, float] = {}
    try:
        last = json.loads(resources.read_text(encoding="utf-8"))
        if last["compiler"] == compiler:
            for name, report in last["kernels"].items():
                kind = kernel_kind(name)
                measured[kind] = max(measured.get(kind, 0.0), float(report["peak_mib"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        measured = {}  # there was none, or it is damaged: it is written again by this build
    return [measured.get(kernel_kind(name)) or estimate_mib for name in kernels]


def kernel_kind(name: str) -> str:
    """What decides the memory that a kernel takes to compile: fwd-sm80-d128 of fwd-sm80-bf16-d128-causal.90."""
    parts = name.partition(".")[0].split("-")
    return "-".join((*parts[:2], *parts[3:4]))


def cpu_quota(root: Path) -> float | None:
    """The cores that the cgroups of this process allow, or None where they set no limit."""
    quotas = []
    for folder in _cgroup_folders(root, "cpu"):
        v2 = _read(folder / "cpu.max").split()
        if len(v2) == 2 and v2[0].isdigit() and int(v2[1]) > 0:
            quotas.append(int(v2[0]) / int(v2[1]))
        quota, period = _read(folder / "cpu.cfs_quota_us").strip(), _read(folder / "cpu.cfs_period_us").strip()
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # -1: no limit
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def available_memory(root: Path) -> int | None:
    """Bytes that can still be used: the machine's MemAvailable, or what a cgroup leaves where that is less."""
    amounts = []
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            amounts.append(int(line.split()[1]) * 1024)
    for folder in _cgroup_folders(root, "memory"):
        for limit_name, usage_name, cache_name in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.high", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _read(folder / limit_name).strip()
            if limit.isdigit() and int(limit) < 1 << 60:  # v1 says "no limit" with a huge number
                used = _read(folder / usage_name).strip()
                # Pages of files that were only read are given back before anything is killed.
                used_bytes = max(0, int(used) - _stat(folder, cache_name)) if used.isdigit() else 0
                amounts.append(max(0, int(limit) - used_bytes))
        # v1 tells here of the limits of parents that a container does not see.
        parents = _stat(folder, "hierarchical_memory_limit")
        used = _read(folder / "memory.usage_in_bytes").strip()
        if 0 < parents < 1 << 60 and used.isdigit():
            amounts.append(max(0, parents - max(0, int(used) - _stat(folder, "total_inactive_file"))))
    return min(amounts, default=None)


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's cgroups for `controller`, v1 and v2, each with all its parents."""
    mounts = _cgroup_mounts(root)
    for line in _read(root / "proc/self/cgroup").splitlines():
        fields = line.split(":", 2)
        if len(fields) != 3:
            continue
        hierarchy, controllers, path = fields
        if hierarchy == "0" and not controllers:
            kind = "cgroup2"
        elif controller in controllers.split(","):
            kind = controller
        else:
            continue
        for mount_kind, mount_root, mount_point in mounts:
            if mount_kind != kind:
                continue
            top = root / mount_point.lstrip("/")
            # Inside a container the mount shows only the part of the hierarchy from `mount_root` on.
            below = f"{path}/".startswith(f"{mount_root.rstrip('/')}/")
            inside = path[len(mount_root.rstrip("/")) :] if below else path
            folder = top / inside.lstrip("/")
            if not folder.is_dir():
                folder = top
            yield folder
            while folder != top and top in folder.parents:
                folder = folder.parent
                yield folder


def _cgroup_mounts(root: Path) -> list[tuple[str, str, str]]:
    """(controller or "cgroup2", root within the hierarchy, mount point) of each mounted cgroup hierarchy."""
    mounts = []
    for line in _read(root / "proc/self/mountinfo").splitlines():
        left, separator, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if not separator or len(fields) < 5 or len(kind) < 3:
            continue
        mount_root, mount_point = fields[3], fields[4]
        if kind[0] == "cgroup2":
            mounts.append(("cgroup2", mount_root, mount_point))
        elif kind[0] == "cgroup":
            mounts += [(option, mount_root, mount_point) for option in kind[2].split(",")]
    return mounts


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
