"""The MLPs of transformer blocks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["GatedMlp", "Mlp"]

Activation = Callable[[Tensor], Tensor]


class Mlp(nn.Module):
    """``fc2(activation(fc1(x)))``: (..., in_features) -> (..., out_features).

    Args:
        hidden_features: of the middle; 4 * in_features if None.
        out_features: in_features if None.
        activation: of the middle.
        bias1, bias2: whether fc1 and fc2 have one.
        return_residual: return (y, x), as blocks with the norm behind want it.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = F.gelu,
        bias1: bool = True,
        bias2: bool = True,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = in_features * 4 if hidden_features is None else hidden_features
        out = in_features if out_features is None else out_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        y: Tensor = self.fc2(self.activation(self.fc1(x)))
        return (y, x) if self.return_residual else y


class GatedMlp(nn.Module):
    """``fc2(up * activation(gate))`` with ``up, gate = fc1(x)``: GLU and its variants (Shazeer 2020).

    Args:
        hidden_features: of ``up``; 8 / 3 * in_features if None. Rounded up to a multiple of ``multiple_of``.
        activation: of the gate: sigmoid makes it GLU, silu SwiGLU, gelu GeGLU.
        out_features, bias1, bias2, return_residual: as in :class:`Mlp`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int | None = None,
        out_features: int | None = None,
        activation: Activation = torch.sigmoid,
        bias1: bool = True,
        bias2: bool = True,
        multiple_of: int = 128,
        return_residual: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden = int(8 * in_features / 3) if hidden_features is None else hidden_features
        hidden = -(-hidden // multiple_of) * multiple_of
        out = in_features if out_features is None else out_features
        self.return_residual = return_residual
        self.fc1 = nn.Linear(in_features, 2 * hidden, bias=bias1, device=device, dtype=dtype)
        self.activation = activation
        self.fc2 = nn.Linear(hidden, out, bias=bias2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        up, gate = self.fc1(x).chunk(2, dim=-1)
        y: Tensor = self.fc2(up * self.activation(gate))
        return (y, x) if self.return_residual else y
