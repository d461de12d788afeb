"""Rotary position embedding (RoFormer, Su et al. 2021): one kernel for a tensor, forward and backward.

Pairs of columns of each head are rotated by an angle that grows with the row's position: neighbouring columns if
``interleaved`` (GPT-J), else column i and i + rotary_dim / 2 (GPT-NeoX). Float16 and bfloat16 tensors on a GPU run the
kernel, everything else a few operations of torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from .. import checks
from .._ops_cache import ROTARY, ROTARY_EMBEDDING
from ..errors import ArgumentError, DtypeError, ShapeError
from ..reference_cache import rotary_positions, rotate

__all__ = [
    "ApplyRotaryEmb",
    "RotaryEmbedding",
    "apply_rotary_emb",
    "apply_rotary_emb_func",
    "apply_rotary_emb_kv_",
    "apply_rotary_emb_qkv_",
    "apply_rotary_emb_torch",
    "rotate_half",
]

Offsets = int | Tensor


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """(x, y) -> (-y, x) for the pairs of the last dimension."""
    if interleaved:
        return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The embedding in plain torch, in the dtypes that it is given.

    Args:
        x: (B, S, H, D).
        cos, sin: (S, rotary_dim / 2) or (B, S, rotary_dim / 2), rotary_dim <= D.
    """
    rotary_dim = cos.shape[-1] * 2
    if interleaved:
        cos, sin = (table.repeat_interleave(2, dim=-1)[..., None, :] for table in (cos, sin))
    else:
        cos, sin = (torch.cat((table, table), dim=-1)[..., None, :] for table in (cos, sin))
    head, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((head * cos + rotate_half(head, interleaved) * sin, rest), dim=-1)


class Rotation:
    """What a rotation needs besides the tensor, checked."""

    def __init__(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        interleaved: bool,
        offsets: Offsets,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
    ) -> None:
        """``x`` is (B, S, H, D) or, with cu_seqlens, (T, H, D)."""
        layout = "(B, S, H, D)" if cu_seqlens is None else "(T, H, D)"
        if x.dim() != layout.count(",") + 1:
            raise ShapeError(f"x must have shape {layout}, got {checks.sizes(x)}.")
        if not x.dtype.is_floating_point:
            raise DtypeError(f"x must be a floating point tensor, got {x.dtype}.")
        for name, table in (("cos", cos), ("sin", sin)):
            checks.same_device(name, table, x, "x")
            if table.dim() != 2 or not 0 < 2 * table.shape[1] <= x.shape[-1]:
                raise ShapeError(
                    f"{name} must have shape (positions, rotary_dim / 2) with rotary_dim at most {x.shape[-1]}, "
                    f"got {checks.sizes(table)}."
                )
            if table.dtype not in (x.dtype, torch.float32):
                raise DtypeError(f"{name} must have x's dtype or be torch.float32: x is {x.dtype}, got {table.dtype}.")
        if cos.shape != sin.shape or cos.dtype != sin.dtype:
            raise ShapeError(
                f"sin must be like cos: cos is {cos.dtype} {checks.sizes(cos)}, sin is {sin.dtype} {checks.sizes(sin)}."
            )
        self.cu_seqlens = None if cu_seqlens is None else checks.cu_seqlens_of("cu_seqlens", cu_seqlens, x)
        batch = x.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1
        if self.cu_seqlens is None:
            self.max_seqlen = x.shape[1]
        elif max_seqlen is None:
            raise ArgumentError("max_seqlen must be given with cu_seqlens, got None.")
        else:
            self.max_seqlen = checks.length_of("max_seqlen", max_seqlen)
        self.offsets: Tensor | None = None
        self.offset = 0
        if isinstance(offsets, Tensor):
            if offsets.dtype == torch.int64:
                offsets = offsets.to(torch.int32)
            self.offsets = checks.numbers_of("seqlen_offsets", offsets, batch, x)
        else:
            self.offset = checks.length_of("seqlen_offsets", offsets)
            if self.offset + self.max_seqlen > cos.shape[0]:
                raise ShapeError(
                    f"cos must have a position for each row: {self.offset} + {self.max_seqlen} are needed, "
                    f"got {cos.shape[0]}."
                )
        self.cos, self.sin = cos.contiguous(), sin.contiguous()
        self.interleaved = bool(interleaved)

    def arguments(self, conjugate: bool) -> tuple[Any, ...]:
        """Of the operators, after the tensors."""
        return (
            self.cos, self.sin, self.offsets, self.offset, self.cu_seqlens, self.max_seqlen, self.interleaved, conjugate
        )  # fmt: skip

    def has_kernel(self, x: Tensor) -> bool:
        return x.dtype in checks.KERNEL_DTYPES and x.shape[-1] % 8 == 0

    def to(self, x: Tensor, destination: Tensor, conjugate: bool) -> None:
        """Write ``x``, rotated, to ``destination``, which may be ``x``."""
        if self.has_kernel(x):
            ROTARY(x, destination, *self.arguments(conjugate))
            return
        positions = rotary_positions(x, self.offsets, self.offset, self.cu_seqlens)
        destination.copy_(rotate(x, self.cos, self.sin, positions, self.interleaved, conjugate))

    def traced(self, x: Tensor) -> Tensor:
        """For torch.compile: one operator with its gradient."""
        if self.has_kernel(x):
            result: Tensor = ROTARY_EMBEDDING(x, *self.arguments(False))
            return result
        positions = rotary_positions(x, self.offsets, self.offset, self.cu_seqlens)
        return rotate(x, self.cos, self.sin, positions, self.interleaved, False)


