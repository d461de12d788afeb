"""Attention beside torch's own FLASH and CUDNN backends and beside the bars in bars.json, in one process and one run.

python benchmarks/benchmark.py [--only 'fwd-d128-*'] [--seconds 0.6] [--json result.json]

A card slows as it warms, so the three take turns on each case, and a figure is the median of its turns. What the card
can do at most (a matrix product, a copy) is measured in the same run. No figure is given for a wrong result: what the
package returns is compared with torch's first. report.py makes the page and the chart from the JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import math
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from cases import CUDNN, FLASH, LENGTHS, OURS, UNITS, Attention, Case, Decoding, Host, figure, load_bars, selected
from report import HEADER, cells, conditions, failing, line
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn
import flash_attn_interface
from flash_attn.fp8 import flash_attn_fp8_func

ROOT = Path(__file__).resolve().parent.parent
SAMPLE_MS = 5.0  # the calls between two events take about this long
HOST_CALLS = 200  # a turn; below the driver's queue length, so that no call waits for a place in it
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
Call = Callable[[], Any]


# -- the calls -------------------------------------------------------------------------------------------------------


def backend(provider: str) -> contextlib.AbstractContextManager[Any]:
    """Makes torch's attention take one backend alone; nothing to choose for ours."""
    if provider == OURS:
        return contextlib.nullcontext()
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION if provider == FLASH else SDPBackend.CUDNN_ATTENTION)


def randn(*sizes: int) -> Tensor:
    return torch.randn(sizes, device="cuda", dtype=BF16)


def of_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """torch's attention of tensors in our layout, (B, S, H, D)."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped).transpose(1, 2)


def attention_calls(case: Attention) -> dict[str, Call]:
    if case.group == "varlen":
        return varlen_calls(case)
    if case.group == "feature":
        return feature_calls(case)
    shape = (len(case.sequences), case.sequences[0], case.heads, case.head_dim)
    q, k, v, dout = (randn(*shape) for _ in range(4))

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q, k, v, causal=case.causal)

    if case.group == "bwd":
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def backward(provider: str) -> Call:
            with backend(provider):
                out = ours(*leaves) if provider == OURS else of_torch(*leaves, case.causal)
            return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)

        return {provider: backward(provider) for provider in (OURS, FLASH, CUDNN)}

    calls: dict[str, Call] = {OURS: lambda: ours(q, k, v)}
    if case.group == "fp8":
        small = [x.to(E4M3) for x in (q, k, v)]
        ones = torch.ones(shape[0], shape[2], device="cuda")
        options: dict[str, Any] = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
        calls[OURS] = lambda: first(flash_attn_interface.flash_attn_func(*small, causal=case.causal, **options))
        q, k, v = (x.to(BF16) for x in small)
    return calls | {provider: lambda: of_torch(q, k, v, case.causal) for provider in (FLASH, CUDNN)}


def varlen_calls(case: Attention) -> dict[str, Call]:
    tokens, longest = sum(case.sequences), max(case.sequences)
    q, k, v = (randn(tokens, case.heads, case.head_dim) for _ in range(3))
    bounds = torch.tensor([0, *case.sequences], device="cuda").cumsum(0).int()
    flash: Any = torch.ops.aten._flash_attention_forward
    return {
        OURS: lambda: flash_attn.flash_attn_varlen_func(q, k, v, bounds, bounds, longest, longest, causal=case.causal),
        FLASH: lambda: flash(q, k, v, bounds, bounds, longest, longest, 0.0, case.causal, False)[0],
    }


def feature_calls(case: Attention) -> dict[str, Call]:
    """Of torch's backends, FLASH has windows, and none has softcaps or sinks."""
    shape = (len(case.sequences), case.sequences[0])
    q, k, v = (randn(*shape, heads, case.head_dim) for heads in (case.heads, case.heads_kv, case.heads_kv))
    window = (-1 if case.window is None else case.window, 0 if case.causal else -1)
    sink = torch.randn(case.heads, device="cuda") if case.sink else None
    options: dict[str, Any] = {"window_size": window, "softcap": case.softcap, "learnable_sink": sink}
    calls: dict[str, Call] = {OURS: lambda: flash_attn.flash_attn_func(q, k, v, **options)}
    if case.window is not None and not case.softcap and not case.sink:
        flash: Any = torch.ops.aten._flash_attention_forward
        sides = {"window_size_left": window[0], "window_size_right": window[1]}
        calls[FLASH] = lambda: flash(q, k, v, None, None, shape[1], shape[1], 0.0, False, False, **sides)[0]
    return calls


