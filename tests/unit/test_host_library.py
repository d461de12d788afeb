"""The host library as a file: how it is built, what it needs and offers, and its declarations of torch's functions."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest
from host_support import ROOT, build_library, copy_tree, library

from buildtools.host import platform_tag

SHIM = ROOT / "csrc" / "host" / "torch_shim.h"
FUNCTION = re.compile(r"\b((?:aoti_)?torch_\w+)\(")
EXPORTS = {
    "flash_attn_version", "flash_attn_device_count", "flash_attn_supported", "flash_attn_capability",
    "flash_attn_set_compiler", "flash_attn_compile_answer",
}  # fmt: skip

# In libtorch's stable ABI, but absent from some torch that the library runs on.
WEAK = {"aoti_torch_get_current_cuda_stream", "torch_exception_get_what_without_backtrace"}


def shim_functions() -> set[str]:
    """The names that torch_shim.h declares."""
    code = re.sub(r"//.*", "", SHIM.read_text())
    return set(FUNCTION.findall(code))


def symbols(path: Path, which: str) -> dict[str, str]:
    """{name: type} of the dynamic symbols; versions are cut off."""
    listing = subprocess.run(["nm", "-D", which, str(path)], check=True, capture_output=True, text=True).stdout
    return {line.split()[-1].partition("@")[0]: line.split()[-2] for line in listing.splitlines()}


# ---- The file ----


def test_equal_bytes_from_different_folders(tmp_path: Path) -> None:
    """Neither the folder of the sources nor that of the build enters the library."""
    tree = copy_tree(tmp_path / "some" / "much longer folder")
    data = build_library(tree, tree / "build" / "deeper").read_bytes()
    assert data == library().read_bytes()
    for folder in (tmp_path, library().parent, Path.home()):
        assert str(folder).encode() not in data


def test_manylinux_promise() -> None:
    """Field case 8, whatever glibc and g++ this machine has: nothing newer than the tag promises."""
    assert platform_tag(library(), "manylinux_2_28_x86_64") == ("manylinux_2_28_x86_64", "")


def test_exports() -> None:
    assert set(symbols(library(), "--defined-only")) == EXPORTS


def test_needs_the_stable_abi_alone() -> None:
    """Of torch only what torch_shim.h declares, all of it used, and the rest from C's and C++'s own libraries."""
    needed = symbols(library(), "--undefined-only")
    from_torch = {name for name in needed if FUNCTION.fullmatch(f"{name}(")}
    assert from_torch == shim_functions()
    assert {name for name in from_torch if needed[name] == "w"} == WEAK
    others = set(needed) - from_torch
    assert not [name for name in others if re.search("torch|c10|ATen|^cu[A-Z]|^cuda", name)]
    listing = subprocess.run(["objdump", "-p", str(library())], check=True, capture_output=True, text=True).stdout
    libraries = re.findall(r"NEEDED\s+(\S+)", listing)
    assert set(libraries) <= {
        "libtorch.so", "libdl.so.2", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6",
    }  # fmt: skip
    assert libraries[0] == "libtorch.so"
    assert "libdl.so.2" in libraries
    assert "RUNPATH" not in listing
    assert "RPATH" not in listing


def test_sources_include_nothing_heavy_or_foreign() -> None:
    """Own headers and light standard ones: no torch, no CUDA, and nothing that takes seconds to compile."""
    light = {
        "atomic", "cerrno", "cstdarg", "cstddef", "cstdint", "cstdio", "cstdlib", "cstring", "dlfcn.h", "exception",
        "fcntl.h", "mutex", "stdexcept", "sys/mman.h", "unistd.h",
    }  # fmt: skip
    for path in sorted((ROOT / "csrc" / "host").glob("*.*")):
        text = path.read_text()
        assert set(re.findall(r"#include <(.*)>", text)) <= light, path.name
        assert all(name == "params.h" or name.startswith("host/") for name in re.findall(r'#include "(.*)"', text))
        assert "__FILE__" not in text
        if not path.name.startswith("torch_"):
            assert "torch_" not in "".join(re.findall(r'#include "host/(.*)"', text)), path.name


# ---- The declarations of torch's functions ----


def torch_includes() -> list[Path]:
    """The header folders of the torch that is installed, and those named in FLASH_ATTN_TEST_TORCH_INCLUDES."""
    named = [Path(name) for name in os.environ.get("FLASH_ATTN_TEST_TORCH_INCLUDES", "").split(os.pathsep) if name]
    spec = importlib.util.find_spec("torch")
    assert spec is not None, "torch, whose headers are compared, is not installed"
    assert spec.origin is not None
    return [Path(spec.origin).parent / "include", *named]


def torch_version(include: Path) -> tuple[int, int]:
    text = (include / "torch" / "headeronly" / "version.h").read_text()
    return tuple(int(re.findall(rf"#define TORCH_VERSION_{part} (\d+)", text)[0]) for part in ("MAJOR", "MINOR"))  # type: ignore[return-value]


def compile_with_torch(include: Path, code: str, *folders: Path) -> subprocess.CompletedProcess[str]:
    command = ["g++", "-std=c++17", "-fsyntax-only", "-x", "c++", "-", "-DUSE_CUDA", "-Wall", "-Werror"]
    command += [option for folder in (*folders, ROOT / "csrc") for option in ("-I", str(folder))]
    command += ["-isystem", str(include)]
    return subprocess.run(command, input=code, capture_output=True, text=True, check=False)


TORCH_SHIM = "#include <torch/csrc/stable/c/shim.h>\n"
OWN_SHIM = '#include "host/torch_shim.h"\n'


@pytest.mark.parametrize("include", torch_includes(), ids=lambda path: "torch-{}.{}".format(*torch_version(path)))
def test_declarations_agree_with_torch(include: Path) -> None:
    """Both headers in one file: a function declared in two ways does not compile. And each is one of torch's."""
    for code in (TORCH_SHIM + OWN_SHIM, OWN_SHIM + TORCH_SHIM):
        result = compile_with_torch(include, code)
        assert result.returncode == 0, result.stderr
    functions = shim_functions()
    if torch_version(include) < (2, 13):
        functions -= {"torch_exception_get_what_without_backtrace"}
    uses = "".join(f"auto* const use_{name} = &{name};\n" for name in sorted(functions))
    result = compile_with_torch(include, TORCH_SHIM + uses)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("_get_dim(AtenTensorHandle tensor, int64_t*", "_get_dim(AtenTensorHandle tensor, int32_t*"),
        ("AOTITorchError aoti_torch_zero_", "void aoti_torch_zero_"),
        ("int32_t aoti_torch_dtype_float16", "int64_t aoti_torch_dtype_float16"),
        ("void (*fn)(StableIValue*, uint64_t, uint64_t), uint64_t", "void (*fn)(StableIValue*, uint64_t), uint64_t"),
        ("cuda_stream(int32_t device_index, void**", "cuda_stream(int64_t device_index, void**"),
        ("using StableIValue = uint64_t", "using StableIValue = int64_t"),
    ],
)
def test_a_wrong_declaration_does_not_compile(tmp_path: Path, right: str, wrong: str) -> None:
    """What the test above relies on."""
    text = SHIM.read_text()
    assert right in text
    (tmp_path / "host").mkdir()
    (tmp_path / "host" / "torch_shim.h").write_text(text.replace(right, wrong))
    result = compile_with_torch(torch_includes()[0], TORCH_SHIM + OWN_SHIM, tmp_path)
    assert "torch_shim.h" in result.stderr
    assert result.returncode != 0


def test_torch_target_version() -> None:
    """The number that tells torch whose conventions the library follows is torch's own for 2.10."""
    include = torch_includes()[0]
    code = TORCH_SHIM + OWN_SHIM + "static_assert(flash_attn::kTorchTargetVersion == TORCH_VERSION_2_10_0);\n"
    result = compile_with_torch(include, code)
    assert result.returncode == 0, result.stderr
