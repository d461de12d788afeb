"""Every wrong argument is refused before anything runs, by name and with what was found."""

import pytest
import torch
from torch import zeros

import flash_attn
from flash_attn import errors, flash_attn_func
from flash_attn.errors import ArgumentError, DeviceError, DtypeError, ShapeError


def good(**changes):
    """Arguments of a correct call, with some replaced."""
    arguments = {"q": torch.zeros(2, 5, 4, 8), "k": torch.zeros(2, 7, 2, 8), "v": torch.zeros(2, 7, 2, 8)}
    return {**arguments, **changes}


BAD_TENSORS = [
    (ArgumentError, {"q": [1.0]}, r"^q must be a torch\.Tensor, got list"),
    (ArgumentError, {"v": None}, r"^v must be a torch\.Tensor, got NoneType"),
    (ShapeError, {"q": zeros(5, 4, 8)}, r"^q must have 4 dimensions, \(B, Sq, H, D\), got 3: \(5, 4, 8\)"),
    (ShapeError, {"k": zeros(8)}, r"^k must have 4 dimensions, \(B, Sk, Hk, D\), got 1: \(8,\)"),
    (ShapeError, {"v": zeros(1, 2, 7, 2, 8)}, r"^v must have 4 dimensions.*got 5"),
    (ShapeError, {"v": zeros(2, 6, 2, 8)}, r"^v must have k's shape.*\(2, 7, 2, 8\).*\(2, 6, 2, 8\)"),
    (ShapeError, {"q": zeros(3, 5, 4, 8)}, r"^k must have q's batch size: q has 3, k has 2"),
    (ShapeError, {"q": zeros(2, 5, 4, 9)}, r"^k must have q's head dim: q has 9, k has 8"),
    (ShapeError, {"q": zeros(2, 5, 3, 8)}, r"^q's heads must be a multiple of k's: q has 3 heads, k has 2"),
    (ShapeError, {"k": zeros(2, 7, 0, 8), "v": zeros(2, 7, 0, 8)}, r"q has 4 heads, k has 0"),
    (ShapeError, {n: zeros(1, 1, 1, 257) for n in "qkv"}, r"^the head dim.* must be 1 to 256, got 257"),
    (ShapeError, {n: zeros(1, 1, 1, 0) for n in "qkv"}, r"^the head dim.* must be 1 to 256, got 0"),
    (DtypeError, {"q": zeros(2, 5, 4, 8, dtype=torch.int32)}, r"^q must be one of float16, .* got torch\.int32"),
    (DtypeError, {"k": zeros(2, 7, 2, 8).half()}, r"^k must have q's dtype: q is torch\.float32, k is torch\.float16"),
    (DtypeError, {"v": zeros(2, 7, 2, 8).double()}, r"^v must have q's dtype: .*float32.*float64"),
    (DeviceError, {"k": zeros(2, 7, 2, 8, device="meta")}, r"^k must be on q's device: q is on cpu, k is on meta"),
    (DeviceError, {"v": zeros(2, 7, 2, 8, device="meta")}, r"^v must be on q's device: q is on cpu, v is on meta"),
]


@pytest.mark.parametrize(("error", "changes", "text"), BAD_TENSORS, ids=[case[2][:40] for case in BAD_TENSORS])
def test_tensors(error, changes, text):
    assert issubclass(error, ValueError)
    with pytest.raises(error, match=text):
        flash_attn_func(**good(**changes))


BAD_VALUES = [
    (ValueError, {"dropout_p": -0.1}, r"^dropout_p must be in \[0, 1\), got -0\.1"),
    (ValueError, {"dropout_p": 1.0}, r"^dropout_p must be in \[0, 1\), got 1\.0"),
    (ValueError, {"softcap": -2.0}, r"^softcap must be .*got -2\.0"),
    (ValueError, {"softmax_scale": torch.tensor(0.5)}, r"^softmax_scale must be a number or None, got a tensor"),
    (ValueError, {"window_size": (1, 2, 3)}, r"^window_size must be two integers.*\(1, 2, 3\)"),
    (ValueError, {"window_size": None}, r"^window_size must be two integers.*None"),
    (NotImplementedError, {"dropout_p": 0.1}, r"^dropout_p=0\.1 is not supported"),
    (NotImplementedError, {"window_size": (3, 0)}, r"^window_size=\(3, 0\) is not supported"),
    (NotImplementedError, {"softcap": 30.0}, r"^softcap=30\.0 is not supported"),
    (NotImplementedError, {"alibi_slopes": torch.ones(4)}, r"^alibi_slopes=a tensor is not supported"),
]


@pytest.mark.parametrize(("error", "changes", "text"), BAD_VALUES, ids=[case[2][:40] for case in BAD_VALUES])
def test_values(error, changes, text):
    with pytest.raises(error, match=text) as caught:
        flash_attn_func(**good(**changes))
    assert isinstance(caught.value, errors.FlashAttnError)


def test_harmless_spellings_are_accepted():
    expected = flash_attn_func(**good(), causal=True)
    out = flash_attn_func(**good(), dropout_p=0, softmax_scale=8**-0.5, causal=1, window_size=[-1, -1], softcap=0)
    assert torch.equal(out, expected)


def test_arguments_keep_the_order_of_flash_attn_2():
    q, k, v = good().values()
    out = flash_attn_func(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, True, True)
    assert len(out) == 3


def test_a_device_without_kernels():
    tensors = {name: torch.zeros(1, 1, 1, 8, device="meta") for name in "qkv"}
    assert flash_attn_func(**tensors).device.type == "meta"
    assert flash_attn.supported("meta")[0] is False


def test_float32_on_a_gpu_is_refused_with_the_way_out():
    with torch._subclasses.FakeTensorMode():
        q, k, v = (torch.zeros(1, 1, 1, 8, device="cuda") for _ in "qkv")
        with pytest.raises(errors.DtypeError, match=r"q must be one of float16, bfloat16 on cuda, .*float32.*autocast"):
            flash_attn_func(q, k, v)
        assert flash_attn_func(q.half(), k.half(), v.half()).device.type == "cuda"


def test_two_gpus_are_refused_by_name():
    with torch._subclasses.FakeTensorMode():
        q, k = (torch.zeros(1, 1, 1, 8, device=f"cuda:{i}", dtype=torch.float16) for i in (0, 1))
        with pytest.raises(errors.DeviceError, match="k must be on q's device: q is on cuda:0, k is on cuda:1"):
            flash_attn_func(q, k, k)
