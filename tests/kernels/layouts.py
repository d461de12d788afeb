"""The same values laid out in memory in every way that a caller may hand over."""

import torch


def contiguous(x):
    return x.contiguous()


def heads_first(x):
    """A view of a (B, H, S, D) tensor."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def sequence_first(x):
    """A view of an (S, B, H, D) tensor."""
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def wide_rows(x):
    """The first columns of rows that are 8 elements longer: rows stay on 16 bytes where they were."""
    return torch.nn.functional.pad(x, (0, 8), value=float("nan"))[..., : x.shape[-1]]


def odd_rows(x):
    """The first columns of rows that are 1 element longer: most rows do not begin on 16 bytes."""
    return torch.nn.functional.pad(x, (0, 1), value=float("nan"))[..., : x.shape[-1]]


def odd_pointer(x):
    """A tensor whose first element is not on 16 bytes."""
    storage = torch.full((x.numel() + 1,), float("nan"), dtype=x.dtype, device=x.device)
    view = storage[1:].view(x.shape)
    return view.copy_(x)


def packed(x):
    """One of three tensors interleaved in a packed (B, S, 3, H, D)."""
    return torch.stack((torch.full_like(x, float("nan")), x, torch.full_like(x, float("nan"))), dim=2)[:, :, 1]


def strided_columns(x):
    """Every second column: the last dimension is not contiguous."""
    return torch.stack((x, torch.full_like(x, float("nan"))), dim=-1)[..., 0]


LAYOUTS = [contiguous, heads_first, sequence_first, wide_rows, odd_rows, odd_pointer, packed, strided_columns]
