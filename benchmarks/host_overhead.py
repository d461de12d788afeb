"""Host time of a call: microseconds of CPU from calling to returning, on a problem so small that the GPU waits.

Beside torch's scaled_dot_product_attention in the same run. Each figure is the median over rounds of calls that are not
waited for; the GPU is let finish between rounds, outside of the time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import flash_attn

CALLS = 200  # a round; below the driver's queue length, so that no call waits for a place in it
LIMIT_US = 12.0
OURS = "flash_attn_func, autograd off"


def microseconds(call: Callable[[], object], rounds: int) -> float:
    """Median over ``rounds`` of the time of one call."""
    for _ in range(20):
        call()
    found = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - begin) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def measure(rounds: int, head_dim: int) -> dict[str, float]:
    """Name -> microseconds a call."""
    q, k, v = (torch.randn(1, 64, 2, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q_t, k_t, v_t = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def ours() -> object:
        return flash_attn.flash_attn_func(q, k, v, causal=True)

    def torchs() -> object:
        return scaled_dot_product_attention(q_t, k_t, v_t, is_causal=True)

    operator = torch.ops.flash_attn.fwd.default
    result = {}
    with torch.no_grad():
        result[OURS] = microseconds(ours, rounds)
        result["flash_attn's operator alone"] = microseconds(lambda: operator(q, k, v, 0.125, True), rounds)
        result["SDPA, default choice"] = microseconds(torchs, rounds)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            result["SDPA, FLASH"] = microseconds(torchs, rounds)
    for x in (q, k, v, q_t, k_t, v_t):
        x.requires_grad_()
    result["flash_attn_func, autograd on"] = microseconds(ours, rounds)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        result["SDPA, FLASH, autograd on"] = microseconds(torchs, rounds)
    return result


def main(argv: list[str] | None = None) -> int:
    """Print the figures; 1 if a call without autograd takes longer than the limit."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--limit", type=float, default=LIMIT_US, help="microseconds a call without autograd may take")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args(argv)
    supported, reason = flash_attn.supported("cuda")
    if not supported:
        print(f"nothing to measure: {reason}", file=sys.stderr)
        return 1
    found = measure(arguments.rounds, arguments.head_dim)
    for name, value in found.items():
        print(f"{value:7.2f} us  {name}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "us": found}, file, indent=1)
    return 0 if found[OURS] <= arguments.limit else 1


if __name__ == "__main__":
    sys.exit(main())
