"""Every wrong argument is refused before anything runs, by name and with what was found."""

import pytest
import torch
from torch import zeros

import flash_attn
from flash_attn import errors, flash_attn_func
from flash_attn.errors import ArgumentError, DeviceError, DtypeError, ShapeError
from flash_attn_interface import get_scheduler_metadata


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


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


SLOPES = torch.ones(4)
BAD_VALUES = [
    (ValueError, {"dropout_p": -0.1}, r"^dropout_p must be in \[0, 1\), got -0\.1"),
    (ValueError, {"dropout_p": 1.0}, r"^dropout_p must be in \[0, 1\), got 1\.0"),
    (ValueError, {"softcap": -2.0}, r"^softcap must be .*got -2\.0"),
    (ValueError, {"softcap": 5.0, "dropout_p": 0.1}, r"^softcap does not go together with dropout.*5\.0.*0\.1"),
    (ValueError, {"softmax_scale": torch.tensor(0.5)}, r"^softmax_scale must be a number or None, got a tensor"),
    (ValueError, {"softmax_scale": torch.tensor(0.5), "softcap": 1.0}, r"^softmax_scale must be a number or None"),
    (ValueError, {"softmax_scale": "0.5"}, r"^softmax_scale must be a number or None, got '0\.5'"),
    (ValueError, {"softmax_scale": [1], "softcap": 1.0}, r"^softmax_scale must be a number or None, got \[1\]"),
    (ValueError, {"softcap": None}, r"^softcap must be a number, got None"),
    (ValueError, {"softcap": float("inf")}, r"^softcap must be .* finite, got inf"),
    (ValueError, {"dropout_p": "0.1"}, r"^dropout_p must be a number, got '0\.1'"),
    (ValueError, {"window_size": (1, 2, 3)}, r"^window_size must be two integers.*\(1, 2, 3\)"),
    (ValueError, {"window_size": None}, r"^window_size must be two integers.*None"),
    (ValueError, {"window_size": (1.5, 0)}, r"^window_size must be two integers.*1\.5"),
    (ValueError, {"sm_margin": -1}, r"^sm_margin must be a number of multiprocessors to leave free, got -1"),
    (ValueError, {"sm_margin": 1.5}, r"^sm_margin must be .*, got 1.5"),
    (ValueError, {"attention_chunk": -1}, r"^attention_chunk must be 0 \(none\) or a positive integer, got -1"),
    (ArgumentError, {"alibi_slopes": 0.5}, r"^alibi_slopes must be a torch\.Tensor, got float"),
    (DtypeError, {"alibi_slopes": SLOPES.half()}, r"^alibi_slopes must be torch\.float32, got torch\.float16"),
    (
        ShapeError,
        {"alibi_slopes": torch.ones(3)},
        r"^alibi_slopes must have shape .*\(4,\) or \(2, 4\) here, got \(3,\)",
    ),
    (DeviceError, {"alibi_slopes": SLOPES.to("meta")}, r"^alibi_slopes must be on q's device: q is on cpu, .* meta"),
    (ArgumentError, {"alibi_slopes": SLOPES.clone().requires_grad_()}, r"^alibi_slopes must not require grad"),
    (ShapeError, {"learnable_sink": torch.ones(5)}, r"^learnable_sink must have shape \(H,\), \(4,\) here, got \(5,\)"),
    (DtypeError, {"learnable_sink": torch.ones(4).int()}, r"^learnable_sink must be a floating .*got torch\.int32"),
    (ShapeError, {"seqused_k": int32(1)}, r"^seqused_k must have shape \(B,\), \(2,\) here, got \(1,\)"),
    (DtypeError, {"seqused_q": torch.ones(2)}, r"^seqused_q must be torch\.int32, got torch\.float32"),
    (DtypeError, {"leftpad_k": torch.ones(2).long()}, r"^leftpad_k must be torch\.int32, got torch\.int64"),
    (
        ShapeError,
        {"qv": zeros(2, 5, 4, 9)},
        r"^qv must have q's shape and the values' head dim, \(2, 5, 4, 8\), got \(2, 5, 4, 9\)",
    ),
    (ValueError, {"q_descale": torch.ones(2, 2)}, r"^q_descale is for FP8 inputs"),
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
    numbers = torch.tensor([2, 1]).numpy()
    out = flash_attn_func(**good(), window_size=tuple(numbers), softmax_scale=numbers.astype("float32")[1])
    assert torch.equal(out, flash_attn_func(**good(), window_size=(2, 1), softmax_scale=1.0))


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
        with pytest.raises(
            errors.DtypeError, match=r"q must be one of float16, bfloat16, float8_e4m3fn on cuda, .*float32.*autocast"
        ):
            flash_attn_func(q, k, v)
        assert flash_attn_func(q.half(), k.half(), v.half()).device.type == "cuda"


def test_two_gpus_are_refused_by_name():
    with torch._subclasses.FakeTensorMode():
        q, k = (torch.zeros(1, 1, 1, 8, device=f"cuda:{i}", dtype=torch.float16) for i in (0, 1))
        with pytest.raises(errors.DeviceError, match="k must be on q's device: q is on cuda:0, k is on cuda:1"):
            flash_attn_func(q, k, k)


def varlen(**changes):
    arguments = {"q": zeros(5, 4, 8), "k": zeros(7, 2, 8), "v": zeros(7, 2, 8)}
    arguments.update(cu_seqlens_q=int32(0, 2, 5), cu_seqlens_k=int32(0, 3, 7), max_seqlen_q=3, max_seqlen_k=4)
    return {**arguments, **changes}


BAD_VARLEN = [
    (ShapeError, {"q": zeros(1, 5, 4, 8)}, r"^q must have 3 dimensions, \(T, H, D\), got 4"),
    (ShapeError, {"v": zeros(6, 2, 8)}, r"^v must have k's shape but for the head dim.*\(7, 2, 8\).*\(6, 2, 8\)"),
    (ArgumentError, {"cu_seqlens_q": None}, r"^cu_seqlens_q must be a torch\.Tensor, got NoneType"),
    (ArgumentError, {"cu_seqlens_k": [0, 7]}, r"^cu_seqlens_k must be a torch\.Tensor, got list"),
    (DtypeError, {"cu_seqlens_k": int32(0, 3, 7).long()}, r"^cu_seqlens_k must be torch\.int32, got torch\.int64"),
    (ShapeError, {"cu_seqlens_q": int32(0, 5)[None]}, r"^cu_seqlens_q must have shape \(B \+ 1,\), got \(1, 2\)"),
    (ShapeError, {"cu_seqlens_k": int32(0, 7)}, r"^cu_seqlens_k must have as many sequences as the queries: 2, got 1"),
    (DeviceError, {"cu_seqlens_k": int32(0, 3, 7).to("meta")}, r"^cu_seqlens_k must be on q's device"),
    (ArgumentError, {"max_seqlen_q": 2.5}, r"^max_seqlen_q must be an integer, got 2\.5"),
    (ArgumentError, {"max_seqlen_k": None}, r"^max_seqlen_k must be an integer, got None"),
    (ArgumentError, {"max_seqlen_k": -1}, r"^max_seqlen_k must not be negative, got -1"),
    (
        ArgumentError,
        {"max_seqlen_k": torch.ones(1, device="meta").int()},
        r"^max_seqlen_k must be an integer, got a tensor",
    ),
    (
        ShapeError,
        {"block_table": int32(0, 0)[:, None]},
        r"^k must have 4 dimensions, .*with a block_table, got \(7, 2, 8\)",
    ),
    # What a CPU tensor holds can be looked at.
    (
        ShapeError,
        {"cu_seqlens_q": int32(0, 2, 6)},
        r"^cu_seqlens_q must ascend from 0 to at most .* 5, got \[0, 2, 6\]",
    ),
    (ShapeError, {"cu_seqlens_k": int32(0, 4, 3)}, r"^cu_seqlens_k must ascend"),
]


@pytest.mark.parametrize(("error", "changes", "text"), BAD_VARLEN, ids=[case[2][:40] for case in BAD_VARLEN])
def test_packed_sequences(error, changes, text):
    flash_attn.flash_attn_varlen_func(**varlen())
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_varlen_func(**varlen(**changes))


PAGES = {"k": zeros(6, 2, 2, 8), "v": zeros(6, 2, 2, 8)}


def test_block_tables():
    flash_attn.flash_attn_varlen_func(**varlen(**PAGES, block_table=int32(0, 1, 2, 3).view(2, 2)))
    with pytest.raises(ShapeError, match=r"^block_table must have shape \(B, pages\), \(2, pages\) here, got \(1, 2\)"):
        flash_attn.flash_attn_varlen_func(**varlen(**PAGES, block_table=int32(0, 1)[None]))
    with pytest.raises(DtypeError, match=r"^block_table must be torch\.int32, got torch\.int64"):
        flash_attn.flash_attn_varlen_func(**varlen(**PAGES, block_table=int32(0, 1, 2, 3).view(2, 2).long()))
    fewer = {**PAGES, "v": zeros(5, 2, 2, 8), "dropout_p": 0.5}
    with pytest.raises(ShapeError, match=r"^v must have k's shape but for the head dim"):
        flash_attn.flash_attn_varlen_func(**varlen(**fewer, block_table=int32(0, 1, 2, 3).view(2, 2)))
    rowless = {n: zeros(6, 0, 2, 8) for n in "kv"}
    with pytest.raises(ShapeError, match=r"^k must have pages of at least one row, got \(6, 0, 2, 8\)"):
        flash_attn.flash_attn_varlen_func(**varlen(**rowless, block_table=int32(0, 1, 2, 3).view(2, 2)))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.5}, {"seqused_q": int32(1, 1)}])
