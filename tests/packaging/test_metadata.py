"""What pip and uv read before they build or install anything. Field cases 1, 2, 10, 12, 13, 15 and 16."""

from __future__ import annotations

import base64
import email.parser
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging.utils import parse_wheel_filename
from packaging_support import ROOT, Environment, WheelFile, build_hook, clean_environ, make_torch

from buildtools.index import serving, write_index
from buildtools.metadata import load_project
from buildtools.wheel import DEFAULT_EPOCH, write_wheel

# What looks at sys.platform when it is imported is imported first.
METADATA_HOOK = """
import json, shutil, ssl, subprocess, sys, tarfile, tempfile, urllib.request, zipfile
sys.platform, machine = sys.argv[1], sys.argv[2]
import platform
platform.machine = lambda: machine
sys.path.insert(0, "")
from buildtools import backend
requires = backend.get_requires_for_build_wheel()  # pip asks before it asks for metadata
folder = backend.prepare_metadata_for_build_wheel(sys.argv[3])
standard = {*sys.stdlib_module_names, "__main__", "buildtools", "tomli", "_virtualenv", "sitecustomize"}
foreign = sorted({name.split(".")[0] for name in sys.modules} - standard)
print(json.dumps([requires, folder, [name for name in foreign if not name.startswith(("_distutils", "__editable"))]]))
"""
BACKEND_MODULES = "archive archs backend build choose compile edges elf errors facts fetch host jobs kernels manifest "
BACKEND_MODULES += "matrix metadata ninja_graph nvrtc prebuilt sbom sources variables wheel"


@pytest.mark.parametrize(
    ("system", "machine"),
    [("linux", "x86_64"), ("darwin", "arm64"), ("win32", "AMD64"), ("linux", "aarch64"), ("linux", "riscv64")],
)
def test_metadata_needs_nothing_on_any_system(
    used_environment: Environment, tmp_path: Path, system: str, machine: str
) -> None:
    """Case 1: no torch, no compiler, no GPU, and not even Linux."""
    result = used_environment.run("-I", "-c", METADATA_HOOK, system, machine, tmp_path, cwd=ROOT)
    assert result.returncode == 0, result.stdout
    requires, folder, foreign = json.loads(result.stdout)
    assert foreign == []
    assert not any(requirement.startswith("torch") for requirement in requires)
    assert bool(requires) == (system == "linux" and machine in ("x86_64", "aarch64"))
    text = (tmp_path / folder / "METADATA").read_text()
    assert "Requires-Dist: torch>=2.10\n" in text


def test_the_backend_imports_the_standard_library_alone(used_environment: Environment) -> None:
    """Case 2. An environment without a single package, not even pip's."""
    code = f"import importlib, sys; sys.path.insert(0, '')\nfor name in {BACKEND_MODULES.split()}:\n"
    result = used_environment.run(
        "-I", "-S", "-c", code + "    importlib.import_module('buildtools.' + name)", cwd=ROOT
    )
    assert result.returncode == 0, result.stdout


@pytest.mark.slow
def test_pip_download_of_the_sdist_without_torch(environment: Environment, sdist: Path, tmp_path: Path) -> None:
    """Case 1, by pip with build isolation, which gets NVRTC and ninja from the usual index, but never torch."""
    command = ("download", "--no-deps", "--no-binary=flash-attn", sdist, "--dest", tmp_path / "got", "-v")
    log = environment.pip(*command, environ=clean_environ(keep_index=True))
    assert "torch-" not in log
    assert [path.name for path in (tmp_path / "got").iterdir()] == [sdist.name]


def test_nothing_is_dynamic(sdist: Path, empty_wheel: Path) -> None:
    """Case 12: what the sdist says is what every wheel of it says."""
    with tarfile.open(sdist) as archive:
        member = archive.extractfile(f"{sdist.name.removesuffix('.tar.gz')}/PKG-INFO")
        assert member is not None
        text = member.read()
    information = email.parser.BytesParser().parsebytes(text)
    assert "Dynamic" not in information
    assert information["Requires-Python"] == ">=3.10"
    assert information.get_all("Requires-Dist") == ["torch>=2.10"]
    assert WheelFile.read(empty_wheel).metadata.items() == information.items()


def test_uv_locks_the_sdist_without_building_it(sdist: Path, tmp_path: Path) -> None:
    """Cases 1 and 11: `uv lock` and `uv sync` from an empty environment, with one index and no torch to import."""
    torch = make_torch(tmp_path / "dist", "2.13.0")
    write_index([sdist, torch], tmp_path / "index")
    project = tmp_path / "project"
    project.mkdir()
    with serving(tmp_path / "index") as url:
        (project / "pyproject.toml").write_text(
            '[project]\nname = "user"\nversion = "1"\nrequires-python = ">=3.10"\ndependencies = ["flash-attn"]\n'
            f'[[tool.uv.index]]\nurl = "{url}stable/"\ndefault = true\n'
        )
        # Before 3.11 the isolated build of `sync` needs tomli, which this index does not have.
        for command in ("lock", "sync") if sys.version_info >= (3, 11) else ("lock",):
            result = subprocess.run(
                [sys.executable, "-m", "uv", command, "--no-cache", "--python", sys.executable],
                cwd=project,
                env=clean_environ(SKIP_CUDA_BUILD="1"),
                capture_output=True,
                encoding="utf-8",
                timeout=120,
            )
            assert result.returncode == 0, result.stderr
    assert 'name = "flash-attn"' in (project / "uv.lock").read_text()
    if sys.version_info < (3, 11):
        return
    installed = Environment(project / ".venv")
    assert installed.version("flash-attn") == load_project(ROOT).version
    assert installed.version("torch") == "2.13.0"


