"""Every installed kernel on small shapes under compute-sanitizer, dealt to several processes:

python tests/kernels/sanitize.py --tool memcheck --tool racecheck --processes 14

A share of kernels in which something is found is run again kernel by kernel, so that each report has its key. Fails
where anything is reported, where a result is wrong, and where a process does not come to its end.

Before that each tool is given a kernel with the fault that it is for, and has to find it.

What the tools see: memcheck, global and shared memory, wgmma's operands and bulk copies; each tensor has an allocation
and padding of its own. racecheck, shared memory: ordinary accesses, cp.async, bulk copies and the fences before them
(also between a read and the copy that overwrites what was read), and mbarriers, which it has to be told the number of.
It does not see what wgmma and TMA's tensor copies access. Before 2026.3 (CUDA 13.3) it reports hazards that are none
around mbarriers and warpgroup barriers on Hopper; the package nvidia-cuda-sanitizer-api on PyPI has a newer one than an
older toolkit.
"""

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

# Before torch is imported: its allocator would put many tensors into one allocation.
os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]

import torch  # noqa: E402
from cache_cases import CacheCase  # noqa: E402
from cache_cases import run as run_cache  # noqa: E402
from feature_cases import Case  # noqa: E402
from feature_cases import run as run_feature  # noqa: E402
from fp8_cases import Case as Fp8Case  # noqa: E402
from fp8_cases import run as run_fp8_case  # noqa: E402
from kernel_set import BASE_FAMILY, EVERY_KERNEL, FP8_KERNELS, ROUND_KERNELS, faster_families  # noqa: E402
from layouts import contiguous, heads_first, wide_rows  # noqa: E402
from rotary_cases import run as run_rotary  # noqa: E402

from flash_attn import flash_attn_func  # noqa: E402
from flash_attn._ops_fp8 import FWD_ROUNDED  # noqa: E402

ALL = (*EVERY_KERNEL, *FP8_KERNELS, *ROUND_KERNELS)
FOUND = 86  # the exit code that compute-sanitizer is told to use
ONLY_OURS = ("--kernel-name", "kns=flash_")  # torch's kernels cost time
# More mbarriers than a kernel has: those in dynamic shared memory are not counted by the tool.
BARRIERS = ("--num-cuda-barriers", "64")
TOOLS = {
    "memcheck": (*ONLY_OURS, "--padding", "1024"),
    "racecheck": (*ONLY_OURS, *BARRIERS),
    "synccheck": (*ONLY_OURS, *BARRIERS),
    "initcheck": (),  # what torch's kernels write counts
}

# Kernels with a fault for each tool.
CONTROLS = {
    "memcheck": "x[1 << 24] = 1.0f;",
    "racecheck": "__shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x]; x[threadIdx.x] = s[63 - threadIdx.x];",
    "synccheck": "if (threadIdx.x < 40) { __syncthreads(); } x[threadIdx.x] = 1.0f;",
    "initcheck": "x[threadIdx.x] += 1.0f;",
}

# (seqlen_q, seqlen_k, head dim taken from the built one, layout): one key; rows that see none; tails in both
# directions; more key blocks than a pipeline has stages.
SHAPES = [
    (1, 1, 0, contiguous),
    (5, 2, 0, contiguous),
    (130, 67, 8, heads_first),
    (70, 200, 3, wide_rows),
    (140, 700, 0, contiguous),
]


# -- what runs under the tool ----------------------------------------------------------------------------------------


