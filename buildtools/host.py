"""The host library: its compiler probed, its part of the ninja graph, and the platform tag that it deserves."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .elf import Needs, read_needs
from .errors import HostCompilerError, SourceError
from .matrix import POLICIES, HostLibrary
from .ninja_graph import HostEdges, relative, write_if_changed

LIBRARY = "libflash_attn.so"

# How csrc/host is compiled; the root of the source tree is the current folder, so no path of the machine is recorded.
COMPILE_FLAGS = (
    "-std=c++17", "-O2", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-fno-plt", "-Wall", "-Wextra",
    "-I", "csrc",
)  # fmt: skip
LINK_FLAGS = (f"-Wl,-soname,{LIBRARY}", "-Wl,--build-id=none", "-Wl,-z,now", "-Wl,-z,relro")

_EXPORTS = "csrc/host/compat/exports.map"

_PROBE = """\
#include <new>
#include <type_traits>
static_assert(__cplusplus >= 201703L && sizeof(void*) == 8);
template <class T> int size() { if constexpr (std::is_same_v<T, int>) throw std::bad_alloc(); else return sizeof(T); }
extern "C" int probe(bool fail) { return fail ? size<int>() : size<char>(); }
"""

_PLATFORM_LIBRARIES = re.compile(
    r"lib(stdc\+\+\.so\.6|gcc_s\.so\.1|m\.so\.6|c\.so\.6|dl\.so\.2|rt\.so\.1|pthread\.so\.0)|ld-linux-.*"
)
_TORCH_LIBRARIES = ("libtorch.so",)


@dataclass(frozen=True)
class HostCompiler:
    """`command`: the compiler with its leading arguments. `name`: such as "g++ 12.2.0"."""

    command: tuple[str, ...]
    name: str


def find_host_compiler(
    environ: Mapping[str, str], minimum: tuple[int, ...], cache: Path, default: str = "g++"
) -> HostCompiler:
    """CXX, or `default`, after it has compiled and linked five lines of C++17; HostCompilerError if it cannot.

    The answer is kept in `cache` as long as the compiler's file stays the same.
    """
    needed = ".".join(map(str, minimum))
    how = f"install g++ {needed} or newer, or set CXX to one"
    command = shlex.split(environ.get("CXX", "")) or [default]
    path = shutil.which(command[0], path=environ.get("PATH"))
    if path is None:
        raise HostCompilerError(
            f"no C++ compiler: {command[0]} is not on PATH", why="the host library is compiled from csrc/host", fix=how
        )
    stat = os.stat(path)
    identity = [path, *command[1:], stat.st_size, stat.st_mtime_ns, needed]
    try:
        known = json.loads(cache.read_text(encoding="utf-8"))
        if known["identity"] == identity:
            return HostCompiler(tuple(command), known["name"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not probed yet, or the note is damaged
    name = _probe(command, environ, minimum, how)
    write_if_changed(cache, json.dumps({"identity": identity, "name": name}))
    return HostCompiler(tuple(command), name)


def _probe(command: list[str], environ: Mapping[str, str], minimum: tuple[int, ...], how: str) -> str:
    version_text = _output([*command, "--version"], environ)
    kind = "clang++" if "clang" in version_text else "g++"
    version = _output([*command, "-dumpfullversion", "-dumpversion"], environ).strip()
    numbers = tuple(int(number) for number in re.findall(r"\d+", version))
    needed = f"g++ {'.'.join(map(str, minimum))} or newer is needed"
    if kind == "g++" and numbers < minimum:
        raise HostCompilerError(
            f"{' '.join(command)} is {kind} {version or 'of an unknown version'}; {needed}",
            why="the host library is C++17",
            fix=how,
        )
    with tempfile.TemporaryDirectory(prefix="flash_attn_probe_") as folder:
        source = Path(folder, "probe.cpp")
        source.write_text(_PROBE, encoding="utf-8")
        arguments = [*command, "-std=c++17", "-fPIC", "-shared", str(source), "-o", str(Path(folder, "probe.so"))]
        result = subprocess.run(arguments, env=dict(environ), capture_output=True, text=True, check=False)
        if result.returncode != 0:
            raise HostCompilerError(
                f"{' '.join(command)} ({kind} {version}) cannot compile and link five lines of C++17; {needed}",
                why=result.stderr.strip() or f"it exited with {result.returncode}",
                fix=how,
            )
    return f"{kind} {version}"


def _output(command: list[str], environ: Mapping[str, str]) -> str:
    try:
        return subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise HostCompilerError(
            f"{command[0]} does not start: {error.strerror}", fix="set CXX to a working g++"
        ) from None


def host_edges(
    root: Path,
    folder: Path,
    compiler: HostCompiler,
    version: str,
    environ: Mapping[str, str],
    row: HostLibrary | None = None,
    torch_include: Path | None = None,
) -> HostEdges:
    """The edges that make `folder`/libflash_attn.so. `version` is what the library says it is of.

    Torch is not needed: the library is linked against an empty one that only has torch's name. A per-torch `row` also
    has the sources in csrc/host/compat, and its torch's headers in `torch_include` if it has any.
    """
    sources = sorted((root / "csrc" / "host").glob("*.cpp"))
    if not sources:
        raise SourceError("csrc/host holds no C++ file", why="the host library is compiled from it")
    for_torch: list[str] = []
    exports: list[str] = []
    if row is not None and row.per_torch is not None:
        sources += sorted((root / "csrc" / "host" / "compat").glob("*.cpp"))
        exports = [f"-Wl,--version-script={_EXPORTS}"]
        major, minor = row.per_torch
        for_torch = [f"-DFLASH_ATTN_TORCH={100 * major + minor}", f"-D_GLIBCXX_USE_CXX11_ABI={int(row.cxx11_abi)}"]
        if torch_include is not None:
            # The prefix map keeps the folder out of the file names in torch's checks.
            for_torch += ["-isystem", str(torch_include), f"-ffile-prefix-map={torch_include}=torch/include"]
    where = f"{relative(folder, root)}/host"
    (folder / "host").mkdir(parents=True, exist_ok=True)
    # A changed compiler, which its command line does not show, is a changed input of every edge.
    write_if_changed(folder / "host" / "compiler.txt", compiler.name)
    identity = f"{where}/compiler.txt"
    cxx = shlex.join(compiler.command)
    flags = [*COMPILE_FLAGS, f'-DFLASH_ATTN_VERSION="{version}"', *for_torch, *shlex.split(environ.get("CXXFLAGS", ""))]
    edges = HostEdges()
    edges.rules["cxx"] = {
        "command": f"{cxx} {_shell(flags)} -MMD -MF $out.d -c $in -o $out",
        "depfile": "$out.d",
        "deps": "gcc",
        "description": "$in",
    }
    stub = ["-shared", "-nostdlib", "-x", "c++", "/dev/null", "-Wl,-soname,libtorch.so", "-Wl,--build-id=none"]
    edges.rules["stub"] = {"command": f"{cxx} {_shell(stub)} -o $out", "description": "a library of torch's name"}
    link = [*LINK_FLAGS, *exports, "-L", where, "-Wl,--no-as-needed", "-ltorch", "-l:libdl.so.2"]
    link += shlex.split(environ.get("LDFLAGS", ""))
    edges.rules["link"] = {"command": f"{cxx} -shared -s $in {_shell(link)} -o $out", "description": LIBRARY}
    objects = []
    for source in sources:
        objects.append(f"{where}/{source.stem}.o")
        edges.builds.append(("cxx", [objects[-1]], [relative(source, root)], [identity], {}))
    edges.builds.append(("stub", [f"{where}/libtorch.so"], [], [identity], {}))
    implicit = [f"{where}/libtorch.so", *([_EXPORTS] if exports else [])]
    edges.builds.append(("link", [f"{relative(folder, root)}/{LIBRARY}"], objects, implicit, {}))
    return edges


def _shell(arguments: list[str]) -> str:
    return shlex.join(arguments).replace("$", "$$")


def platform_tag(library: Path, promised: str) -> tuple[str, str]:
    """(tag, why not): `promised`, such as "manylinux_2_28_x86_64", where the library keeps that promise.

    Otherwise the tag is for machines like this one, linux_x86_64, and the second value says what breaks the promise.
    """
    needs = read_needs(library)
    policy = re.sub(r"_(x86_64|aarch64)$", "", promised)
    broken = broken_promises(needs, policy)
    if broken:
        return f"linux_{needs.machine}", f"{library.name} is not {policy}: it needs {', '.join(broken)}"
    return f"{policy}_{needs.machine}", ""


def broken_promises(needs: Needs, policy: str) -> list[str]:
    """What `needs` asks for beyond the manylinux `policy`."""
    limits: dict[str, tuple[int, ...]] = {"GLIBC": _numbers(policy), **POLICIES[policy]}
    broken = [
        name for name in needs.libraries if name not in _TORCH_LIBRARIES and not _PLATFORM_LIBRARIES.fullmatch(name)
    ]
    for library, version in needs.versions:
        numbers = _numbers(version)
        if library not in _TORCH_LIBRARIES and (not numbers or numbers > limits.get(version.partition("_")[0], ())):
            broken.append(f"{version} of {library}")
    return broken + [f"the search path {path}" for path in needs.search_paths]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text))
