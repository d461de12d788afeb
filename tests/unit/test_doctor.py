"""What `python -m flash_attn doctor` reads, concludes and prints."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from buildtools import archive, errors
from flash_attn import doctor
from flash_attn._driver import DriverFacts, Gpu, read_driver

ROOT = Path(__file__).resolve().parents[2]
GPU = Gpu(0, "NVIDIA H200", (9, 0), 141 * 2**30)
BUILD_INFO = {
    "version": "2.9.0",
    "cuda_build": True,
    "host": {"kind": "stable", "torch": ">=2.10", "platform": "manylinux_2_28_x86_64", "compiler": "g++ 12.2.0"},
    "kernel_set": {"compiler": "nvrtc 12.9.86", "sha256": "ab12"},
}
HEALTHY = doctor.Facts(
    version="2.9.0",
    package="/site-packages/flash_attn",
    python="3.12.3",
    machine="linux x86_64",
    glibc=(2, 39),
    torch=doctor.TorchFacts("2.13.0+cu130", "13.0", None, True),
    driver=DriverFacts("580.159.04", (13, 0), (GPU,)),
    build_info=BUILD_INFO,
    library_problem=None,
    library_version="2.9.0",
    kernel_set=doctor.KernelSetFacts(
        "nvrtc 12.9.86", ("80", "90", "ptx80"), ("fwd-sm80-bf16-d64-full",), 3, 99, "ab12"
    ),
    gpu_answers=((True, "its capability is served"),),
)


def changed(facts=HEALTHY, **changes):
    return dataclasses.replace(facts, **changes)


def test_a_healthy_installation():
    assert doctor.diagnose(HEALTHY) == ([], [])
    text = doctor.render(HEALTHY, [], [])
    for fact in ("2.9.0", "2.13.0+cu130", "CUDA 13.0", "580.159.04", "NVIDIA H200", "9.0", "nvrtc 12.9.86", "ptx80"):
        assert fact in text
    assert "fwd-sm80-bf16-d64-full" in text
    assert text.endswith("nothing clashes")


NO_GPU = changed(driver=DriverFacts(problem="no NVIDIA driver: not found"), gpu_answers=())
WITHOUT_CUDA = {"version": "2.9.0", "cuda_build": False, "host": None, "kernel_set": None}

CLASHES = {
    "source tree": (changed(build_info=None), "build_info.json is missing"),
    "skipped cuda on a gpu": (changed(build_info=WITHOUT_CUDA), "SKIP_CUDA_BUILD"),
    "library": (changed(library_problem="built for torch ==2.6.*, found torch 2.13.0"), "found torch 2.13.0"),
    "mixed versions": (changed(library_version="2.8.0"), "host library is of flash_attn 2.8.0"),
    "old glibc": (changed(glibc=(2, 17)), "needs glibc 2.28 or newer, found 2.17"),
    "no glibc": (changed(glibc=None), "found none"),
    "other machine": (changed(machine="linux aarch64"), "this machine is linux aarch64"),
    "archive": (changed(kernel_set=doctor.KernelSetFacts(problem="it is cut off")), "it is cut off"),
    "archive of another build": (
        changed(kernel_set=dataclasses.replace(HEALTHY.kernel_set, sha256="cd34")),
        "sha256 is cd34, build_info.json says ab12",
    ),
    "cpu torch on a gpu": (changed(torch=doctor.TorchFacts("2.13.0+cpu", None, None, True)), "without CUDA"),
    "rocm torch": (changed(torch=doctor.TorchFacts("2.13.0", None, "6.4", True)), "ROCm"),
    "old driver": (changed(driver=DriverFacts("470.1", (11, 4), (GPU,))), "serves CUDA 11.4"),
    "broken driver": (
        changed(
            driver=DriverFacts("580.1", (13, 0), problem="the NVIDIA driver does not start: X (999)", broken=True),
            gpu_answers=(),
        ),
        "does not start",
    ),
    "gpu without kernels": (
        changed(gpu_answers=((False, "compute capability 7.5, built for 80, 90"),)),
        "GPU 0 (NVIDIA H200) cannot be used: compute capability 7.5",
    ),
}


@pytest.mark.parametrize("name", CLASHES)
def test_each_clash_is_found_alone(name):
    facts, text = CLASHES[name]
    clashes, notes = doctor.diagnose(facts)
    assert len(clashes) == 1, clashes
    assert text in clashes[0]
    assert f"CLASH         {clashes[0]}" in doctor.render(facts, clashes, notes).splitlines()


NOTES = {
    "no gpu": (NO_GPU, "no NVIDIA driver"),
    "skipped cuda, no gpu": (changed(NO_GPU, build_info=WITHOUT_CUDA), "SKIP_CUDA_BUILD"),
    "old driver for the ptx": (changed(driver=DriverFacts("535.1", (12, 2), (GPU,))), "driver for CUDA 12.9"),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_is_no_clash_is_a_note(name):
    facts, text = NOTES[name]
    clashes, notes = doctor.diagnose(facts)
    assert clashes == []
    assert any(text in note for note in notes)


def test_a_cpu_torch_without_a_gpu_is_no_clash():
    facts = changed(NO_GPU, torch=doctor.TorchFacts("2.13.0+cpu", None, None, True))
    assert doctor.diagnose(facts)[0] == []


@pytest.fixture
def installed_reader(monkeypatch):
    """What the wheel has as flash_attn._buildtools."""
    monkeypatch.setitem(sys.modules, "flash_attn._buildtools.archive", archive)
    monkeypatch.setitem(sys.modules, "flash_attn._buildtools.errors", errors)


def test_reads_the_kernel_set(tmp_path, installed_reader):
    path = tmp_path / "flash_attn.kernels"
    records = [archive.Record("fwd-sm80-bf16-d64-full", arch, 64, 128, 128, 128, 49152, 200) for arch in ("80", "90")]
    path.write_bytes(archive.pack("nvrtc 12.9.86", [(record, b"cubin") for record in records]))
    facts = doctor.read_kernel_set(path)
    assert (facts.compiler, facts.archs, facts.kernels) == ("nvrtc 12.9.86", ("80", "90"), 2)
    assert facts.keys == ("fwd-sm80-bf16-d64-full",)
    assert facts.problem is None
    assert facts.sha256 is not None

    path.write_bytes(path.read_bytes()[:200])
    assert "cut off" in doctor.read_kernel_set(path).problem
    path.write_bytes(b"")
    assert "not a kernel set" in doctor.read_kernel_set(path).problem
    path.unlink()
    assert "missing" in doctor.read_kernel_set(path).problem


def test_reading_the_driver_never_raises():
    facts = read_driver()
    assert (facts.problem is None) == bool(facts.gpus)


def run_doctor(*arguments):
    command = [sys.executable, "-m", "flash_attn", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_on_the_source_tree():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert done.returncode == (1 if report["clashes"] else 0)
    assert report["version"] == "2.9.0"
    if report["build_info"] is None:
        assert done.returncode == 1
        assert "source tree" in report["clashes"][0]
    text = run_doctor()
    assert text.returncode == done.returncode
    assert report["torch"]["version"] in text.stdout
    assert report["clashes"] == [] or report["clashes"][0] in text.stdout


def test_an_unknown_command_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn", "nurse"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nurse" in done.stderr
