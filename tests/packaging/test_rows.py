"""Proof of every row of matrix.toml: its wheel in a real environment with a real torch, and what is inside the wheel.

`nox -s prove` runs it: torch with its CUDA libraries is installed for every row, some 5 GB each. Arguments choose
rows: `nox -s prove -- -k torch2.6`. FLASH_ATTN_PROVE_FOLDER names a folder in which the environments are kept and found
again; FLASH_ATTN_PROVE_HEAD_DIMS makes the kernel sets of some head dims alone, which is quicker.

The GPU is pretended, as in tests/unit/host: the library's CUDA operators run inside that torch, on a driver that
computes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from _pytest.mark.structures import ParameterSet
from packaging_support import ROOT, Environment, clean_environ

sys.path.insert(0, str(ROOT / "tests" / "unit"))
import host_support

from buildtools import archive, rows
from buildtools.build import build, load_tables
from buildtools.elf import read_needs
from buildtools.host import broken_promises
from buildtools.matrix import Wheel
from buildtools.metadata import load_project
from buildtools.variables import read_variables

# The fake GPU computes by torch's CPU, which in 2.4 cannot fill e4m3 (CUDA can): the cases that pad FP8 tensors.
NO_FILL = "\"fill_cpu\" not implemented for 'Float8_e4m3fn'"
PADDED_FP8 = {"case_fp8_head_dims", "case_fp8_failures_free_everything", "case_fp8_success_frees_everything"}

TABLE, MATRIX = load_tables(ROOT)
# What a wheel of the stable ABI is tried with, beside the oldest torch that it is for: the one that its declarations
# were compared with, and the newest.
STABLE_TORCHES = ("==2.13.*", "")
HERE = "x86_64"


@dataclass(frozen=True)
class Case:
    """A wheel and a torch that it is for; `torch` is the version specifier, empty for the newest."""

    wheel: Wheel
    torch: str

    @property
    def name(self) -> str:
        return f"{self.wheel.name}-on-{self.torch.strip('=.*') or 'newest'}"


def cases() -> list[Case]:
    found = []
    for wheel in MATRIX.wheels.values():
        row = wheel.host_library
        if row.machine != HERE:
            continue
        if row.per_torch is not None:
            found.append(Case(wheel, row.torch))
        elif wheel.kernel_set != MATRIX.default_kernel_set:
            found.append(Case(wheel, ""))  # its host library is the default wheel's, which is tried with all of them
        else:
            oldest = f"=={row.torch.removeprefix('>=')}.*"
            found += [Case(wheel, torch) for torch in (oldest, *STABLE_TORCHES)]
    return found


def marked_cases() -> list[ParameterSet]:
    return [pytest.param(case, id=case.name, marks=pytest.mark.prove) for case in cases()]


def test_every_row_of_this_machine_is_proved() -> None:
    """And adding a row adds its proof."""
    proved = {case.wheel.name for case in cases()}
    assert proved == {wheel.name for wheel in MATRIX.wheels.values() if wheel.host_library.machine == HERE}
    assert len(proved) >= 8


SUBSET = {"FLASH_ATTN_HEAD_DIMS": os.environ.get("FLASH_ATTN_PROVE_HEAD_DIMS", "")}


@functools.cache
def kernel_set(name: str = "") -> Path:
    """A kernel set, the default one if no name is given, compiled once for all rows by the compiler that it pins."""
    chosen = MATRIX.kernel_set(name) if name else MATRIX.default_kernel_set
    subprocess.run(
        [sys.executable, "-m", "buildtools", "compiler", "--kernel-set", chosen.name],
        cwd=ROOT, env=clean_environ(keep_index=True), check=True,
    )  # fmt: skip
    return build(ROOT, kernel_set=chosen.name, environ=clean_environ(**SUBSET), quiet=True).kernel_set


@dataclass(frozen=True)
class Proof:
    """An environment with the case's torch, and the wheels that are put into it, all of one kernel set."""

    case: Case
    environment: Environment
    folder: Path

    @property
    def torch_folder(self) -> Path:
        (found,) = self.environment.folder.glob("lib/python3*/site-packages/torch")
        return found

    @functools.cached_property
    def torch(self) -> tuple[str, bool]:
        """(version, C++ ABI) as the installed torch says."""
        code = "import json, torch; print(json.dumps([torch.__version__, torch.compiled_with_cxx11_abi()]))"
        result = self.environment.run("-c", code)
        assert result.returncode == 0, result.stdout
        version, abi = json.loads(result.stdout.splitlines()[-1])
        return version, abi

    def build(self, row: str, **variables: str) -> Path:
        """The wheel of a row. Headers come from the installed torch, where it is the row's."""
        torch = str(self.torch_folder) if row == self.case.wheel.name else ""
        environ = clean_environ(FLASH_ATTN_TORCH=torch, **SUBSET, **variables)
        output = self.folder / "-".join(["wheels", row, *variables.values()])
        kernels = kernel_set(MATRIX.wheels[row].kernel_set.name)
        return rows.build_row_wheel(row, output, kernel_set=kernels, folder=self.folder, environ=environ)

    @functools.cached_property
    def wheel(self) -> Path:
        return self.build(self.case.wheel.name)

    def install(self, wheel: Path, *options: str) -> None:
        self.environment.pip("install", "--quiet", "--force-reinstall", "--no-deps", *options, wheel)


