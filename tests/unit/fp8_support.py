"""What the tests of FP8 attention on CPU tensors share."""

import torch


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def rmse(found, exact):
    return (found.double() - exact.double()).square().mean().sqrt().item()


def outliers(generator, rows, head_dim):
    """N(0, 1) with 0.1 % of N(0, 100) on top, as in FlashAttention-3's table: (1, rows, 1, head_dim)."""
    x, more = (torch.randn(1, rows, 1, head_dim, generator=generator) for _ in range(2))
    return x + 10.0 * more * (torch.rand(x.shape, generator=generator) < 0.001)