@pytest.mark.parametrize("label", ["", "cu12", "cu12.torch2.6-abi_FALSE"])
def test_filename_metadata_record_and_folder_agree(tmp_path: Path, label: str) -> None:
    """Case 13."""
    variables = {"FLASH_ATTN_LOCAL_VERSION": label} if label else {}
    wheel = WheelFile.read(build_hook("build_wheel", ROOT, tmp_path, SKIP_CUDA_BUILD="1", **variables))
    name, version, _, tags = parse_wheel_filename(wheel.path.name)
    assert name == wheel.metadata["Name"] == "flash-attn"
    assert str(version) == wheel.metadata["Version"]
    assert version.local == (label.lower().replace("-", ".").replace("_", ".") or None)
    assert sorted(map(str, tags)) == sorted(wheel.tags)
    folder = f"flash_attn-{version}.dist-info"
    assert {path.split("/")[0] for path in wheel.names} == {"flash_attn", "flash_attn_interface.py", folder}
    assert sorted(wheel.record) == sorted(wheel.names)
    assert wheel.record.pop(f"{folder}/RECORD") == ("", "")
    for path, (digest, size) in wheel.record.items():
        content = wheel.read_member(path)
        assert int(size) == len(content)
        assert digest == "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@pytest.mark.parametrize("command", [("install",), ("install", "--upgrade")])
def test_installing_leaves_torch_alone(
    environment: Environment, empty_wheel: Path, tmp_path: Path, command: tuple[str, ...]
) -> None:
    """Cases 7 and 10: a folder of wheels with a newer torch in it, and no connection."""
    (tmp_path / "wheels").mkdir()
    shutil.copy(empty_wheel, tmp_path / "wheels")
    for version in ("2.13.0", "2.99.0"):
        make_torch(tmp_path / "wheels", version)
    environment.pip("install", "--find-links", tmp_path / "wheels", "torch==2.13.0")
    log = environment.pip(*command, "--find-links", tmp_path / "wheels", "flash-attn")
    assert "Requirement already satisfied: torch>=2.10" in log
    assert environment.version("torch") == "2.13.0"
    assert environment.version("flash-attn") == load_project(ROOT).version


def test_an_old_torch_is_not_accepted_in_silence(environment: Environment, empty_wheel: Path, tmp_path: Path) -> None:
    wheels = tmp_path / "wheels"
    make_torch(wheels, "2.9.1")
    environment.pip("install", "--find-links", wheels, "torch")
    log = environment.pip("install", "--find-links", wheels, empty_wheel, fails=True)
    assert "torch>=2.10" in log
    assert environment.version("torch") == "2.9.1"


@pytest.mark.parametrize("value", ["TRUE", "yes", "maybe"])
def test_booleans_by_pip(used_environment: Environment, tmp_path: Path, value: str) -> None:
    """Case 15, for both names; SKIP_CUDA_BUILD because what it does can be seen in seconds."""
    for name in ("FORCE_BUILD", "FLASH_ATTENTION_FORCE_BUILD"):
        environ = clean_environ(SKIP_CUDA_BUILD="1") | {name: value}
        command = ("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", tmp_path, ROOT)
        log = used_environment.pip(*command, environ=environ, fails=value == "maybe")
        if value == "maybe":
            assert f"{name}=maybe is neither true nor false" in log
        else:
            assert "Successfully built flash-attn" in log


@pytest.mark.parametrize(
    ("target", "found"),
    [
        (("--python-version=3.15", "--platform=manylinux_2_28_x86_64"), True),
        (("--python-version=3.10", "--platform=manylinux_2_28_x86_64"), True),
        (("--python-version=3.9", "--platform=manylinux_2_28_x86_64"), False),
        (("--python-version=3.12", "--platform=manylinux_2_28_aarch64"), False),
        (("--python-version=3.12", "--platform=win_amd64"), False),
        (("--python-version=3.12", "--platform=macosx_14_0_arm64"), False),
        (("--python-version=3.12", "--platform=manylinux_2_17_x86_64"), False),
    ],
)
def test_which_machines_the_wheel_is_for(
    used_environment: Environment, tmp_path: Path, target: tuple[str, str], found: bool
) -> None:
    """Case 16: an answer from the index, and no compiler is started for it."""
    project = load_project(ROOT)
    tag, contents = "py3-none-manylinux_2_28_x86_64", {"flash_attn/__init__.py": b""}
    wheel = write_wheel(tmp_path / "dist", project, tag, contents, DEFAULT_EPOCH)
    write_index([tmp_path / "dist" / wheel], tmp_path / "index")
    with serving(tmp_path / "index/stable") as url:
        command = ("download", "flash-attn", "--index-url", url, "--no-deps", "--only-binary=:all:", *target)
        log = used_environment.pip(*command, "--dest", tmp_path / "got", fails=not found)
    assert found or "No matching distribution found for flash-attn" in log
