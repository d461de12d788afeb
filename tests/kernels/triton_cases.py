"""Random cases of the norms and of cross entropy, forward and backward, against float64, and of rounding to FP8.

They run on a GPU, in Triton's interpreter and, where there are no kernels, on the CPU.
"""

import math
import random
from dataclasses import dataclass

import torch

from flash_attn import fp8
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn, layer_norm_ref, rms_norm_fn, rms_norm_ref


def off(name, found, wanted, alike, dtype):
    """A line if ``found`` is further from the float64 ``wanted`` than twice what torch in that dtype, ``alike``, is."""
    scale = max(1.0, wanted.abs().max().item()) if wanted.numel() else 1.0
    floor = torch.finfo(dtype).eps * scale * (1 if dtype != torch.float32 else 32)
    allowed = max(2 * (alike.double() - wanted).abs().max().item() if wanted.numel() else 0.0, floor)
    if found.shape != wanted.shape:
        return [f"{name} has shape {tuple(found.shape)}, not {tuple(wanted.shape)}"]
    worst = (found.double() - wanted).abs().max().item() if wanted.numel() else 0.0
    return [] if worst <= allowed else [f"{name} is off by {worst:.3g}, allowed is {allowed:.3g}"]


@dataclass(frozen=True)
class NormCase:
    seed: int
    rows: tuple
    columns: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    rms: bool
    bias: bool
    residual: torch.dtype | None
    x1: bool
    second: bool
    rowscale: bool
    dropout_p: float
    prenorm: bool
    residual_in_fp32: bool
    zero_centered: bool
    strided: bool


