"""Attention in TFLOP/s, beside torch's own FLASH and CUDNN backends measured in the same run.

python benchmarks/benchmark_flash_attention.py --seq-len 1024 4096 --head-dim 64 128 --causal --plot chart.png

A card slows as it warms, so the backends take turns, and the figure is the median of their turns. Each case has
``--tokens`` tokens (batch = tokens / sequence length) and ``--hidden`` columns (heads = hidden / head dim). A forward
counts 4 * batch * heads * Sq * Sk * head dim operations, causal half of it, a backward 2.5 times a forward; it is timed
alone.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
OURS = "flash_attn"
BACKENDS = (OURS, "FLASH", "CUDNN")
SAMPLE_MS = 5.0  # the calls between two events take about this long


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    direction: str
    dtype: str
    head_dim: int
    causal: bool
    seq_len: int
    batch: int
    heads: int

    def operations(self) -> float:
        """Floating-point operations, by the counting of the module's docstring."""
        forward = 4.0 * self.batch * self.heads * self.seq_len**2 * self.head_dim * (0.5 if self.causal else 1.0)
        return forward if self.direction == "fwd" else 2.5 * forward

    def name(self) -> str:
        return f"{self.direction} {self.dtype} d{self.head_dim} {'causal' if self.causal else 'full'} {self.seq_len}"


def chosen(backend: str) -> AbstractContextManager[None]:
    """Makes torch's attention take one backend alone; nothing to choose for ours."""
    if backend == OURS:
        return nullcontext()
    backends = {"FLASH": SDPBackend.FLASH_ATTENTION, "CUDNN": SDPBackend.CUDNN_ATTENTION}
    context: AbstractContextManager[None] = sdpa_kernel(backends[backend])
    return context


def attention(backend: str, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """A function of q, k, v (B, S, H, D) that returns the output in the same layout."""
    if backend == OURS:
        return lambda q, k, v: flash_attn.flash_attn_func(q, k, v, causal=causal)

    def torch_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)

    return torch_attention


def prepare(case: Case, backend: str, tensors: list[Tensor]) -> Callable[[], Any]:
    """What is timed, inside of :func:`chosen`: one forward, or one backward of a forward done here."""
    function = attention(backend, case.causal)
    q, k, v, dout = tensors
    if case.direction == "fwd":

        def forward() -> Any:
            with torch.no_grad():
                return function(q, k, v)

        return forward
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    with chosen(backend):
        out = function(q, k, v)
    return lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)


def check(case: Case, tensors: list[Tensor]) -> None:
    """No figures for wrong results: compare with torch's FLASH backend first."""
    found = prepare(case, OURS, tensors)()
    with chosen("FLASH"):
        wanted = prepare(case, "FLASH", tensors)()
    pairs = zip(found, wanted, strict=True) if isinstance(found, tuple) else [(found, wanted)]
    for a, b in pairs:
        error = (a.float() - b.float()).norm() / b.float().norm()
        if not error < 0.02:
            sys.exit(f"{case.name()}: differs from torch's FLASH backend by {error.item():.3g} (relative norm)")


