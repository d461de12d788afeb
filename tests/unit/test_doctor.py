"""What `python -m flash_attn doctor` reads, concludes and prints."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from buildtools import archive, errors
from flash_attn import _driver, doctor
from flash_attn._driver import DriverFacts, Gpu, read_driver

ROOT = Path(__file__).resolve().parents[2]
GPU = Gpu(0, "NVIDIA H200", (9, 0), 141 * 2**30)
BUILD_INFO = {
    "version": "2.9.0",
    "cuda_build": True,
    "host": {"kind": "stable", "torch": ">=2.10", "platform": "manylinux_2_28_x86_64", "compiler": "g++ 12.2.0"},
    "kernel_set": {"compiler": "nvrtc 12.9.86", "sha256": "ab12"},
}
PACKAGE = "/site-packages/flash_attn"
USED = doctor.Install("package", PACKAGE, "2.9.0")
RECORD = doctor.Install("record", "/site-packages", "2.9.0")
HEALTHY = doctor.Facts(
    version="2.9.0",
    package=PACKAGE,
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
    gpu_archs=(("90", "ptx80"),),
    jit=doctor.JitFacts(None, "12.9.86", "/nvrtc/libnvrtc.so.12", "the Python environment", "/cache", None, 2, 3000000),
    installs=(USED, RECORD),
)


def changed(facts=HEALTHY, **changes):
    return dataclasses.replace(facts, **changes)


def test_a_healthy_installation():
    assert doctor.diagnose(HEALTHY) == ([], [])
    text = doctor.render(HEALTHY, [], [])
    for fact in (
        "2.9.0", "2.13.0+cu130", "CUDA 13.0", "580.159.04", "NVIDIA H200", "9.0", "nvrtc 12.9.86", "ptx80",
        "runs the wheel's 90, ptx80", "12.9.86, /nvrtc/libnvrtc.so.12", "/cache: can be written, 2 kernels, 3.0 MB",
    ):  # fmt: skip
        assert fact in text
    assert "fwd-sm80-bf16-d64-full" in text
    assert text.endswith("nothing clashes")


NO_GPU = changed(driver=DriverFacts(problem="no NVIDIA driver: not found"), gpu_answers=(), gpu_archs=())
WITHOUT_CUDA = {"version": "2.9.0", "cuda_build": False, "host": None, "kernel_set": None}

HIDDEN = doctor.Install("package", "/user/flash_attn", "2.8.3")
DRIVER_12 = DriverFacts("550.1", (12, 4), (GPU,))

CLASHES = {
    "source tree": (changed(build_info=None), "installation", "build_info.json is missing"),
    "skipped cuda on a gpu": (changed(build_info=WITHOUT_CUDA), "installation", "SKIP_CUDA_BUILD"),
    "library": (
        changed(library_problem="built for torch ==2.6.*, found torch 2.13.0"),
        "library",
        "found torch 2.13.0",
    ),
    "missing symbol": (
        changed(library_problem="it does not load", library_missing={"symbol": "aoti_torch_x"}),
        "library",
        "Missing: symbol aoti_torch_x.",
    ),
    "mixed versions": (changed(library_version="2.8.0"), "installation", "host library is of flash_attn 2.8.0"),
    "hidden copy": (
        changed(installs=(USED, HIDDEN, RECORD)),
        "installation",
        f"2 times on Python's path: {PACKAGE} (2.9.0) is imported and hides /user/flash_attn (2.8.3)",
    ),
    "two records": (
        changed(installs=(USED, RECORD, doctor.Install("record", "/user", "2.8.3"))),
        "installation",
        "pip has 2 records of flash-attn: 2.9.0 in /site-packages, 2.8.3 in /user",
    ),
    "a record of another version": (
        changed(installs=(USED, doctor.Install("record", "/site-packages", "2.8.3+cu12"))),
        "installation",
        "pip has flash-attn 2.8.3+cu12 in /site-packages, the Python files are of 2.9.0",
    ),
    "old glibc": (changed(glibc=(2, 17)), "platform", "needs glibc 2.28 or newer, found 2.17"),
    "no glibc": (changed(glibc=None), "platform", "found none"),
    "other machine": (changed(machine="linux aarch64"), "platform", "this machine is linux aarch64"),
    "archive": (changed(kernel_set=doctor.KernelSetFacts(problem="it is cut off")), "kernels", "it is cut off"),
    "archive of another build": (
        changed(kernel_set=dataclasses.replace(HEALTHY.kernel_set, sha256="cd34")),
        "kernels",
        "sha256 is cd34, build_info.json says ab12",
    ),
    "no torch": (
        changed(
            torch=doctor.TorchFacts(None, None, None, None, "torch is not installed"),
            library_problem="the host library was not loaded: torch is not installed.",
            library_version=None,
        ),
        "torch",
        'torch is not installed, and flash_attn is for PyTorch. Install it: pip install "torch>=2.10".',
    ),
    "broken torch": (
        changed(
            torch=doctor.TorchFacts("2.13.0", None, None, None, "importing torch fails: libc10.so: no such file"),
            library_problem="the host library was not loaded.",
        ),
        "torch",
        "libc10.so",
    ),
    "cpu torch on a gpu": (changed(torch=doctor.TorchFacts("2.13.0+cpu", None, None, True)), "torch", "without CUDA"),
    "rocm torch": (changed(torch=doctor.TorchFacts("2.13.0", None, "6.4", True)), "torch", "ROCm"),
    "old driver": (
        changed(driver=DriverFacts("470.1", (11, 4), (GPU,)), torch=doctor.TorchFacts("2.10.0", "11.8", None, True)),
        "driver",
        "the NVIDIA driver 470.1 serves CUDA 11.4, and the kernels were compiled for CUDA 12: update the driver to "
        "525.60.13 or newer.",
    ),
    "a driver older than torch": (
        changed(driver=DRIVER_12),
        "driver",
        "torch 2.13.0+cu130 was built for CUDA 13.0, and the NVIDIA driver 550.1 serves CUDA 12.4: update the driver "
        "to 580.65.06 or newer, or install a torch for CUDA 12.",
    ),
    "broken driver": (
        changed(
            driver=DriverFacts("580.1", (13, 0), problem="the NVIDIA driver does not start: X (999)", broken=True),
            gpu_answers=(),
            gpu_archs=(),
        ),
        "driver",
        "does not start",
    ),
    "gpu without kernels": (
        changed(gpu_answers=((False, "compute capability 7.5, built for 80, 90"),), gpu_archs=((),)),
        "gpu",
        "GPU 0 (NVIDIA H200) cannot be used: compute capability 7.5",
    ),
}


@pytest.mark.parametrize("name", CLASHES)
def test_each_clash_is_found_alone(name):
    facts, kind, text = CLASHES[name]
    clashes, notes = doctor.diagnose(facts)
    assert len(clashes) == 1, clashes
    assert clashes[0].kind == kind
    assert text in clashes[0].text
    assert f"CLASH         [{kind}] {clashes[0].text}" in doctor.render(facts, clashes, notes).splitlines()
    assert doctor.exit_code(clashes) == doctor.EXIT_CODES[kind]


def test_the_exit_code_is_that_of_the_first_cause():
    assert doctor.exit_code([]) == 0
    facts = changed(glibc=(2, 17), library_problem="it does not load", kernel_set=doctor.KernelSetFacts(problem="cut"))
    clashes, _ = doctor.diagnose(facts)
    assert [clash.kind for clash in clashes] == ["platform", "library", "kernels"]
    assert doctor.exit_code(clashes) == doctor.EXIT_CODES["platform"]
    assert sorted(doctor.EXIT_CODES.values()) == list(doctor.EXIT_CODES.values())
    assert not {0, 1, 2} & set(doctor.EXIT_CODES.values())  # well, a traceback, wrong usage


NOTES = {
    "no gpu": (NO_GPU, "no NVIDIA driver"),
    "skipped cuda, no gpu": (changed(NO_GPU, build_info=WITHOUT_CUDA), "SKIP_CUDA_BUILD"),
    "old driver for the ptx": (
        changed(driver=DriverFacts("535.1", (12, 2), (GPU,)), torch=doctor.TorchFacts("2.10.0", "12.8", None, True)),
        "driver for CUDA 12.9",
    ),
    "no compiler": (changed(jit=doctor.JitFacts("no usable NVRTC library.")), "first use: no usable NVRTC library."),
    "a cache that cannot be written": (
        changed(jit=dataclasses.replace(HEALTHY.jit, cache_problem="/cache cannot be written: no permission")),
        "compiled again by each process: /cache cannot be written",
    ),
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


def test_a_driver_without_a_function(tmp_path, monkeypatch):
    class Old:
        def __getattr__(self, name):
            raise AttributeError(f"libcuda.so.1: undefined symbol: {name}")

    monkeypatch.setattr(_driver.ctypes, "CDLL", lambda name: Old())
    facts = read_driver()
    assert facts.broken
    assert "undefined symbol: cu" in facts.problem


def run_doctor(*arguments):
    command = [sys.executable, "-m", "flash_attn", "doctor", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


# The JSON object is for other programs: a change here is a change of doctor.SCHEMA.
KEYS = {
    "schema", "exit_code", "version", "package", "python", "machine", "glibc", "torch", "driver", "build_info",
    "library_problem", "library_version", "library_missing", "kernel_set", "gpu_answers", "gpu_archs", "jit",
    "installs", "clashes", "notes",
}  # fmt: skip
KEYS_OF = {
    "torch": {"version", "cuda", "hip", "cxx11_abi", "problem"},
    "driver": {"version", "cuda", "gpus", "problem", "broken"},
    "kernel_set": {"compiler", "archs", "keys", "kernels", "size_bytes", "sha256", "problem"},
    "jit": {
        "problem", "nvrtc", "nvrtc_path", "nvrtc_where", "cache_folder", "cache_problem", "cache_entries",
        "cache_bytes",
    },
}  # fmt: skip


def test_the_command_on_the_source_tree():
    done = run_doctor("--json")
    report = json.loads(done.stdout)
    assert (report["schema"], set(report)) == (1, KEYS)
    assert {name: set(report[name]) for name in KEYS_OF} == KEYS_OF
    assert (
        done.returncode
        == report["exit_code"]
        == doctor.exit_code([doctor.Clash(c["kind"], "") for c in report["clashes"]])
    )
    assert all(set(clash) == {"kind", "text", "exit_code"} for clash in report["clashes"])
    assert report["version"] == "2.9.0"
    if report["build_info"] is None:
        assert done.returncode == doctor.EXIT_CODES["installation"]
        assert any("source tree" in clash["text"] for clash in report["clashes"])
    text = run_doctor()
    assert text.returncode == done.returncode
    assert report["torch"]["version"] in text.stdout
    assert report["clashes"] == [] or report["clashes"][0]["text"] in text.stdout


# A Python without site-packages.
BARE = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
runpy.run_module("flash_attn", run_name="__main__", alter_sys=True)
"""


