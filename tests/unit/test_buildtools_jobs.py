"""The number of jobs on machines and in containers of every kind, laid out as files."""

from __future__ import annotations

import pytest

from buildtools.jobs import available_memory, cpu_quota, job_limit

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A function that lays out a machine: its memory in GiB and files below its root."""

    def lay_out(memory_gib: float, files: dict[str, str] | None = None):
        (tmp_path / "proc/self").mkdir(parents=True)
        kib = int(memory_gib * GIB / 1024)
        (tmp_path / "proc/meminfo").write_text(f"MemTotal: {2 * kib} kB\nMemFree: 1 kB\nMemAvailable:   {kib} kB\n")
        for name, text in (files or {}).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return lay_out


V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1_MOUNTS = (
    "31 23 0:27 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "32 23 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def v2(path: str, **files: str) -> dict[str, str]:
    """A process in the v2 cgroup `path`, with these control files there."""
    folder = f"sys/fs/cgroup{path.rstrip('/')}"
    return {
        "proc/self/cgroup": f"0::{path}\n",
        "proc/self/mountinfo": V2_MOUNT,
        **{f"{folder}/{name.replace('__', '.')}": text for name, text in files.items()},
    }


def test_cores_decide_where_memory_is_plenty(machine):
    limit = job_limit(None, 400, root=machine(64), cores=8)
    assert (limit.jobs, limit.reason) == (8, "8 cores")


def test_32_cores_and_32_gib_stay_within_80_percent(machine):
    limit = job_limit(None, 1024, root=machine(32), cores=32)
    assert limit.jobs == 25
    assert "32768 MiB of memory" in limit.reason


def test_max_jobs_replaces_the_cores_but_not_the_memory(machine):
    root = machine(4)
    assert job_limit(3, 400, root=root, cores=8).jobs == 3
    assert job_limit(64, 400, root=root, cores=8).jobs == 8  # 80 % of 4 GiB
    assert job_limit(64, 100, root=root, cores=8).jobs == 32


def test_one_job_at_least(machine):
    assert job_limit(None, 4000, root=machine(0.1), cores=8).jobs == 1


def test_cgroup_v2_of_8_gib_and_2_cpus_on_a_96_core_host(machine):
    files = v2("/docker/abc", cpu__max="200000 100000\n", memory__max=f"{8 * GIB}\n", memory__current=f"{GIB}\n")
    root = machine(500, files)
    assert cpu_quota(root) == 2
    assert available_memory(root) == 7 * GIB
    assert job_limit(None, 400, root=root, cores=96).jobs == 2
    assert job_limit(96, 400, root=root, cores=96).jobs == 14


def test_cgroup_v2_in_its_own_namespace(machine):
    root = machine(500, v2("/", cpu__max="150000 100000", memory__max=str(4 * GIB), memory__current="0"))
    assert cpu_quota(root) == 1.5
    assert job_limit(None, 400, root=root, cores=96).jobs == 1
    assert available_memory(root) == 4 * GIB


def test_cgroup_v2_limit_of_a_parent_counts(machine):
    files = v2("/user/job", cpu__max="max 100000", memory__max="max", memory__current="0")
    files |= {"sys/fs/cgroup/user/memory.max": str(2 * GIB), "sys/fs/cgroup/user/cpu.max": "300000 100000"}
    root = machine(500, files)
    assert available_memory(root) == 2 * GIB
    assert cpu_quota(root) == 3


def test_cgroup_v2_high_limit_counts_and_file_cache_does_not(machine):
    files = v2(
        "/job", memory__max="max", memory__high=str(4 * GIB), memory__current=str(3 * GIB),
        memory__stat=f"anon 1\ninactive_file {2 * GIB}\n",
    )  # fmt: skip
    assert available_memory(machine(500, files)) == 3 * GIB


def test_cgroup_v2_without_limits(machine):
    root = machine(16, v2("/job", cpu__max="max 100000", memory__max="max", memory__current="5"))
    assert cpu_quota(root) is None
    assert available_memory(root) == 16 * GIB


def v1(path: str, folder: str) -> dict[str, str]:
    base = "sys/fs/cgroup"
    return {
        "proc/self/cgroup": f"4:memory:{path}\n3:cpu,cpuacct:{path}\n1:name=systemd:/x\n0::/\n",
        "proc/self/mountinfo": V1_MOUNTS,
        f"{base}/cpu,cpuacct{folder}/cpu.cfs_quota_us": "200000\n",
        f"{base}/cpu,cpuacct{folder}/cpu.cfs_period_us": "100000\n",
        f"{base}/memory{folder}/memory.limit_in_bytes": f"{8 * GIB}\n",
        f"{base}/memory{folder}/memory.usage_in_bytes": f"{2 * GIB}\n",
        f"{base}/memory{folder}/memory.stat": f"cache 0\ntotal_inactive_file {GIB}\n",
    }


@pytest.mark.parametrize(("path", "folder"), [("/docker/abc", "/docker/abc"), ("/docker/abc", ""), ("/", "")])
def test_cgroup_v1_seen_from_the_host_and_from_inside(machine, path, folder):
    root = machine(500, v1(path, folder))
    assert cpu_quota(root) == 2
    assert available_memory(root) == 7 * GIB


def test_cgroup_v1_mounted_from_a_part_of_the_hierarchy(machine):
    files = v1("/docker/abc/job", "/job")
    files["proc/self/mountinfo"] = V1_MOUNTS.replace(":27 / ", ":27 /docker/abc ").replace(":28 / ", ":28 /docker/abc ")
    root = machine(500, files)
    assert cpu_quota(root) == 2
    assert available_memory(root) == 7 * GIB


def test_cgroup_v1_without_limits(machine):
    files = v1("/", "")
    files["sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us"] = "-1\n"
    files["sys/fs/cgroup/memory/memory.limit_in_bytes"] = "9223372036854771712\n"
    root = machine(16, files)
    assert cpu_quota(root) is None
    assert available_memory(root) == 16 * GIB


@pytest.mark.parametrize("damage", ["", "x", "0::", "12:cpu", "4:memory:/../..\n", "0::/\n0::/a\n"])
def test_strange_files_are_no_error(machine, damage):
    root = machine(16, {"proc/self/cgroup": damage, "proc/self/mountinfo": f"{damage}\n- -\n{V2_MOUNT}"})
    assert job_limit(None, 400, root=root, cores=4).jobs == 4


def test_no_proc_at_all(tmp_path):
    assert job_limit(None, 400, root=tmp_path, cores=4).jobs == 4


def test_this_machine_has_an_answer():
    limit = job_limit(None, 400)
    assert limit.jobs >= 1
    assert limit.reason