def make_environment(folder: Path, torch: str) -> Environment:
    """A new environment with a torch and all that this requires, from pip's usual index."""
    pythons = [f"--python=3.{minor}" for minor in (12, 11, 10)]  # every torch of the matrix is for one of these
    command = [sys.executable, "-m", "virtualenv", "--quiet", "--no-download", *pythons, str(folder)]
    subprocess.run(command, check=True)
    environment = Environment(folder)
    environ = clean_environ(keep_index=True)
    command = ["-m", "pip", "install", "--quiet", "--no-cache-dir", f"torch{torch}", "numpy"]
    result = subprocess.run(
        [environment.python, *command], env=environ, capture_output=True, encoding="utf-8", check=False
    )
    assert result.returncode == 0, result.stderr
    return environment


@pytest.fixture(scope="module", params=marked_cases())
def proof(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proof]:
    case: Case = request.param
    kept = os.environ.get("FLASH_ATTN_PROVE_FOLDER")
    folder = tmp_path_factory.mktemp("row")
    place = Path(kept).absolute() / (case.torch.strip("=.*") or "newest") if kept else folder / "environment"
    if not (place / "bin" / "python").exists():
        make_environment(place, case.torch)
    yield Proof(case, Environment(place), folder)
    shutil.rmtree(folder)


# ---- In its torch ----


def test_pip_installs_it_beside_its_torch(proof: Proof) -> None:
    """Everything it requires is there: nothing is downloaded and the torch stays (field case 10); then it works."""
    before = proof.environment.version("torch")
    proof.environment.pip("install", "--quiet", "--no-index", "--force-reinstall", "--no-deps", proof.wheel)
    proof.environment.pip("install", "--quiet", "--no-index", proof.wheel)
    assert "flash" not in proof.environment.run("-m", "pip", "check").stdout
    assert proof.environment.version("torch") == before
    result = proof.environment.run(ROOT / "tests" / "packaging" / "first_use.py")
    assert result.returncode == 0, result.stdout
    assert f"torch {proof.torch[0]}" in result.stdout
    doctor = proof.environment.run("-m", "flash_attn", "doctor")
    assert doctor.returncode == 0, doctor.stdout
    assert "host library  loaded" in doctor.stdout


