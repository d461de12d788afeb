"""Transformer blocks around an attention module ("mixer") and an MLP.

The order within a block is that in which dropout, addition and norm stand next to each other, so that one kernel does
all three: a prenorm block begins with the addition of what the block before it computed, and returns its MLP's output
and the residual stream without adding the two.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ArgumentError
from ..ops.triton.layer_norm import RMSNorm, layer_norm_fn
from .mha import MHA
from .mlp import Mlp

__all__ = ["Block", "ParallelBlock", "StochasticDepth", "fused_add_norm"]


class StochasticDepth(nn.Module):
    """Drops whole rows, (B, ...) -> (B, ...), while training, and scales the others up (Huang et al. 2016)."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0.0 <= p < 1.0:
            raise ArgumentError(f"p must be in [0, 1), got {p}.")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if self.p == 0.0 or not self.training:
            return x
        sizes = (x.shape[0],) + (1,) * (x.dim() - 1)
        keeps = torch.rand(sizes, dtype=torch.float32, device=x.device) >= self.p
        return torch.where(keeps, x / (1.0 - self.p), 0.0).to(x.dtype)


def _check_fusable(norm: nn.Module, dropout: nn.Module) -> None:
    if not isinstance(norm, (nn.LayerNorm, RMSNorm)) or not isinstance(dropout, nn.Dropout):
        raise ArgumentError(
            "fused_dropout_add_ln needs torch.nn.LayerNorm or RMSNorm, and torch.nn.Dropout, got "
            f"{type(norm).__name__} and {type(dropout).__name__}."
        )


def fused_add_norm(
    norm: Any,
    dropout: Any,
    x: Tensor,
    residual: Tensor | None,
    x1: Tensor | None = None,
    second: Any = None,
    **options: Any,
) -> Any:
    """:func:`layer_norm_fn` with the parameters that the modules have: ``second`` is another norm of the same sum."""
    weight1, bias1 = (None, None) if second is None else (second.weight, second.bias)
    return layer_norm_fn(
        x,
        norm.weight,
        norm.bias,
        residual=residual,
        x1=x1,
        weight1=weight1,
        bias1=bias1,
        eps=norm.eps,
        dropout_p=dropout.p if dropout.training else 0.0,
        zero_centered_weight=getattr(norm, "zero_centered_weight", False),
        is_rms_norm=isinstance(norm, RMSNorm),
        **options,
    )


