"""The wheel hook's choice in an unpacked sdist: what it takes, says and does then. Field cases 4, 5, 12 and 16."""

from __future__ import annotations

import email.parser
import json
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest
from choice_support import (
    HERE,
    PLATFORM,
    VERSION,
    FaultServer,
    Hook,
    make_driver,
    make_published,
    make_sdist_tree,
    make_site,
)
from packaging_support import ROOT, WheelFile, build_hook, clean_environ

from buildtools import errors
from buildtools.archive import read
from buildtools.index import serving, write_index
from buildtools.manifest import MANIFEST_NAME, make_manifest

STABLE = f"flash_attn-{VERSION}-py3-none-{HERE}.whl"
OF_2_6 = f"flash_attn-{VERSION}+torch2.6.cxx11abi0-py3-none-{HERE}.whl"
OF_2_9 = f"flash_attn-{VERSION}+torch2.9.cxx11abi1-py3-none-{HERE}.whl"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    make_published(folder, padding=500)
    make_published(folder, "==2.6.*", 0, padding=500)
    make_published(folder, "==2.9.*", 1, padding=500)
    return folder


@pytest.fixture(scope="module")
def tree(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_sdist_tree(tmp_path_factory.mktemp("tree") / "tree", sorted(dist.iterdir()))


@pytest.fixture
def hook(tree: Path, tmp_path: Path) -> Hook:
    for name in ("build", "compiler-was-started"):
        shutil.rmtree(tree / name, ignore_errors=True)
        (tree / name).unlink(missing_ok=True)
    return Hook(tree, tmp_path / "output")


def site(tmp_path: Path, torch: str, cuda: str | None = "12.4") -> dict[str, str]:
    return {"FLASH_ATTN_TEST_SITE": str(make_site(tmp_path / "site", torch, cuda=cuda))}


@pytest.mark.parametrize(
    ("torch", "expected"),
    [("2.13.0+cu130", STABLE), ("2.6.0+cu124", OF_2_6), ("2.9.1", OF_2_9), ("2.12.0a0+git1234567", STABLE)],
)
def test_the_wheel_for_the_torch_that_is_there(
    hook: Hook, dist: Path, tmp_path: Path, torch: str, expected: str
) -> None:
    """And metadata that the frontend reads before agrees with it about torch, so that pip leaves torch alone."""
    environ = {"FLASH_ATTN_WHEELS": str(dist), **site(tmp_path, torch)}
    requires = hook.run("get_requires_for_build_wheel", **environ).stdout
    metadata = hook.run("prepare_metadata_for_build_wheel", **environ)
    result = hook.run(**environ)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == [expected]
    assert f"found {expected}" in result.stderr
    assert (hook.output / expected).read_bytes() == (dist / expected).read_bytes()
    assert not hook.compiled()
    text = (hook.output / metadata.stdout.strip() / "METADATA").read_text()
    promised = email.parser.Parser().parsestr(text)
    assert promised.get_all("Requires-Dist") == WheelFile.read(dist / expected).metadata.get_all("Requires-Dist")
    assert promised["Version"] == VERSION
    assert requires == "[]\n"  # no NVRTC has to be fetched beside the wheel


def test_a_miss_says_why_and_compiles_for_the_gpus_that_are_there(hook: Hook, tmp_path: Path) -> None:
    """Case 5: the key, the nearest wheels with a reason each, and what happens next, before it happens."""
    hook.may_compile = True
    driver = str(make_driver(tmp_path / "driver"))
    result = hook.run(LD_LIBRARY_PATH=driver, **site(tmp_path, "2.7.1+cu126"))
    assert result.returncode == 0, result.stderr
    lines = result.stderr.splitlines()
    assert lines[0].startswith("looked for a wheel for torch2.7.1+cu126-cxx11abi1-linux_")
    assert lines[0].endswith("-cuda12.8-gpu75.90")
    assert lines[1] == "  none of the 3 published wheels fits"
    assert any(f"not {OF_2_6}: it is for torch 2.6 alone, found 2.7.1+cu126" in line for line in lines[2:5])
    assert any(f"not {STABLE}: it needs torch 2.10 or newer, found 2.7.1+cu126" in line for line in lines[2:5])
    says = next(index for index, line in enumerate(lines) if line.startswith("next: "))
    assert lines[says].startswith("next: compiling from source, for the GPUs that are here (90)")
    assert next(index for index, line in enumerate(lines) if "kernels with nvrtc" in line) > says
    wheel = WheelFile.read(hook.output / result.stdout.splitlines()[-1])
    (hook.output / "kernels").write_bytes(wheel.read_member("flash_attn/flash_attn.kernels"))
    assert read(hook.output / "kernels").archs == ["90"]
    assert wheel.metadata.get_all("Requires-Dist") == ["torch==2.7.*"]


# --- compiled beside a torch that the stable wheel is not for ------------------------------------------------------

SMALL = {"FORCE_BUILD": "1", "FLASH_ATTN_CUDA_ARCHS": "90", "FLASH_ATTN_KERNELS": "bwd-*"}


def with_headers(site: dict[str, str], version: str) -> dict[str, str]:
    """The torch of `site` with the header by which its headers are known."""
    header = Path(site["FLASH_ATTN_TEST_SITE"], "torch/include/torch/csrc/api/include/torch/version.h")
    header.parent.mkdir(parents=True)
    parts = zip(("MAJOR", "MINOR", "PATCH"), version.split("."), strict=True)
    header.write_text("".join(f"#define TORCH_VERSION_{part} {number}\n" for part, number in parts))
    return site


@pytest.mark.parametrize(
    ("torch", "forced", "abi"),
    [("2.6.1+cu124", "", False), ("2.6.0+cu126", "", True), ("2.6.0+cu124", "1", True), ("2.7.1+cu126", "", True)],
)
def test_from_source_it_is_for_the_torch_that_is_here(
    hook: Hook, tmp_path: Path, torch: str, forced: str, abi: bool
) -> None:
    """Case 10: with that torch's headers and C++ ABI, and metadata that keeps it, before and after the build."""
    hook.may_compile = True
    environ = SMALL | with_headers(site(tmp_path, torch), torch.partition("+")[0]) | {"FORCE_CXX11_ABI": forced}
    minor = torch[:3]
    metadata = hook.run("prepare_metadata_for_build_wheel", **environ)
    assert metadata.returncode == 0, metadata.stderr
    text = (hook.output / metadata.stdout.strip() / "METADATA").read_text()
    assert email.parser.Parser().parsestr(text).get_all("Requires-Dist") == [f"torch=={minor}.*"]
    result = hook.run(**environ)
    assert result.returncode == 0, result.stderr
    assert f"the host library is for torch {minor} with C++ ABI {int(abi)}, which is here" in result.stderr
    wheel = WheelFile.read(hook.output / result.stdout.splitlines()[-1])
    assert wheel.metadata.get_all("Requires-Dist") == [f"torch=={minor}.*"]
    assert wheel.metadata["Version"] == VERSION
    info = json.loads(wheel.read_member("flash_attn/build_info.json"))
    assert (info["host"]["kind"], info["host"]["torch"], info["host"]["cxx11_abi"]) == ("torch", f"=={minor}.*", abi)
    rules = (hook.tree / "build/build.ninja").read_text()
    assert f"-D_GLIBCXX_USE_CXX11_ABI={int(abi)}" in rules
    assert (f"{tmp_path}/site/torch/include" in rules) == (minor == "2.6")
    bill = wheel.read_member(f"flash_attn-{VERSION}.dist-info/sboms/flash_attn.cdx.json").decode()
    assert f'flash_attn:row",\n     "value": "torch{minor}"' in bill
    assert ('"name": "torch"' in bill) == (minor == "2.6")


@pytest.mark.parametrize(
    ("torch", "error", "says"),
    [
        ("2.6.0+cu124", errors.TorchHeadersError, "no headers of torch 2.6: FLASH_ATTN_TORCH has none"),
        ("2.3.1", errors.TorchVersionError, "flash_attn is not for torch 2.3.1, which is in "),
    ],
)
def test_a_torch_that_nothing_can_be_compiled_for(
    hook: Hook, tmp_path: Path, torch: str, error: type[errors.BuildError], says: str
) -> None:
    """The message comes before a compiler is started; metadata can be had all the same (case 1)."""
    environ = SMALL | site(tmp_path, torch)
    assert hook.run("prepare_metadata_for_build_wheel", **environ).returncode == 0
    result = hook.run(**environ)
    assert result.returncode == error.exit_code, result.stderr
    assert says in result.stderr
    assert not list((hook.tree / "build").rglob("*.image"))


def test_no_build_stops_instead(hook: Hook, tmp_path: Path) -> None:
    for name in ("get_requires_for_build_wheel", "build_wheel"):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        result = hook.run(name, FLASH_ATTN_NO_BUILD="1", **site(tmp_path, "3.0.0"))
        assert result.returncode == errors.NoWheelError.exit_code
        assert "torch 3 is newer than what it was made for (torch 2)" in result.stderr
        assert "nothing was compiled and nothing installed" in result.stderr
    assert list(hook.output.iterdir()) == []
    assert not hook.compiled()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FLASH_ATTN_HEAD_DIMS": "64"}, "FLASH_ATTN_HEAD_DIMS asks for a build of its own"),
        (
            {"FLASH_ATTN_CUDA_ARCHS": "90", "FLASH_ATTN_KERNELS": "*"},
            "FLASH_ATTN_KERNELS and FLASH_ATTN_CUDA_ARCHS asks",
        ),
        ({"FORCE_BUILD": "1"}, "FORCE_BUILD and FLASH_ATTN_NO_BUILD contradict each other"),
        ({}, "nothing says where it is: set FLASH_ATTN_WHEELS"),
    ],
)
def test_what_else_leads_to_compiling(hook: Hook, tmp_path: Path, variables: dict[str, str], message: str) -> None:
    result = hook.run(FLASH_ATTN_NO_BUILD="1", **variables, **site(tmp_path, "2.13.0"))
    assert result.returncode in (errors.NoWheelError.exit_code, errors.VariableError.exit_code)
    assert message in result.stderr