def test_a_page_that_does_not_exist(options):
    """Whether the table is followed or the pages are gathered first."""
    with pytest.raises(ShapeError, match=r"^block_table must hold page numbers from 0 to 5, got 6 at \(1, 0\)"):
        flash_attn.flash_attn_varlen_func(**varlen(**PAGES, block_table=int32(0, 1, 6, 3).view(2, 2), **options))


BAD_PACKED = [
    (ShapeError, "flash_attn_qkvpacked_func", (zeros(2, 5, 2, 4, 8),), r"^qkv must have shape \(B, S, 3, H, D\), got"),
    (ShapeError, "flash_attn_qkvpacked_func", (zeros(5, 3, 4, 8),), r"^qkv must have shape \(B, S, 3, H, D\), got"),
    (ArgumentError, "flash_attn_qkvpacked_func", (None,), r"^qkv must be a torch\.Tensor, got NoneType"),
    (ShapeError, "flash_attn_kvpacked_func", (zeros(2, 5, 4, 8), zeros(2, 5, 3, 4, 8)), r"^kv must have shape"),
    (
        ArgumentError,
        "flash_attn_kvpacked_func",
        (None, zeros(2, 5, 2, 4, 8)),
        r"^q must be a torch\.Tensor, got NoneType",
    ),
    (
        DtypeError,
        "flash_attn_kvpacked_func",
        (zeros(2, 5, 4, 8), zeros(2, 5, 2, 4, 8).half()),
        r"^k must have q's dtype",
    ),
    (
        ShapeError,
        "flash_attn_varlen_qkvpacked_func",
        (zeros(5, 4, 8), int32(0, 5), 5),
        r"^qkv must have shape \(T, 3, H, D\)",
    ),
    (ArgumentError, "flash_attn_varlen_qkvpacked_func", (zeros(5, 3, 4, 8), None, 5), r"^cu_seqlens must be a torch"),
]


