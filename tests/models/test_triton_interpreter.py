"""The Triton kernels on the CPU, in Triton's interpreter: the same cases as on a GPU, smaller."""

import pytest
import torch
from triton_cases import draw_loss, draw_norm, draw_rounding, run_loss, run_norm, run_rounding

import flash_attn.ops.triton.cross_entropy as cross_entropy
import flash_attn.ops.triton.layer_norm as layer_norm
from flash_attn import fp8
from flash_attn.ops.triton import _kernels


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """CPU tensors are for the kernels, too; the number of times that one was asked for."""
    launches = []

    def kernels_of(module):
        launches.append(module)
        return _kernels.kernels_of(module)

    monkeypatch.setattr(fp8, "_converts_to_fp8", lambda device: True)
    for module in (cross_entropy, fp8, layer_norm):
        monkeypatch.setattr(module, "runs_kernel", lambda x: x.dtype != torch.float64)
        monkeypatch.setattr(module, "kernels_of", kernels_of)
    return launches


@pytest.mark.parametrize("seed", range(40))
def test_norm(seed, interpreted):
    case = draw_norm(seed, columns=1000, rows=12)
    wrong = run_norm(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])
    assert interpreted == ["_norm_kernels"] * 2


@pytest.mark.parametrize("seed", range(25))
def test_loss(seed, interpreted):
    case = draw_loss(seed)
    wrong = run_loss(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])
    assert interpreted == ["_cross_entropy_kernels"] * 2


@pytest.mark.parametrize("seed", range(30))
def test_rounding(seed, interpreted):
    case = draw_rounding(seed, rows=100)
    wrong = run_rounding(case, device="cpu")
    assert not wrong, "\n".join([str(case), *wrong])
    empty = case.rows == 0 or (case.batch == 0 and not case.packed)  # nothing to launch for
    assert interpreted == ([] if empty else ["_fp8_kernels"] * (2 if case.mean else 1))


def test_rounding_under_another_default_dtype(interpreted):
    x = torch.randn(2, 9, 4, 64)
    wanted = fp8.rotate_and_quantize(x, 2)[1]
    torch.set_default_dtype(torch.bfloat16)
    try:
        descale = fp8.rotate_and_quantize(x, 2)[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert interpreted == ["_fp8_kernels"] * 2
    assert descale.dtype is torch.float32
    assert torch.equal(descale, wanted)


def test_several_programs_of_the_backward(monkeypatch):
    """Each takes some blocks of rows, one of them fewer."""
    kernels = _kernels.kernels_of("_norm_kernels")
    monkeypatch.setattr(kernels, "BACKWARD_TILE", 256)
    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    for seed in range(6):
        case = draw_norm(100 + seed, columns=200, rows=30)
        wrong = run_norm(case, device="cpu")
        assert not wrong, "\n".join([str(case), *wrong])


def test_ignored_and_wrong_labels():
    logits = torch.randn(3, 5)
    losses, _ = cross_entropy.cross_entropy_loss(logits, torch.tensor([-100, 5, -3]))
    assert losses[0] == 0.0
    assert losses[1:].isnan().all()