def _mark_dirty(ctx: Any, x: Tensor) -> None:
    """Autograd is told of the change where it can follow it. Leaves, and views that unbind and split make, cannot be
    changed in its eyes; their callers go on with what is returned, whose gradient is right all the same."""
    if not x.requires_grad or not (x.is_leaf or x._is_view()):
        ctx.mark_dirty(x)


class ApplyRotaryEmb(torch.autograd.Function):
    """``apply(x, rotation, inplace)``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rotation: Rotation, inplace: bool) -> Tensor:
        ctx.rotation = rotation
        if inplace:
            _mark_dirty(ctx, x)
        out = x if inplace else torch.empty_like(x, memory_format=torch.contiguous_format)
        rotation.to(x, out, conjugate=False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (dout,) = grads
        dx = torch.empty_like(dout, memory_format=torch.contiguous_format)
        ctx.rotation.to(dout, dx, conjugate=True)
        return dx, None, None


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: Offsets = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the first rotary_dim columns of ``x``.

    Args:
        x: (B, S, H, D), or packed (T, H, D) with cu_seqlens.
        cos, sin: (positions, rotary_dim / 2), in x's dtype or fp32.
        interleaved: pairs of neighbouring columns, rather than halves.
        inplace: write to ``x`` and return it.
        seqlen_offsets: the position of each sequence's first row: an int, or int32 (B,).
        cu_seqlens: int32 (B + 1,), the sequences of a packed ``x``.
        max_seqlen: the longest of them.

    Returns:
        A tensor like ``x``. Rows whose position ``cos`` does not have are not rotated (with an int offset: an error).
    """
    checks.tensor_of("x", x)
    rotation = Rotation(x, cos, sin, interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    if is_compiling():
        out = rotation.traced(x)
        return x.copy_(out) if inplace else out
    result: Tensor = ApplyRotaryEmb.apply(x, rotation, inplace)  # type: ignore[no-untyped-call]
    return result


apply_rotary_emb_func = apply_rotary_emb


class _InPlace(torch.autograd.Function):
    """``apply(x, views, rotations)``: each of the views of x, ``views(x)``, is rotated by its own rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, views: Any, rotations: list[Rotation]) -> Tensor:
        ctx.views, ctx.rotations = views, rotations
        _mark_dirty(ctx, x)
        for view, rotation in zip(views(x), rotations, strict=True):
            rotation.to(view, view, conjugate=False)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        dx = grads[0].clone(memory_format=torch.contiguous_format)
        for view, rotation in zip(ctx.views(dx), ctx.rotations, strict=True):
            rotation.to(view, view, conjugate=True)
        return dx, None, None


def _rotate_in_place(x: Tensor, views: Any, rotations: list[Rotation]) -> Tensor:
    if is_compiling():
        for view, rotation in zip(views(x), rotations, strict=True):
            view.copy_(rotation.traced(view))
        return x
    result: Tensor = _InPlace.apply(x, views, rotations)  # type: ignore[no-untyped-call]
    return result


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: Offsets = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Rotate q and k of a packed tensor in place, and return it.

    Args:
        qkv: (B, S, 3, H, D), or (B, S, num_heads_q + 2 * heads_kv, D) with ``num_heads_q``.
        cos, sin: (positions, rotary_dim / 2).
        cos_k, sin_k: those of k, if they differ.
        interleaved, seqlen_offsets: as in :func:`apply_rotary_emb`.
    """
    checks.tensor_of("qkv", qkv)
    if qkv.dim() == 5 and qkv.shape[2] == 3:
        heads_q, heads_k = qkv.shape[3], qkv.shape[3]
    elif qkv.dim() == 4 and num_heads_q is not None and (qkv.shape[2] - num_heads_q) % 2 == 0:
        heads_q, heads_k = num_heads_q, (qkv.shape[2] - num_heads_q) // 2
    else:
        raise ShapeError(
            "qkv must have shape (B, S, 3, H, D), or (B, S, num_heads_q + 2 * heads_kv, D) with num_heads_q, "
            f"got {checks.sizes(qkv)} and num_heads_q={num_heads_q}."
        )
    # One launch where q and k share their table, and are heads next to each other.
    together = cos_k is None and sin_k is None and (qkv.dim() == 4 or qkv.stride(2) == qkv.shape[3] * qkv.stride(3))

    def views(x: Tensor) -> list[Tensor]:
        if x.dim() == 5 and together:
            sizes = (*x.shape[:2], heads_q + heads_k, x.shape[4])
            strides = (x.stride(0), x.stride(1), x.stride(3), x.stride(4))
            return [x.as_strided(sizes, strides)]
        if x.dim() == 5:
            return [x[:, :, 0], x[:, :, 1]]
        if together:
            return [x[:, :, : heads_q + heads_k]]
        return [x[:, :, :heads_q], x[:, :, heads_q : heads_q + heads_k]]

    tables = [(cos, sin), (cos if cos_k is None else cos_k, sin if sin_k is None else sin_k)]
    rotations = [
        Rotation(view, *table, interleaved, seqlen_offsets)
        for view, table in zip(views(qkv.detach()), tables, strict=False)
    ]
    return _rotate_in_place(qkv, views, rotations)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: Offsets = 0
) -> Tensor:
    """Rotate k of a packed kv (B, S, 2, Hk, D) in place, and return it. As :func:`apply_rotary_emb` otherwise."""
    checks.tensor_of("kv", kv)
    if kv.dim() != 5 or kv.shape[2] != 2:
        raise ShapeError(f"kv must have shape (B, S, 2, Hk, D), got {checks.sizes(kv)}.")

    def views(x: Tensor) -> list[Tensor]:
        return [x[:, :, 0]]

    rotation = Rotation(kv.detach()[:, :, 0], cos, sin, interleaved, seqlen_offsets)
    return _rotate_in_place(kv, views, [rotation])


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with its tables of angles, which are made when they are first needed and kept.

    Args:
        dim: rotary_dim, the columns that are rotated.
        base: the angles are ``position * base ** (-2 i / dim)``.
        interleaved: pairs of neighbouring columns, rather than halves.
        scale_base: not None: XPos (Sun et al. 2022), which scales q up and k down with the position; 512 is usual.
        device: of the frequencies.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = scale_base
        self.register_buffer("inv_freq", self._inverse_frequencies(device), persistent=False)
        self.register_buffer("scale", None if scale_base is None else self._scales(device), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _even(self, device: torch.device | str | None) -> Tensor:
        return torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)

    def _inverse_frequencies(self, device: torch.device | str | None) -> Tensor:
        return 1.0 / self.base ** (self._even(device) / self.dim)

    def _scales(self, device: torch.device | str | None) -> Tensor:
        return (self._even(device) + 0.4 * self.dim) / (1.4 * self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Make the tables if there are none of this length, device and dtype."""
        cached = self._cos_cached
        if cached is not None and seqlen <= self._seq_len_cached and cached.device == device and cached.dtype == dtype:
            return
        self._seq_len_cached = seqlen
        if is_compiling():
            self._make_tables(seqlen, device, dtype)
        else:
            with torch.inference_mode(False):  # training may need the same tables later
                self._make_tables(seqlen, device, dtype)

    def _make_tables(self, seqlen: int, device: torch.device | None, dtype: torch.dtype | None) -> None:
        # In float32 whatever the module was cast to: an angle is a large number of which only the remainder counts.
        position = torch.arange(seqlen, device=device, dtype=torch.float32)
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._inverse_frequencies(device)
        angles = torch.outer(position, inv_freq.to(device))
        cos, sin = torch.cos(angles), torch.sin(angles)
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self.scale if self.scale.dtype == torch.float32 else self._scales(device)
        factor = scale.to(device) ** ((position - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * factor).to(dtype), (sin * factor).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / factor).to(dtype), (sin / factor).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: Offsets = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate q and k in place.

        Args:
            qkv: (B, S, 3, H, D), or (B, S, num_heads_q + 2 * heads_kv, D) with ``num_heads_q``; with ``kv`` q alone,
                (B, S, H, D).
            kv: (B, S, 2, Hk, D).
            seqlen_offset: the position of each sequence's first row: an int, or int32 (B,). With a tensor the tables
                must reach as far as it says: give ``max_seqlen``, the largest position and one.

        Returns:
            qkv, or (q, kv).
        """
        seqlen = qkv.shape[1]
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, device=qkv.device, dtype=qkv.dtype)
        elif not isinstance(seqlen_offset, Tensor):
            self._update_cos_sin_cache(seqlen + seqlen_offset, device=qkv.device, dtype=qkv.dtype)
        if self._cos_cached is None or self._sin_cached is None:
            raise ArgumentError("max_seqlen must be given with a tensor seqlen_offset, got None.")
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv,
                self._cos_cached,
                self._sin_cached,
                self._cos_k_cached,
                self._sin_k_cached,
                interleaved=self.interleaved,
                seqlen_offsets=seqlen_offset,
                num_heads_q=num_heads_q,
            )
        q = apply_rotary_emb(
            qkv,
            self._cos_cached,
            self._sin_cached,
            interleaved=self.interleaved,
            inplace=True,
            seqlen_offsets=seqlen_offset,
        )
        cos_k = self._cos_cached if self._cos_k_cached is None else self._cos_k_cached
        sin_k = self._sin_cached if self._sin_k_cached is None else self._sin_k_cached
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, interleaved=self.interleaved, seqlen_offsets=seqlen_offset)
