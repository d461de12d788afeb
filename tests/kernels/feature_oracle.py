"""Every feature of attention in plain torch, padded and all sequences at once, differentiated by torch.

Nothing is shared with the package. Rows of a batch, packed or padded, whole or partly used, are gathered into one
padded tensor, so that gradients flow back to where the rows came from.
"""

from dataclasses import dataclass

import torch


@dataclass
class Rows:
    """Where the rows of each sequence are among all rows of a tensor, padded to the longest: ``index`` (B, S) int64,
    ``exists`` (B, S) bool, ``lengths`` (B). ``there`` (n) int64 are the places of (B, S) that exist, one after another,
    and ``rows`` (n) the rows that they are."""

    index: torch.Tensor
    exists: torch.Tensor
    lengths: torch.Tensor
    there: torch.Tensor
    rows: torch.Tensor

    @classmethod
    def of(cls, first, lengths, device):
        """``first`` and ``lengths``: a list each, of the rows of every sequence that count."""
        # On the CPU, where counting what exists waits for nothing.
        lengths = torch.tensor(lengths, dtype=torch.int64)
        step = torch.arange(int(lengths.max()) if lengths.numel() else 0)
        exists = step < lengths[:, None]
        index = torch.where(exists, torch.tensor(first, dtype=torch.int64)[:, None] + step, 0)
        parts = (index, exists, lengths, exists.flatten().nonzero().flatten(), index[exists])
        return cls(*(x.to(device) for x in parts))

    def gather(self, x):
        """(rows, ...) -> (B, S, ...)."""
        if x.shape[0] == 0:
            return x.new_zeros((*self.index.shape, *x.shape[1:]))
        return x[self.index]

    def scatter(self, padded, rows, fill):
        """(B, S, ...) -> (rows, ...), ``fill`` where no sequence has the row."""
        out = torch.full((rows, *padded.shape[2:]), fill, dtype=padded.dtype, device=padded.device)
        return out.index_copy(0, self.rows, padded.flatten(0, 1).index_select(0, self.there))


@dataclass
class Modifiers:
    softmax_scale: float
    causal: bool = False
    window: tuple = (-1, -1)
    chunk: int = 0
    softcap: float = 0.0
    alibi: torch.Tensor | None = None
    keep: torch.Tensor | None = None  # bool (B, H, at least Sq, at least Sk)
    dropout_p: float = 0.0


def visible(queries, keys, m):
    """bool (B, Sq, Sk)."""
    device = queries.exists.device
    shift = (keys.lengths - queries.lengths)[:, None, None]
    position = torch.arange(queries.index.shape[1], device=device)[:, None] + shift
    key = torch.arange(keys.index.shape[1], device=device)
    seen = queries.exists[:, :, None] & keys.exists[:, None, :]
    left, right = m.window
    if m.causal:
        right = 0
    if left >= 0:
        seen = seen & (key >= position - left)
    if right >= 0:
        seen = seen & (key <= position + right)
    if m.chunk:
        seen = seen & (torch.floor_divide(position, m.chunk) == torch.floor_divide(key, m.chunk))
    return seen, position - key


def attention(q, k, v, sink, queries, keys, m):
    """(out, lse, reach) of q (rows, H, D), k (rows, Hk, D) and v (rows, Hk, Dv), in their dtype.

    out is (rows, H, Dv), lse (rows, H), and reach the largest norm of the weights that a key has in all queries.
    """
    group = q.shape[1] // k.shape[1]
    q_pad, k_pad, v_pad = queries.gather(q), keys.gather(k), keys.gather(v)
    k_pad, v_pad = (x.repeat_interleave(group, dim=2) for x in (k_pad, v_pad))
    scores = torch.einsum("bihd,bjhd->bhij", q_pad, k_pad) * m.softmax_scale
    if m.softcap:
        scores = m.softcap * torch.tanh(scores / m.softcap)
    seen, distance = visible(queries, keys, m)
    if m.alibi is not None:
        slopes = m.alibi if m.alibi.dim() == 2 else m.alibi[None]
        scores = scores - (slopes.double()[:, :, None, None] * distance.abs()[:, None]).to(scores.dtype)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sink is not None:
        column = sink.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    lse = torch.logsumexp(scores, dim=-1)
    nothing = lse == float("-inf")
    weights = torch.softmax(scores.masked_fill(nothing[..., None], 0.0), dim=-1)
    weights = weights.masked_fill(nothing[..., None], 0.0)[..., : k_pad.shape[1]]
    if m.keep is not None:
        weights = weights * m.keep[:, :, : weights.shape[2], : weights.shape[3]] / (1 - m.dropout_p)
    out = torch.einsum("bhij,bjhd->bihd", weights, v_pad)
    rows, reach = q.shape[0], largest(weights.detach().norm(dim=2))
    return queries.scatter(out, rows, 0.0), queries.scatter(lse.transpose(1, 2), rows, float("-inf")), reach


