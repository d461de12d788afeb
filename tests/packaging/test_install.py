"""Builds from source by real pip, and what they install. Field cases 3, 10, 14, 22, 23 and 25."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from packaging_support import ROOT, Environment, WheelFile, clean_environ, make_torch

from buildtools import nvrtc
from buildtools.archive import read
from buildtools.build import load_tables
from buildtools.compile import compile_kernel
from buildtools.index import serving, write_index
from buildtools.sources import SourceTree

pytestmark = pytest.mark.slow

SUBSET = {"TORCH_CUDA_ARCH_LIST": "9.0", "FLASH_ATTN_HEAD_DIMS": "64"}
CONTENTS = ("flash_attn.kernels", "libflash_attn.so", "build_info.json")


def source_environ(**variables: str) -> dict[str, str]:
    """The user's own pip settings, no CUDA toolkit in sight, and the smallest build."""
    environ = clean_environ(keep_index=True, FORCE_BUILD="1", **SUBSET, **variables)
    folders = environ["PATH"].split(":")
    environ["PATH"] = ":".join(folder for folder in folders if not Path(folder, "nvcc").exists())
    for name in ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH", "CPATH"):
        environ.pop(name, None)
    # g++ may lie beside nvcc, and pip's environment has to find it.
    if not shutil.which("g++", path=environ["PATH"]):
        gxx = shutil.which("g++")
        assert gxx is not None
        environ["CXX"] = gxx
    return environ


@pytest.fixture(scope="module")
def built(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of head dim 64 for arch 90, built from the sdist by pip, with isolation and without a toolkit."""
    folder = tmp_path_factory.mktemp("built")
    environment = Environment.make(folder / "environment")
    log = environment.pip("wheel", "--no-deps", "-v", sdist, "--wheel-dir", folder, environ=source_environ())
    assert "torch-" not in log
    (wheel,) = folder.glob("*.whl")
    return wheel


def test_a_wheel_holds_library_and_kernels(built: Path) -> None:
    """Cases 14 and 22: what was asked for is in it, and nothing else is."""
    wheel = WheelFile.read(built)
    for name in CONTENTS:
        assert len(wheel.read_member(f"flash_attn/{name}")) > 500
    info = json.loads(wheel.read_member("flash_attn/build_info.json"))
    assert info["kernel_set"]["archs"] == ["90", "90a"]  # 90a: the code for 9.0 of the family that is for it alone
    assert {key.split("-")[3] for key in info["kernel_set"]["keys"]} == {"d64"}
    assert info["version"] == wheel.metadata["Version"]
    assert info["cuda_build"] is True
    assert wheel.tags == [f"py3-none-{info['host']['platform']}"]


def test_install_from_an_index_without_toolkit_or_gpu(environment: Environment, built: Path, tmp_path: Path) -> None:
    """Cases 3 and 10: pip takes torch from where it was, changes nothing, and starts no compiler."""
    make_torch(tmp_path / "dist", "2.99.0")
    torch = make_torch(tmp_path / "installed", "2.13.0")
    write_index([built, *(tmp_path / "dist").glob("*.whl")], tmp_path / "index")
    environ = clean_environ(PATH=str(environment.folder / "bin"))
    environment.pip("install", torch, environ=environ)
    with serving(tmp_path / "index/stable") as url:
        log = environment.pip("install", "flash-attn", "--index-url", url, environ=environ)
    assert f"Looking in indexes: {url}" in log
    assert "Building wheel" not in log
    assert environment.version("torch") == "2.13.0"
    package = environment.folder / f"lib/python3.{sys.version_info.minor}/site-packages/flash_attn"
    assert all((package / name).is_file() for name in CONTENTS)
    archive = read(package / "flash_attn.kernels")
    assert archive.archs == ["90", "90a"]
    assert {image[48] for image in archive.images} == {90}  # e_flags of the cubins
    assert all("-d64-" in key for key in archive.keys)
    environment.pip("uninstall", "--yes", "flash-attn", environ=environ)
    assert not package.exists()


def test_doctor_of_a_subset_names_what_was_built(built: Path, tmp_path: Path) -> None:
    """Case 23, as far as it goes without a GPU: import works, and doctor lists head dim 64 alone."""
    target = tmp_path / "site"
    Environment.make(tmp_path / "environment").pip("install", "--no-deps", "--target", target, built)
    # This process's own environment has the torch that the tests were started with.
    environment = Environment(Path(sys.prefix))
    environ = clean_environ(PYTHONPATH=str(target))
    result = environment.run("-m", "flash_attn", "doctor", "--json", cwd=tmp_path, environ=environ)
    facts = result.stdout[result.stdout.index("{") :]
    assert "fwd-sm80-bf16-d64-causal" in facts
    assert "-d128-" not in facts
    code = "import flash_attn, torch; x = torch.ones(1, 8, 2, 128); print(flash_attn.flash_attn_func(x, x, x).shape)"
    result = environment.run("-W", "error::UserWarning:flash_attn", "-c", code, cwd=tmp_path, environ=environ)
    assert "torch.Size([1, 8, 2, 128])" in result.stdout, result.stdout


def test_pip_install_of_the_tree_twice_compiles_once(environment: Environment, tmp_path: Path, sdist: Path) -> None:
    """Case 25, by pip: the second build finds the first one's results."""
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path)
    tree = tmp_path / sdist.name.removesuffix(".tar.gz")
    command = ("install", "--no-deps", "--force-reinstall", "-v", tree)
    first = environment.pip(*command, environ=source_environ())
    assert "fwd-sm80-bf16-d64-causal" in first
    assert (tree / "build").is_dir()
    second = environment.pip(*command, environ=source_environ())
    assert "fwd-sm80-bf16-d64-causal" not in second
    assert environment.version("flash-attn") is not None