def decoding_calls(case: Decoding) -> dict[str, Call]:
    """Graphs of calls over so many caches that none is in the L2 cache when its turn comes; see `per_call`."""
    length, batch, heads_kv, head_dim = LENGTHS[case.length], case.batch, case.heads_kv, case.head_dim
    pages = length // case.page_size
    paged = case.layout == "pages"
    sizes = (batch * pages, case.page_size, heads_kv, head_dim) if paged else (batch, length, heads_kv, head_dim)
    caches = [(randn(*sizes), randn(*sizes)) for _ in range(copies_of(case))]
    table = torch.randperm(batch * pages, device="cuda").view(batch, pages).int() if paged else None
    q = randn(batch, case.tokens, case.heads, head_dim)
    options: dict[str, Any] = {"causal": True, "block_table": table}
    lengths = torch.full((batch,), length, device="cuda", dtype=torch.int32)
    if case.group == "append":
        new = [randn(batch, 1, heads_kv, head_dim) for _ in range(2)]
        angles = torch.rand(length, head_dim // 2, device="cuda") * 3
        options |= {"k": new[0], "v": new[1], "rotary_cos": angles.cos(), "rotary_sin": angles.sin()}
        lengths = lengths - 1

    def ours(k: Tensor, v: Tensor) -> Tensor:
        return first(flash_attn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, **options))

    calls: dict[str, Call] = {OURS: captured(OURS, [lambda k=k, v=v: ours(k, v) for k, v in caches])}
    if case.group == "decode" and not paged and case.tokens == 1:  # torch's causal mask is aligned to the other corner
        for provider in (FLASH, CUDNN):
            functions = [lambda k=k, v=v: of_torch(q, k, v, False) for k, v in caches]
            with contextlib.suppress(RuntimeError):
                calls[provider] = captured(provider, functions)
    return calls


def copies_of(case: Decoding) -> int:
    cache = torch.cuda.get_device_properties("cuda").L2_cache_size
    return max(1, math.ceil(4 * cache / case.work()))


def captured(provider: str, functions: list[Callable[[], Tensor]]) -> Call:
    """A graph that makes all the calls; its replay returns the first one's result."""
    with backend(provider), torch.no_grad():
        for function in functions[:1]:
            function()  # what is loaded or compiled at the first call is no part of it
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = [function() for function in functions]

    def replay(alive: object = functions) -> Tensor:  # what the graph reads is theirs
        graph.replay()
        return results[0]

    return replay


def host_calls(case: Host) -> dict[str, Call]:
    q, k, v = (randn(1, 64, 2, 64) for _ in range(3))
    if case.call == "forward-autograd":
        q, k, v = (x.requires_grad_() for x in (q, k, v))
    q_t, k_t, v_t = (x.transpose(1, 2) for x in (q, k, v))
    packed_q, packed_k, packed_v = q[0], k[0], v[0]
    bounds = torch.tensor([0, 20, 64], device="cuda", dtype=torch.int32)
    one, new_k, new_v = (randn(1, 1, 2, 64) for _ in range(3))
    k_cache, v_cache = (randn(1, 256, 2, 64) for _ in range(2))
    one_t, k_used, v_used = (x[:, :200].transpose(1, 2) for x in (one, k_cache, v_cache))
    lengths = torch.full((1,), 200, device="cuda", dtype=torch.int32)
    cos, sin = (randn(256, 32) for _ in range(2))
    small, ones = [x.detach().to(E4M3) for x in (q, k, v)], torch.ones(1, 2, device="cuda")
    descales = {"q_descale": ones, "k_descale": ones, "v_descale": ones}
    varlen, decode = flash_attn.flash_attn_varlen_func, flash_attn.flash_attn_with_kvcache
    forward: dict[str, Call] = {
        OURS: lambda: flash_attn.flash_attn_func(q, k, v, causal=True),
        FLASH: lambda: scaled_dot_product_attention(q_t, k_t, v_t, is_causal=True),
    }
    return {
        "forward": forward,
        "forward-autograd": forward,
        "varlen": {OURS: lambda: varlen(packed_q, packed_k, packed_v, bounds, bounds, 44, 44, causal=True)},
        "decode": {
            OURS: lambda: decode(one, k_cache, v_cache, cache_seqlens=lengths, causal=True),
            FLASH: lambda: scaled_dot_product_attention(one_t, k_used, v_used),
        },
        "append": {OURS: lambda: decode(one, k_cache, v_cache, new_k, new_v, cache_seqlens=lengths, causal=True)},
        "append-rotary": {
            OURS: lambda: decode(one, k_cache, v_cache, new_k, new_v, cos, sin, cache_seqlens=lengths, causal=True)
        },
        "fp8": {OURS: lambda: flash_attn_interface.flash_attn_func(*small, causal=True, **descales)},
        "fp8-func": {OURS: lambda: flash_attn_fp8_func(q, k, v, causal=True)},
    }[case.call]


