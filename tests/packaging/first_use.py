"""What a user does first: one forward and one backward of the installed package, checked against float64.

A script of its own, to be run by an environment's Python away from the source tree. It takes the GPU if there is one
and the CPU's reference otherwise; either way the host library has to load.
"""

from __future__ import annotations

import sys
import warnings
from importlib import metadata
from pathlib import Path

import torch

warnings.simplefilter("error")  # a host library that cannot be loaded only warns

import flash_attn  # noqa: E402


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of (B, S, H, D) tensors, written out."""
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool, device=q.device).triu(k.shape[1] - q.shape[1] + 1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), v)


def main() -> int:
    package = Path(flash_attn.__file__).parent
    version = metadata.version("flash-attn").partition("+")[0]  # a local label is no part of the code's version
    if version != flash_attn.__version__ or "site-packages" not in package.parts:
        raise SystemExit(f"this is not the installed package: {package}")
    for name in ("libflash_attn.so", "flash_attn.kernels", "build_info.json"):
        if not (package / name).stat().st_size:
            raise SystemExit(f"{name} is empty")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        usable, reason = flash_attn.supported("cuda")
        if not usable:
            raise SystemExit(f"the GPU cannot be used: {reason}")
    device, dtype, bound = ("cuda", torch.bfloat16, 0.03) if on_gpu else ("cpu", torch.float32, 1e-5)
    torch.manual_seed(0)
    shape = (2, 193, 4, 64)
    q, k, v = inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, device=device, dtype=dtype)
    exact_inputs = [tensor.detach().double().requires_grad_() for tensor in inputs]

    output = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert isinstance(output, torch.Tensor)  # and no tuple: no log-sum-exp was asked for
    torch.autograd.backward(output, gradient)
    exact = attention(*exact_inputs)
    torch.autograd.backward(exact, gradient.double())
    pairs = [(output, exact), *((t.grad, e.grad) for t, e in zip(inputs, exact_inputs, strict=True))]
    errors = []
    for found, expected in pairs:
        assert found is not None
        assert expected is not None
        errors.append((found.double() - expected).abs().max().item())
    text = ", ".join(f"{name} {error:.1e}" for name, error in zip(("out", "dq", "dk", "dv"), errors, strict=True))
    print(f"flash_attn {flash_attn.__version__}, torch {torch.__version__}, {device}: largest errors {text}")
    return int(max(errors) > bound)


if __name__ == "__main__":
    sys.exit(main())
