"""Kernel sets beside the default one: built by the very compiler that they pin, which can be fetched."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from buildtools_support import MATRIX, clean_environ, make_tree

from buildtools.archive import read
from buildtools.build import build, find_compiler, load_tables
from buildtools.errors import NvrtcNotFoundError, TableError
from buildtools.kernel_compiler import cache_folder, fetch
from buildtools.matrix import KernelSet
from buildtools.sbom import LOCK

FWD64 = "fwd-sm80-bf16-d64-full"


@pytest.fixture
def here(tmp_path: Path) -> str:
    """The version of the NVRTC that a build here finds first."""
    return find_compiler(tmp_path, clean_environ()).version


def tree_with(folder: Path, version: str) -> Path:
    """A tree whose matrix has one more kernel set, of one arch, and a wheel of it."""
    make_tree(folder)
    stanza = f'[kernel_sets.other]\nrequirement = "nvrtc-of-a-test"\nversion = "{version}"\narchs = ["90"]\n\n'
    wheel = '[wheels.other]\nkernel_set = "other"\nhost_library = "stable-x86_64"\n\n'
    text = MATRIX.replace("[host_libraries", f"{stanza}[host_libraries", 1).replace("[budgets]", f"{wheel}[budgets]")
    (folder / "matrix.toml").write_text(text)
    return folder


def test_a_kernel_set_has_its_archs_and_a_folder_of_its_own(tmp_path: Path, here: str) -> None:
    """Building it leaves the default set as it is, and the other way round."""
    tree = tree_with(tmp_path / "tree", here)
    environ = clean_environ(FLASH_ATTN_KERNELS=FWD64)
    default = build(tree, environ=environ, quiet=True)
    other = build(tree, kernel_set="other", environ=environ, quiet=True)
    assert other.kernel_set == tree / "build/kernel_sets/other/flash_attn.kernels"
    assert [record.arch for record in read(other.kernel_set).records] == ["90"]
    assert [record.arch for record in read(default.kernel_set).records] == ["80", "90", "ptx80"]
    assert build(tree, environ=environ, quiet=True).compiled == 0
    assert build(tree, kernel_set="other", environ=environ, quiet=True).compiled == 0


def test_another_compiler_than_the_pinned_one_is_an_error(tmp_path: Path, here: str) -> None:
    """With what is here, and how to get the right one; a build from source takes what there is."""
    tree = tree_with(tmp_path / "tree", "99.1.2")
    environ = clean_environ(FLASH_ATTN_KERNELS=FWD64, XDG_CACHE_HOME=str(tmp_path))
    with pytest.raises(NvrtcNotFoundError) as error:
        build(tree, kernel_set="other", environ=environ, quiet=True)
    assert error.value.what == "nvrtc 99.1.2, which compiles the kernel set other, is not here"
    assert f"nvrtc {here} of " in error.value.why
    assert "buildtools compiler --kernel-set other" in error.value.fix
    assert build(tree, environ=environ, quiet=True).compiler.version == here


def test_a_kernel_set_that_the_matrix_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"'othr'[\s\S]*did you mean \"other\""):
        build(tree_with(tmp_path / "tree", "1.2"), kernel_set="othr", environ=clean_environ(), quiet=True)


# --- fetching the compiler ---------------------------------------------------------------------------------------


@pytest.fixture
def published(tmp_path: Path) -> Path:
    """A folder with the wheel of a compiler, for pip's --find-links."""
    path = tmp_path / "links" / "nvrtc_of_a_test-7.8.9-py3-none-any.whl"
    path.parent.mkdir()
    info = "nvrtc_of_a_test-7.8.9.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("nvidia/cu7/lib/libnvrtc.so.7", "a library")
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nvrtc-of-a-test\nVersion: 7.8.9\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return path


def locked(tree: Path, digest: str) -> KernelSet:
    """The kernel set of a tree whose lock file has this hash of the compiler."""
    (tree / LOCK).write_text(f"nvrtc-of-a-test==7.8.9 \\\n    --hash=sha256:{digest}\n")
    return load_tables(tree)[1].kernel_set("other")


def environ_of(tmp_path: Path, published: Path) -> dict[str, str]:
    links = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(published.parent), "PIP_CONFIG_FILE": "/dev/null"}
    return clean_environ(**links, XDG_CACHE_HOME=str(tmp_path / "cache"))


def test_the_pinned_compiler_is_fetched_once(tmp_path: Path, published: Path) -> None:
    tree, environ = tree_with(tmp_path / "tree", "7.8.9"), environ_of(tmp_path, published)
    kernel_set = locked(tree, hashlib.sha256(published.read_bytes()).hexdigest())
    folder = fetch(kernel_set, tree, environ)
    assert folder == cache_folder(kernel_set, environ)
    assert (folder / "nvidia/cu7/lib/libnvrtc.so.7").read_text() == "a library"
    published.unlink()
    assert fetch(kernel_set, tree, environ) == folder


@pytest.mark.parametrize(
    ("digest", "message"),
    [("0" * 64, "THESE PACKAGES DO NOT MATCH THE HASHES"), ("", "has no hash of nvrtc-of-a-test==7.8.9")],
)
def test_a_compiler_that_is_not_the_locked_one_is_refused(
    tmp_path: Path, published: Path, digest: str, message: str
) -> None:
    """Nothing is left behind."""
    tree, environ = tree_with(tmp_path / "tree", "7.8.9"), environ_of(tmp_path, published)
    with pytest.raises(NvrtcNotFoundError, match=message):
        fetch(locked(tree, digest), tree, environ)
    assert not list((tmp_path / "cache").rglob("*nvrtc*"))


def test_the_command_finds_what_is_here_and_downloads_nothing(tmp_path: Path, here: str) -> None:
    tree = tree_with(tmp_path / "tree", here)
    environ = clean_environ(PIP_NO_INDEX="1", XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, "-m", "buildtools", "compiler", "--kernel-set", "other"]
    result = subprocess.run(command, cwd=tree, env=environ, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert f": nvrtc {here}, for " in result.stdout
    assert not (tmp_path / "cache").exists()


def test_a_compiler_in_the_cache_comes_before_others(tmp_path: Path, here: str) -> None:
    """So that a pinned one does not depend on what else is installed."""
    kernel_set = replace(load_tables(tree_with(tmp_path / "tree", here))[1].kernel_set("other"), version=here)
    found = find_compiler(tmp_path, clean_environ())
    environ = clean_environ(XDG_CACHE_HOME=str(tmp_path / "cache"))
    folder = cache_folder(kernel_set, environ) / "nvidia" / "cu12"
    folder.mkdir(parents=True)
    (folder / "lib").symlink_to(found.path.parent)
    assert find_compiler(tmp_path, environ, kernel_set).path == folder / "lib" / found.path.name