def differentiate(inputs, queries, keys, m, dout, dlse, dtype):
    """({"out", "lse", "dq", "dk", "dv", "dsink"} in ``dtype``, reach).

    ``inputs`` is (q, k, v, sink or None), rows first.
    """
    leaves = [None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs]
    out, lse, reach = attention(*leaves, queries, keys, m)
    found = {"out": out.detach(), "lse": lse.detach()}
    if dout is None:
        return found, reach
    # Of every leaf nothing, so that all of them are in the graph.
    loss = (out * dout.to(dtype)).sum() + sum(x.flatten()[:0].sum() for x in leaves if x is not None)
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == float("-inf"), 0.0) * dlse.to(dtype)).sum()
    wanted = [x for x in leaves if x is not None]
    grads = torch.autograd.grad(loss, wanted, allow_unused=True)
    grads = [torch.zeros_like(x) if g is None else torch.nan_to_num(g) for g, x in zip(grads, wanted, strict=True)]
    names = ("dq", "dk", "dv", "dsink")
    return {**found, **dict(zip(names, grads, strict=False))}, reach


def largest(x):
    """The largest magnitude, 0 of nothing: a float64 tensor without dimensions, so that nothing waits for it."""
    return x.abs().max().double() if x.numel() else torch.zeros((), dtype=torch.float64, device=x.device)


def largest_finite(x):
    """As :func:`largest`, of what is not infinite."""
    return largest(torch.where(x.isinf(), 0.0, x))


def allowed_errors(exact, same, dtype, factor, scale, softcap, inputs, dout, reach):
    """The largest error that each result may have: ``factor`` times torch's own in ``dtype``, and a floor under it.

    A small result is a small sample: torch's error in it can be near 0 by luck. And the backward of a kernel takes dS
    as P (dP - rowsum(dO * O)) with an O that was rounded, which torch's does not.
    """
    eps = torch.finfo(dtype).eps
    allowed = {}
    for name, value in exact.items():
        size = largest(value)
        error = largest(torch.nan_to_num(same[name].double()) - value) if name != "lse" else 0.0 * size
        allowed[name] = factor * error + 1e-5 * size.clamp(min=1.0)
        if value.numel() < 4096:
            allowed[name] += 2 * eps * size
    allowed["lse"] = (6e-3 if softcap else 2e-3) * (largest_finite(exact["lse"]) / 10).clamp(min=1.0)
    if dout is not None:
        lost = eps * largest((dout.double() * exact["out"]).norm(dim=-1)) * abs(scale)
        q, k = inputs[:2]
        allowed["dq"] += lost * largest(k)
        allowed["dk"] += lost * largest(q) * reach * (q.shape[1] / k.shape[1]) ** 0.5
    if "dsink" in exact:
        # A sum over all rows of what the output lost by rounding.
        allowed["dsink"] += eps * largest((dout.double() * exact["out"]).abs().sum(-1).sum(0))
    return allowed


def compare(found, exact, allowed):
    """Lines of text about what is off; none if all is well. Waits for the GPU once."""
    lines, names, figures = [], [], []
    for name, value in found.items():
        reference = exact[name]
        if value.shape != reference.shape:
            lines.append(f"{name} has shape {tuple(value.shape)}, expected {tuple(reference.shape)}")
            continue
        infinite = reference == float("-inf")
        misplaced = ((value == float("-inf")) != infinite).sum().double()
        names.append(name)
        figures += [misplaced, largest((value.double() - reference).masked_fill(infinite, 0.0)), allowed[name]]
    figures = iter(torch.stack(figures).tolist() if figures else [])
    for name, misplaced, worst, limit in zip(names, figures, figures, figures, strict=True):
        if misplaced:
            lines.append(f"{name} is -inf in other places than it should be")
        if not worst <= limit:  # NaN is no error that is allowed
            lines.append(f"{name} is off by {worst:.3g}, allowed is {limit:.3g}")
    return lines


def that_differ(pairs):
    """The names of ``pairs``, {name: (tensor, tensor)}, whose two have different values. Waits for the GPU once."""
    if not pairs:
        return []
    differ = torch.stack([(a != b).any() for a, b in pairs.values()]).tolist()
    return [name for name, d in zip(pairs, differ, strict=True) if d]
