"""Plain attention in torch, differentiated by torch, and how far a result may be from it.

The rule: compared with float64, a kernel's largest error is at most twice that of the same mathematics done by torch in
the input dtype. Torch's error can be 0 by luck or because a value is exact (one key: the softmax is 1), so there is a
floor under it, what any kernel of this kind loses by rounding at most; it matters in small cases only.
"""

import torch
from feature_oracle import compare as mismatches
from feature_oracle import largest, largest_finite

__all__ = ["expected", "largest", "largest_finite", "mismatches", "plain_attention", "results"]

FACTOR = 2.0
FP32 = 4e-7


def plain_attention(q, k, v, scale, causal):
    """(out, lse) in the tensors' own dtype; the softmax is torch's, the lse is only good in float64."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    seqlen_q, seqlen_k = scores.shape[-2:]
    visible = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=q.device)
    if causal:
        visible = visible.tril(seqlen_k - seqlen_q)
    scores = scores.masked_fill(~visible, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # A row of -inf alone has no softmax; its output is 0 by definition.
    weights = scores.softmax(dim=-1).masked_fill(~visible.any(dim=-1)[:, None], 0.0)
    return torch.einsum("bhij,bjhd->bihd", weights, v), lse


def results(function, q, k, v, dout=None):
    """{"out", "lse"} of ``function(q, k, v)``, with "dq", "dk", "dv" where there is a ``dout``."""
    q, k, v = (x.detach().requires_grad_(dout is not None) for x in (q, k, v))
    out, lse = function(q, k, v)
    found = {"out": out.detach(), "lse": lse.detach()}
    if dout is not None:
        found.update(zip(("dq", "dk", "dv"), torch.autograd.grad(out, (q, k, v), dout), strict=True))
    return found


def expected(q, k, v, scale, causal, dout=None):
    """(exact, allowed): the results in float64, and for each of them the largest error that a kernel may have."""

    def function(q, k, v):
        return plain_attention(q, k, v, scale, causal)

    double = [x if x is None else x.double() for x in (q, k, v, dout)]
    exact = results(function, *double)
    same = results(function, q, k, v, dout)
    floor = _floor(*double, exact, scale, torch.finfo(q.dtype).eps / 2)
    allowed = {n: torch.maximum(FACTOR * largest(same[n] - exact[n]), floor[n]) for n in exact if n != "lse"}
    return exact, {**allowed, "lse": floor["lse"]}


def _floor(q, k, v, dout, exact, scale, half_ulp):
    """What rounding alone may cost each result: its own, that of fp32 sums, and that of ``out`` before the backward."""
    # Each is rounded once at its end, and P and dS are rounded before the last product.
    floor = {name: 2 * half_ulp * largest(value) + 1e-6 for name, value in exact.items()}
    q_norm, k_norm, v_norm = (largest(x.norm(dim=-1)) for x in (q, k, v))
    # An fp32 sum of exact products loses in proportion to the products, however small the sum is.
    floor["lse"] = FP32 * abs(scale) * q_norm * k_norm + 2e-5 * largest_finite(exact["lse"]).clamp(min=1.0)
    if dout is not None:
        # dS = P * (dP - delta) with dP = dO V^T and delta = rowsum(dO * O): both sums, and O was rounded.
        lost = FP32 * largest(dout.norm(dim=-1)) * v_norm + half_ulp * largest((dout * exact["out"]).norm(dim=-1))
        rows = q.shape[1] * q.shape[2] / k.shape[2]
        floor["dq"] += abs(scale) * lost * k_norm
        floor["dk"] += abs(scale) * lost * q_norm * rows**0.5
    return floor
