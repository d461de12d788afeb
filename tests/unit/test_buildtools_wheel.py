"""Wheels, sdists and the PEP 517 hooks, in a tree that builds in seconds."""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import io
import json
import os
import stat
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ, make_tree

from buildtools.errors import MetadataError, TableError, WheelError
from buildtools.metadata import load_project
from buildtools.wheel import write_sdist, write_wheel

ARCHS = {"FLASH_ATTN_CUDA_ARCHS": "80"}


def hook(tree: Path, call: str, *, python: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `backend.CALL` as a frontend does: in a process of its own, in the tree."""
    code = (
        f"import json, sys; sys.path.insert(0, '.'); from buildtools import backend; print(json.dumps(backend.{call}))"
    )
    return subprocess.run(
        [sys.executable, *python, "-c", code],
        cwd=tree, env=clean_environ(**environ), capture_output=True, text=True, check=False,
    )  # fmt: skip


def value(result: subprocess.CompletedProcess[str]):
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    return make_tree(tmp_path_factory.mktemp("wheel") / "tree")


@pytest.fixture(scope="module")
def wheel(tree) -> Path:
    return tree / "dist" / value(hook(tree, "build_wheel('dist')", **ARCHS))


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


# --- the wheel ---------------------------------------------------------------------------------------------------


def test_wheel_holds_package_library_kernels_and_licence(wheel):
    assert wheel.name in (
        "flash_attn-2.9.0-py3-none-manylinux_2_28_x86_64.whl",
        "flash_attn-2.9.0-py3-none-linux_x86_64.whl",
    )
    names = set(members(wheel))
    runtime = {f"flash_attn/_buildtools/{name}.py" for name in load_project(ROOT).runtime}
    info = "flash_attn-2.9.0.dist-info"
    sources = {"kernels.json", "params.h", "kernels/common/twice.cuh", "kernels/sm80/fwd.cu", "kernels/sm80/bwd.cu"}
    assert names == runtime | {f"flash_attn/_kernels_src/{name}" for name in sources} | {
        "flash_attn/__init__.py", "flash_attn/py.typed", "flash_attn/libflash_attn.so", "flash_attn/flash_attn.kernels",
        "flash_attn/build_info.json", f"{info}/METADATA", f"{info}/WHEEL", f"{info}/RECORD", f"{info}/licenses/LICENSE",
        "flash_attn_interface.py",
        f"{info}/sboms/flash_attn.cdx.json",
    }  # fmt: skip


def test_record_lists_every_member_with_its_hash(wheel):
    contents = members(wheel)
    record = contents.pop("flash_attn-2.9.0.dist-info/RECORD").decode()
    rows = {name: (digest, size) for name, digest, size in csv.reader(io.StringIO(record))}
    assert rows.pop("flash_attn-2.9.0.dist-info/RECORD") == ("", "")
    assert set(rows) == set(contents)
    for name, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert rows[name] == (f"sha256={digest}", str(len(data)))


def test_file_name_metadata_and_wheel_agree(wheel):
    contents = members(wheel)
    info = message_from_string(contents["flash_attn-2.9.0.dist-info/WHEEL"].decode())
    assert wheel.name == f"flash_attn-2.9.0-{info['Tag']}.whl"
    assert info["Root-Is-Purelib"] == "false"
    metadata = message_from_string(contents["flash_attn-2.9.0.dist-info/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("flash-attn", "2.9.0")
    assert metadata["License-Expression"] == "BSD-3-Clause"
    assert metadata.get_all("Requires-Dist") == ["torch>=2.10"]
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_metadata_is_valid_by_packagings_rules():
    metadata = pytest.importorskip("packaging.metadata", reason="comes with every pytest")
    parsed = metadata.Metadata.from_email(load_project(ROOT).metadata(), validate=True)
    assert parsed.name == "flash-attn"
    assert str(parsed.requires_python) == ">=3.10"
    assert parsed.license_files == ["LICENSE"]


def test_installed_part_of_buildtools_works_on_its_own(wheel, tmp_path):
    """The modules that the package has import nothing that it lacks, and read the kernel set beside them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    code = (
        "import flash_attn._buildtools.compile, flash_attn._buildtools.archive as archive, pathlib\n"
        "print(archive.read(pathlib.Path('flash_attn/flash_attn.kernels')).archs)"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert result.stdout.strip() == "['80']", result.stderr


def test_wheel_bytes_do_not_depend_on_folder_umask_time_or_jobs(wheel, tmp_path):
    other = make_tree(tmp_path / "some other place")
    for path in other.rglob("*"):
        path.chmod(0o700 if path.is_dir() else 0o600)
    environ = clean_environ(**ARCHS, MAX_JOBS="1", TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="7")
    code = "import sys; sys.path.insert(0, '.'); from buildtools import backend; print(backend.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=other, env=environ, check=True, capture_output=True, umask=0o077)
    assert (other / "dist" / wheel.name).read_bytes() == wheel.read_bytes()


def test_members_are_dated_by_source_date_epoch_with_plain_permissions(tree, tmp_path):
    project = load_project(tree)
    name = write_wheel(tmp_path, project, "py3-none-any", {"b.py": b"", "a.so": b""}, 1700000000)
    with zipfile.ZipFile(tmp_path / name) as archive:
        infos = archive.infolist()
    assert {info.date_time for info in infos} == {(2023, 11, 14, 22, 13, 20)}
    assert [info.filename for info in infos][:2] == ["a.so", "b.py"]
    assert infos[-1].filename.endswith("RECORD")
    assert [stat.filemode(info.external_attr >> 16) for info in infos[:2]] == ["-rwxr-xr-x", "-rw-r--r--"]


def test_local_version_label_is_everywhere_or_nowhere(tree):
    name = value(hook(tree, "build_wheel('dist')", **ARCHS, FLASH_ATTN_LOCAL_VERSION="cu12-x"))
    assert name.startswith("flash_attn-2.9.0+cu12.x-py3-none-")
    contents = members(tree / "dist" / name)
    assert b"\nVersion: 2.9.0+cu12.x\n" in contents["flash_attn-2.9.0+cu12.x.dist-info/METADATA"]
    assert all(".dist-info" not in member or "2.9.0+cu12.x.dist-info" in member for member in contents)
    prepared = value(hook(tree, "prepare_metadata_for_build_wheel('meta')", FLASH_ATTN_LOCAL_VERSION="cu12-x"))
    assert prepared == "flash_attn-2.9.0+cu12.x.dist-info"


def test_skip_cuda_build_gives_a_wheel_for_any_machine_that_says_so(tree):
    name = value(hook(tree, "build_wheel('skip')", SKIP_CUDA_BUILD="yes"))
    assert name == "flash_attn-2.9.0-py3-none-any.whl"
    contents = members(tree / "skip" / name)
    info = json.loads(contents["flash_attn/build_info.json"])
    assert info == {"version": "2.9.0", "kernel_set": None, "host": None, "cuda_build": False}
    assert not any(member.endswith((".so", ".kernels")) for member in contents)
    assert b"Root-Is-Purelib: true" in contents["flash_attn-2.9.0.dist-info/WHEEL"]


# --- hooks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_metadata_needs_nothing_at_all(tree, tmp_path, kind):
    """No site-packages, no PATH, no torch, no compiler: what `pip download` of the sdist runs."""
    needs_tomli = sys.version_info < (3, 11)
    python = () if needs_tomli else ("-I", "-S")
    result = hook(tree, f"prepare_metadata_for_build_{kind}({str(tmp_path)!r})", python=python, PATH="")
    assert value(result) == "flash_attn-2.9.0.dist-info"
    text = (tmp_path / "flash_attn-2.9.0.dist-info/METADATA").read_text()
    assert text == load_project(tree).metadata()
    assert not (tmp_path / "flash_attn-2.9.0.dist-info/RECORD").exists()


def test_metadata_is_the_same_on_another_system(tree, tmp_path):
    code = f"prepare_metadata_for_build_wheel({str(tmp_path)!r}) if not setattr(sys, 'platform', 'darwin') else ''"
    assert value(hook(tree, code)) == "flash_attn-2.9.0.dist-info"


def test_another_system_can_ask_but_not_compile(tree):
    """pip asks for requirements before it reads metadata, on every system."""
    other = "not setattr(sys, 'platform', 'win32')"
    assert value(hook(tree, f"get_requires_for_build_wheel() if {other} else ''")) == []
    result = hook(tree, f"build_wheel('dist') if {other} else ''")
    assert result.returncode == 23
    assert "cannot be compiled on win32" in result.stderr
    assert "SKIP_CUDA_BUILD=1" in result.stderr
    assert "Traceback" not in result.stderr


def test_requirements_are_ninja_where_an_nvrtc_is_found(tree):
    assert value(hook(tree, "get_requires_for_build_wheel()")) == ["ninja>=1.11"]
    assert value(hook(tree, "get_requires_for_build_editable()")) == ["ninja>=1.11"]
    assert value(hook(tree, "get_requires_for_build_sdist()")) == []


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 reads TOML with tomli, from site-packages")
def test_requirements_have_the_pinned_nvrtc_where_none_is_found(tree):
    nothing = {"PATH": "/usr/bin:/bin", "CUDA_HOME": "", "CUDA_PATH": "", "CONDA_PREFIX": "", "LD_LIBRARY_PATH": ""}
    no_toolkit = "not setattr(__import__('buildtools.nvrtc').nvrtc, 'SYSTEM_ROOT', __import__('pathlib').Path('/none'))"
    call = f"get_requires_for_build_wheel() if {no_toolkit} else ''"
    result = hook(tree, call, python=("-S",), **nothing)
    assert value(result) == ["ninja>=1.11", "nvidia-cuda-nvrtc-cu12==12.9.86"]


def test_requirements_are_none_without_kernels(tree):
    assert value(hook(tree, "get_requires_for_build_wheel()", SKIP_CUDA_BUILD="1")) == []


def test_wrong_nvrtc_folder_is_told_before_anything_is_downloaded(tree):
    result = hook(tree, "get_requires_for_build_wheel()", FLASH_ATTN_NVRTC="/nowhere")
    assert result.returncode == 16
    assert "FLASH_ATTN_NVRTC=/nowhere holds no usable libnvrtc.so" in result.stderr


@pytest.mark.parametrize("call", ["build_wheel('dist')", "prepare_metadata_for_build_wheel('meta')"])
def test_wrong_variable_ends_every_hook_with_its_message(tree, call):
    result = hook(tree, call, FORCE_BUILD="maybe")
    assert result.returncode == 10
    assert "FORCE_BUILD=maybe is neither true nor false" in result.stderr
    assert "Traceback" not in result.stderr


def test_editable_install_points_to_the_tree_and_builds_in_place(tree):
    name = value(hook(tree, "build_editable('editable')", **ARCHS))
    contents = members(tree / "editable" / name)
    assert contents["__editable__.flash_attn.pth"].decode() == f"{tree}\n"
    assert not any(member.startswith("flash_attn/") for member in contents)
    package = tree / "flash_attn"
    assert (package / "_buildtools/archive.py").samefile(tree / "buildtools/archive.py")
    assert json.loads((package / "build_info.json").read_text())["kernel_set"]["archs"] == ["80"]
    # What it left there is no part of a wheel or an sdist made afterwards.
    wheel = tree / "again" / value(hook(tree, "build_wheel('again')", **ARCHS))
    assert wheel.read_bytes() == (tree / "dist" / wheel.name).read_bytes()
    value(hook(tree, "build_editable('editable')", SKIP_CUDA_BUILD="1"))
    assert not (package / "libflash_attn.so").exists()
    assert json.loads((package / "build_info.json").read_text())["cuda_build"] is False


# --- the sdist ---------------------------------------------------------------------------------------------------


def test_own_sdist_holds_what_building_and_testing_need_and_no_results(tmp_path):
    name = write_sdist(tmp_path, load_project(ROOT), 1700000000)
    assert name == "flash_attn-2.9.0.tar.gz"
    with tarfile.open(tmp_path / name) as archive:
        infos = archive.getmembers()
    names = {info.name.removeprefix("flash_attn-2.9.0/") for info in infos}
    assert {
        "PKG-INFO", "pyproject.toml", "kernels.toml", "matrix.toml", "LICENSE", "README.md", "setup.py", "noxfile.py",
        "csrc/params.h", "csrc/kernels/sm80/fwd.cu", "csrc/host/torch_binding.cpp", "buildtools/backend.py",
        "flash_attn/py.typed", "tests/unit/buildtools_support.py", "docker/Dockerfile",
    } <= names  # fmt: skip
    assert not [name for name in names if "__pycache__" in name or name.startswith(("build/", "dist/", "."))]
    assert not names & {f"flash_attn/{name}" for name in ("libflash_attn.so", "flash_attn.kernels", "build_info.json")}
    assert [info.name for info in infos] == sorted(info.name for info in infos)
    assert {(info.uid, info.gid, info.uname, info.mtime) for info in infos} == {(0, 0, "", 1700000000)}
    assert {info.mode for info in infos} <= {0o644, 0o755}
    assert len({info.name.split("/")[0] for info in infos}) == 1


def test_sdist_has_every_source_that_git_tracks():
    """Except what is only for the repository's own machinery: hidden folders."""
    from buildtools.wheel import sdist_files

    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: there is nothing to compare with")
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = {name for name in listing.split("\0") if name and not name.startswith(".") and (ROOT / name).exists()}
    held = {path.relative_to(ROOT).as_posix() for path in sdist_files(load_project(ROOT))}
    assert tracked - held == set()


def test_sdist_bytes_do_not_depend_on_folder_or_umask(tree, tmp_path):
    other = make_tree(tmp_path / "other")
    for path in other.rglob("*.py"):
        path.chmod(0o600)
    names = []
    for root in (tree, other):
        names.append(root / "sdist" / value(hook(root, "build_sdist('sdist')", FLASH_ATTN_LOCAL_VERSION="x")))
    assert names[0].name == "flash_attn-2.9.0.tar.gz"
    assert names[0].read_bytes() == names[1].read_bytes()


def test_wheel_of_the_sdist_is_the_wheel_of_the_tree(tree, wheel, tmp_path):
    name = value(hook(tree, "build_sdist('sdist')"))
    with tarfile.open(tree / "sdist" / name) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / "flash_attn-2.9.0"
    built = value(hook(unpacked, "build_wheel('dist')", **ARCHS))
    assert (unpacked / "dist" / built).read_bytes() == wheel.read_bytes()


def test_sdist_without_a_listed_file_is_an_error(tmp_path):
    tree = make_tree(tmp_path)
    (tree / "noxfile.py").unlink()
    with pytest.raises(WheelError, match=r"noxfile\.py is not there"):
        write_sdist(tmp_path, load_project(tree), 1700000000)


# --- metadata ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        ('version = "2.9.0"', 'dynamic = ["version"]', MetadataError, "dynamic = \\['version'\\]"),
        ('version = "2.9.0"', 'version = "2.9-beta"', MetadataError, '"2.9-beta" is not a normalised version'),
        ('license = "BSD', 'licence = "BSD', TableError, 'unknown key "licence"[\\s\\S]*did you mean "license"'),
        ('readme = "README.md"\n', "", TableError, 'key "readme" is missing'),
        ("sdist = [", "sdists = [", TableError, 'tool.buildtools: unknown key "sdists"'),
    ],
)
def test_metadata_that_is_wrong(tmp_path, old, new, error, message):
    text = (ROOT / "pyproject.toml").read_text()
    assert old in text
    (tmp_path / "pyproject.toml").write_text(text.replace(old, new, 1))
    with pytest.raises(error, match=message):
        load_project(tmp_path)


