"""The number of jobs on machines and in containers of every kind, laid out as files."""

from __future__ import annotations

import json

import pytest

from buildtools.jobs import available_memory, cpu_quota, expected_peaks, job_limit, kernel_kind

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


# --- more hierarchies ----------------------------------------------------------------------------------------------


def test_cgroup_v2_nested_five_deep_the_tightest_limit_of_each_kind_counts(machine):
    """Kubernetes: slice, pod, container, and what the container starts, each with limits of its own."""
    files = v2("/kubepods/pod/container/job/step", cpu__max="max 100000", memory__max="max", memory__current=str(GIB))
    base = "sys/fs/cgroup/kubepods"
    files |= {
        f"{base}/memory.max": str(64 * GIB), f"{base}/memory.current": str(40 * GIB), f"{base}/cpu.max": "80000 10000",
        f"{base}/pod/memory.max": str(16 * GIB), f"{base}/pod/memory.current": str(13 * GIB),
        f"{base}/pod/container/memory.max": str(8 * GIB), f"{base}/pod/container/memory.current": str(2 * GIB),
        f"{base}/pod/container/cpu.max": "150000 50000", f"{base}/pod/container/job/cpu.max": "400000 100000",
    }  # fmt: skip
    root = machine(500, files)
    assert available_memory(root) == 3 * GIB  # of the pod, which others use too
    assert cpu_quota(root) == 3


@pytest.mark.parametrize(
    "sentinel", ["max", "9223372036854771712", "9223372036854710272", "18446744073709551615", "-1"]
)
def test_no_limit_is_written_in_many_ways(machine, sentinel):
    files = v2("/job", cpu__max="max 100000", memory__max=sentinel, memory__high=sentinel, memory__current="5")
    folder = "sys/fs/cgroup/job"
    files |= {f"{folder}/memory.limit_in_bytes": sentinel, f"{folder}/memory.usage_in_bytes": "5"}
    assert available_memory(machine(16, files)) == 16 * GIB


def test_a_limit_above_the_memory_of_the_machine_is_none(machine):
    root = machine(16, v2("/job", memory__max=str(100 * GIB), memory__current="0"))
    assert available_memory(root) == 16 * GIB


def test_cgroup_v1_tells_of_the_parents_that_a_container_does_not_see(machine):
    files = v1("/", "")
    base = "sys/fs/cgroup/memory"
    files[f"{base}/memory.limit_in_bytes"] = "9223372036854771712\n"
    files[f"{base}/memory.stat"] = f"total_inactive_file {GIB}\nhierarchical_memory_limit {6 * GIB}\n"
    assert available_memory(machine(500, files)) == 5 * GIB


def test_cgroup_v1_parents_that_are_seen_count(machine):
    files = v1("/a/b", "/a")
    files["sys/fs/cgroup/memory/a/b/memory.limit_in_bytes"] = f"{100 * GIB}\n"
    files["sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us"] = "-1\n"
    root = machine(500, files)
    assert available_memory(root) == 7 * GIB
    assert cpu_quota(root) == 2


def test_hybrid_memory_in_v1_and_cpu_in_v2(machine):
    files = v1("/job", "/job")
    files["proc/self/cgroup"] = "4:memory:/job\n0::/job\n"
    files["proc/self/mountinfo"] = V1_MOUNTS.splitlines(keepends=True)[1] + V2_MOUNT.replace(
        "cgroup rw", "cgroup/unified rw", 1
    )
    files["sys/fs/cgroup/unified/job/cpu.max"] = "500000 100000\n"
    root = machine(500, files)
    assert available_memory(root) == 7 * GIB
    assert cpu_quota(root) == 5


def test_a_mount_of_another_cgroup_whose_name_begins_the_same_is_not_ours(machine):
    files = v1("/docker/abcdef", "/docker/abcdef")
    mounts = V1_MOUNTS.replace(":28 / ", ":28 /docker/abc ").replace("cgroup/memory rw", "cgroup/other rw")
    files["proc/self/mountinfo"] = mounts + V1_MOUNTS
    files["sys/fs/cgroup/other/def/memory.limit_in_bytes"] = f"{GIB}\n"
    assert available_memory(machine(500, files)) == 7 * GIB


@pytest.mark.parametrize("cpus", ["50000 100000", "100000 100000", "1 100000"])
def test_less_than_a_core_is_one_job(machine, cpus):
    assert job_limit(None, 400, root=machine(16, v2("/job", cpu__max=cpus)), cores=96).jobs == 1


def test_nothing_left_of_a_limit_is_one_job(machine):
    root = machine(16, v2("/job", memory__max=str(GIB), memory__current=str(2 * GIB)))
    assert available_memory(root) == 0
    assert job_limit(8, 400, root=root, cores=8).jobs == 1


# --- measured peaks --------------------------------------------------------------------------------------------------


def test_the_largest_kernels_are_those_that_run_at_once(machine):
    root = machine(1)  # 819 MiB to use
    assert job_limit(None, [100.0] * 50, root=root, cores=32).jobs == 8
    limit = job_limit(None, [100.0] * 50 + [400.0, 300.0], root=root, cores=32)
    assert limit.jobs == 3
    assert "up to 400 MiB a job" in limit.reason
    assert job_limit(None, [100.0] * 3, root=root, cores=32).jobs == 32  # all of them fit
    assert job_limit(None, [2000.0], root=root, cores=32).jobs == 32  # one job is never less than one
    assert job_limit(2, [100.0] * 50, root=root, cores=32).reason == "MAX_JOBS=2"


def test_a_kind_is_what_decides_the_memory():
    assert (
        kernel_kind("fwd-sm80-bf16-d128-causal.90") == kernel_kind("fwd-sm80-fp16-d128-full.ptx80") == "fwd-sm80-d128"
    )
    assert kernel_kind("bwd-sm80-bf16-d128-full.90a") == "bwd-sm80-d128"


def test_peaks_are_those_of_the_last_build(tmp_path):
    path = tmp_path / "resources.json"
    names = ["fwd-sm80-bf16-d64-full.80", "fwd-sm80-fp16-d64-causal.90", "bwd-sm80-bf16-d64-full.80"]
    assert expected_peaks(path, "nvrtc 12.9.86", names, 400) == [400] * 3
    last = {"fwd-sm80-bf16-d64-full.80": {"peak_mib": 80.0}, "fwd-sm80-bf16-d64-full.90": {"peak_mib": 120.5}}
    path.write_text(json.dumps({"compiler": "nvrtc 12.9.86", "kernels": last}))
    assert expected_peaks(path, "nvrtc 12.9.86", names, 400) == [120.5, 120.5, 400]
    assert expected_peaks(path, "nvrtc 13.0.88", names, 400) == [400] * 3


DAMAGED = [
    "",
    "{",
    "[]",
    "null",
    "{}",
    *(f'{{"compiler": "c", "kernels": {text}}}' for text in ("[1]", '{"a": {}}', "{")),
]


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_report_of_the_last_build_is_no_error(tmp_path, text):
    path = tmp_path / "resources.json"
    path.write_text(text)
    assert expected_peaks(path, "c", ["fwd-sm80-bf16-d64-full.80"], 400) == [400]