def first(result: Any) -> Tensor:
    found: Tensor = result[0] if isinstance(result, tuple) else result
    return found


# -- measuring -------------------------------------------------------------------------------------------------------


def between_events(provider: str, call: Call, repeats: int) -> float:
    """Milliseconds a call, over `repeats` calls between two events."""
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with backend(provider):
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def on_the_host(provider: str, call: Call, repeats: int) -> float:
    """Milliseconds that a call takes to return; the GPU finishes before and after, outside of the time."""
    with backend(provider):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        taken = time.perf_counter() - begin
    torch.cuda.synchronize()
    return taken / repeats * 1e3


def take_turns(calls: dict[str, Call], seconds: float, on_host: bool) -> dict[str, float]:
    """The median of each one's turns, in milliseconds a call; about `seconds` for all of them together."""
    time_calls = on_the_host if on_host else between_events
    repeats = {}
    for provider, call in calls.items():
        once = min(time_calls(provider, call, 3) for _ in range(2))
        repeats[provider] = HOST_CALLS if on_host else max(1, round(SAMPLE_MS / once))
    samples: dict[str, list[float]] = {provider: [] for provider in calls}
    end = time.perf_counter() + seconds
    while len(samples[OURS]) < 3 or time.perf_counter() < end:
        for provider, call in calls.items():
            samples[provider].append(time_calls(provider, call, repeats[provider]))
    return {provider: statistics.median(found) for provider, found in samples.items()}


def usable(calls: dict[str, Call]) -> tuple[dict[str, Call], dict[str, str]]:
    """(the calls that work, the first line of what the others say)."""
    kept, refusals = {}, {}
    for provider, call in calls.items():
        try:
            with backend(provider):
                call()
            torch.cuda.synchronize()
            kept[provider] = call
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            refusals[provider] = str(error).strip().splitlines()[0]
    return kept, refusals


def check(case: Case, calls: dict[str, Call]) -> None:
    """Ends the run if our results are not those of a backend of torch."""
    other = next((provider for provider in (FLASH, CUDNN) if provider in calls), None)
    if other is None or OURS not in calls:
        return
    results = []
    for provider in (OURS, other):
        with backend(provider):
            found = calls[provider]()
        results.append(found if isinstance(found, tuple) else (found,))
    limit = 0.1 if case.group == "fp8" else 0.02
    for a, b in zip(*results, strict=True):
        if isinstance(case, Host) and a.shape != b.shape:
            b = b.transpose(1, 2)
        error = ((a.float() - b.float()).norm() / b.float().norm()).item()
        if not error < limit:
            sys.exit(f"{case.name}: differs from torch's {other} backend by {error:.3g} (relative norm)")


def measure(case: Case, seconds: float) -> dict[str, Any]:
    """A row of the result."""
    torch.manual_seed(0)
    differentiated = case.group == "bwd" or case.name == "host-forward-autograd"
    with torch.set_grad_enabled(differentiated):
        calls, refusals = {}, {}
        try:
            if isinstance(case, Attention):
                calls = attention_calls(case)
            else:
                calls = decoding_calls(case) if isinstance(case, Decoding) else host_calls(case)
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
            refusals[OURS] = str(error).strip().splitlines()[0]
        kept, more = usable(calls)
        refusals |= more
        check(case, kept)
        times = take_turns(kept, seconds, isinstance(case, Host)) if OURS in kept else {}
    if isinstance(case, Decoding):
        times = {provider: value / copies_of(case) for provider, value in times.items()}
    return {
        "name": case.name,
        "group": case.group,
        "unit": UNITS[case.group],
        "figures": {provider: figure(case, value) for provider, value in times.items()},
        "refusals": refusals,
    }