def test_extras_urls_and_scripts_are_written(tmp_path):
    text = (ROOT / "pyproject.toml").read_text()
    more = (
        '[project.urls]\nSource = "https://example.org/x"\n[project.scripts]\nfa = "flash_attn.__main__:main"\n'
        '[project.optional-dependencies]\ntest = ["numpy", "pytest; python_version >= \'3.10\'"]\n\n[tool.buildtools]'
    )
    (tmp_path / "pyproject.toml").write_text(text.replace("[tool.buildtools]", more))
    (tmp_path / "README.md").write_text("x\n")
    project = load_project(tmp_path)
    metadata = message_from_string(project.metadata())
    assert metadata["Project-URL"] == "Source, https://example.org/x"
    assert metadata["Provides-Extra"] == "test"
    assert metadata.get_all("Requires-Dist")[1:] == [
        "numpy; extra == 'test'", "pytest; (python_version >= '3.10') and extra == 'test'",
    ]  # fmt: skip
    assert project.entry_points() == "[console_scripts]\nfa = flash_attn.__main__:main\n"


# --- what buildtools may import ----------------------------------------------------------------------------------

ALLOWED = {*sys.stdlib_module_names, "packaging", "ninja", "tomli", "tomllib"}


@pytest.mark.parametrize("path", sorted((ROOT / "buildtools").glob("*.py")), ids=lambda path: path.stem)
def test_buildtools_import_the_standard_library_and_never_torch(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for name in names:
            assert name.partition(".")[0] in ALLOWED, f"{path.name} imports {name}"


@pytest.mark.skipif(sys.version_info < (3, 11), reason="3.10 reads TOML with tomli, a build requirement")
def test_every_module_of_the_backend_is_there_without_site_packages():
    code = "import sys, buildtools.backend, buildtools.build, buildtools.edges, buildtools.wheel\n"
    code += "assert not {'torch', 'setuptools', 'pip', 'packaging'} & set(sys.modules)"
    environ = {**os.environ, "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, "-S", "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr


def test_setup_py_is_short_and_knows_its_commands(tree):
    assert len((ROOT / "setup.py").read_text().splitlines()) < 60
    for arguments, code, text in (
        (["--version"], 0, "2.9.0"), (["--name"], 0, "flash-attn"), (["sdist"], 0, "flash_attn-2.9.0.tar.gz"),
        (["build_ext", "--inplace"], 2, "bdist_wheel"), ([], 2, "pip install ."),
    ):  # fmt: skip
        result = subprocess.run(
            [sys.executable, "setup.py", *arguments], cwd=tree, capture_output=True, text=True, check=False
        )
        assert result.returncode == code
        assert text in result.stdout + result.stderr
