"""matrix.toml read and checked: kernel sets, host libraries, the wheels made of them, and all pinned versions."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .archs import Arch, parse_arch
from .errors import ArchError, TableError
from .kernels import KernelTable, arch_name, check_keys, choice_of, expect, read_toml

MACHINES = ("x86_64", "aarch64")
# The newest symbol versions that a manylinux policy allows, beside GLIBC, which its name says.
POLICIES = {"manylinux_2_28": {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}}
_TOP_KEYS = ("version", "kernel_sets", "host_libraries", "wheels", "budgets", "tools", "images", "requirements")
_KERNEL_SET_KEYS = ("requirement", "version", "archs")
_HOST_KEYS = ("abi", "torch", "cxx11_abi", "machine", "platform")
# torch before 2.7 is reached through its C++ API, whose headers the build then needs.
_HEADERS_BEFORE = (2, 7)
_WHEEL_KEYS = ("kernel_set", "host_library")
_IMAGE_KEYS = ("image", "python")
_REQUIREMENT_KEYS = ("build", "tools", "release")
_BUDGET_KEYS = ("wheel_kib", "host_library_kib", "host_library_cpu_s")
_TOOL_KEYS = ("ninja", "minimum_gxx", "job_peak_mib")


@dataclass(frozen=True)
class KernelSet:
    """A CUDA compiler, pinned, and the archs that it compiles the table for."""

    name: str
    requirement: str
    version: str
    archs: tuple[Arch, ...]

    @property
    def pin(self) -> str:
        return f"{self.requirement}=={self.version}"


@dataclass(frozen=True)
class HostLibrary:
    """A build of csrc/host: for every torch that `torch` specifies, one C++ ABI, one platform tag.

    `headers`: the torch version whose headers it is compiled with, or an empty string where none are needed.
    """

    name: str
    abi: str
    torch: str
    cxx11_abi: bool
    machine: str
    platform: str
    headers: str = ""

    @property
    def per_torch(self) -> tuple[int, int] | None:
        """(2, 6) where the library is for torch 2.6 alone; None where it is of the stable ABI."""
        found = re.fullmatch(r"==([0-9]+)\.([0-9]+)\.\*", self.torch)
        return (int(found[1]), int(found[2])) if found and self.abi == "torch" else None

    @property
    def label(self) -> str:
        """The local version label of its wheels: torch2.6.cxx11abi0, or empty for the stable ABI."""
        minor = self.per_torch
        return f"torch{minor[0]}.{minor[1]}.cxx11abi{int(self.cxx11_abi)}" if minor else ""


@dataclass(frozen=True)
class Wheel:
    """One kernel set and one host library."""

    name: str
    kernel_set: KernelSet
    host_library: HostLibrary


@dataclass(frozen=True)
class Budgets:
    """What a row may cost: bytes of a wheel and of its host library, CPU-seconds of compiling the library."""

    wheel_kib: int
    host_library_kib: int
    host_library_cpu_s: int


@dataclass(frozen=True)
class Tools:
    """`ninja`: a requirement. `minimum_gxx`: a version. `job_peak_mib`: memory of one compiler, for the job count."""

    ninja: str
    minimum_gxx: tuple[int, ...]
    job_peak_mib: int


@dataclass(frozen=True)
class Image:
    """The build container of a platform: `image` by digest, and `python`, the name of its interpreter in it."""

    platform: str
    image: str
    python: str


@dataclass(frozen=True)
class Matrix:
    kernel_sets: Mapping[str, KernelSet]
    host_libraries: Mapping[str, HostLibrary]
    wheels: Mapping[str, Wheel]
    budgets: Budgets
    tools: Tools
    images: Mapping[str, Image]
    requirements: Mapping[str, tuple[str, ...]]  # of the project's own environments, which docker/ locks

    @property
    def default_kernel_set(self) -> KernelSet:
        """The kernel set of the first wheel, which a build from source follows."""
        return next(iter(self.wheels.values())).kernel_set

    def kernel_set(self, name: str) -> KernelSet:
        """The kernel set called `name`; TableError with the nearest if there is none."""
        return self.kernel_sets[choice_of(name, self.kernel_sets, "the kernel set")]

    def label(self, wheel: Wheel) -> str:
        """The local version label that tells a wheel from the first one: its kernel set's name, its torch and ABI."""
        own = "" if wheel.kernel_set == self.default_kernel_set else wheel.kernel_set.name
        return ".".join(filter(None, (own, wheel.host_library.label)))