def test_no_build_isolation_no_deps_offline(tmp_path: Path) -> None:
    """Issue 2's offline build: the build requirements are there, no index is, and torch must not be imported."""
    environment = Environment.make(tmp_path / "environment")
    requirements = ("--require-hashes", "--only-binary=:all:", "-r", ROOT / "docker/requirements-build.txt")
    environment.pip("install", "--quiet", *requirements, environ=clean_environ(keep_index=True))
    environment.pip("install", make_torch(tmp_path / "dist", "2.13.0"))
    nowhere = "http://127.0.0.1:9"
    offline = source_environ() | {"PIP_NO_INDEX": "1", "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere}
    offline |= {"FLASH_ATTN_BUILD_DIR": str(tmp_path / "build")}
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        offline.pop(name, None)
    offline["PIP_CONFIG_FILE"] = "/dev/null"
    log = environment.pip("install", "--no-build-isolation", "--no-deps", ROOT, environ=offline)
    assert "Successfully installed flash-attn" in log
    assert environment.version("torch") == "2.13.0"


def test_the_oldest_nvrtc_compiles_every_source(tmp_path: Path) -> None:
    """The one that an older torch brings, at run time and beside a build: one kernel of each source, for its archs."""
    oldest = ".".join(map(str, nvrtc.MINIMUM_VERSION))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path]
    subprocess.run([*command, f"nvidia-cuda-nvrtc-cu12=={oldest}.*"], env=clean_environ(keep_index=True), check=True)
    library = nvrtc.load_nvrtc(nvrtc.FoundNvrtc(tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "a test"))
    assert library.version == nvrtc.MINIMUM_VERSION
    table = load_tables(ROOT)[0]
    of_source = {row.source: row for row in table.rows}
    for row in of_source.values():
        arch = max(arch for arch in table.families[row.family].archs if arch.number in library.supported_archs())
        texts = SourceTree(ROOT / "csrc").closure(row.source)
        assert compile_kernel(library, table.kernel(row, arch), texts).report.entries


ENGINE = os.environ.get("FLASH_ATTN_ENGINE") or next(filter(shutil.which, ("podman", "docker")), "")


@pytest.mark.skipif(
    not ENGINE or subprocess.run([ENGINE, "info"], capture_output=True, check=False).returncode != 0,
    reason="needs a container engine",
)
def test_install_in_a_container_without_network(built: Path) -> None:
    """Case 3, in a container: no nvcc, no CUDA_HOME, no GPU, no compiler to fall back on, and no connection."""
    image = load_tables(ROOT)[1].images["manylinux_2_28_x86_64"]
    command = [ENGINE, "run", "--rm", "--network=none", f"--volume={built.parent}:/dist:ro"]
    script = f"""
        set -eu
        ! command -v nvcc; test -z "${{CUDA_HOME:-}}"
        python=/opt/python/{image.python}/bin/python
        CXX=/none $python -m pip install --no-index --find-links /dist --no-deps --target /tmp/site flash-attn
        ls -l /tmp/site/flash_attn/flash_attn.kernels /tmp/site/flash_attn/libflash_attn.so
    """
    name = os.environ.get("FLASH_ATTN_BASE_IMAGE") or image.image
    commands = ([ENGINE, "image", "inspect", name], [ENGINE, "pull", name])
    if all(subprocess.run(look, capture_output=True, check=False).returncode != 0 for look in commands):
        pytest.skip(f"needs the image {name}, which cannot be pulled; FLASH_ATTN_BASE_IMAGE names another")
    result = subprocess.run([*command, name, "bash", "-c", script], capture_output=True, encoding="utf-8", timeout=600)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Successfully installed flash-attn" in result.stdout