@pytest.mark.parametrize(
    ("error", "function", "arguments", "text"), BAD_PACKED, ids=[case[3][:40] for case in BAD_PACKED]
)
def test_packed_tensors(error, function, arguments, text):
    with pytest.raises(error, match=text):
        getattr(flash_attn, function)(*arguments)


def cached(**changes):
    arguments = {"q": zeros(2, 3, 4, 8), "k_cache": zeros(2, 20, 2, 8), "v_cache": zeros(2, 20, 2, 8)}
    arguments.update(k=zeros(2, 3, 2, 8), v=zeros(2, 3, 2, 8), cache_seqlens=int32(4, 9))
    arguments.update(rotary_cos=zeros(20, 4), rotary_sin=zeros(20, 4))
    return {**arguments, **changes}


NOTHING_NEW = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None}
PACKED_Q = {"q": zeros(6, 4, 8), "cu_seqlens_q": int32(0, 3, 6), "max_seqlen_q": 3}
PACKED_K = {"k": torch.ones(6, 2, 8), "v": torch.ones(6, 2, 8)}
BAD_CACHE = [
    (ArgumentError, {"k_cache": None}, r"^k_cache must be a torch\.Tensor, got NoneType"),
    (ShapeError, {"k_cache": zeros(20, 2, 8)}, r"^k_cache must have 4 dimensions, \(Bc, capacity, Hk, D\), got 3"),
    (ShapeError, {"v_cache": zeros(2, 19, 2, 8)}, r"^v_cache must have k_cache's shape but for the head dim"),
    (ShapeError, {"k_cache": zeros(2, 20, 2, 9)}, r"^k_cache must have q's head dim: q has 8, k_cache has 9"),
    (ShapeError, {n: zeros(2, 20, 3, 8) for n in ("k_cache", "v_cache")},
    r"^q's heads must be a multiple of k_cache's"), (ShapeError, {n: zeros(1, 20, 2, 8) for n in ("k_cache",
    "v_cache")}, r"^k_cache must have a slab for each .* 2, got 1"), (DtypeError, {"v_cache": zeros(2, 20, 2,
    8).half()}, r"^v_cache must have q's dtype: q is torch\.float32"), (DeviceError, {"v_cache": zeros(2, 20, 2, 8,
    device="meta")}, r"^v_cache must be on q's device"), (ShapeError, {"q": zeros(6, 4, 8)},
    r"^q must have 4 dimensions, \(B, Sq, H, D\), got 3"), (ShapeError, {"k": zeros(2, 3, 2, 9)},
    r"^k must have shape \(2, 3, 2, 8\) here, got \(2, 3, 2, 9\)"), (ShapeError, {"v": zeros(2, 2, 2, 8)},
    r"^v must have shape \(2, 3, 2, 8\) here, got \(2, 2, 2, 8\)"), (DtypeError, {"k": zeros(2, 3, 2, 8).half()},
    r"^k must have q's dtype"), (ArgumentError, {"v": None}, r"^v must be a torch\.Tensor, got NoneType"),
    (ArgumentError, {"k": None}, r"^k must be given together with v: k is None"),
    (ArgumentError, {"k": None, "v": None}, r"^k must be given together with rotary_cos: k is None"),
    (ArgumentError, {"cache_seqlens": None}, r"^cache_seqlens must say where k goes"),
    (ArgumentError, {"cache_seqlens": 18}, r"^cache_seqlens must leave room for k: 18 \+ 3 .* capacity, 20"),
    (ArgumentError, {"cache_seqlens": -1}, r"^cache_seqlens must not be negative, got -1"),
    (ArgumentError, {**NOTHING_NEW, "cache_seqlens": 21}, r"^cache_seqlens must be at most .*capacity, 20, got 21"),
    (DtypeError, {"cache_seqlens": int32(4, 9).long()}, r"^cache_seqlens must be torch\.int32, got torch\.int64"),
    (ShapeError, {"cache_seqlens": int32(4)}, r"^cache_seqlens must have shape \(B,\), \(2,\) here, got \(1,\)"),
    (ShapeError, {"cache_batch_idx": int32(4)}, r"^cache_batch_idx must have shape \(B,\), \(2,\) here, got \(1,\)"),
    (DtypeError, {"cache_leftpad": torch.zeros(2)}, r"^cache_leftpad must be torch\.int32, got torch\.float32"),
    (ShapeError, {"block_table": int32(0, 1)},
    r"^block_table must have shape \(B, pages\), \(2, pages\) here, got \(2,\)"), (ArgumentError, {"block_table":
    int32(0, 1)[:, None], "cache_batch_idx": int32(0, 1)}, r"^cache_batch_idx must be None"), (ShapeError,
    {"rotary_cos": zeros(20, 5), "rotary_sin": zeros(20, 5)}, r"^rotary_cos must have shape .* got \(20, 5\)"),
    (ShapeError, {"rotary_sin": zeros(20, 3)}, r"^rotary_sin must be like rotary_cos"), (ShapeError, {"rotary_cos":
    zeros(19, 4), "rotary_sin": zeros(19, 4)}, r"^rotary_cos must have a position .* 20, got 19"), (ShapeError,
     {"rotary_cos": zeros(9, 4), "rotary_sin": zeros(9, 4), "cache_seqlens": 8, "causal": True},
     r"^rotary_cos must have a position for each new row: 8 \+ 3 are needed, got 9"),
    (DtypeError, {"rotary_cos": zeros(20, 4).half()}, r"^rotary_cos must have q's dtype or be torch\.float32"),
    (ArgumentError, {"rotary_sin": None}, r"^rotary_sin must be a torch\.Tensor, got NoneType"),
    (ArgumentError, {"num_splits": -1}, r"^num_splits must not be negative, got -1"),
    (ArgumentError, {"softcap": -1.0}, r"^softcap must be .* got -1\.0"),
    (ArgumentError, {"window_size": 3}, r"^window_size must be two integers"),
    (ShapeError, {"alibi_slopes": torch.ones(3)}, r"^alibi_slopes must have shape"),
    (ValueError, {"v_descale": torch.ones(2, 2)}, r"^v_descale is for FP8"),
    (ArgumentError, {"sm_margin": -1}, r"^sm_margin must be a number of multiprocessors .* got -1"),
    (ArgumentError, {"softmax_scale": "1"}, r"^softmax_scale must be a number or None, got '1'"),
    (ShapeError, {"v_cache": zeros(1, 20, 2, 8).expand(2, -1, -1, -1)}, r"^v_cache must not be expanded .*\(0, 16"),
    (ShapeError, {"k": zeros(3, 2, 8)}, r"^k must have 4 dimensions, \(B, Sn, Hk, D\), got 3"),
    # What turns up late on the way: the cache must be as it was all the same.
    (ShapeError, {"qv": zeros(2, 3, 4, 9)}, r"^qv must have q's shape and the values' head dim"),
    (ArgumentError, {"qv": zeros(2, 3, 4, 8), "cache_seqlens": 18}, r"^cache_seqlens must leave room for k: 18 \+ 3"),
    (ArgumentError, {"rotary_seqlens": int32(0, 0), "cache_seqlens": 18}, r"^cache_seqlens must leave room for k"),
    (ShapeError, {"cu_seqlens_q": int32(0, 3, 6)}, r"^q must have 3 dimensions, \(T, H, D\), got 4"),
    (ArgumentError, {**PACKED_Q, "max_seqlen_q": None}, r"^max_seqlen_q must be an integer, got None"),
    (ArgumentError, {**PACKED_Q, "max_seqlen_q": -1}, r"^max_seqlen_q must not be negative, got -1"),
    (ShapeError, {**PACKED_K, "cu_seqlens_k_new": int32(0, 6)}, r"^cu_seqlens_k_new must have shape \(B \+ 1,\)"),
    (ArgumentError, {**NOTHING_NEW, "cu_seqlens_k_new": int32(0, 3, 6)}, r"^k must be given together with cu_seq"),
]  # fmt: skip
# Wrong values of index tensors: where those are on a GPU, nothing waits for them to be looked at.
BAD_CACHE_INDICES = [
    (ShapeError, {"cache_batch_idx": int32(0, 2)}, r"^cache_batch_idx must hold .* from 0 to 1, got 2 at \(1,\)"),
    (ShapeError, {**PACKED_Q, "cu_seqlens_q": int32(0, 7, 6)}, r"^cu_seqlens_q must ascend .* 6, got \[0, 7, 6\]"),
    (ShapeError, {**PACKED_K, "cu_seqlens_k_new": int32(0, 7, 6)}, r"^cu_seqlens_k_new must ascend from 0"),
]
CACHE_CASES = [*BAD_CACHE, *BAD_CACHE_INDICES]