def load_matrix(path: Path, table: KernelTable | None = None) -> Matrix:
    """matrix.toml; with `table`, the archs are checked against kernels.toml."""
    return parse_matrix(read_toml(path), path.name, table)


def parse_matrix(data: Mapping[str, Any], name: str = "matrix.toml", table: KernelTable | None = None) -> Matrix:
    """TableError names the key that is wrong and the nearest right one."""
    check_keys(data, _TOP_KEYS, where=name, required=_TOP_KEYS)
    if data["version"] != 1:
        raise TableError(f"{name}: version = {data['version']!r}", why="this builder reads version 1")
    sections = {key: expect(data[key], dict, f"{name}: {key}") for key in _TOP_KEYS[1:]}
    kernel_sets = {
        key: _kernel_set(key, expect(value, dict, f"{name}: kernel_sets.{key}"), name, table)
        for key, value in sections["kernel_sets"].items()
    }
    hosts = {
        key: _host_library(key, expect(value, dict, f"{name}: host_libraries.{key}"), name)
        for key, value in sections["host_libraries"].items()
    }
    wheels = {}
    for key, value in sections["wheels"].items():
        where = f"{name}: wheels.{key}"
        check_keys(expect(value, dict, where), _WHEEL_KEYS, where=where, required=_WHEEL_KEYS)
        wheels[key] = Wheel(
            key,
            kernel_sets[choice_of(value["kernel_set"], kernel_sets, f"{where}.kernel_set")],
            hosts[choice_of(value["host_library"], hosts, f"{where}.host_library")],
        )
    if not wheels:
        raise TableError(f"{name}: wheels is empty", fix="a wheel is a kernel_set and a host_library")
    default = next(iter(wheels.values())).kernel_set
    named = {wheel.host_library.name for wheel in wheels.values() if wheel.kernel_set == default}
    # A row is one stanza: a host library gets a wheel with the first wheel's kernel set, unless one is named.
    wheels |= {key: Wheel(key, default, host) for key, host in hosts.items() if key not in named}
    return Matrix(
        kernel_sets=kernel_sets,
        host_libraries=hosts,
        wheels=wheels,
        budgets=_budgets(sections["budgets"], f"{name}: budgets"),
        tools=_tools(sections["tools"], f"{name}: tools"),
        images=_images(sections["images"], hosts, f"{name}: images"),
        requirements=_requirements(sections["requirements"], f"{name}: requirements"),
    )


def _kernel_set(key: str, data: Mapping[str, Any], name: str, table: KernelTable | None) -> KernelSet:
    where = f"{name}: kernel_sets.{key}"
    check_keys(data, _KERNEL_SET_KEYS, where=where, required=_KERNEL_SET_KEYS)
    _identifier(key, where)
    archs = []
    for value in expect(data["archs"], list, f"{where}.archs"):
        if table is not None:
            archs.append(arch_name(value, table.archs, f"{where}.archs"))
        else:
            try:
                archs.append(parse_arch(expect(value, str, f"{where}.archs")))
            except ArchError as error:
                raise TableError(f"{where}.archs: {error.what}", fix=error.fix) from None
    if not archs:
        raise TableError(f"{where}.archs is empty")
    return KernelSet(
        name=key,
        requirement=expect(data["requirement"], str, f"{where}.requirement"),
        version=_version_text(data["version"], f"{where}.version"),
        archs=tuple(archs),
    )