# -- what the card can do at most, and the state that it is in -------------------------------------------------------


def ceilings(seconds: float) -> dict[str, float]:
    """TFLOP/s of 8192 cubed matrix products in bf16 and e4m3, GB/s read and written by a copy."""
    n, found = 8192, {}
    a, b = randn(n, n), randn(n, n)
    ones = torch.ones((), device="cuda")
    small_a, small_b = a.to(E4M3), b.to(E4M3).t()
    source = torch.empty(2**30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    works: dict[str, tuple[Call, float]] = {
        "gemm-bf16": (lambda: a @ b, 2.0 * n**3 / 1e9),
        "gemm-fp8": (lambda: torch._scaled_mm(small_a, small_b, ones, ones, out_dtype=BF16), 2.0 * n**3 / 1e9),
        "copy": (lambda: target.copy_(source), 2.0 * source.numel() / 1e6),
    }
    for name, (call, work) in works.items():
        calls, _ = usable({OURS: call})
        if calls:
            found[name] = work / take_turns(calls, seconds, False)[OURS]
    return found


def state() -> dict[str, Any] | None:
    """Clocks and temperature as nvidia-smi gives them, None without it."""
    fields = "clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
        sm, memory, celsius, watts, driver = (part.strip() for part in done.stdout.strip().split(","))
        return {"sm_mhz": int(sm), "memory_mhz": int(memory), "celsius": int(celsius), "watts": watts, "driver": driver}
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def commit() -> str | None:
    """Of the source tree that this file is in."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def compiler() -> str:
    """Of the kernels that are installed."""
    from flash_attn._buildtools import archive

    return archive.read(Path(flash_attn.__file__).with_name(archive.FILE_NAME)).compiler


def environment(
    named_commit: str | None, before: dict[str, Any] | None, after: dict[str, Any] | None
) -> dict[str, Any]:
    properties, cudnn = torch.cuda.get_device_properties("cuda"), torch.backends.cudnn
    version: Any = cudnn.version
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "driver": (before or {}).get("driver"),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": version(),
        "flash_attn": flash_attn.__version__,
        "compiler": compiler(),
        "commit": named_commit or commit(),
        "before": before,
        "after": after,
    }


# -- the command -----------------------------------------------------------------------------------------------------


def rows_of(cases: list[Case], seconds: float, limit: float) -> Iterator[dict[str, Any]]:
    end = time.monotonic() + limit
    for case in cases:
        if time.monotonic() > end:
            print(f"{case.name} and what follows: left out, the time limit is over", file=sys.stderr)
            return
        yield measure(case, seconds)


def save(result: dict[str, Any], path: Path | None) -> None:
    if path:
        path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    """Measure, print each row as it comes, write the JSON; 1 where this machine cannot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="cases, such as 'fwd-d128-*'")
    parser.add_argument("--seconds", type=float, default=0.6, help="about how long a case is measured")
    parser.add_argument("--limit", type=float, default=3600.0, help="no case is begun after so many seconds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result")
    parser.add_argument("--commit", help="what the wheel was built from, where this is no clone")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    options = parser.parse_args(argv)
    cases, bars = selected(options.only), load_bars()
    if options.list or not cases:
        print("\n".join(case.name for case in selected([])))
        return 0 if options.list else 1
    supported, reason = flash_attn.supported("cuda")
    if not supported:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    limits, before = ceilings(options.seconds / 2), state()
    print(line(HEADER))
    rows: list[dict[str, Any]] = []
    # What has been measured is kept, also where Ctrl-C or `timeout` ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        for row in rows_of(cases, options.seconds, options.limit):
            rows.append(row)
            print(line(cells(row, limits, bars)), flush=True)
            for provider, why in row["refusals"].items():
                print(f"  {provider}: {why}", flush=True)
    finally:
        environ = environment(options.commit, before, state())
        result = {"schema": 1, "environment": environ, "ceilings": limits, "rows": rows}
        save(result, options.json)
    for name, value in ceilings(options.seconds / 2).items():
        limits[name] = max(value, limits.get(name, 0.0))
    save(result, options.json)
    print(conditions(result))
    print(f"below their bars: {' '.join(failing(result, bars)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
