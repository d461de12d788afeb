"""Random calls against float64: shapes, tails, layouts, masks, forward and gradients, in memory full of NaN."""

import os

import pytest
from memory import poison
from random_cases import draw, run

from flash_attn import flash_attn_func

FIRST = int(os.environ.get("FLASH_ATTN_TEST_SEED", "0"))
CASES = int(os.environ.get("FLASH_ATTN_TEST_CASES", "200"))


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_random_case(seed):
    case = draw(seed)
    wrong = run(case, flash_attn_func, before=poison)
    assert not wrong, "\n".join([str(case), *wrong])