def test_its_cuda_operators_run_inside_its_torch(proof: Proof) -> None:
    """The wheel's library, called through this torch's dispatcher: values, gradients, errors, and nothing leaks."""
    place = proof.folder / "pretended"
    place.mkdir()
    with zipfile.ZipFile(proof.wheel) as wheel:
        (place / "libflash_attn.so").write_bytes(wheel.read("flash_attn/libflash_attn.so"))
    (place / "flash_attn.kernels").write_bytes(host_support.every_kernel())
    version, abi = proof.torch
    sources = [host_support.HELPERS / "fake_torch_gpu.cpp"]
    if tuple(map(int, version.split(".")[:2])) < (2, 7):
        sources.append(host_support.HELPERS / "fake_torch_gpu_before_2_7.cpp")
    options = ("-shared", "-ldl", f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}")
    preloaded = host_support.compile_cpp(sources, place / "libfake_torch_gpu.so", *options)
    environ = clean_environ(
        LD_PRELOAD=str(preloaded),
        LD_LIBRARY_PATH=str(host_support.fake_driver()),
        FAKE_CUDA_DEVICES=host_support.H200,
        FAKE_CUDA_COMPUTE="1",
        FAKE_CUDA_MULTIPROCESSORS="7",
    )
    script = host_support.HELPERS / "torch_cases.py"
    result = proof.environment.run(script, place / "libflash_attn.so", environ=environ)
    assert result.returncode == 0, result.stdout
    answers = json.loads(result.stdout.splitlines()[-1])
    assert len(answers) >= 90
    known = PADDED_FP8 if tuple(map(int, version.split(".")[:2])) < (2, 5) else set()
    assert {name: answer for name, answer in answers.items() if answer and name not in known} == {}
    assert all(NO_FILL in answers[name] for name in known)


@pytest.mark.parametrize("isolation", [True, False], ids=["isolated", "no-build-isolation"])
def test_pip_compiles_its_library_from_the_sdist(proof: Proof, sdist: Path, isolation: bool) -> None:
    """Beside its torch pip builds the library of this row, of that torch's headers and ABI; torch stays (case 10)."""
    row = proof.case.wheel.host_library
    before = proof.environment.version("torch")
    # The user's index, for ninja and, where torch brought none, NVRTC; the smallest build.
    environ = clean_environ(keep_index=True, FORCE_BUILD="1", FLASH_ATTN_CUDA_ARCHS="80", FLASH_ATTN_KERNELS="rotary-*")
    proof.environment.pip("uninstall", "--quiet", "--yes", "flash-attn")
    there = bool(list(proof.torch_folder.parent.glob("nvidia/*/lib/libnvrtc.so.*")))
    if not isolation:
        missing = [] if there else [MATRIX.default_kernel_set.pin]
        proof.environment.pip("install", "--quiet", MATRIX.tools.ninja, *missing, environ=environ)
    options = [] if isolation else ["--no-build-isolation"]
    log = proof.environment.pip("install", "-v", "--no-cache-dir", *options, sdist, environ=environ)
    place = "the build requirements" if isolation and not there else "the Python environment"
    assert re.search(rf"kernels with nvrtc [0-9.]+ of {place}, host library with", log), log
    assert proof.environment.version("torch") == before
    (folder,) = proof.torch_folder.parent.glob("flash_attn-*.dist-info")
    assert f"\nRequires-Dist: torch{row.torch}\n" in (folder / "METADATA").read_text()
    info = json.loads((proof.torch_folder.parent / "flash_attn" / "build_info.json").read_text())["host"]
    assert (info["kind"], info["torch"], info["cxx11_abi"]) == (row.abi, row.torch, row.cxx11_abi)
    result = proof.environment.run(ROOT / "tests" / "packaging" / "first_use.py")
    assert result.returncode == 0, result.stdout
    doctor = proof.environment.run("-m", "flash_attn", "doctor")
    assert "host library  loaded" in doctor.stdout, doctor.stdout
    proof.install(proof.wheel)


# ---- In another torch ----


def wrong_wheels(proof: Proof) -> list[tuple[Path, str]]:
    """Wheels that are not for this torch, with what their library says it was built for."""
    row = proof.case.wheel.host_library
    if row.per_torch is None:
        return [(proof.build("torch2.9-abi1"), "torch 2.9, C++ ABI 1")]
    other = replace(row, cxx11_abi=not row.cxx11_abi)
    other_abi = proof.build(proof.case.wheel.name, FORCE_CXX11_ABI=str(int(other.cxx11_abi)))
    assert other.label in other_abi.name
    built = f"torch {'.'.join(map(str, row.per_torch))}, C++ ABI {int(other.cxx11_abi)}"
    return [(proof.build("default"), "torch 2.10 or newer"), (other_abi, built)]


