"""What a build from source costs: CPU-seconds, wall time, peak memory of a job, wheel size, and what a rebuild does.

    python benchmarks/build_time.py [--json FILE] [--quick]

Runs in an environment that has the build requirements (`nox -s bench-build` makes one), in folders of its own: nothing
of an earlier build is used. CPU-seconds are those of the build's process and of all its descendants, NVRTC, g++, the
linker and Python's start included; the peak is that of the largest single process.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BUILD = [sys.executable, "-m", "buildtools", "build", "--quiet"]
WHEEL = [sys.executable, "-c", "import sys; from buildtools import backend; print(backend.build_wheel(sys.argv[1]))"]
ONE_OF_EACH = {"FLASH_ATTN_CUDA_ARCHS": "90", "FLASH_ATTN_KERNELS": "*-bf16-d64-*"}


@dataclass(frozen=True)
class Cost:
    """Of one build. `steps`: what ninja ran, None where a wheel was asked for."""

    name: str
    cpu_s: float
    wall_s: float
    peak_mib: float
    steps: int | None = None
    kernel_cpu_s: float | None = None  # the kernels' part of cpu_s, from their own reports
    bar: str = ""


def measure(name: str, command: list[str], folder: Path, variables: dict[str, str], bar: str = "") -> Cost:
    """Runs a build and takes the resources of its whole process tree."""
    ignored = ("FLASH_ATTN_", "FLASH_ATTENTION_", "TORCH_CUDA_ARCH_LIST", "SKIP_CUDA_BUILD")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ignored)}
    environment |= {"FLASH_ATTN_BUILD_DIR": str(folder), "PYTHONDONTWRITEBYTECODE": "1", **variables}
    with tempfile.TemporaryFile("w+") as output:
        start = time.perf_counter()
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        text = output.read()
    if process.returncode != 0:
        raise SystemExit(f"{name}: the build failed with exit code {process.returncode}\n{text}")
    steps = re.search(r"^(\d+) steps run", text, re.MULTILINE)
    return Cost(
        name,
        cpu_s=round(usage.ru_utime + usage.ru_stime, 2),
        wall_s=round(wall, 2),
        peak_mib=round(usage.ru_maxrss / 1024, 1),
        steps=int(steps[1]) if steps else None,
        kernel_cpu_s=kernel_cpu_s(folder),
        bar=bar,
    )


def kernel_cpu_s(folder: Path) -> float:
    kernels = json.loads((folder / "resources.json").read_text(encoding="utf-8"))["kernels"]
    return round(sum(float(kernel["cpu_s"]) for kernel in kernels.values()), 2)


def run(quick: bool) -> tuple[list[Cost], dict[str, object]]:
    """All measurements; `quick` leaves out the complete wheel."""
    facts: dict[str, object] = {
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": sys.version.split()[0],
    }
    with tempfile.TemporaryDirectory(prefix="build-time-") as name:
        scratch = Path(name)
        one = scratch / "one"
        costs = [measure("one arch, one head dim, one dtype", BUILD, one, ONE_OF_EACH, "5 CPU-s")]
        variables, folder = ONE_OF_EACH, one
        if not quick:
            variables, folder = {}, scratch / "all"
            command = [*WHEEL, str(scratch / "dist")]
            costs.append(measure("complete wheel, all archs", command, folder, variables, "300 CPU-s, 400 MiB a job"))
            (wheel,) = (scratch / "dist").glob("*.whl")
            kernels = json.loads((folder / "resources.json").read_text(encoding="utf-8"))
            facts |= {"wheel": wheel.name, "wheel_mb": round(wheel.stat().st_size / 1e6, 2)}
            facts |= {"kernels": len(kernels["kernels"]), "compiler": kernels["compiler"]}
        costs.append(measure("nothing edited", BUILD, folder, variables, "0 steps, 0.5 s"))
        for item in folder.rglob("*.o"):
            item.unlink()
        costs.append(measure("host library alone", BUILD, folder, variables, "15 CPU-s"))
    return costs, facts


def table(costs: list[Cost]) -> str:
    lines = ["| build | CPU-s | of which kernels | wall s | peak MiB a job | steps | bar |", "|" + " --- |" * 7]
    for cost in costs:
        kernels = "" if cost.steps == 0 or cost.kernel_cpu_s is None else f"{cost.kernel_cpu_s:.1f}"
        if cost.name == "host library alone":
            kernels = ""
        steps = "" if cost.steps is None else str(cost.steps)
        lines.append(
            f"| {cost.name} | {cost.cpu_s:.2f} | {kernels} | {cost.wall_s:.2f} | {cost.peak_mib:.0f} | {steps} "
            f"| {cost.bar} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE too")
    parser.add_argument("--quick", action="store_true", help="leave out the complete wheel")
    options = parser.parse_args()
    costs, facts = run(options.quick)
    print(table(costs))
    print(", ".join(f"{key} {value}" for key, value in facts.items()))
    if options.json:
        options.json.write_text(json.dumps({**facts, "builds": [asdict(cost) for cost in costs]}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
