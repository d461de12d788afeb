"""Rotary embedding against complex numbers in float64: forward, backward, in place, packed and with offsets."""

import torch
from cache_cases import rotated

from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_kv_, apply_rotary_emb_qkv_


def _off(name, found, wanted, dtype):
    close = 1.01 * torch.finfo(dtype).eps * max(1.0, wanted.abs().max().item())
    worst = (found.double() - wanted).abs().max().item()
    return [] if worst <= close else [f"{name} is off by {worst:.3g}, allowed is {close:.3g}"]


def run(seed, dtype, head_dim, rotary_dim, interleaved, before=lambda: None, device="cuda"):
    """Lines saying what is wrong; an empty list if nothing is."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    angles = torch.randn((100, rotary_dim // 2), generator=generator, device=device) * 3
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    batch, seqlen, heads = 3, 21, 4
    offsets = torch.tensor([0, 5, 79], dtype=torch.int32, device=device)
    positions = offsets[:, None].long() + torch.arange(seqlen, device=device)
    x, dout = normal(batch, seqlen, heads, head_dim), normal(batch, seqlen, heads, head_dim)
    wanted = rotated(x, cos, sin, positions, interleaved)
    wanted_dx = rotated(dout, cos, -sin, positions, interleaved)
    lines = []
    for inplace in (False, True):
        leaf = x.clone().requires_grad_()
        before()
        out = apply_rotary_emb(leaf * 1, cos, sin, interleaved, inplace, offsets)
        lines += _off(f"out, inplace={inplace}", out.detach(), wanted, dtype)
        (dx,) = torch.autograd.grad(out, leaf, dout)
        lines += _off(f"dx, inplace={inplace}", dx, wanted_dx, dtype)
    expanded = torch.ones((), dtype=dtype, device=device).expand(x.shape)
    leaf = x.clone().requires_grad_()
    (dx,) = torch.autograd.grad(apply_rotary_emb(leaf, cos.float(), sin.float(), interleaved, False, 7).sum(), leaf)
    same = torch.arange(7, 7 + seqlen, device=device).expand(batch, seqlen)
    lines += _off("dx of a sum", dx, rotated(expanded, cos, -sin, same, interleaved), dtype)

    lengths = (1, 0, 20)
    bounds = torch.tensor([0, 1, 1, 21], dtype=torch.int32, device=device)
    packed = apply_rotary_emb(x[0], cos, sin, interleaved, False, offsets, bounds, max(lengths))
    at = torch.tensor([0, *range(79, 99)], device=device)[None]
    lines += _off("packed out", packed, rotated(x[:1], cos, sin, at, interleaved)[0], dtype)

    qkv, dqkv = normal(batch, seqlen, 3, heads, head_dim), normal(batch, seqlen, 3, heads, head_dim)
    for together in (True, False):
        tables = () if together else (cos.flip(0), sin.flip(0))
        k_cos, k_sin = tables or (cos, sin)
        leaf = qkv.clone().requires_grad_()
        out = apply_rotary_emb_qkv_(leaf * 1, cos, sin, *tables, interleaved=interleaved, seqlen_offsets=offsets)
        (grad,) = torch.autograd.grad(out, leaf, dqkv)
        for name, found, given, sign in (("qkv", out.detach(), qkv, 1), ("dqkv", grad, dqkv, -1)):
            parts = [
                rotated(given[:, :, 0], cos, sign * sin, positions, interleaved),
                rotated(given[:, :, 1], k_cos, sign * k_sin, positions, interleaved),
                given[:, :, 2].double(),
            ]
            lines += _off(f"{name}, {together=}", found, torch.stack(parts, dim=2), dtype)
    grouped = qkv.flatten(2, 3)[:, :, : heads + 4]  # four query heads, two of keys and of values
    out = apply_rotary_emb_qkv_(
        grouped.clone(), cos, sin, interleaved=interleaved, seqlen_offsets=offsets, num_heads_q=heads
    )
    turned = rotated(grouped[:, :, : heads + 2], cos, sin, positions, interleaved)
    lines += _off("grouped qkv", out, torch.cat((turned, grouped[:, :, heads + 2 :].double()), dim=2), dtype)
    kv = qkv[:, :, 1:].clone()
    out = apply_rotary_emb_kv_(kv, cos, sin, interleaved, offsets)
    parts = [rotated(qkv[:, :, 1], cos, sin, positions, interleaved), qkv[:, :, 2].double()]
    lines += _off("kv", out, torch.stack(parts, dim=2), dtype)
    if out is not kv:
        lines.append("kv is not what was given")
    return lines
