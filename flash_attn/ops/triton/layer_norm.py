"""Layer norm and RMS norm, fused with what stands before them in a transformer: dropout and the residual's addition.

    residual_out = residual + dropout(x * rowscale) + dropout(x1)
    out = norm(residual_out) * weight + bias
    out1 = norm(residual_out) * weight1 + bias1

float16, bfloat16 and float32 tensors on a GPU run one Triton kernel for all of it, and one for the gradient. Others run
plain operations of torch with the same results (slow on a CPU); so does torch.compile, which makes a kernel of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling

from ... import checks
from ...errors import ArgumentError, DtypeError, ShapeError
from ._kernels import kernels_of, runs_kernel

__all__ = ["RMSNorm", "layer_norm_fn", "layer_norm_ref", "rms_norm_fn", "rms_norm_ref"]

# A program's registers hold a row. What is longer is for torch, and so are empty tensors.
MAX_ROW_BYTES = 65536

Norms = Tensor | tuple[Tensor | None, ...]


class _Options(NamedTuple):
    """What a call has besides tensors that have gradients."""

    eps: float
    dropout_p: float
    rowscale: Tensor | None
    zero_centered: bool
    rms: bool
    masks: bool
    out_dtype: torch.dtype
    sum_dtype: torch.dtype
    out: Tensor | None
    sum_out: Tensor | None
    # Whether the sum is returned, and whether it is needed at all: then or for a backward.
    prenorm: bool
    keeps_sum: bool


def _scaled(x: Tensor, p: float) -> tuple[Tensor, Tensor | None]:
    """Dropout, and which elements it kept."""
    if p == 0.0:
        return x, None
    keeps = torch.rand_like(x) >= p
    return torch.where(keeps, x / (1.0 - p), 0.0), keeps


def _norm_in_torch(
    x: Tensor,
    residual: Tensor | None,
    x1: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    options: _Options,
) -> tuple[Tensor | None, ...]:
    """(out, out1, residual_out, mask, mask1) in operations of torch, which know their gradients."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    total = x.to(dtype)
    if options.rowscale is not None:
        total = total * options.rowscale[..., None]
    total, mask = _scaled(total, options.dropout_p)
    mask1 = None
    if x1 is not None:
        added, mask1 = _scaled(x1.to(dtype), options.dropout_p)
        total = total + added
    if residual is not None:
        total = total + residual
    centered = total if options.rms else total - total.mean(-1, keepdim=True)
    normal = centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + options.eps)

    def affine(weight: Tensor, bias: Tensor | None) -> Tensor:
        y = normal * (weight.to(dtype) + 1.0 if options.zero_centered else weight)
        return (y if bias is None else y + bias).to(options.out_dtype)

    y = affine(weight, bias)
    y1 = None if weight1 is None else affine(weight1, bias1)
    total = total.to(options.sum_dtype)
    if options.out is not None:
        y = options.out.copy_(y)
    if options.sum_out is not None:
        total = options.sum_out.copy_(total)
    return y, y1, total, mask, mask1


def _rows(x: Tensor) -> Tensor:
    """(M, N) with a contiguous last dimension."""
    x = x.reshape(-1, x.shape[-1])
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows_of(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if x is None else _rows(x) for x in tensors]


