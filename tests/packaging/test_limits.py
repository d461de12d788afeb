"""The number of jobs inside of real limits: a cgroup made here, and a container of podman (field cases 18 and 19)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging_support import ROOT, clean_environ

MIB, GIB = 1 << 20, 1 << 30
TOP = Path("/sys/fs/cgroup")
CHOOSER = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from buildtools.jobs import available_memory, cpu_quota, job_limit
few, many = job_limit(None, 400, cores=96), job_limit(96, 400, cores=96)
print(json.dumps([cpu_quota(Path("/")), available_memory(Path("/")), few.jobs, few.reason, many.jobs, many.reason]))
"""


@dataclass
class Cgroup:
    """A cgroup made for a test: its folder in each hierarchy that limits something, one for v2 and two for v1."""

    folders: tuple[Path, ...]

    def put_before(self, inside: str = "") -> list[str]:
        """What to put before a command so that it runs in the cgroup, or in the one called `inside` in it."""
        for folder in self.folders:
            (folder / inside).mkdir(exist_ok=True)
        joined = "".join(f'echo $$ > "{folder / inside}/cgroup.procs"; ' for folder in self.folders)
        return ["sh", "-ec", f'{joined} exec "$@"', "sh"]

    def peak(self) -> int:
        """The most memory that was ever used, in bytes."""
        names = ("memory.peak", "memory.max_usage_in_bytes")
        (path,) = [folder / name for folder in self.folders for name in names if (folder / name).exists()]
        return int(path.read_text())

    def was_killed(self) -> bool:
        texts = [folder / name for folder in self.folders for name in ("memory.events", "memory.oom_control")]
        lines = [line for path in texts if path.exists() for line in path.read_text().splitlines()]
        return any(line.split()[0] == "oom_kill" and line.split()[1] != "0" for line in lines)


def make_cgroup(name: str, memory: int, cpus: float) -> Cgroup:
    """OSError, with what is missing, where this machine does not allow it."""
    if os.geteuid() != 0:
        raise OSError("making a cgroup needs root")
    quota = int(cpus * 100_000)
    if (TOP / "cgroup.controllers").is_file():
        there = (TOP / "cgroup.subtree_control").read_text().split()
        if not {"memory", "cpu"} <= set(there):
            raise OSError(f"{TOP}/cgroup.subtree_control gives {there}, and memory and cpu are needed")
        settings = [(TOP / name, {"memory.max": memory, "cpu.max": f"{quota} 100000"})]
    else:
        settings = [
            (TOP / "memory" / name, {"memory.limit_in_bytes": memory}),
            (TOP / "cpu" / name, {"cpu.cfs_period_us": 100_000, "cpu.cfs_quota_us": quota}),
        ]
    for folder, values in settings:
        folder.mkdir()
        for file, value in values.items():
            (folder / file).write_text(f"{value}")
    return Cgroup(tuple(folder for folder, _ in settings))


def remove(cgroup: Cgroup) -> None:
    for folder in cgroup.folders:
        for inner in (*(path for path in folder.iterdir() if path.is_dir()), folder):
            for _ in range(100):  # the kernel takes a moment after the last process has ended
                try:
                    inner.rmdir()
                    break
                except OSError:
                    time.sleep(0.05)


@pytest.fixture
def cgroup() -> Iterator[Cgroup]:
    """A cgroup of 2 GiB and 2 cores."""
    try:
        made = make_cgroup(f"flash-attn-test-{os.getpid()}", 2 * GIB, 2)
    except OSError as error:
        pytest.skip(f"no cgroup can be made on this machine: {error}; the tests with podman limit a container instead")
    yield made
    remove(made)


def ask(before: Sequence[str], root: Path = ROOT) -> tuple[float, int, int, str, int, str]:
    """What the chooser says after `before`: quota, memory, and jobs with reason without MAX_JOBS and with 96."""
    command = [*before, sys.executable, "-c", CHOOSER, str(root)]
    result = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    quota, memory, few, why_few, many, why_many = json.loads(result.stdout)
    return quota, memory, few, why_few, many, why_many


@pytest.mark.parametrize("inside", ["", "nested"])
def test_jobs_in_a_cgroup_of_2_gib_and_2_cores_of_96(cgroup: Cgroup, inside: str) -> None:
    quota, memory, few, why_few, many, why_many = ask(cgroup.put_before(inside))
    assert quota == 2
    assert 1.8 * GIB < memory <= 2 * GIB
    assert (few, why_few) == (2, "the cgroup's 2 cores")
    assert many in (3, 4)  # 80 % of 2 GiB are 4 of 400 MiB, less what this process takes
    assert "80% of it used, 400 MiB a job" in why_many


def test_what_others_use_of_the_limit_is_not_there(cgroup: Cgroup) -> None:
    """Another process in the same cgroup holds 1 GiB."""
    code = "import sys; data = b'x' * (1 << 30); print('there', flush=True); sys.stdin.read()"
    command = [*cgroup.put_before(), sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "there\n"
        _, memory, _, _, many, _ = ask(cgroup.put_before())
        other.communicate("")
    assert 0.75 * GIB < memory < 1.05 * GIB
    assert many in (1, 2)


@pytest.mark.slow
def test_a_build_stays_below_80_percent_of_a_cgroup(cgroup: Cgroup, tmp_path: Path) -> None:
    """Field case 18: the first build goes by the estimate, the next one by what it measured; nothing is killed."""
    limit = GIB
    (memory,) = [folder for folder in cgroup.folders for name in ("memory.max", "memory.limit_in_bytes")
                 if (folder / name).exists()]  # fmt: skip
    (memory / ("memory.max" if (memory / "memory.max").exists() else "memory.limit_in_bytes")).write_text(str(limit))
    more = {"FLASH_ATTN_BUILD_DIR": str(tmp_path / "build"), "FLASH_ATTN_CUDA_ARCHS": "80;90", "MAX_JOBS": "64"}
    environ = clean_environ(keep_index=True) | more | {"FLASH_ATTN_KERNELS": "fwd-*-d64-*"}
    jobs = []
    for _ in range(2):
        command = [*cgroup.put_before(), sys.executable, "-m", "buildtools", "build"]
        result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, encoding="utf-8", timeout=600)
        assert result.returncode == 0, result.stderr
        said = result.stderr.partition(" at once (")[0].rpartition(" ")[2]
        jobs.append(int(said))
        for image in (tmp_path / "build/kernels").glob("*.image"):
            image.unlink()
    assert jobs[0] in (1, 2)  # 400 MiB each
    assert jobs[1] > jobs[0]
    assert cgroup.peak() <= 0.8 * limit
    assert not cgroup.was_killed()


@pytest.mark.slow
def test_jobs_in_a_container_of_2_gib_and_1_core(tmp_path: Path) -> None:
    """Field case 19. The container's files are those of this machine, so that no image has to be fetched."""
    podman = shutil.which("podman")
    if podman is None:
        pytest.skip("podman is not installed; the tests with a cgroup limit the same without a container")
    command = [podman, "run", "--rm", "--memory=2g", "--cpus=1", "--network=none", "--rootfs", "/:O"]
    probe = subprocess.run([*command, "true"], capture_output=True, text=True, timeout=300, check=False)
    if probe.returncode != 0:
        pytest.skip(f"podman cannot start a container here: {probe.stderr.strip().splitlines()[-1:]}")
    quota, memory, few, why_few, many, _ = ask(command)
    assert quota == 1
    assert 1.8 * GIB < memory <= 2 * GIB
    assert (few, why_few) == (1, "the cgroup's 1 core")
    assert many in (3, 4)