def test_force_build_looks_for_nothing(hook: Hook, dist: Path, tmp_path: Path) -> None:
    result = hook.run(FORCE_BUILD="1", FLASH_ATTN_WHEELS=str(dist), **site(tmp_path, "2.13.0"))
    assert result.returncode == errors.HostCompilerError.exit_code  # it was started, and is one that fails
    assert hook.compiled()
    assert "looked for a wheel" not in result.stderr


def test_a_working_tree_is_compiled(hook: Hook, dist: Path, tmp_path: Path) -> None:
    """Its sources may have been edited: a list of wheels that lies there is for its sdist."""
    tree = tmp_path / "working"
    shutil.copytree(hook.tree, tree)
    (tree / "PKG-INFO").unlink()
    result = Hook(tree, tmp_path / "output").run(FLASH_ATTN_WHEELS=str(dist), FLASH_ATTN_NO_BUILD="1")
    assert result.returncode == errors.NoWheelError.exit_code
    assert "this source tree has no list of published wheels" in result.stderr
    result = Hook(tree, tmp_path / "output").run(FLASH_ATTN_WHEELS=str(dist))
    assert "FLASH_ATTN_WHEELS is not used" in result.stderr
    assert result.returncode == errors.HostCompilerError.exit_code


def test_a_list_of_another_version_is_an_error(hook: Hook, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(hook.tree, tree)
    text = (tree / MANIFEST_NAME).read_text().replace(VERSION, "1.0.0")
    (tree / MANIFEST_NAME).write_text(text)
    for name in ("build_wheel", "build_sdist"):
        result = Hook(tree, tmp_path / "output").run(name)
        assert result.returncode == errors.ManifestError.exit_code
        assert "lists the wheels of 1.0.0" in result.stderr


OTHER_MACHINE = """
import platform, sys
sys.path.insert(0, ".")
from buildtools import backend, facts, nvrtc
sys.platform, machine, facts.read_libc = sys.argv[2], sys.argv[3], lambda: None
platform.machine = lambda: machine
backend.build_wheel(sys.argv[1])
"""


@pytest.mark.parametrize(
    ("system", "machine", "reason", "exit_code"),
    [
        ("win32", "AMD64", "it is for Linux, this is win32", errors.PlatformError.exit_code),
        ("darwin", "arm64", "it is for Linux, this is darwin", errors.PlatformError.exit_code),
        ("linux", "riscv64", "this machine is riscv64", errors.PlatformError.exit_code),
        ("linux", "aarch64", "this machine is aarch64", errors.HostCompilerError.exit_code),
    ],
)
def test_another_machine_gets_an_answer(hook: Hook, system: str, machine: str, reason: str, exit_code: int) -> None:
    """Case 16: in seconds. What follows is said before it is done; what cannot be compiled is not tried."""
    hook.output.mkdir()
    started = time.monotonic()
    command = [sys.executable, "-c", OTHER_MACHINE, str(hook.output), system, machine]
    result = subprocess.run(
        command, cwd=hook.tree, env=hook.environ, capture_output=True, encoding="utf-8", check=False
    )
    assert result.returncode == exit_code, result.stderr
    assert time.monotonic() - started < 5
    assert reason in result.stderr
    assert ("next: compiling from source" in result.stderr) == (machine == "aarch64")
    assert hook.compiled() == (machine == "aarch64")


@pytest.mark.parametrize(("torch", "text"), [("3.0.0", "torch 3 is newer"), ("2.10.0rc1", "needs torch 2.10 or newer")])
def test_the_next_torch_gets_an_answer(hook: Hook, dist: Path, tmp_path: Path, torch: str, text: str) -> None:
    """Case 16: "none, because ..." for a torch that nobody has seen."""
    result = hook.run(FLASH_ATTN_WHEELS=str(dist), FLASH_ATTN_NO_BUILD="1", **site(tmp_path, torch))
    assert result.returncode == errors.NoWheelError.exit_code
    assert text in result.stderr


@pytest.mark.parametrize(
    ("cuda", "message"),
    [
        ("13.0", "nothing has to be done, the driver that torch needs runs these kernels too"),
        ("11.8", "these kernels need a driver for CUDA 12 or newer"),
        ("12.1", None),
        (None, None),
    ],
)
def test_compiler_and_torch_of_two_cuda_majors(
    hook: Hook, tmp_path: Path, cuda: str | None, message: str | None
) -> None:
    """Case 4: one line before compiling names both, where each was found, and what to do."""
    hook.may_compile = True
    variables = {"FORCE_BUILD": "1", "FLASH_ATTN_CUDA_ARCHS": "90", "FLASH_ATTN_KERNELS": "bwd-*"}
    nvrtc = next(path for path in map(Path, sys.path) if (path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12").exists())
    variables["FLASH_ATTN_NVRTC"] = str(nvrtc / "nvidia/cuda_nvrtc/lib")
    result = hook.run(**variables, **site(tmp_path, "2.13.0", cuda))
    assert result.returncode == 0, result.stderr
    before = result.stderr.partition("kernels with nvrtc")[0]
    found = [line for line in before.splitlines() if line.startswith("note: the kernels are compiled by nvrtc 12.9")]
    assert len(found) == (message is not None)
    for line in found:
        assert f"(FLASH_ATTN_NVRTC, {nvrtc}/nvidia/cuda_nvrtc/lib/libnvrtc.so.12)" in line
        assert f"torch 2.13.0 ({tmp_path / 'site'}) is for CUDA {cuda}: {message}" in line


# --- the sdist -----------------------------------------------------------------------------------------------------


def test_the_sdist_has_the_list_and_its_metadata_stay_static(hook: Hook, dist: Path, tmp_path: Path) -> None:
    """Case 12 with a list of wheels in it; and the same wheels give the same sdist."""
    wheels = sorted(dist.iterdir())
    assert make_manifest(wheels, VERSION).text() == make_manifest(wheels[::-1], VERSION).text()
    first = build_hook("build_sdist", hook.tree, tmp_path / "a")
    second = build_hook("build_sdist", hook.tree, tmp_path / "b")
    assert first.read_bytes() == second.read_bytes()
    base = first.name.removesuffix(".tar.gz")
    with tarfile.open(first) as archive:
        members = {name: archive.extractfile(f"{base}/{name}").read() for name in ("PKG-INFO", MANIFEST_NAME)}
    assert members[MANIFEST_NAME].decode() == make_manifest(wheels, VERSION).text()
    information = email.parser.BytesParser().parsebytes(members["PKG-INFO"])
    assert "Dynamic" not in information
    assert (information["Version"], information.get_all("Requires-Dist")) == (VERSION, ["torch>=2.10"])


def test_the_manifest_command(dist: Path, tmp_path: Path, empty_wheel: Path) -> None:
    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        line = [sys.executable, "-m", "buildtools", "manifest", *arguments, "--out", str(tmp_path / "wheels.json")]
        return subprocess.run(line, cwd=ROOT, env=clean_environ(), capture_output=True, encoding="utf-8", check=False)

    assert command(str(dist), "--place", "https://wheels.example/").returncode == 0
    data = json.loads((tmp_path / "wheels.json").read_text())
    assert data["places"] == ["https://wheels.example/"]
    assert [wheel["filename"] for wheel in data["wheels"]] == [OF_2_6, OF_2_9, STABLE]
    result = command(str(empty_wheel))
    assert result.returncode == errors.ManifestError.exit_code
    assert "it was built with SKIP_CUDA_BUILD and has no kernels" in result.stderr


# --- the command ---------------------------------------------------------------------------------------------------


def wheels_command(*arguments: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "buildtools", "wheels", *map(str, arguments)]
    return subprocess.run(
        line, cwd=ROOT, env=clean_environ(**variables), capture_output=True, encoding="utf-8", check=False
    )


FOR_2_6 = f"torch=2.6,abi=0,platform={PLATFORM},python=3.15"


def test_wheels_for_another_machine_from_an_index(dist: Path, tmp_path: Path) -> None:
    """The index has a page for each kind, and the list in its root; the wheel is chosen, checked and put into DIR."""
    write_index(sorted(dist.iterdir()), tmp_path / "index")
    with serving(tmp_path / "index") as url:
        result = wheels_command("--for", FOR_2_6, "--to", tmp_path / "house", FLASH_ATTN_WHEELS=url)
        assert result.returncode == 0, result.stderr
        again = wheels_command("--for", FOR_2_6, "--to", tmp_path / "house", "--json", FLASH_ATTN_WHEELS=url)
    assert f"found {OF_2_6}" in result.stdout
    assert "torch2.6-cxx11abi0-nvrtc12.9.86-80.86.90.ptx80" in result.stdout
    assert f"/torch2.6.cxx11abi0/flash-attn/{OF_2_6}" in result.stderr
    assert [path.name for path in (tmp_path / "house").iterdir()] == [OF_2_6]
    assert (tmp_path / "house" / OF_2_6).read_bytes() == (dist / OF_2_6).read_bytes()
    report = json.loads(again.stdout)
    assert report["downloaded"] == [str(tmp_path / "house" / OF_2_6)]
    (decision,) = report["decisions"]
    assert decision["wheel"]["requires"] == "torch==2.6.*"
    assert {item["filename"] for item in decision["rejected"]} == {STABLE, OF_2_9}


def test_wheels_for_several_machines_from_a_folder(dist: Path, tmp_path: Path) -> None:
    machines = ("--for", FOR_2_6, "--for", f"torch=2.13,platform={PLATFORM},gpu=9.0")
    result = wheels_command("--from", dist, *machines, "--to", tmp_path / "house")
    assert result.returncode == 0, result.stderr
    assert sorted(path.name for path in (tmp_path / "house").iterdir()) == [OF_2_6, STABLE]


def test_wheels_where_there_is_none(dist: Path, tmp_path: Path) -> None:
    for platform in ("win_amd64", "manylinux_2_28_aarch64", "macosx_14_0_arm64"):
        result = wheels_command("--from", dist, "--for", f"platform={platform}", "--to", tmp_path / "house")
        assert result.returncode == errors.NoWheelError.exit_code
        assert "none of the 3 published wheels fits" in result.stdout
    assert not (tmp_path / "house").exists()


def test_wheels_and_a_fault(dist: Path, tmp_path: Path) -> None:
    def flipped(exchange) -> None:
        exchange.send("200 OK", exchange.content[:-1] + bytes([exchange.content[-1] ^ 1]))

    (tmp_path / "list.json").write_text(make_manifest(sorted(dist.iterdir()), VERSION).text())
    arguments = ("--for", FOR_2_6, "--manifest", tmp_path / "list.json", "--to", tmp_path / "house", "--json")
    with FaultServer(dist, flipped).running() as server:
        result = wheels_command(*arguments, "--from", server.url)
    assert result.returncode == errors.AlteredFileError.exit_code
    assert json.loads(result.stdout)["error"] == "AlteredFileError"
    assert list((tmp_path / "house").iterdir()) == []


def test_wheels_without_a_place(tmp_path: Path) -> None:
    result = wheels_command()
    assert result.returncode == errors.ManifestError.exit_code
    assert "no place was named" in result.stderr
    result = wheels_command("--from", tmp_path)
    assert result.returncode == errors.ManifestError.exit_code
    result = wheels_command("--for", "torhc=2.6", "--from", tmp_path)
    assert "error: " in result.stderr