class Block(nn.Module):
    """A transformer block.

    With ``prenorm`` dropout, addition, norm1, mixer, dropout, addition, norm2, MLP, and it returns (MLP's output,
    residual). Without, mixer, dropout, addition, norm1, MLP, dropout, addition, norm2, and it returns one tensor.

    Args:
        dim: size of the hidden states.
        mixer_cls, mlp_cls, norm_cls: called with dim. ``torch.nn.Identity`` as MLP leaves out all behind the mixer.
        dropout_cls: called with ``resid_dropout1``, of what comes in, and ``resid_dropout2``, of the mixer's output
            (with ``prenorm=False`` of the mixer's and of the MLP's).
        drop_path1, drop_path2: stochastic depth at the same places.
        fused_dropout_add_ln: the three in one kernel.
        return_residual: mixer and MLP return (output, input); for ``prenorm=False``.
        residual_in_fp32: keep the residual stream in float32; for ``prenorm``.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module] | None = None,
        mlp_cls: Callable[[int], nn.Module] | None = None,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        prenorm: bool = True,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        drop_path1: float = 0.0,
        drop_path2: float = 0.0,
        fused_dropout_add_ln: bool = False,
        return_residual: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        if residual_in_fp32 and not prenorm:
            raise ArgumentError("residual_in_fp32 must be False with prenorm=False: there is no residual stream.")
        self.prenorm = prenorm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.return_residual = return_residual
        self.residual_in_fp32 = residual_in_fp32
        mixer_cls = partial(MHA, num_heads=dim // 64) if mixer_cls is None else mixer_cls
        mlp_cls = partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls
        self.mixer = mixer_cls(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.drop_path1 = StochasticDepth(drop_path1)
        self.norm1 = norm_cls(dim)
        self.mlp = mlp_cls(dim)
        if not isinstance(self.mlp, nn.Identity):
            self.dropout2 = dropout_cls(resid_dropout2)
            self.drop_path2 = StochasticDepth(drop_path2)
            self.norm2 = norm_cls(dim)
        if fused_dropout_add_ln:
            _check_fusable(self.norm1, self.dropout1)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        cache: Tensor = self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype)  # type: ignore[operator]
        return cache

    def _add_norm(
        self, x: Tensor, residual: Tensor | None, dropout: nn.Module, drop_path: StochasticDepth, norm: Any
    ) -> tuple[Tensor, Tensor]:
        """(norm of the sum, sum)."""
        if self.fused_dropout_add_ln:
            ones = x.new_ones(x.shape[:-1])
            rowscale = drop_path(ones) if drop_path.p > 0.0 and self.training else None
            options: dict[str, Any] = {"rowscale": rowscale, "prenorm": True, "residual_in_fp32": self.residual_in_fp32}
            result: tuple[Tensor, Tensor] = fused_add_norm(norm, dropout, x, residual, **options)
            return result
        dropped = drop_path(dropout(x))
        total = dropped if residual is None else dropped + residual
        normal = norm(total.to(norm.weight.dtype))
        return normal, total.float() if self.residual_in_fp32 else total

    def forward(
        self,
        hidden_states: Tensor,
        residual: Tensor | None = None,
        mixer_subset: Any = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """
        Args:
            hidden_states: (B, S, dim).
            residual: the stream so far, for ``prenorm``; None for the first block.
            mixer_subset: an index of positions: only these are queries, for cross attention.
            mixer_kwargs: further arguments of the mixer.
        """
        kwargs = dict(mixer_kwargs or {})
        if self.prenorm:
            x, residual = self._add_norm(hidden_states, residual, self.dropout1, self.drop_path1, self.norm1)
            if mixer_subset is not None:
                kwargs["mixer_subset"] = mixer_subset
                residual = residual[:, mixer_subset]
            x = self.mixer(x, **kwargs)
            if not isinstance(self.mlp, nn.Identity):
                x, residual = self._add_norm(x, residual, self.dropout2, self.drop_path2, self.norm2)
                x = self.mlp(x)
            return x, residual
        if residual is not None:
            raise ArgumentError("residual must be None with prenorm=False.")
        x = self.mixer(hidden_states, **kwargs)
        x, hidden_states = x if self.return_residual else (x, hidden_states)
        x, _ = self._add_norm(x, hidden_states, self.dropout1, self.drop_path1, self.norm1)
        if not isinstance(self.mlp, nn.Identity):
            y = self.mlp(x)
            y, x = y if self.return_residual else (y, x)
            x, _ = self._add_norm(y, x, self.dropout2, self.drop_path2, self.norm2)
        return x


class ParallelBlock(nn.Module):
    """A block whose mixer and MLP work side by side on the same residual stream (GPT-J, GPT-NeoX, PaLM).

    Args:
        tied_norm: mixer and MLP share one norm.
        dim, mixer_cls, mlp_cls, norm_cls, dropout_cls, fused_dropout_add_ln, residual_in_fp32: as in :class:`Block`.
        resid_dropout1, resid_dropout2: of the mixer's and of the MLP's output of the block before.
    """

    def __init__(
        self,
        dim: int,
        mixer_cls: Callable[[int], nn.Module] | None = None,
        mlp_cls: Callable[[int], nn.Module] | None = None,
        norm_cls: Callable[[int], nn.Module] = nn.LayerNorm,
        dropout_cls: Callable[[float], nn.Module] = nn.Dropout,
        resid_dropout1: float = 0.0,
        resid_dropout2: float = 0.0,
        tied_norm: bool = False,
        fused_dropout_add_ln: bool = False,
        residual_in_fp32: bool = False,
    ) -> None:
        super().__init__()
        self.tied_norm = tied_norm
        self.fused_dropout_add_ln = fused_dropout_add_ln
        self.residual_in_fp32 = residual_in_fp32
        mixer_cls = partial(MHA, num_heads=dim // 64) if mixer_cls is None else mixer_cls
        mlp_cls = partial(Mlp, hidden_features=4 * dim) if mlp_cls is None else mlp_cls
        self.mixer = mixer_cls(dim)
        self.dropout1 = dropout_cls(resid_dropout1)
        self.norm1 = norm_cls(dim)
        self.mlp = mlp_cls(dim)
        self.dropout2 = dropout_cls(resid_dropout2)
        if not tied_norm:
            self.norm2 = norm_cls(dim)
        if fused_dropout_add_ln:
            _check_fusable(self.norm1, self.dropout1)

    def allocate_inference_cache(self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None) -> Tensor:
        cache: Tensor = self.mixer.allocate_inference_cache(batch_size, max_seqlen, dtype=dtype)  # type: ignore[operator]
        return cache

    def forward(
        self,
        hidden_states1: Tensor,
        hidden_states2: Tensor | None = None,
        residual: Tensor | None = None,
        mixer_kwargs: dict[str, Any] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(mixer's output, MLP's output, residual) of those of the block before; the first has one input.

        Args:
            hidden_states1, hidden_states2, residual: (B, S, dim).
            mixer_kwargs: further arguments of the mixer.
        """
        second = None if self.tied_norm else self.norm2
        if self.fused_dropout_add_ln and hidden_states2 is not None and self.dropout1.p != self.dropout2.p:
            raise ArgumentError("fused_dropout_add_ln has one probability of dropout for both branches.")
        if self.fused_dropout_add_ln:
            options = {"prenorm": True, "residual_in_fp32": self.residual_in_fp32}
            results = fused_add_norm(
                self.norm1, self.dropout1, hidden_states1, residual, hidden_states2, second, **options
            )
            to_mixer, to_mlp, total = results if second is not None else (results[0], *results)
        else:
            total = self.dropout1(hidden_states1)
            if hidden_states2 is not None:
                total = total + self.dropout2(hidden_states2)
            if residual is not None:
                total = total + residual
            to_mixer = self.norm1(total.to(self.norm1.weight.dtype))
            to_mlp = to_mixer if second is None else second(total.to(second.weight.dtype))
            total = total.float() if self.residual_in_fp32 else total
        return self.mixer(to_mixer, **(mixer_kwargs or {})), self.mlp(to_mlp), total
