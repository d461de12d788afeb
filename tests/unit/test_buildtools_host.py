"""The host compiler's probe, what an ELF file needs, and the platform tag that follows."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from buildtools_support import ROOT, clean_environ

from buildtools.elf import Needs, read_needs
from buildtools.errors import HostCompilerError, WheelError
from buildtools.host import LIBRARY, broken_promises, find_host_compiler, host_edges, platform_tag


def script(path: Path, text: str) -> Path:
    """An executable that stands for a compiler."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


# --- the probe ---------------------------------------------------------------------------------------------------


def test_real_compiler_passes_and_is_asked_once(tmp_path, monkeypatch):
    cache = tmp_path / "gxx.json"
    first = find_host_compiler(clean_environ(), (9,), cache)
    assert first.name.startswith("g++ ")
    assert first.command == ("g++",)
    monkeypatch.setattr(subprocess, "run", None)  # a second probe would call it
    assert find_host_compiler(clean_environ(), (9,), cache) == first


def test_compiler_that_is_not_there(tmp_path):
    with pytest.raises(HostCompilerError, match=r"g\+\+ is not on PATH[\s\S]*install g\+\+ 9 or newer, or set CXX"):
        find_host_compiler({"PATH": str(tmp_path)}, (9,), tmp_path / "cache")


def test_compiler_too_old_names_both_versions(tmp_path):
    old = script(tmp_path / "g++", 'case "$1" in --version) echo "g++ (GCC) 4.8.5";; *) echo 4.8.5;; esac')
    with pytest.raises(HostCompilerError, match=r"is g\+\+ 4\.8\.5; g\+\+ 9 or newer is needed"):
        find_host_compiler({"PATH": f"{old.parent}:{os.environ['PATH']}"}, (9,), tmp_path / "cache")