class _Norm(torch.autograd.Function):
    """The kernels: ``apply(x, residual, x1, weight, bias, weight1, bias1, options)`` is _norm_in_torch of the same."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        x, residual, x1, weight, bias, weight1, bias1, options = arguments
        shape = x.shape
        x = _rows(x)
        residual, x1 = _rows_of(residual, x1)
        weight, bias, weight1, bias1 = (None if w is None else w.contiguous() for w in (weight, bias, weight1, bias1))
        rowscale = None if options.rowscale is None else options.rowscale.reshape(-1).contiguous()
        ctx.set_materialize_grads(False)

        y = torch.empty_like(x, dtype=options.out_dtype) if options.out is None else options.out.view(x.shape)
        y1 = None if weight1 is None else torch.empty_like(y)
        # Where nothing is added and nothing cast, the sum is x itself.
        changes = any(added is not None for added in (residual, x1, rowscale, options.sum_out))
        changes = changes or options.dropout_p > 0.0 or options.sum_dtype != x.dtype
        total = options.sum_out
        if total is not None:
            total = total.view(x.shape)
        elif changes and options.keeps_sum:
            total = torch.empty_like(x, dtype=options.sum_dtype)
        wants_masks = options.masks and options.dropout_p > 0.0
        mask = torch.empty(x.shape, dtype=torch.bool, device=x.device) if wants_masks else None
        mask1 = torch.empty_like(mask) if mask is not None and x1 is not None else None

        sums = kernels_of("_norm_kernels").forward(
            x, residual, x1, rowscale, weight, bias, weight1, bias1, y, y1, total, mask, mask1,
            options.eps, options.dropout_p, options.rms, options.zero_centered,
        )  # fmt: skip
        if not changes:
            total = x
        ctx.save_for_backward(total, sums.mean, sums.rstd, sums.seed, rowscale, weight, bias, weight1, bias1)
        ctx.options, ctx.shape, ctx.x_dtype = options, shape, x.dtype
        ctx.has_residual, ctx.has_x1 = residual is not None, x1 is not None
        written = (y, y1, total if options.prenorm else None, mask, mask1)
        results = tuple(None if result is None else result.view(shape) for result in written)
        ctx.mark_non_differentiable(*(m for m in results[3:] if m is not None))
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        total, mean, rstd, seed, rowscale, weight, bias, weight1, bias1 = ctx.saved_tensors
        options = ctx.options
        dy, dy1, dtotal = _rows_of(*grads[:3])
        if dy is None:
            dy = torch.zeros_like(total, dtype=options.out_dtype)
        if dy1 is None and weight1 is not None:
            dy1 = torch.zeros_like(dy)
        dx = torch.empty_like(total, dtype=ctx.x_dtype)
        # One tensor is the gradient of all that are added, unless dropout, a scale or a cast tells them apart.
        apart = options.dropout_p > 0.0 or rowscale is not None
        dresidual = dx1 = None
        if ctx.has_residual and (apart or total.dtype != dx.dtype):
            dresidual = torch.empty_like(total)
        if ctx.has_x1 and options.dropout_p > 0.0:
            dx1 = torch.empty_like(dx)
        kernels = kernels_of("_norm_kernels")
        dweight, dbias, dweight1, dbias1 = kernels.backward(
            total, kernels.Sums(mean, rstd, seed), dy, dy1, dtotal, rowscale, weight, weight1, bias, bias1,
            dx, dx1, dresidual, options.dropout_p, options.rms, options.zero_centered,
        )  # fmt: skip
        dx = dx.view(ctx.shape)
        dresidual, dx1 = (None if d is None else d.view(ctx.shape) for d in (dresidual, dx1))
        # The same object where it is the same gradient: autograd then knows not to add to it in place.
        dresidual = dx if ctx.has_residual and dresidual is None else dresidual
        dx1 = dx if ctx.has_x1 and dx1 is None else dx1
        return dx, dresidual, dx1, dweight, dbias, dweight1, dbias1, None


def _check(x: Tensor, rowscale: Tensor | None, dropout_p: float, **others: Tensor | None) -> None:
    """Shapes and devices; ``others`` by name, those of ``x``'s shape first: residual, x1, out, residual_out."""
    checks.tensor_of("x", x)
    if x.dim() == 0 or not x.dtype.is_floating_point:
        raise DtypeError(f"x must be a floating point tensor (..., N), got {x.dtype} of shape {checks.sizes(x)}.")
    checks.check_dropout(dropout_p)
    checks.tensor_of("weight", others["weight"])
    for name, other in others.items():
        if other is None:
            continue
        checks.same_device(name, checks.tensor_of(name, other), x, "x")
        shape = x.shape if name in ("residual", "x1", "out", "residual_out") else x.shape[-1:]
        if other.shape != shape:
            raise ShapeError(f"{name} must have shape {tuple(shape)}, got {checks.sizes(other)}.")
        if not other.dtype.is_floating_point or other.dtype.itemsize == 1:
            raise DtypeError(f"{name} must be a floating point tensor of 16 bits or more, got {other.dtype}.")
        if name in ("out", "residual_out") and not other.is_contiguous():
            raise ShapeError(f"{name} must be contiguous, got strides {other.stride()}.")
    if rowscale is not None:
        checks.same_device("rowscale", checks.tensor_of("rowscale", rowscale), x, "x")
        if not rowscale.dtype.is_floating_point:
            raise DtypeError(f"rowscale must be a floating point tensor, got {rowscale.dtype}.")
        if rowscale.shape != x.shape[:-1]:
            raise ShapeError(f"rowscale must have shape {tuple(x.shape[:-1])}, got {checks.sizes(rowscale)}.")
        if others["x1"] is not None:
            raise ArgumentError("rowscale must be None together with x1: it would scale x alone.")
    if others["weight1"] is None and others["bias1"] is not None:
        raise ArgumentError("bias1 must be given together with weight1: weight1 is None, bias1 is not.")


