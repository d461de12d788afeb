"""Random products of features against float64, forward and gradients, in memory full of NaN."""

import os

import pytest
import torch
from cache_cases import draw as draw_cache
from cache_cases import run as run_cache
from feature_cases import FORMS, Limits, draw, run
from kernel_set import DTYPES, largest_head_dim
from memory import poison

FIRST = int(os.environ.get("FLASH_ATTN_TEST_SEED", "0"))
CASES = int(os.environ.get("FLASH_ATTN_TEST_CASES", "300"))
LIMITS = Limits(
    tuple(DTYPES.values()),
    min(largest_head_dim(op, dtype, "general") for op in ("fwd", "bwd") for dtype in DTYPES.values()),
)
CACHE_LIMITS = Limits(
    tuple(DTYPES.values()), min(largest_head_dim("decode", d, "general") for d in DTYPES.values()), 1000
)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_feature_case(seed):
    case = draw(seed, LIMITS)
    wrong = run(case, before=poison)
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_cache_case(seed):
    case = draw_cache(seed, CACHE_LIMITS)
    wrong = run_cache(case, before=poison)
    assert not wrong, "\n".join([str(case), *wrong])


def test_every_feature_is_drawn():
    cases = [draw(seed, LIMITS) for seed in range(1000)]
    named = (
        "chunk",
        "softcap",
        "alibi",
        "dropout_p",
        "sink",
        "seqused_q",
        "seqused_k",
        "leftpad_k",
        "page_size",
        "dlse",
    )
    for name in named:
        assert sum(bool(getattr(case, name)) for case in cases) > 30, name
    assert {case.form for case in cases} == set(FORMS)
    assert {case.dtype for case in cases} == {torch.float16, torch.bfloat16}