def test_compiler_that_is_broken_shows_its_message(tmp_path):
    text = (
        'case "$1" in --version) echo "g++ 13";; -dump*) echo 13.2.0;; *) echo "cc1plus: not found" >&2; exit 1;; esac'
    )
    script(tmp_path / "g++", text)
    with pytest.raises(HostCompilerError, match=r"\(g\+\+ 13\.2\.0\) cannot compile and link[\s\S]*cc1plus: not found"):
        find_host_compiler({"PATH": f"{tmp_path}:{os.environ['PATH']}"}, (9,), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_cxx_may_have_arguments(tmp_path):
    wrapper = script(tmp_path / "launcher", 'exec "$@"')
    environ = clean_environ(CXX=f"{wrapper} g++ -fno-semantic-interposition")
    compiler = find_host_compiler(environ, (9,), tmp_path / "cache")
    assert compiler.command == (str(wrapper), "g++", "-fno-semantic-interposition")
    assert compiler.name.startswith("g++ ")


# --- the graph ---------------------------------------------------------------------------------------------------


def test_edges_hold_no_path_of_the_machine(tmp_path):
    compiler = find_host_compiler(clean_environ(), (9,), tmp_path / "gxx.json")
    edges = host_edges(ROOT, ROOT / "build", compiler, "2.9.0", {"CXXFLAGS": "-O3 '-DA=b c'", "LDFLAGS": "-Wl,-O1"})
    assert str(ROOT) not in str(edges)
    assert "'-DA=b c'" in edges.rules["cxx"]["command"]
    assert "-Wl,-O1" in edges.rules["link"]["command"]
    objects = [outputs[0] for rule, outputs, *_ in edges.builds if rule == "cxx"]
    assert objects == sorted(objects)
    assert edges.builds[-1][1] == [f"build/{LIBRARY}"]


# --- ELF and the tag ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_library(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("elf")
    source = '#include <string>\nextern "C" int f(const char* s) { return int(std::string(s).size()); }\n'
    (folder / "f.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", "f.cpp", "-o", "libf.so", "-Wl,-rpath,/opt/lib"]
    subprocess.run(command, cwd=folder, check=True)
    return folder / "libf.so"


def test_needs_are_those_that_readelf_shows(small_library):
    needs = read_needs(small_library)
    shown = subprocess.run(
        ["readelf", "-dV", str(small_library)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "LC_ALL": "C"},
    ).stdout
    assert needs.machine in ("x86_64", "aarch64")
    assert list(needs.libraries) == [
        line.split("[")[1].rstrip("]") for line in shown.splitlines() if "(NEEDED)" in line
    ]
    assert needs.search_paths == ("/opt/lib",)
    versions = {line.split("Name: ")[1].split()[0] for line in shown.splitlines() if "Flags: none  Version" in line}
    assert {version for _, version in needs.versions} == versions
    assert versions


@pytest.mark.parametrize("data", [b"", b"MZ", b"\x7fELF\x01\x01" + bytes(100), b"\x7fELF\x02\x01" + b"\xff" * 100])
def test_what_is_no_elf_file(tmp_path, data):
    path = tmp_path / "libx.so"
    path.write_bytes(data)
    with pytest.raises(WheelError, match=r"libx\.so is"):
        read_needs(path)


def test_truncated_elf_file_is_an_error(small_library, tmp_path):
    data = small_library.read_bytes()
    for size in range(64, len(data), 997):
        (tmp_path / "libx.so").write_bytes(data[:size])
        with pytest.raises(WheelError):
            read_needs(tmp_path / "libx.so")


def needs(
    *versions: tuple[str, str], libraries: tuple[str, ...] = ("libc.so.6",), paths: tuple[str, ...] = ()
) -> Needs:
    return Needs("x86_64", libraries, versions, paths)


KEPT = [
    needs(),
    needs(("libc.so.6", "GLIBC_2.28"), ("libc.so.6", "GLIBC_2.2.5")),
    needs(("libstdc++.so.6", "GLIBCXX_3.4.24"), ("libstdc++.so.6", "CXXABI_1.3.11")),
    needs(("libgcc_s.so.1", "GCC_3.0"), ("libtorch.so", "ANY_99"), libraries=("libtorch.so", "libdl.so.2")),
]
BROKEN = {
    "GLIBC_2.29 of libm.so.6": needs(("libm.so.6", "GLIBC_2.29")),
    "GLIBC_2.34 of libc.so.6": needs(("libc.so.6", "GLIBC_2.17"), ("libc.so.6", "GLIBC_2.34")),
    "GLIBC_PRIVATE of libc.so.6": needs(("libc.so.6", "GLIBC_PRIVATE")),
    "GLIBCXX_3.4.29 of libstdc++.so.6": needs(("libstdc++.so.6", "GLIBCXX_3.4.29")),
    "CXXABI_1.3.13 of libstdc++.so.6": needs(("libstdc++.so.6", "CXXABI_1.3.13")),
    "FOO_1.0 of libfoo.so": needs(("libfoo.so", "FOO_1.0")),
    "libcudart.so.12": needs(libraries=("libcudart.so.12",)),
    "libc.musl-x86_64.so.1": needs(libraries=("libc.musl-x86_64.so.1",)),
    "the search path /opt": needs(paths=("/opt",)),
}


@pytest.mark.parametrize("kept", KEPT)
def test_promise_kept(kept):
    assert broken_promises(kept, "manylinux_2_28") == []


@pytest.mark.parametrize("reason", BROKEN)
def test_promise_broken(reason):
    assert broken_promises(BROKEN[reason], "manylinux_2_28") == [reason]


def test_tag_is_for_machines_like_this_where_the_promise_is_broken(small_library, tmp_path):
    machine = read_needs(small_library).machine
    tag, why_not = platform_tag(small_library, f"manylinux_2_28_{machine}")
    assert tag == f"linux_{machine}"
    assert "libf.so is not manylinux_2_28: it needs" in why_not
    assert "the search path /opt/lib" in why_not
    plain = tmp_path / "libplain.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "/dev/null", "-o", str(plain)], check=True)
    assert platform_tag(plain, f"manylinux_2_28_{machine}") == (f"manylinux_2_28_{machine}", "")