def layer_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Norms:
    """Layer norm (or RMS norm) of ``residual + dropout(x * rowscale) + dropout(x1)`` over the last dimension.

    Args:
        x: (..., N).
        weight, bias: (N,); bias may be None. They may be float32 beside a half precision x.
        residual: like x, in its own dtype.
        x1: like x: the output of another branch ("parallel" blocks), with a dropout mask of its own.
        weight1, bias1: (N,), of a second norm of the same sum.
        eps: added to the variance.
        dropout_p: probability of dropping an element of x and x1, in [0, 1), seeded by torch's generator.
        rowscale: x's shape without N: a factor for each row, as stochastic depth has; no gradient. Not with x1.
        prenorm: also return the sum.
        residual_in_fp32: the sum is float32, if there is no residual that says otherwise.
        zero_centered_weight: the factor is 1 + weight.
        is_rms_norm: divide by the root mean square and do not centre.
        return_dropout_mask: also return the masks.
        out_dtype: of the norms; x's if None.
        out, residual_out: contiguous and like x: memory for the norm and for the sum.

    Returns:
        out; where they are asked for, of (out, out1, residual_out, mask, mask1) those: out1 with ``weight1``,
        residual_out with ``prenorm``, and both masks (bool, like x, True where kept; None without dropout, mask1 also
        without x1) with ``return_dropout_mask``. residual_out has the dtype of the residual, else float32 or x's.

    Raises:
        ShapeError, DtypeError, DeviceError, ArgumentError: a ``ValueError`` naming the argument and what was found.
        ImportError: on a GPU, where Triton is not installed.
    """
    _check(
        x, rowscale, dropout_p, residual=residual, x1=x1, out=out, residual_out=residual_out,
        weight=weight, bias=bias, weight1=weight1, bias1=bias1,
    )  # fmt: skip
    if out_dtype is not None and not (isinstance(out_dtype, torch.dtype) and out_dtype.is_floating_point):
        raise DtypeError(f"out_dtype must be a floating point dtype or None, got {out_dtype!r}.")
    sum_dtype = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    out_dtype = out.dtype if out is not None else x.dtype if out_dtype is None else out_dtype
    if residual_out is not None:
        sum_dtype = residual_out.dtype
    tensors = (x, residual, x1, weight, bias, weight1, bias1)
    keeps_sum = prenorm or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
    options = _Options(
        eps, dropout_p, rowscale, zero_centered_weight, is_rms_norm, return_dropout_mask, out_dtype, sum_dtype, out,
        residual_out, prenorm, keeps_sum,
    )  # fmt: skip
    fits = x.numel() > 0 and x.shape[-1] * x.element_size() <= MAX_ROW_BYTES
    if runs_kernel(x) and fits and not is_compiling():
        results = _Norm.apply(*tensors, options)  # type: ignore[no-untyped-call]
    else:
        results = _norm_in_torch(*tensors, options)
    y, y1, total, mask, mask1 = results
    wanted = [y]
    if weight1 is not None:
        wanted.append(y1)
    if prenorm:
        wanted.append(total)
    if return_dropout_mask:
        wanted += [mask, mask1]
    return wanted[0] if len(wanted) == 1 else tuple(wanted)