def test_the_command_without_torch():
    command = [sys.executable, "-I", "-S", "-c", BARE, str(ROOT), "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert report["torch"] == {
        "version": None, "cuda": None, "hip": None, "cxx11_abi": None, "problem": "torch is not installed",
    }  # fmt: skip
    torch_clash = next(clash for clash in report["clashes"] if clash["kind"] == "torch")
    assert torch_clash["text"].startswith("torch is not installed, and flash_attn is for PyTorch.")
    assert report["library_problem"] == "the host library was not loaded: torch is not installed."
    assert done.returncode == report["exit_code"]


def test_the_package_without_torch():
    """Importing is all that works; what is used says what is missing."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import flash_attn
print(flash_attn.__version__, hasattr(flash_attn, "__wrapped__"))
try:
    from flash_attn import flash_attn_func
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        "2.9.0 False",
        "flash_attn.flash_attn_func needs torch: torch is not installed. `python -m flash_attn doctor` says more.",
    ]


@pytest.mark.parametrize(
    ("message", "missing"),
    [
        ("/x/libflash_attn.so: undefined symbol: aoti_torch_new_thing", {"symbol": "aoti_torch_new_thing"}),
        ("libtorch.so: cannot open shared object file: No such file or directory", {"library": "libtorch.so"}),
        ("/lib/libc.so.6: version `GLIBC_2.99' not found (required by /x.so)", {"version": "GLIBC_2.99"}),
        ("undefined symbol: f, version GLIBCXX_3.4.32. Install another.", {"symbol": "f"}),
        ("built for torch 2.6; found torch 2.13", {}),
    ],
)
def test_what_the_loader_did_not_find(message, missing):
    assert doctor.missing_names(message) == missing


def test_copies_and_records_on_the_path(tmp_path):
    for name, version in (("first", "2.9.0"), ("second", "2.8.3")):
        (tmp_path / name / "flash_attn").mkdir(parents=True)
        (tmp_path / name / "flash_attn" / "__init__.py").write_text(f'__version__ = "{version}"\n')
        info = tmp_path / name / f"flash_attn-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flash_attn\nVersion: {version}\n")
    (tmp_path / "third" / "flash_attn").mkdir(parents=True)  # a namespace, hidden by any package
    path = [str(tmp_path / name) for name in ("first", "second", "third", "first")]
    found = doctor.read_installs(tmp_path / "first" / "flash_attn", path)
    assert [(item.kind, item.path, item.version) for item in found] == [
        ("package", f"{tmp_path}/first/flash_attn", "2.9.0"),
        ("package", f"{tmp_path}/second/flash_attn", "2.8.3"),
        ("record", f"{tmp_path}/first", "2.9.0"),
        ("record", f"{tmp_path}/second", "2.8.3"),
    ]


def test_reads_what_would_compile(tmp_path, monkeypatch):
    monkeypatch.setenv("FLASH_ATTN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("FLASH_ATTN_JIT", raising=False)
    found = doctor.read_jit(ROOT / "flash_attn", DriverFacts())
    assert (found.problem, found.cache_problem) == (None, None)
    assert found.nvrtc_path in Path("/proc/self/maps").read_text()
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("FLASH_ATTN_JIT", "0")
    assert "FLASH_ATTN_JIT=0 forbids it" in doctor.read_jit(ROOT / "flash_attn", DriverFacts()).problem
    monkeypatch.delenv("FLASH_ATTN_JIT")
    assert (
        "does not load: it serves CUDA 11.4" in doctor.read_jit(ROOT / "flash_attn", DriverFacts(cuda=(11, 4))).problem
    )
    assert "kernel sources are missing" in doctor.read_jit(tmp_path / "flash_attn", DriverFacts()).problem


def test_an_unknown_command_is_refused():
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn", "nurse"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "nurse" in done.stderr
