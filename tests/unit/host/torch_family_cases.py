"""Cases of the choice between the kernel families."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch_cache_cases import launches
from torch_general_cases import Case, batched, halves, ints, packed, reference
from torch_general_cases import check as check_gradients
from torch_support import close

# 2^21 scores: from here on a faster family is worth its tensor maps.
MANY = {"b": 1, "sq": 1024, "sk": 1024, "h": 2, "hk": 1, "d": 8, "dv": 8}


def check(case: Case, family: str) -> tuple[Tensor, Tensor]:
    """The forward, served by ``family``, against float64."""
    with launches() as found:
        out, lse = case.forward()
    assert [x["key"].split("-")[1] for x in found] == [family], found
    wanted_out, wanted_lse = reference(*(x.double() for x in (case.q, case.k, case.v)), case.options)
    close(out, wanted_out, "out")
    close(lse, wanted_lse, "lse", 2e-3)
    return out, lse


def check_backward(case: Case, family: str) -> None:
    """The backward, served by ``family``, against float64; the forward too."""
    with launches() as found:
        check_gradients(case)
    assert {x["key"].split("-")[1] for x in found if x["key"].startswith("bwd")} == {family}, found


def case_many_scores() -> None:
    check(batched(**MANY), "sm90")
    check(batched(**MANY, causal=True), "sm90")
    check(batched(**MANY, window_left=100, softcap=2.0, sink=torch.ones(2)), "sm90")
    check(batched(**{**MANY, "sk": 1023}), "sm80")


def case_many_scores_with_alibi_or_dropout() -> None:
    torch.manual_seed(1)
    check(batched(**MANY, alibi_slopes=torch.rand(2)), "sm80")
    check(batched(**MANY, dropout_p=0.1, rng_state=torch.tensor([1, 2])), "sm80")
    check(batched(**MANY, rng_state=torch.tensor([1, 2])), "sm90")  # without dropout it is of no account


def case_many_scores_of_packed_sequences() -> None:
    case = packed([1024, 0, 70], [1024, 5, 1], h=2, hk=1, d=8, dv=8, causal=True)
    check(case, "sm90")
    check(replace(case, options=replace(case.options, seqused_k=ints(900, 5, 0), leftpad_k=ints(3, 0, 0))), "sm90")


def case_many_scores_backward() -> None:
    check_backward(batched(**MANY), "sm90")
    check_backward(batched(**{**MANY, "sk": 1023}, causal=True), "sm80")
    check_backward(batched(**MANY, window_left=100), "sm80")
    check_backward(batched(**MANY, alibi_slopes=torch.rand(2)), "sm80")


def case_many_scores_of_packed_sequences_backward() -> None:
    case = packed([1024, 0, 70], [1024, 5, 1], h=2, hk=1, d=8, dv=8, causal=True)
    check_backward(case, "sm90")
    check_backward(
        replace(case, options=replace(case.options, seqused_k=ints(900, 5, 0), leftpad_k=ints(3, 0, 0))), "sm90"
    )


def case_many_tiles_of_packed_sequences() -> None:
    lengths = [1024, *[1] * 8]
    check(packed(lengths, lengths, h=2, hk=1, d=8, dv=8, causal=True), "sm90")  # with a counter of tiles


def case_margin() -> None:
    """Of the 7 multiprocessors."""
    with launches() as found:
        for margin in (0, 4):
            batched(**MANY, sm_margin=margin).forward()
    assert [x["grid"] for x in found] == ["7", "3"], found


def case_no_map() -> None:
    """What cannot be put into a tensor map goes to the family that needs none, and comes out the same."""
    os.environ["FAKE_CUDA_FAIL"] = "cuTensorMapEncodeTiled=1"
    try:
        check_backward(batched(**MANY, causal=True), "sm80")
        check(batched(**MANY, causal=True), "sm80")
        check(packed([1024], [1024], h=2, hk=1, d=8, dv=8), "sm80")
    finally:
        del os.environ["FAKE_CUDA_FAIL"]
    case = batched(**{**MANY, "b": 2})  # one sequence's keys for all: a stride of 0
    check(replace(case, k=halves(1, 1024, 1, 8).expand(2, -1, -1, -1)), "sm80")
    check(replace(case, q=halves(2, 1024, 2, 9)[..., 1:]), "sm90")  # copied, hence as any other
    no_keys: dict[str, Any] = {**MANY, "sq": 1, "sk": 0}
    check(batched(**no_keys), "sm80")


def check_family() -> None:
    """Under FLASH_ATTN_FAMILY: that one, whatever the size, but for what it lacks."""
    family = os.environ["FLASH_ATTN_FAMILY"]
    check(batched(), family)
    check(batched(**MANY), family)
    check(batched(sk=0), "sm80")
    check(batched(alibi_slopes=torch.ones(4)), "sm80")
    check_backward(batched(causal=True), family)
    check_backward(batched(sk=0), "sm80")
    check_backward(batched(window_left=3), "sm80")