def time_call(backend: str, call: Callable[[], Any], repeats: int) -> float:
    """Milliseconds a call, over ``repeats`` calls between two events."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with chosen(backend):
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def measure(case: Case, budget_ms: float) -> dict[str, Any]:
    """Milliseconds and TFLOP/s of every backend, None where one refuses the case."""
    shape = (case.batch, case.seq_len, case.heads, case.head_dim)
    tensors = [torch.randn(shape, device="cuda", dtype=DTYPES[case.dtype]) for _ in range(4)]
    check(case, tensors)
    calls: dict[str, Callable[[], Any]] = {}
    refusals = {}
    for backend in BACKENDS:
        try:
            calls[backend] = prepare(case, backend, tensors)
            time_call(backend, calls[backend], 1)
        except RuntimeError as error:
            calls.pop(backend, None)
            refusals[backend] = str(error).splitlines()[0]
    repeats, rounds = {}, 1
    for backend, call in calls.items():
        once = min(time_call(backend, call, 3) for _ in range(2))
        repeats[backend] = max(1, round(SAMPLE_MS / once))
        rounds = max(rounds, round(budget_ms / max(SAMPLE_MS, once)))
    samples: dict[str, list[float]] = {backend: [] for backend in calls}
    for _ in range(max(3, rounds)):
        for backend, call in calls.items():
            samples[backend].append(time_call(backend, call, repeats[backend]))
    times = {backend: statistics.median(found) for backend, found in samples.items()}
    return {
        **asdict(case),
        "ms": {backend: times.get(backend) for backend in BACKENDS},
        "tflops": {b: case.operations() / times[b] / 1e9 if b in times else None for b in BACKENDS},
        "refusals": refusals,
    }


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    directions = ("fwd", "bwd") if arguments.direction == "both" else (arguments.direction,)
    masks = [False] * arguments.full + [True] * arguments.causal or [False, True]
    for direction in directions:
        for dtype in arguments.dtype:
            for head_dim in arguments.head_dim:
                for causal in masks:
                    for seq_len in arguments.seq_len:
                        batch, heads = arguments.tokens // seq_len, arguments.hidden // head_dim
                        yield Case(direction, dtype, head_dim, causal, seq_len, max(1, batch), max(1, heads))


def table_row(row: dict[str, Any]) -> list[str]:
    figures = row["tflops"]
    cells = [f"{figures[backend]:.0f}" if figures[backend] else "-" for backend in BACKENDS]
    ratio = f"{figures[OURS] / figures['FLASH']:.2f}" if figures["FLASH"] else "-"
    mask = "causal" if row["causal"] else "full"
    return [row["direction"], row["dtype"], str(row["head_dim"]), mask, str(row["seq_len"]), *cells, ratio]


def print_table(rows: list[dict[str, Any]]) -> None:
    """With rich where it is installed, else as plain columns."""
    header = ["dir", "dtype", "d", "mask", "seq len", *BACKENDS, f"{OURS} / FLASH"]
    try:
        console, tables = importlib.import_module("rich.console"), importlib.import_module("rich.table")
    except ImportError:
        lines = [header, *map(table_row, rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
        return
    table = tables.Table(*header, title="TFLOP/s, median")
    for row in rows:
        table.add_row(*table_row(row))
    console.Console(width=None if sys.stdout.isatty() else 120).print(table)


def plot(rows: list[dict[str, Any]], path: str) -> None:
    """One bar chart for each direction, dtype and head dim."""
    try:
        matplotlib, pyplot = importlib.import_module("matplotlib"), importlib.import_module("matplotlib.pyplot")
    except ImportError:
        print("no plot: matplotlib is not installed (pip install matplotlib)", file=sys.stderr)
        return
    matplotlib.use("Agg")

    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row["direction"], row["dtype"], row["head_dim"]), []).append(row)
    figure, axes = pyplot.subplots(len(groups), 1, figsize=(10, 3.2 * len(groups)), squeeze=False)
    for axis, ((direction, dtype, head_dim), members) in zip(axes[:, 0], groups.items(), strict=True):
        for index, backend in enumerate(BACKENDS):
            places = [place + 0.27 * (index - 1) for place in range(len(members))]
            heights = [row["tflops"][backend] or 0.0 for row in members]
            bars = axis.bar(places, heights, 0.25, label=backend if backend == OURS else f"torch {backend}")
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        labels = [f"{'causal' if row['causal'] else 'full'}\n{row['seq_len']}" for row in members]
        axis.set_xticks(range(len(members)), labels)
        axis.set_title(f"{direction}, {dtype}, head dim {head_dim}, {torch.cuda.get_device_name()}")
        axis.set_ylabel("TFLOP/s")
        axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    print(f"plot: {path}")


def environment() -> dict[str, Any]:
    cudnn: Any = torch.backends.cudnn
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "flash_attn": flash_attn.__version__,
        "flash_attn_from": flash_attn.__file__,
    }


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seq-len", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--head-dim", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--causal", action="store_true", help="causal alone; both masks if neither is named")
    parser.add_argument("--full", action="store_true", help="full alone")
    parser.add_argument("--direction", choices=["fwd", "bwd", "both"], default="both")
    parser.add_argument("--dtype", choices=sorted(DTYPES), nargs="+", default=["bf16"])
    parser.add_argument("--tokens", type=int, default=16384, help="batch times sequence length")
    parser.add_argument("--hidden", type=int, default=2048, help="heads times head dim")
    parser.add_argument("--ms", type=float, default=250.0, help="about how long each backend is measured, a case")
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON")
    parser.add_argument("--plot", metavar="FILE", help="draw a chart (needs matplotlib)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Measure, print the table, write what was asked for."""
    arguments = parse(argv)
    supported, reason = flash_attn.supported("cuda")
    if not supported:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    facts = environment()
    print(", ".join(f"{name} {value}" for name, value in facts.items()))
    torch.manual_seed(0)
    rows = []
    for case in cases(arguments):
        rows.append(measure(case, arguments.ms))
        for backend, why in rows[-1]["refusals"].items():
            print(f"{case.name()}: torch's {backend} refuses: {why}", file=sys.stderr)
    print_table(rows)
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"environment": facts, "rows": rows}, file, indent=1)
    if arguments.plot:
        plot(rows, arguments.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
