"""What the Triton kernels reach of the GPU's memory bandwidth, beside a copy, and beside torch: GB/s, and microseconds.

python benchmarks/norms_and_losses.py [--rows-of 4096] [--vocabulary 32000 128256]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn

REPEATS = 20
# Cycles that the GPU sleeps before a measurement, so that it never waits for the CPU in one.
SLEEP = 1_000_000


def microseconds(call: Callable[[], object]) -> float:
    """The median time of a call on the GPU."""
    for _ in range(5):
        call()
    events = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(SLEEP)
        start.record()
        call()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return 1e3 * statistics.median(start.elapsed_time(end) for start, end in events)


def report(name: str, size: int, call: Callable[[], object]) -> None:
    """``size``: the bytes that the call has to read and write."""
    time = microseconds(call)
    print(f"{name:44} {time:8.0f} us {size / time / 1e3:8.0f} GB/s", flush=True)


def normal(*shape: int, requires_grad: bool = False) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(requires_grad)


def norms(columns: int) -> None:
    """The sum of a block's output and the residual stream, and its norm: two tensors in, two out, each way."""
    rows = 2**25 // columns
    x, residual, weight = normal(rows, columns, requires_grad=True), normal(rows, columns), normal(columns)
    residual.requires_grad_()
    weight.requires_grad_()
    bias = normal(columns, requires_grad=True)
    dy, dtotal = normal(rows, columns), normal(rows, columns)
    size = 4 * x.numel() * x.element_size()
    with torch.no_grad():
        report(f"copy ({rows}, {columns})", size // 2, lambda: dy.copy_(dtotal))
    for rms in (True, False):
        name = f"{'RMS' if rms else 'layer'} norm of a sum"
        leaves = [x, residual, weight] if rms else [x, residual, weight, bias]

        def ours(rms: bool = rms) -> tuple[Tensor, ...]:
            return layer_norm_fn(x, weight, None if rms else bias, residual, prenorm=True, is_rms_norm=rms)  # type: ignore[return-value]

        def torchs(rms: bool = rms) -> tuple[Tensor, ...]:
            total = x + residual
            if rms:
                return F.rms_norm(total, (columns,), weight, 1e-6), total
            return F.layer_norm(total, (columns,), weight, bias, 1e-6), total

        for owner, call in (("flash_attn", ours), ("torch", torchs)):
            report(f"{name}, {owner}", size, call)
            results = call()
            report(
                f"{name}, backward, {owner}",
                size,
                lambda results=results, leaves=leaves: torch.autograd.grad(
                    results, leaves, (dy, dtotal), retain_graph=True
                ),
            )


def losses(columns: int, rows: int = 4096) -> None:
    logits, labels = normal(rows, columns, requires_grad=True), torch.randint(columns, (rows,), device="cuda")
    dloss = torch.rand(rows, device="cuda")
    size = logits.numel() * logits.element_size()

    def ours() -> Tensor:
        return cross_entropy_loss(logits, labels)[0]

    def torchs() -> Tensor:
        return F.cross_entropy(logits, labels, reduction="none")

    for owner, call in (("flash_attn", ours), ("torch", torchs)):
        report(f"cross entropy ({rows}, {columns}), {owner}", size, call)
        result = call()
        grad = dloss.to(result.dtype)
        report(
            f"cross entropy, backward, {owner}",
            2 * size,
            lambda result=result, grad=grad: torch.autograd.grad(result, logits, grad, retain_graph=True),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-of", type=int, nargs="+", default=[1024, 4096, 8192], help="columns of the norms")
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[32000, 128256], help="columns of the losses")
    arguments = parser.parse_args()
    for columns in arguments.rows_of:
        norms(columns)
    for columns in arguments.vocabulary:
        losses(columns)


if __name__ == "__main__":
    main()