def test_another_rows_wheel_is_refused(proof: Proof) -> None:
    """By pip; and if forced in, by the first import with both sides named, before anything is loaded (field case 9)."""
    version, abi = proof.torch
    for wheel, built in wrong_wheels(proof):
        if f"torch{version[:3]}." not in wheel.name:  # pip knows versions, but no ABI
            proof.environment.pip("uninstall", "--quiet", "--yes", "flash-attn")
            text = proof.environment.pip("install", "--no-index", wheel, fails=True)
            assert re.search(r"No matching distribution found for torch(==|>=)2\.", text), text
        proof.install(wheel)
        code = "import flash_attn, torch; q = torch.ones(1, 2, 1, 8); print(flash_attn.flash_attn_func(q, q, q).sum())"
        result = proof.environment.run("-c", code)
        assert result.returncode == 0, result.stdout
        found = f"found torch {version}" + (f", C++ ABI {int(abi)}" if "C++ ABI" in built else "")
        assert f"built for {built}; {found}. " in result.stdout
        assert "HostLibraryWarning" in result.stdout
        assert not re.search("undefined symbol|_ZN", result.stdout)
        assert "tensor(16.)" in result.stdout
        doctor = proof.environment.run("-m", "flash_attn", "doctor")
        assert doctor.returncode == 6, doctor.stdout  # "library"
        assert re.search(f"^CLASH .*built for {re.escape(built)}; {re.escape(found)}", doctor.stdout, re.MULTILINE)
    proof.install(proof.wheel)


# ---- Inside the wheel ----


def exports() -> set[str]:
    """The library's own C functions, as its source marks them."""
    text = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "host").glob("*.cpp")))
    names = set(re.findall(r"^FLASH_ATTN_EXPORT [^;{]*?\b(flash_attn_\w+)\(", text, re.MULTILINE))
    assert "flash_attn_version" in names
    return names


def dynamic_symbols(library: Path) -> tuple[dict[str, str], set[str]]:
    """({undefined name, with its version: nm's letter for it}, {defined names})."""
    listing = subprocess.run(["nm", "-D", str(library)], capture_output=True, text=True, check=True)
    symbols = [(line.split()[-1], line.split()[-2]) for line in listing.stdout.splitlines()]
    undefined = {name: kind for name, kind in symbols if kind in "Uwv"}
    return undefined, {name for name, _ in symbols} - set(undefined)


def torch_exports(folder: Path) -> set[str]:
    """What the libraries of an installed torch define."""
    names: set[str] = set()
    for path in sorted((folder / "lib").glob("lib*.so")):
        if re.fullmatch(r"lib(torch|torch_cpu|torch_cuda|c10|c10_cuda)\.so", path.name):
            listing = subprocess.run(
                ["nm", "-D", "--defined-only", str(path)], capture_output=True, text=True, check=True
            )
            names |= {line.split()[-1].partition("@")[0] for line in listing.stdout.splitlines()}
    assert len(names) > 10_000
    return names


def test_symbols(proof: Proof) -> None:
    """All that is undefined comes from the stable list and this torch, or from C's and C++'s own libraries."""
    library = proof.folder / "symbols.so"
    with zipfile.ZipFile(proof.wheel) as wheel:
        library.write_bytes(wheel.read("flash_attn/libflash_attn.so"))
    kinds, defined = dynamic_symbols(library)
    from_torch = {name for name in kinds if "@" not in name and not name.startswith(("_ITM_", "__gmon"))}
    strong = {name for name in from_torch if kinds[name] == "U"}
    stable = set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", (ROOT / "csrc" / "host" / "torch_shim.h").read_text()))
    row = proof.case.wheel.host_library
    if row.per_torch is None:
        assert strong <= stable
    elif row.headers:
        assert [name for name in strong - stable if re.search(r"^_ZN.*(c10|at|torch)", name)], "no C++ of torch is used"
    else:
        assert strong - stable == {"aoti_torch_get_data_ptr", "aoti_torch_library_impl"}
    assert strong <= torch_exports(proof.torch_folder)
    assert defined == exports()