def run_plain(kernel):
    """A forward of each shape, with its backward if that is the kernel; one with more tiles than the GPU has SMs."""
    many = torch.cuda.get_device_properties("cuda").multi_processor_count // 2 * 2 + 4
    shapes = [(2, *shape) for shape in SHAPES]
    # A block goes from tile to tile, or (head dim 128) from key block to key block.
    if kernel.family != BASE_FAMILY and (kernel.op == "fwd" or kernel.head_dim == 128):
        shapes.append((many, 70, 150, 0, contiguous))
    for heads, seqlen_q, seqlen_k, less, layout in shapes:
        backward = kernel.op == "bwd"
        rows = ((seqlen_q, heads), (seqlen_k, heads // 2), (seqlen_k, heads // 2))
        sizes = [(1, seqlen, h, kernel.head_dim - less) for seqlen, h in rows]
        tensors = [layout(torch.randn(size).to("cuda", kernel.dtype)).requires_grad_(backward) for size in sizes]
        for deterministic in (False, True) if backward else (False,):
            out = flash_attn_func(*tensors, causal=kernel.causal, deterministic=deterministic)
            found = [out, *(torch.autograd.grad(out.sum(), tensors) if backward else ())]
            if any(x.isnan().any().item() for x in found):
                sys.exit(f"NaN from {kernel.key} with {(seqlen_q, seqlen_k, sizes[0][-1], layout.__name__)}")


def run_general(kernel):
    """Every feature that the family has, padded and packed."""
    features = {"alibi": "BH"} if kernel.family == BASE_FAMILY else {}
    dropout = {"dropout_p": 0.2} if kernel.family == BASE_FAMILY else {}
    for form, options in (
        ("func", {"window": (20, 5), "softcap": 5.0, "sink": True, "dlse": True, **features}),
        ("varlen_kvpacked", {"causal": True, "chunk": 50, "deterministic": True, **dropout}),
        ("varlen", {"seqused_k": (60, 0), "leftpad_k": (3, 0), "spare_tokens": 5}),
    ):
        lengths_q, lengths_k = ((70, 70), (390, 390)) if form == "func" else ((70, 9), (90, 33))
        case = Case(
            seed=0,
            form=form,
            dtype=kernel.dtype,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            heads=2,
            heads_kv=1,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            backward=kernel.op == "bwd",
            **options,
        )
        check(kernel, case, run_feature(case))


def run_decode(kernel):
    """With the rotary kernel, which appends."""
    for options in (
        {"seqlen_q": 1, "num_splits": 3},
        {"seqlen_q": 5, "new": 5, "rotary_dim": 16, "causal": True, "page_size": 16},
        {"seqlen_q": 3, "new": 2, "rotary_dim": 32, "interleaved": True, "batch_idx": True, "leftpad": (2, 5)},
        {"seqlen_q": 40, "packed": (40, 3), "causal": True, "page_size": 32, "num_splits": 2},
    ):
        case = CacheCase(
            seed=0,
            dtype=kernel.dtype,
            batch=2,
            heads=4,
            heads_kv=1,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            capacity=450,
            lengths=(420, 33),
            **options,
        )
        check(kernel, case, run_cache(case))


def run_fp8(kernel):
    options = {"window": (90, 5), "softcap": 5.0, "sink": True} if kernel.mask == "general" else {}
    factors = ("block" if kernel.mask == "general" else "head",) * 3
    for form, lengths_q, lengths_k in (("func", (140, 140), (700, 700)), ("varlen", (70, 9, 1), (90, 0, 33))):
        case = Case(
            seed=0,
            form=form,
            dtype=torch.bfloat16,
            lengths_q=lengths_q,
            lengths_k=lengths_k,
            heads=2,
            heads_kv=1,
            head_dim=kernel.head_dim,
            head_dim_v=kernel.head_dim,
            causal=kernel.causal,
            backward=False,
            **options,
        )
        check(kernel, case, run_fp8_case(Fp8Case(case, ("contiguous", "wide_rows", "heads_first"), factors)))


def run_round(kernel):
    """With the forward, which reads what was rounded."""
    q, k, v = (torch.randn(2, s, h, kernel.head_dim, device="cuda").half() for s, h in ((140, 2), (700, 1), (700, 1)))
    for key in (-1, 1):
        wrong = not FWD_ROUNDED(q, k, v, False, key, True, True).isfinite().all()
        check(kernel, f"rounded at once, {key=}", ["not finite"] if wrong else [])


def run_rotary_kernel(kernel):
    for interleaved in (False, True):
        check(kernel, f"rotary, {interleaved=}", run_rotary(0, kernel.dtype, 64, 32, interleaved))


def run_control(tool):
    source = f'extern "C" __global__ void flash_control(float* x) {{ {CONTROLS[tool]} }}'
    x = torch.empty(64, device="cuda")
    torch.cuda._compile_kernel(source, "flash_control")((1, 1, 1), (64, 1, 1), (x,))
    torch.cuda.synchronize()


def check(kernel, case, wrong):
    if wrong:
        sys.exit("\n".join([kernel.key, str(case), *wrong]))


def run(kernel):
    if kernel in FP8_KERNELS:
        run_fp8(kernel)
    elif kernel in ROUND_KERNELS:
        run_round(kernel)
    elif kernel.op == "decode":
        run_decode(kernel)
    elif kernel.op == "rotary":
        run_rotary_kernel(kernel)
    elif kernel.mask == "general":
        run_general(kernel)
    else:
        run_plain(kernel)
    torch.cuda.synchronize()


# -- what runs the tool ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Share:
    """Kernels of one family, which a process works off under one tool."""

    tool: str
    kernels: tuple

    def start(self, sanitizer):
        keys = [kernel.key for kernel in self.kernels]
        return start(sanitizer, self.tool, ["--run", *keys], FLASH_ATTN_FAMILY=self.kernels[0].family)


def start(sanitizer, tool, arguments, **variables):
    """This script under the tool."""
    command = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "40", *TOOLS[tool]]
    return subprocess.Popen(
        [*command, sys.executable, str(Path(__file__).resolve()), *arguments],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # the tool and what it runs end together
    )


def finds_its_fault(sanitizer, tool):
    """Whether a tool works here at all; if not, what it says is printed."""
    process = start(sanitizer, tool, ["--control", tool])
    try:
        output, _ = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        _end(process)
        output, _ = process.communicate()
    found = "flash_control" in output and re.search(r"SUMMARY: [1-9]", output) is not None
    print(f"{tool} {'finds' if found else 'does not find'} the fault of its control kernel", flush=True)
    if not found:
        print(shortened(output), flush=True)
    return found


def shares(tool, kernels, processes):
    """All kernels as shares of about equal work, each of one family."""
    found = []
    families = sorted({kernel.family for kernel in kernels})
    for family in families:
        of_family = [kernel for kernel in kernels if kernel.family == family]
        count = min(len(of_family), max(1, round(processes * len(of_family) / len(kernels))))
        found += [Share(tool, tuple(of_family[i::count])) for i in range(count)]
    return found


def verdict(code, output):
    """What is wrong with a share by its exit code and output: "" if nothing is."""
    if code == 0:
        return ""
    if code == FOUND:
        summary = re.findall(r"^=+ ((?:ERROR|RACECHECK) SUMMARY: .*)$", output, re.MULTILINE)
        return summary[-1] if summary else "reports without a summary"
    return f"exit code {code}"


def work_off(waiting, processes, sanitizer, seconds):
    """[(share, verdict, output)] of single kernels in which something is wrong; every share is tried."""
    waiting, failures, running = deque(waiting), [], {}
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                share = waiting.popleft()
                process = share.start(sanitizer)
                # Read by a thread: a tool that has a lot to say must not wait for us.
                running[process] = (share, _reading(process.stdout), time.monotonic())
            time.sleep(0.2)
            for process, (share, reader, begin) in list(running.items()):
                late = time.monotonic() > begin + seconds
                if process.poll() is None and not late:
                    continue
                _end(process)
                del running[process]
                output = reader()
                wrong = f"did not end within {seconds:.0f} s" if late else verdict(process.returncode, output)
                name = share.kernels[0].key if len(share.kernels) == 1 else f"{len(share.kernels)} kernels"
                print(f"{share.tool}, {name}: {wrong or 'clean'}, {time.monotonic() - begin:.1f} s", flush=True)
                if wrong and len(share.kernels) > 1:
                    waiting.extend(Share(share.tool, (kernel,)) for kernel in share.kernels)
                elif wrong:
                    failures.append((share, wrong, output))
                    print(shortened(output), flush=True)
    finally:
        for process in running:
            _end(process)
    return failures


def _end(process):
    """With what it has started, if it is still there."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reading(stream):
    parts = []
    thread = Thread(target=lambda: parts.append(stream.read()), daemon=True)
    thread.start()

    def result():
        thread.join(timeout=5)
        return "".join(parts)

    return result


def shortened(output, lines=30):
    kept = [line for line in output.splitlines() if not re.match(r"^=+\s*$", line)]
    return "\n".join(kept if len(kept) <= lines else [*kept[: lines - 5], "...", *kept[-5:]])


def main(argv=None):
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tool", action="append", choices=sorted(TOOLS), help="may be repeated (default: memcheck)")
    parser.add_argument("--kernels", action="append", metavar="GLOB", help="keys such as '*-bf16-*'; may be repeated")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--seconds", type=float, default=600.0, help="the most that a share may take")
    parser.add_argument("--sanitizer", default=shutil.which("compute-sanitizer"), help="its path")
    parser.add_argument("--run", nargs="+", metavar="KEY", help="these kernels, without the tool, in this process")
    parser.add_argument("--control", choices=sorted(TOOLS), help="the kernel with a fault for this tool, likewise")
    options = parser.parse_args(argv)
    if options.control:
        run_control(options.control)
        return 0
    if options.run:
        by_key = {kernel.key: kernel for kernel in ALL}
        for key in options.run:
            print(f"kernel {key}", flush=True)
            run(by_key[key])
        return 0
    if not options.sanitizer:
        parser.error("compute-sanitizer is not on PATH: a CUDA toolkit has it, and so has nvidia-cuda-sanitizer-api")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs ends too
    families = (BASE_FAMILY, *faster_families())
    kernels = [
        kernel
        for kernel in ALL
        if kernel.family in families and any(fnmatch.fnmatchcase(kernel.key, glob) for glob in options.kernels or ["*"])
    ]
    failed = False
    for tool in options.tool or ["memcheck"]:
        begin = time.monotonic()
        if not finds_its_fault(options.sanitizer, tool):
            failed = True
            continue
        failures = work_off(
            shares(tool, kernels, options.processes), options.processes, options.sanitizer, options.seconds
        )
        keys = [share.kernels[0].key for share, _, _ in failures]
        print(
            f"{tool}: {len(kernels)} kernels, {len(kernels) - len(keys)} clean, {len(keys)} not, "
            f"{time.monotonic() - begin:.1f} s{': ' if keys else ''}{' '.join(keys)}",
            flush=True,
        )
        failed = failed or bool(failures) or not kernels
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