def rms_norm_fn(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
    residual_out: Tensor | None = None,
) -> Norms:
    """:func:`layer_norm_fn` with ``is_rms_norm=True``."""
    return layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


class RMSNorm(torch.nn.Module):
    """RMS norm with its weight: (..., hidden_size) -> the same.

    Args:
        hidden_size: N, the last dimension.
        eps: added to the mean square.
        dropout_p: dropout of the input while training, as :func:`rms_norm_fn` has it.
        zero_centered_weight: the factor is 1 + weight, which starts at 0.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.drop = torch.nn.Dropout(dropout_p) if dropout_p > 0.0 else None
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self, x: Tensor, residual: Tensor | None = None, prenorm: bool = False, residual_in_fp32: bool = False
    ) -> Norms:
        """The norm of ``residual + x``; with ``prenorm`` (norm, sum)."""
        return rms_norm_fn(
            x,
            self.weight,
            None,
            residual=residual,
            eps=self.eps,
            dropout_p=self.drop.p if self.drop is not None and self.training else 0.0,
            prenorm=prenorm,
            residual_in_fp32=residual_in_fp32,
            zero_centered_weight=self.zero_centered_weight,
        )


def _ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    x1: Tensor | None,
    weight1: Tensor | None,
    bias1: Tensor | None,
    eps: float,
    dropout_p: float,
    rowscale: Tensor | None,
    prenorm: bool,
    zero_centered_weight: bool,
    masks: tuple[Tensor | None, Tensor | None],
    upcast: bool,
    rms: bool,
) -> Norms:
    dtype = x.dtype

    def cast(tensor: Tensor | None) -> Tensor | None:
        return tensor.float() if upcast and tensor is not None else tensor

    def dropped(tensor: Tensor, mask: Tensor | None) -> Tensor:
        if dropout_p == 0.0:
            return tensor
        if mask is None:
            return F.dropout(tensor, dropout_p)
        return tensor.masked_fill(~mask, 0.0) / (1.0 - dropout_p)

    total = x.float() if upcast else x
    if rowscale is not None:
        total = total * rowscale[..., None]
    total = dropped(total, masks[0])
    if x1 is not None:
        total = total + dropped(x1.float() if upcast else x1, masks[1])
    if residual is not None:
        total = (total + residual).to(total.dtype)

    def norm(weight: Tensor, bias: Tensor | None) -> Tensor:
        weight = weight.float() if upcast else weight
        weight = weight + 1.0 if zero_centered_weight else weight
        if rms:
            y = F.rms_norm(total.to(weight.dtype), total.shape[-1:], weight, eps)
            return (y if bias is None else y + bias).to(dtype)
        return F.layer_norm(total.to(weight.dtype), total.shape[-1:], weight, cast(bias), eps).to(dtype)

    results = [norm(weight, bias)]
    if weight1 is not None:
        results.append(norm(weight1, bias1))
    if prenorm:
        results.append(total)
    return results[0] if len(results) == 1 else tuple(results)


def layer_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Norms:
    """What :func:`layer_norm_fn` computes, by torch's own layer norm: in x's dtype, or in float32 with ``upcast``.

    ``dropout_mask`` and ``dropout_mask1`` say which elements of x and x1 to keep; None draws them.
    """
    return _ref(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, zero_centered_weight,
        (dropout_mask, dropout_mask1), upcast, False,
    )  # fmt: skip


def rms_norm_ref(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None = None,
    x1: Tensor | None = None,
    weight1: Tensor | None = None,
    bias1: Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: Tensor | None = None,
    prenorm: bool = False,
    zero_centered_weight: bool = False,
    dropout_mask: Tensor | None = None,
    dropout_mask1: Tensor | None = None,
    upcast: bool = False,
) -> Norms:
    """What :func:`rms_norm_fn` computes, by torch's own RMS norm; as :func:`layer_norm_ref`."""
    return _ref(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, zero_centered_weight,
        (dropout_mask, dropout_mask1), upcast, True,
    )  # fmt: skip