def test_declarations_agree_with_its_torchs_headers(proof: Proof) -> None:
    """Every function that the library declares for itself, together with the declaration of the installed torch."""
    row = proof.case.wheel.host_library
    shim = "torch/csrc/stable/c/shim.h" if row.per_torch is None else "torch/csrc/inductor/aoti_torch/c/shim.h"
    code = f'#include <{shim}>\n#include "host/torch_shim.h"\n'
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-", "-DUSE_CUDA", "-Wall", "-Werror", "-I", "csrc"]
    command += ["-isystem", str(proof.torch_folder / "include")]
    if row.per_torch is not None:
        code += '#include "host/compat/torch_before_2_10.cpp"\n'
        major, minor = row.per_torch
        command += [f"-DFLASH_ATTN_TORCH={100 * major + minor}", f"-D_GLIBCXX_USE_CXX11_ABI={int(row.cxx11_abi)}"]
    result = subprocess.run(command, cwd=ROOT, input=code, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_platform_tag_is_true(proof: Proof) -> None:
    """Field case 8, and no file name says another thing than the library."""
    row = proof.case.wheel.host_library
    assert proof.wheel.name.endswith(f"-py3-none-{row.platform}.whl")
    with zipfile.ZipFile(proof.wheel) as wheel:
        wheel.extract("flash_attn/libflash_attn.so", proof.folder)
        info = json.loads(wheel.read("flash_attn/build_info.json"))
    needs = read_needs(proof.folder / "flash_attn" / "libflash_attn.so")
    assert needs.machine == row.machine
    assert needs.versions
    assert broken_promises(needs, row.platform.removesuffix(f"_{row.machine}")) == []
    assert (info["host"]["platform"], info["host"]["torch"], info["host"]["cxx11_abi"]) == (
        row.platform, row.torch, row.cxx11_abi,
    )  # fmt: skip
    if row.per_torch is not None:
        assert proof.torch[1] is row.cxx11_abi, "the table's ABI is not the one of PyPI's torch"


def test_kernels_are_the_tables(proof: Proof) -> None:
    """Compiler, archs and kernels inside are the table's, read back from the cubins; the bytes are every row's."""
    wanted = proof.case.wheel.kernel_set
    with zipfile.ZipFile(proof.wheel) as wheel:
        data = wheel.read("flash_attn/flash_attn.kernels")
    assert data == kernel_set(wanted.name).read_bytes()
    content = archive.unpack(data)
    families = {arch for family in TABLE.families.values() for arch in family.archs}
    assert content.compiler == f"nvrtc {wanted.version}"
    assert set(content.archs) == {str(arch) for arch in wanted.archs if arch in families}
    head_dims = read_variables(SUBSET).head_dims
    assert set(content.keys) == {row.key for row in TABLE.select(head_dims=head_dims)}
    for record, image in zip(content.records, content.images, strict=True):
        number = int(re.sub(r"\D", "", record.arch))
        if record.arch.startswith("ptx"):
            assert f".target sm_{number}".encode() in image
        else:
            # e_flags of the ELF header; since ABI version 8 (all of CUDA 13) the arch is in its second byte.
            assert image[49 if image[8] >= 8 else 48] == number, record


def test_budget(proof: Proof) -> None:
    """Bytes of wheel and library, CPU-seconds of compiling the row from nothing (field case 41 names what is large)."""
    budgets = MATRIX.budgets
    with zipfile.ZipFile(proof.wheel) as wheel:
        largest = sorted(wheel.infolist(), key=lambda info: -info.compress_size)[:5]
        library = wheel.getinfo("flash_attn/libflash_attn.so").file_size
    contents = ", ".join(f"{info.filename} {info.compress_size}" for info in largest)
    assert proof.wheel.stat().st_size <= budgets.wheel_kib * 1024, f"largest contents: {contents}"
    assert library <= budgets.host_library_kib * 1024
    environ = clean_environ(FLASH_ATTN_TORCH=str(proof.torch_folder))
    fresh = rows.build_host(proof.case.wheel.name, folder=proof.folder / "fresh", environ=environ)
    print(
        f"{proof.case.name}: {fresh.cpu_s:.1f} CPU-s, library {library} bytes, wheel {proof.wheel.stat().st_size} bytes"
    )
    assert fresh.compiled > 0
    assert 0 < fresh.cpu_s <= budgets.host_library_cpu_s
    with zipfile.ZipFile(proof.wheel) as wheel:
        assert fresh.path.read_bytes() == wheel.read("flash_attn/libflash_attn.so"), "two builds differ"


# ---- For another processor ----


OTHERS = [row.name for row in MATRIX.host_libraries.values() if row.machine != HERE]


@pytest.mark.prove
@pytest.mark.parametrize("name", OTHERS)
def test_library_of_another_processor(name: str, tmp_path: Path) -> None:
    """Cross-compiled: its machine, tag, symbols and budget, as far as the file tells."""
    row = MATRIX.host_libraries[name]
    compiler = f"{row.machine}-linux-gnu-g++"
    assert shutil.which(compiler), f"{compiler} is needed (Debian: apt-get install g++-{row.machine}-linux-gnu)"
    built = rows.build_host(name, folder=tmp_path, environ=clean_environ())
    needs = read_needs(built.path)
    assert needs.machine == row.machine
    assert built.platform == row.platform
    assert broken_promises(needs, row.platform.removesuffix(f"_{row.machine}")) == []
    assert needs.libraries[0] == "libtorch.so"
    assert 0 < built.cpu_s <= MATRIX.budgets.host_library_cpu_s
    assert built.path.stat().st_size <= MATRIX.budgets.host_library_kib * 1024
    stable = set(re.findall(r"\b((?:aoti_)?torch_\w+)\(", (ROOT / "csrc" / "host" / "torch_shim.h").read_text()))
    needed, defined = dynamic_symbols(built.path)
    assert {symbol for symbol in needed if "@" not in symbol and not symbol.startswith(("_ITM_", "__gmon"))} == stable
    assert defined == exports()
    for item in [item for item in MATRIX.wheels.values() if item.host_library == row]:
        kernels, environ = kernel_set(item.kernel_set.name), clean_environ(**SUBSET)
        wheel = rows.build_row_wheel(item.name, tmp_path, kernel_set=kernels, folder=tmp_path, environ=environ)
        label = f"+{MATRIX.label(item)}".rstrip("+")
        assert wheel.name == f"flash_attn-2.9.0{label}-py3-none-{row.platform}.whl"


@pytest.mark.prove
@pytest.mark.parametrize("name", OTHERS)
def test_library_of_another_processor_is_loaded_under_emulation(name: str, tmp_path: Path) -> None:
    """By qemu, beside a libtorch that does nothing: it relocates, registers its operators, throws and catches."""
    machine = MATRIX.host_libraries[name].machine
    emulator, gxx = f"qemu-{machine}", f"{machine}-linux-gnu-g++"
    assert shutil.which(emulator), f"{emulator} is needed (Debian: apt-get install qemu-user)"
    built = rows.build_host(name, folder=tmp_path, environ=clean_environ())
    undefined, _ = dynamic_symbols(built.path)
    names = sorted(symbol for symbol in undefined if re.match(r"(aoti_)?torch_", symbol))
    stub = ["int registered_operators;"]
    for symbol in names:
        counted = "++registered_operators; " if symbol == "torch_library_impl" else ""
        stub.append(f"int {symbol}(void) {{ {counted}return 0; }}")
    (tmp_path / "torch.c").write_text("\n".join(stub) + "\n")
    command = [gxx, "-x", "c", "torch.c", "-shared", "-fPIC", "-Wl,-soname,libtorch.so", "-o", "libtorch.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    program = host_support.HELPERS / "load_alone.cpp"
    subprocess.run(
        [gxx, str(program), "-o", "load_alone", "-L.", "-Wl,--no-as-needed", "-ltorch"], cwd=tmp_path, check=True
    )
    arguments = ["-L", f"/usr/{machine}-linux-gnu", "-E", f"LD_LIBRARY_PATH={tmp_path}", "load_alone", str(built.path)]
    result = subprocess.run([emulator, *arguments], cwd=tmp_path, capture_output=True, encoding="utf-8", check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    version, operators, reason = result.stdout.splitlines()
    assert version == load_project(ROOT).base_version
    sources = "".join(path.read_text() for path in sorted((ROOT / "csrc" / "host").glob("torch_*.cpp")))
    assert int(operators) == len(re.findall(r"torch_library_impl\(", sources)) > 0
    assert re.fullmatch(r"-1 .*libcuda\.so\.1.*", reason)