@pytest.mark.parametrize(("error", "changes", "text"), CACHE_CASES, ids=[case[2][:40] for case in CACHE_CASES])
def test_caches(error, changes, text):
    arguments = cached(**changes)
    before = {
        name: x.clone() for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type == "cpu"
    }
    flash_attn.flash_attn_with_kvcache(**cached())
    with pytest.raises(error, match=text):
        flash_attn.flash_attn_with_kvcache(**arguments)
    assert all(torch.equal(x, arguments[name]) for name, x in before.items())


def test_pages_that_do_not_exist():
    """On the CPU a table can be looked at; on a GPU nothing is read or written through it."""
    pages = {"k_cache": zeros(3, 16, 2, 8), "v_cache": zeros(3, 16, 2, 8), "block_table": int32(0, 1, 2, 3).view(2, 2)}
    table = {"rotary_cos": zeros(32, 4), "rotary_sin": zeros(32, 4)}
    flash_attn.flash_attn_with_kvcache(**cached(**pages, **table))  # the last page is not reached
    before = {name: pages[name].clone() for name in ("k_cache", "v_cache")}
    new = {"k": torch.ones(2, 3, 2, 8), "v": torch.ones(2, 3, 2, 8)}
    with pytest.raises(ShapeError, match=r"^block_table must hold page numbers from 0 to 2, got 3 at \(1, 1\)"):
        flash_attn.flash_attn_with_kvcache(**cached(**pages, **table, **new, cache_seqlens=int32(4, 14)))
    assert all(torch.equal(x, pages[name]) for name, x in before.items())


def test_packed_rows_of_no_sequences():
    """A batch without sequences: rows of none of them are not written."""
    cache = {"k_cache": zeros(2, 20, 2, 8), "v_cache": zeros(2, 20, 2, 8), "q": zeros(0, 1, 4, 8)}
    packed = {"k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 8), "cu_seqlens_k_new": int32(0)}
    out = flash_attn.flash_attn_with_kvcache(**cache, **packed, cache_seqlens=int32())
    assert out.shape == (0, 1, 4, 8)
    assert not cache["k_cache"].any()


def test_metadata_is_on_the_device_of_the_lengths():
    assert get_scheduler_metadata(2, 1, 20, 4, 2, 8, int32(3, 4)).shape == (0,)
    with pytest.raises(ArgumentError, match=r"^cache_seqlens must be a torch\.Tensor, got list"):
        get_scheduler_metadata(2, 1, 20, 4, 2, 8, [3, 4])