def _host_library(key: str, data: Mapping[str, Any], name: str) -> HostLibrary:
    where = f"{name}: host_libraries.{key}"
    check_keys(data, (*_HOST_KEYS, "headers"), where=where, required=_HOST_KEYS)
    _identifier(key, where)
    torch = expect(data["torch"], str, f"{where}.torch")
    if not re.fullmatch(r"(>=|==)[0-9]+\.[0-9]+(\.[0-9*]+)?(,(<|<=|!=)[0-9.]+)*", torch):
        raise TableError(f'{where}.torch = "{torch}" is not understood', fix='write ">=2.10" or "==2.6.*"')
    machine = choice_of(data["machine"], MACHINES, f"{where}.machine")
    platforms = [f"{policy}_{machine}" for policy in POLICIES]
    row = HostLibrary(
        name=key,
        abi=choice_of(data["abi"], ("stable", "torch"), f"{where}.abi"),
        torch=torch,
        cxx11_abi=expect(data["cxx11_abi"], bool, f"{where}.cxx11_abi"),
        machine=machine,
        platform=choice_of(data["platform"], platforms, f"{where}.platform"),
        headers=_version_text(data["headers"], f"{where}.headers") if "headers" in data else "",
    )
    minor = row.per_torch
    if row.abi == "torch" and minor is None:
        raise TableError(f'{where}.torch = "{torch}" is no single torch', fix='write abi = "torch" with "==2.6.*"')
    needed = minor is not None and minor < _HEADERS_BEFORE
    if needed != bool(row.headers) or (minor and needed and not row.headers.startswith(f"{minor[0]}.{minor[1]}.")):
        raise TableError(
            f'{where}.headers = "{row.headers}" does not fit torch {torch}',
            why="a library for torch before 2.7 is compiled with that torch's headers, any other with none",
            fix='name one of its versions, such as "2.6.0", or none',
        )
    return row


def _budgets(data: Mapping[str, Any], where: str) -> Budgets:
    check_keys(data, _BUDGET_KEYS, where=where, required=_BUDGET_KEYS)
    values = {key: expect(data[key], int, f"{where}.{key}") for key in _BUDGET_KEYS}
    for key, value in values.items():
        if value <= 0:
            raise TableError(f"{where}.{key} = {value} is not positive")
    return Budgets(**values)


def _tools(data: Mapping[str, Any], where: str) -> Tools:
    check_keys(data, _TOOL_KEYS, where=where, required=_TOOL_KEYS)
    peak = expect(data["job_peak_mib"], int, f"{where}.job_peak_mib")
    if peak <= 0:
        raise TableError(f"{where}.job_peak_mib = {peak} is not positive")
    return Tools(
        ninja=expect(data["ninja"], str, f"{where}.ninja"),
        minimum_gxx=tuple(int(part) for part in _version_text(data["minimum_gxx"], f"{where}.minimum_gxx").split(".")),
        job_peak_mib=peak,
    )


def _images(data: Mapping[str, Any], hosts: Mapping[str, HostLibrary], where: str) -> dict[str, Image]:
    platforms = {host.platform for host in hosts.values()}
    images = {}
    for key, value in data.items():
        here = f"{where}.{choice_of(key, sorted(platforms), where)}"
        check_keys(expect(value, dict, here), _IMAGE_KEYS, where=here, required=_IMAGE_KEYS)
        image = expect(value["image"], str, f"{here}.image")
        if not re.fullmatch(r"[^@\s]+@sha256:[0-9a-f]{64}", image):
            raise TableError(f'{here}.image = "{image}" names no digest', why="a tag can change", fix="NAME@sha256:...")
        images[key] = Image(key, image, expect(value["python"], str, f"{here}.python"))
    return images


def _requirements(data: Mapping[str, Any], where: str) -> dict[str, tuple[str, ...]]:
    check_keys(data, _REQUIREMENT_KEYS, where=where, required=_REQUIREMENT_KEYS)
    return {
        key: tuple(expect(item, str, f"{where}.{key}") for item in expect(value, list, f"{where}.{key}"))
        for key, value in data.items()
    }


def _identifier(key: str, where: str) -> None:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", key):
        raise TableError(f"{where}: a row's name is lower-case letters, digits, - _ and .: it becomes a file's name")


def _version_text(value: Any, where: str) -> str:
    text = expect(value, str, where)
    if not re.fullmatch(r"[0-9]+(\.[0-9]+)*", text):
        raise TableError(f'{where} = "{text}" is not a version', fix='such as "12.9.86"')
    return str(text)
