"""The one compile path: (source texts, kernel, compiler) -> cubin and resource report.

The ninja build, the container build and the run-time fallback all go through `compile_kernel`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from .archive import Record
from .archs import parse_arch
from .errors import KernelCompileError, ResourceError
from .kernels import AllowedSpills, Kernel
from .nvrtc import Nvrtc

BASE_OPTIONS = ("-std=c++17", "-default-device", "--ptxas-options=-v")


@dataclass(frozen=True)
class EntryReport:
    """What ptxas says of one entry point; bytes are per thread, except `smem` (static, per block)."""

    registers: int = 0
    stack: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    smem: int = 0


@dataclass(frozen=True)
class Report:
    """What the compiler's log says. PTX has no entries: its registers are decided by the driver."""

    entries: Mapping[str, EntryReport] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()

    @property
    def spills(self) -> int:
        """Bytes spilled, stores and loads, over all entry points."""
        return sum(entry.spill_stores + entry.spill_loads for entry in self.entries.values())


@dataclass(frozen=True)
class Compiled:
    """`image` is a cubin, or PTX text with its NUL."""

    image: bytes
    report: Report
    log: str


def compile_options(kernel: Kernel) -> list[str]:
    """NVRTC's options. With the texts and the compiler's version they decide every byte of the result."""
    return [*BASE_OPTIONS, f"--gpu-architecture={kernel.arch.gpu_architecture}", *(f"-D{m}" for m in kernel.macros)]


def compile_kernel(nvrtc: Nvrtc, kernel: Kernel, sources: Mapping[str, str]) -> Compiled:
    """Compile one kernel. `sources` is {name: text}, `kernel.source` among them, the rest its headers.

    KernelCompileError names the kernel and carries the compiler's message. Spills are reported, not refused: a slow
    kernel is better than none at run time; a build refuses them through `check_resources`.
    """
    headers = {name: text for name, text in sources.items() if name != kernel.source}
    try:
        image, log = nvrtc.compile(kernel.source, sources[kernel.source], headers, compile_options(kernel))
    except KernelCompileError as error:
        raise KernelCompileError(
            f"kernel {kernel.key} does not compile for arch {kernel.arch}:\n{error.what}",
            fix=f"`python -m buildtools compile {kernel.key} --arch {kernel.arch}` compiles it alone",
        ) from None
    report = parse_log(log)
    _check_entry_points(kernel, image)
    return Compiled(image, report, log)


def record_of(kernel: Kernel, report: Report) -> Record:
    """What the archive says of a compiled kernel; `report` is its compiler's."""
    described = report.entries.get(kernel.entry_points[0])
    return Record(
        key=kernel.key,
        arch=str(kernel.arch),
        head_dim=kernel.head_dim,
        block_m=kernel.tiles["block_m"],
        block_n=kernel.tiles["block_n"],
        threads=kernel.threads,
        smem_bytes=kernel.smem_bytes,
        registers=described.registers if described else 0,
        split=kernel.split,
    )


_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_PROPERTIES = re.compile(r"Function properties for (?P<name>\S+)")
_STACK = re.compile(
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads"
)
_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SMEM = re.compile(r"(?P<smem>\d+) bytes smem")
_WARNING = re.compile(r"serialized|Potential Performance Loss|: warning\b|^ptxas warning", re.IGNORECASE)


def parse_log(log: str) -> Report:
    """The report in a log of `--ptxas-options=-v`. Called functions' stack and spills count for the entry point."""
    values: dict[str, dict[str, int]] = {}
    warnings = []
    current = ""
    for line in log.splitlines():
        entry = _ENTRY.search(line)
        if entry:
            current = entry["name"]
            values.setdefault(current, dict.fromkeys(("registers", "stack", "spill_stores", "spill_loads", "smem"), 0))
        elif current and (stack := _STACK.search(line)):
            values[current]["stack"] += int(stack["stack"])
            values[current]["spill_stores"] += int(stack["stores"])
            values[current]["spill_loads"] += int(stack["loads"])
        elif current and (used := _USED.search(line)):
            values[current]["registers"] = int(used["registers"])
            smem = _SMEM.search(line)
            values[current]["smem"] = int(smem["smem"]) if smem else 0
        if _WARNING.search(line):
            warnings.append(line.strip())
    return Report({name: EntryReport(**entry) for name, entry in values.items()}, tuple(warnings))


def _check_entry_points(kernel: Kernel, image: bytes) -> None:
    # By the image, not the log: what NVRTC has in the driver's cache it returns without the assembler's log.
    for name in kernel.entry_points:
        if (f".entry {name}(" if kernel.arch.ptx else f"\0.text.{name}\0").encode() not in image:
            raise KernelCompileError(
                f"csrc/kernels/{kernel.source} has no entry point {name}",
                why=f"kernels.toml lists it for {kernel.key}, and the host library looks it up by that name",
                fix=f'define it as extern "C" __global__ void {name}(...), or correct entry_points',
            )


def check_resources(kernels: Iterable[tuple[Kernel, Report]]) -> None:
    """ResourceError that lists all spills beyond what the table allows, and all serialised matrix instructions."""
    complaints = []
    for kernel, report in kernels:
        allowed = kernel.allow_spills.bytes if kernel.allow_spills else 0
        if report.spills > allowed:
            found = ", ".join(
                f"{name} ({entry.registers} registers) stores {entry.spill_stores} bytes and loads {entry.spill_loads}"
                for name, entry in report.entries.items()
                if entry.spill_stores + entry.spill_loads
            )
            complaints.append(f"{kernel.key} on arch {kernel.arch} spills: {found}; {allowed} bytes are allowed")
        complaints += [
            f"{kernel.key} on arch {kernel.arch}: {line}" for line in report.warnings if "serialized" in line
        ]
    if complaints:
        raise ResourceError(
            "\n".join(complaints),
            why="spills go through memory, and serialised wgmma waits, in the inner loop",
            fix="change the tiles or the kernel, or give the rows allow_spills = { bytes = N, reason = ... } "
            "in [[kernel.overrides]] of kernels.toml",
        )


# --- kernels and reports as JSON, for the build folder -------------------------------------------------------------


def kernel_to_json(kernel: Kernel) -> dict[str, Any]:
    spills = kernel.allow_spills and {"bytes": kernel.allow_spills.bytes, "reason": kernel.allow_spills.reason}
    return {**vars(kernel), "arch": str(kernel.arch), "allow_spills": spills}


def kernel_from_json(data: Mapping[str, Any]) -> Kernel:
    return Kernel(
        key=data["key"],
        arch=parse_arch(data["arch"]),
        source=data["source"],
        entry_points=tuple(data["entry_points"]),
        head_dim=data["head_dim"],
        tiles=data["tiles"],
        smem_bytes=data["smem_bytes"],
        macros=tuple(data["macros"]),
        allow_spills=AllowedSpills(**data["allow_spills"]) if data["allow_spills"] else None,
    )


def report_to_json(report: Report) -> dict[str, Any]:
    return {
        "entries": {name: asdict(entry) for name, entry in report.entries.items()},
        "spills": report.spills,
        "warnings": list(report.warnings),
    }


def report_from_json(data: Mapping[str, Any]) -> Report:
    entries = {name: EntryReport(**entry) for name, entry in data["entries"].items()}
    return Report(entries, tuple(data["warnings"]))
