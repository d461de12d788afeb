"""Importing works wherever torch does, and what is missing is said by the first call that needs it.

Each case is a copy of the package in another state, imported by a fresh interpreter as an installed one would be.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import flash_attn
from flash_attn import _library

ROOT = Path(__file__).resolve().parents[2]

# Prints what importing, a call on the CPU, and the kernel of a CUDA call do. There is no GPU here: the CUDA kernel of
# the operator is called by its dispatch key.
PROBE = """
import json, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import flash_attn
import torch
from flash_attn import _ops
x = torch.ones(1, 2, 1, 8)
result = {"warnings": [str(w.message) for w in caught if "flash_attn" in str(w.message)]}
result["file"] = flash_attn.__file__
result["cpu"] = flash_attn.flash_attn_func(x, x, x).sum().item()
result["supported"] = flash_attn.supported("cuda")
try:
    _ops.FWD.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), x, x, x, 1.0, False)
except Exception as error:
    result["error"] = [type(error).__name__, isinstance(error, RuntimeError), str(error)]
print(json.dumps(result))
"""


@pytest.fixture
def package(tmp_path):
    """A copy of the package with none of its built files."""
    built = (
        _library.HOST_LIBRARY_NAME,
        _library.KERNEL_SET_NAME,
        _library.BUILD_INFO_NAME,
        "__pycache__",
        "_buildtools",
    )
    shutil.copytree(ROOT / "flash_attn", tmp_path / "flash_attn", ignore=shutil.ignore_patterns(*built))
    return tmp_path / "flash_attn"


def write_build_info(package, **changes):
    host = {"kind": "stable", "torch": ">=2.10", "platform": "manylinux_2_28_x86_64", "cxx11_abi": True}
    info = {"version": "2.9.0", "cuda_build": True, "host": host, "kernel_set": None, **changes}
    (package / _library.BUILD_INFO_NAME).write_text(json.dumps(info))


def probe(package):
    done = subprocess.run(
        [sys.executable, "-c", PROBE], cwd=package.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert Path(result["file"]).parent == package
    assert result["cpu"] == 16.0
    assert result["supported"][0] is False
    return result


def test_source_tree(package):
    result = probe(package)
    kind, is_runtime_error, text = result["error"]
    assert (kind, is_runtime_error, result["warnings"]) == ("NotBuiltError", True, [])
    assert "libflash_attn.so is missing" in text
    assert "source tree" in text


def test_wheel_built_without_cuda(package):
    write_build_info(package, cuda_build=False, host=None)
    kind, _, text = probe(package)["error"]
    assert kind == "NotBuiltError"
    assert "SKIP_CUDA_BUILD" in text


def test_library_lost_from_an_installation(package):
    write_build_info(package)
    kind, _, text = probe(package)["error"]
    assert kind == "NotBuiltError"
    assert "installation is incomplete" in text


def test_library_that_does_not_load(package):
    write_build_info(package)
    (package / _library.HOST_LIBRARY_NAME).write_bytes(b"not a library")
    result = probe(package)
    kind, is_runtime_error, text = result["error"]
    assert (kind, is_runtime_error) == ("HostLibraryError", True)
    assert re.search(r"the loader says: .*libflash_attn\.so", text)
    assert result["warnings"] == [text]


def test_library_for_another_torch(package):
    """Field case 9: both sides are named and what to do is said, by the import and by the first call on a GPU."""
    write_build_info(package, host={"kind": "torch", "torch": "==2.6.*", "cxx11_abi": False})
    (package / _library.HOST_LIBRARY_NAME).write_bytes(b"never opened")
    result = probe(package)
    kind, _, text = result["error"]
    assert kind == "HostLibraryError"
    abi = int(torch.compiled_with_cxx11_abi())
    assert f"built for torch 2.6, C++ ABI 0; found torch {torch.__version__}, C++ ABI {abi}" in text
    assert "or torch==2.6.*" in text
    assert "undefined symbol" not in text
    assert result["warnings"] == [text]


def host(torch_requirement="==2.6.*", cxx11_abi=False, kind="torch"):
    return {"kind": kind, "torch": torch_requirement, "cxx11_abi": cxx11_abi}


@pytest.mark.parametrize(
    ("library", "version", "abi", "problem"),
    [
        (host(), "2.6.0+cu124", False, None),
        (host(), "2.6.1", False, None),
        (host(), "2.6.0", True, "built for torch 2.6, C++ ABI 0; found torch 2.6.0, C++ ABI 1"),
        (host(), "2.7.0", False, "built for torch 2.6, C++ ABI 0; found torch 2.7.0, C++ ABI 0"),
        (host(), "2.60.0", False, "built for torch 2.6, C++ ABI 0; found torch 2.60.0, C++ ABI 0"),
        (host(cxx11_abi=True), "2.6.0", False, "built for torch 2.6, C++ ABI 1; found torch 2.6.0, C++ ABI 0"),
        (host(), "2.6.0a0+git123", False, "built for torch 2.6, C++ ABI 0; found torch 2.6.0a0+git123, C++ ABI 0"),
        (host(), "2.6.0+git123", False, "built for torch 2.6, C++ ABI 0; found torch 2.6.0+git123, C++ ABI 0"),
        (host(), "2.6.0.dev2025", False, "built for torch 2.6, C++ ABI 0; found torch 2.6.0.dev2025, C++ ABI 0"),
        (host(">=2.10", True, "stable"), "2.10.0", False, None),
        (host(">=2.10", True, "stable"), "2.13.0a0+git123", True, None),
        (host(">=2.10", True, "stable"), "2.9.1", True, "built for torch 2.10 or newer; found torch 2.9.1"),
        ({}, "2.9.1", True, None),
    ],
)  # fmt: skip
def test_what_a_library_was_built_for(library, version, abi, problem):
    assert _library.mismatch(library, version, abi) == problem


@pytest.mark.parametrize("content", ["", "{", "[]", "\udcff"])
def test_unreadable_build_info(package, content):
    (package / _library.BUILD_INFO_NAME).write_text(content, errors="surrogateescape")
    assert _library.read_build_info(package) is None


@pytest.mark.parametrize(
    ("requirement", "version", "matches"),
    [
        (">=2.10", "2.10.0", True),
        (">=2.10", "2.9.1+cu126", False),
        (">=2.10", "2.13.0a0+git1234", True),
        (">=2.10", "3.0", True),
        ("==2.6.*", "2.6.0+cpu", True),
        ("==2.6.*", "2.60.0", False),
        ("==2.6.*", "2.7.0", False),
    ],
)
def test_torch_requirement(requirement, version, matches):
    assert _library.torch_matches(requirement, version) is matches


def test_version_is_the_projects():
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert flash_attn.__version__ == version


def test_supported_answers_for_every_kind_of_device():
    assert flash_attn.supported("cpu") == flash_attn.supported(torch.device("cpu"))
    assert flash_attn.supported("cpu")[0] is True
    for device in ("cuda", "cuda:7", 7, "xpu"):
        answer, reason = flash_attn.supported(device)
        assert answer is False
        assert reason.endswith(".")
    with pytest.raises(RuntimeError, match="nonsense"):
        flash_attn.supported("nonsense")
