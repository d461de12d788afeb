"""How many compilers may run at once: from the cores and the memory that this process may really use.

Everything is read below `root`, so that a test can lay out the /proc and /sys of any machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHARE = 0.8  # of the memory that is available
_MIB = 1 << 20


@dataclass(frozen=True)
class JobLimit:
    """`jobs` to run at once, and in words what decided it."""

    jobs: int
    reason: str


def job_limit(max_jobs: int | None, peak_mib: float, *, root: Path = Path("/"), cores: int | None = None) -> JobLimit:
    """min(MAX_JOBS or cores, 80 % of the memory available / `peak_mib` of a job), at least 1.

    `cores`: what the scheduler gives this process (the default asks it); a cgroup's quota lowers it.
    """
    if cores is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    reason = f"{cores} cores"
    quota = cpu_quota(root)
    if quota is not None and quota < cores:
        cores = max(1, int(quota))
        reason = f"the cgroup's {quota:g} cores"
    jobs = cores
    if max_jobs is not None:
        jobs, reason = max_jobs, f"MAX_JOBS={max_jobs}"
    available = available_memory(root)
    if available is not None:
        by_memory = max(1, int(available * SHARE / (peak_mib * _MIB)))
        if by_memory < jobs:
            jobs = by_memory
            reason = f"{available // _MIB} MiB of memory, {SHARE:.0%} of it used, {peak_mib:.0f} MiB a job"
    return JobLimit(jobs, reason)


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
            inside = path[len(mount_root.rstrip("/")) :] if path.startswith(mount_root) else path
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