def draw_norm(seed, dtypes=(torch.float32, torch.bfloat16, torch.float16), columns=3000, rows=40):
    choose = random.Random(seed)
    dtype = choose.choice(dtypes)
    rms, x1 = choose.random() < 0.5, choose.random() < 0.3
    return NormCase(
        seed=seed,
        rows=choose.choice([(choose.randint(1, rows),), (2, choose.randint(1, rows // 2))]),
        columns=choose.choice([8, 100, 128, 768, choose.randint(8, columns)]),
        dtype=dtype,
        weight_dtype=choose.choice([dtype, torch.float32]),
        rms=rms,
        bias=not rms or choose.random() < 0.3,
        residual=choose.choice([None, dtype, torch.float32]),
        x1=x1,
        second=choose.random() < 0.4,
        rowscale=not x1 and choose.random() < 0.3,
        dropout_p=choose.choice([0.0, 0.0, 0.2, 0.9]),
        prenorm=choose.random() < 0.6,
        residual_in_fp32=choose.random() < 0.3,
        zero_centered=choose.random() < 0.3,
        strided=choose.random() < 0.3,
    )


def _formula(case, tensors, rowscale, mask, mask1):
    """Everything that a norm returns, in the tensors' dtype."""
    x, residual, x1, weight, bias, weight1, bias1 = tensors
    total = x if rowscale is None else x * rowscale[..., None]
    keep = 1.0 / (1.0 - case.dropout_p)
    total = total if mask is None else total * mask * keep
    if x1 is not None:
        total = total + (x1 if mask1 is None else x1 * mask1 * keep)
    total = total if residual is None else total + residual
    centered = total if case.rms else total - total.mean(-1, keepdim=True)
    normal = centered / torch.sqrt(centered.square().mean(-1, keepdim=True) + 1e-5)
    results = [normal * (weight + case.zero_centered) + (0.0 if bias is None else bias)]
    if weight1 is not None:
        results.append(normal * (weight1 + case.zero_centered) + (0.0 if bias1 is None else bias1))
    return [*results, total] if case.prenorm else results


def run_norm(case, device="cuda", before=lambda: None):
    """Lines saying what is wrong; an empty list if nothing is."""
    generator = torch.Generator(device).manual_seed(case.seed)
    torch.manual_seed(case.seed)

    def normal(*shape, dtype=case.dtype):
        if case.strided and len(shape) > 1:  # rows of a wider tensor
            wide = torch.randn((*shape[:-1], shape[-1] + 8), generator=generator, device=device)
            return wide.to(dtype)[..., : shape[-1]].detach().requires_grad_()
        return torch.randn(shape, generator=generator, device=device).to(dtype).requires_grad_()

    shape, width = (*case.rows, case.columns), case.columns
    weights = [normal(width, dtype=case.weight_dtype) for _ in range(4)]
    leaves = [
        normal(*shape),
        None if case.residual is None else normal(*shape, dtype=case.residual),
        normal(*shape) if case.x1 else None,
        weights[0],
        weights[1] if case.bias else None,
        weights[2] if case.second else None,
        weights[3] if case.second and case.bias else None,
    ]
    rowscale = torch.rand(case.rows, generator=generator, device=device) if case.rowscale else None
    x, residual, x1, weight, bias, weight1, bias1 = leaves
    before()
    results = (rms_norm_fn if case.rms else layer_norm_fn)(
        x, weight, bias, residual, x1, weight1, bias1, 1e-5, case.dropout_p, rowscale, case.prenorm,
        case.residual_in_fp32, case.zero_centered, return_dropout_mask=True,
    )  # fmt: skip
    *results, mask, mask1 = results
    lines = []
    if case.dropout_p > 0.0:
        for name, kept in (("mask", mask), ("mask1", mask1) if case.x1 else ("mask", mask)):
            share, spread = kept.double().mean().item(), 5 * math.sqrt(0.25 / kept.numel())
            if abs(share - (1.0 - case.dropout_p)) > spread:
                lines.append(f"{name} keeps {share:.3f} of x")
        if case.x1 and x.numel() > 100 and torch.equal(mask, mask1):
            lines.append("x and x1 have the same mask")
    sum_dtype = case.residual or (torch.float32 if case.residual_in_fp32 else case.dtype)
    dtypes = [case.dtype] * (1 + case.second) + [sum_dtype] * case.prenorm
    if [result.dtype for result in results] != dtypes:
        lines.append(f"dtypes are {[result.dtype for result in results]}, not {dtypes}")
    douts = [normal(*shape, dtype=dtype).detach() for dtype in dtypes]

    def backward(results, leaves):
        wanted = [leaf for leaf in leaves if leaf is not None]
        return torch.autograd.grad(results, wanted, [d.to(r.dtype) for d, r in zip(douts, results, strict=True)])

    before()
    grads = backward(results, leaves)
    exact_leaves = [None if leaf is None else leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = _formula(case, exact_leaves, None if rowscale is None else rowscale.double(), mask, mask1)
    exact_grads = backward(exact, exact_leaves)
    x, residual, x1, weight, bias, weight1, bias1 = alike_leaves = [
        None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves
    ]
    alike = (rms_norm_ref if case.rms else layer_norm_ref)(
        x, weight, bias, residual, x1, weight1, bias1, 1e-5, case.dropout_p,
        None if rowscale is None else rowscale.to(case.dtype), case.prenorm, case.zero_centered, mask, mask1,
    )  # fmt: skip
    alike = list(alike) if isinstance(alike, tuple) else [alike]
    alike_grads = backward(alike, alike_leaves)
    names = ["out", "out1"][: 1 + case.second] + ["sum"] * case.prenorm
    for name, found, wanted, other in zip(names, results, exact, alike, strict=True):
        lines += off(name, found.detach(), wanted.detach(), other.detach(), case.dtype)
    every = ("x", "residual", "x1", "weight", "bias", "weight1", "bias1")
    names = [name for name, leaf in zip(every, leaves, strict=True) if leaf is not None]
    for name, found, wanted, other in zip(names, grads, exact_grads, alike_grads, strict=True):
        lines += off(f"d{name}", found, wanted, other, case.dtype)
    return lines


@dataclass(frozen=True)
class LossCase:
    seed: int
    rows: int
    columns: int
    dtype: torch.dtype
    label_dtype: torch.dtype
    smoothing: float
    logit_scale: float
    lse_square_scale: float
    ignored: float
    inplace: bool
    precomputed: bool
    strided: bool


def draw_loss(seed, dtypes=(torch.float32, torch.bfloat16, torch.float16), columns=20000):
    choose = random.Random(seed)
    return LossCase(
        seed=seed,
        rows=choose.randint(1, 30),
        columns=choose.choice([1, 2, 500, 8192, choose.randint(2, columns)]),
        dtype=choose.choice(dtypes),
        label_dtype=choose.choice([torch.int64, torch.int32]),
        smoothing=choose.choice([0.0, 0.0, 0.1]),
        logit_scale=choose.choice([1.0, 1.0, 0.7]),
        lse_square_scale=choose.choice([0.0, 1e-2]),
        ignored=choose.choice([0.0, 0.3]),
        inplace=choose.random() < 0.5,
        precomputed=choose.random() < 0.3,
        strided=choose.random() < 0.3,
    )


def loss_formula(logits, labels, case):
    """(losses, z_losses) in the logits' dtype; labels that are ignored are -100."""
    logits = logits * case.logit_scale
    lse = torch.logsumexp(logits, dim=-1)
    options = {"ignore_index": -100, "reduction": "none", "label_smoothing": case.smoothing}
    losses = torch.nn.functional.cross_entropy(logits, labels.long(), **options)
    z_losses = (case.lse_square_scale * lse.square()).masked_fill(labels == -100, 0.0)
    return losses + z_losses, z_losses


def run_loss(case, device="cuda", before=lambda: None):
    """Lines saying what is wrong; an empty list if nothing is."""
    generator = torch.Generator(device).manual_seed(case.seed)
    width = case.columns + (8 if case.strided else 0)
    values = (torch.randn((case.rows, width), generator=generator, device=device) * 3).to(case.dtype)
    values[:, 0] = float("-inf") if case.smoothing == 0.0 and case.columns > 1 else values[:, 0]
    labels = torch.randint(min(1, case.columns - 1), case.columns, (case.rows,), generator=generator, device=device)
    labels[torch.rand(case.rows, generator=generator, device=device) < case.ignored] = -100
    labels = labels.to(case.label_dtype)
    dloss = torch.randn(case.rows, generator=generator, device=device)
    leaf = values[:, : case.columns].detach().requires_grad_()
    exact_leaf = leaf.detach().double().requires_grad_()
    alike_leaf = leaf.detach().float().requires_grad_()  # rounded at the end
    known = torch.logsumexp(leaf.detach().float(), dim=-1) if case.precomputed else None
    before()
    losses, z_losses = cross_entropy_loss(
        leaf * 1, labels, known, case.smoothing, case.logit_scale, case.lse_square_scale, inplace_backward=case.inplace
    )
    (grad,) = torch.autograd.grad(losses, leaf, dloss)
    exact, exact_z = loss_formula(exact_leaf, labels, case)
    (exact_grad,) = torch.autograd.grad(exact, exact_leaf, dloss.double())
    alike, alike_z = loss_formula(alike_leaf, labels, case)
    (alike_grad,) = torch.autograd.grad(alike, alike_leaf, dloss)
    lines = off("losses", losses.detach(), exact.detach(), alike.detach(), torch.float32)
    lines += off("z_losses", z_losses, exact_z.detach(), alike_z.detach(), torch.float32)
    lines += off("dlogits", grad, exact_grad, alike_grad.to(case.dtype), case.dtype)
    if (losses.dtype, z_losses.dtype, grad.dtype) != (torch.float32, torch.float32, case.dtype):
        lines.append(f"dtypes are {losses.dtype}, {z_losses.dtype}, {grad.dtype}")
    return lines


@dataclass(frozen=True)
class RoundingCase:
    seed: int
    batch: int
    rows: int
    heads: int
    heads_kv: int
    head_dim: int
    dtype: torch.dtype
    packed: bool
    by_block: bool
    used: bool
    mean: bool
    rotated: bool
    layout: str


def draw_rounding(seed, dtypes=(torch.float32, torch.bfloat16, torch.float16), rows=3000):
    choose = random.Random(seed)
    heads_kv, group = choose.randint(1, 3), choose.choice([1, 2, 4])
    return RoundingCase(
        seed=seed,
        batch=choose.randint(1, 3),
        rows=choose.choice([0, 1, 31, 64, choose.randint(1, rows)]),
        heads=heads_kv * group,
        heads_kv=heads_kv,
        head_dim=choose.choice([8, 64, 80, 96, 128, 192, 256, choose.randint(1, 256)]),
        dtype=choose.choice(dtypes),
        packed=choose.random() < 0.4,
        by_block=choose.random() < 0.4,
        used=choose.random() < 0.3,
        mean=choose.random() < 0.5,
        rotated=choose.random() < 0.7,
        layout=choose.choice(["contiguous", "contiguous", "heads_first", "wide", "columns"]),
    )


def run_rounding(case, before=lambda: None, device="cuda", may_differ=0.01):
    """FP8 by the kernels against the same by torch: but for ties, the same numbers."""
    generator = torch.Generator(device).manual_seed(case.seed)
    sizes = [case.batch, case.rows, case.heads, case.head_dim]
    if case.packed:
        sizes = sizes[1:]
    x = torch.randn(sizes, generator=generator, device=device)
    x = torch.where(torch.rand(sizes, generator=generator, device=device) < 0.01, x * 20, x).to(case.dtype)
    cu_seqlens = used = None
    if case.packed:
        bounds = sorted(random.Random(case.seed).randint(0, case.rows) for _ in range(case.batch))
        cu_seqlens = torch.tensor([0, *bounds], dtype=torch.int32, device=device)
    counted = torch.ones(sizes[:-2], dtype=torch.bool, device=device)
    if case.used:
        counted = used = torch.rand(sizes[:-2], generator=generator, device=device) < 0.8
    if cu_seqlens is not None:
        counted = counted & (torch.arange(case.rows, device=device) < cu_seqlens[-1])
    x = torch.where(counted[..., None, None], x, float("nan"))
    if case.layout == "heads_first":
        x = x.transpose(-3, -2).contiguous().transpose(-3, -2)
    elif case.layout == "wide":
        x = torch.cat((x, x), dim=-1)[..., : case.head_dim]
    elif case.layout == "columns":
        x = torch.stack((x, x), dim=-1)[..., 0]

    longest = None if cu_seqlens is None else max(cu_seqlens.diff().tolist(), default=0)
    rows = fp8._Rows(x, cu_seqlens, used, case.by_block, longest)
    mean = wanted_mean = None
    before()
    if case.mean:
        mean, wanted_mean = rows.mean(x), rows.mean_in_torch(x)
    key = fp8._key(case.seed) if case.rotated else None
    wanted, wanted_factors = fp8._rounded_in_torch(x, rows, rows.heads(case.heads, case.heads_kv), mean, key)
    wanted_descale = rows.given(wanted_factors)
    before()
    found, descale = fp8._rounded(x, rows, case.heads_kv, mean, key)
    if found.shape != wanted.shape or not found.is_contiguous() or found.dtype != wanted.dtype:
        return [f"x is {found.dtype} {tuple(found.shape)}, not {tuple(wanted.shape)}"]
    lines = []
    if mean is not None and not torch.allclose(mean, wanted_mean, rtol=1e-5, atol=1e-5):
        lines.append(f"mean is {mean}, not {wanted_mean}")
    if descale.shape != wanted_descale.shape or not torch.allclose(descale, wanted_descale, rtol=1e-5, atol=0):
        lines.append(f"descale is {descale}, not {wanted_descale}")
    differ = (found.float() != wanted.float())[counted].float().mean().item() if counted.any() else 0.0
    if differ > may_differ:
        lines.append(f"{differ:.2%} of the numbers are other ones")
    return lines
