"""The host library without torch: the Hopper family, whose kernels take tensor maps; against a fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_support import Machine, every_kernel, fast_kernels, kernel

from buildtools import archive

FWD = "fwd-sm80-bf16-d128-causal"
BWD = "bwd-sm80-bf16-d128-causal"
TMA = "fwd-sm90-bf16-d128-causal"
TMA_BWD = "bwd-sm90-bf16-d128-causal"
# device dtype mask head_dim batch seqlen_q seqlen_k heads heads_kv
CALL = "0 bf16 causal 128 2 300 200 8 2"


@pytest.fixture
def hopper(tmp_path: Path) -> Machine:
    """One H200 with a complete kernel set."""
    made = Machine(tmp_path)
    made.write_kernels(every_kernel())
    return made


def test_fastest_family_of_the_gpu(hopper: Machine) -> None:
    assert hopper.run(f"fwd {CALL}") == ["ok"]
    assert [load["key"] for load in hopper.log("load")] == [TMA]
    hopper.devices = "10.0:232448:NVIDIA B200"
    assert hopper.run(f"fwd {CALL}") == ["ok"]
    assert [load["key"] for load in hopper.log("load")] == [FWD]


@pytest.mark.parametrize(
    ("head_dim", "key"),
    [(64, "sm80-bf16-d64"), (72, "sm90-bf16-d128"), (96, "sm90-bf16-d128"), (104, "sm90-bf16-d128"),
     (136, "sm90-bf16-d256"), (192, "sm90-bf16-d256"), (200, "sm90-bf16-d256")],
)  # fmt: skip
def test_a_faster_family_pads_by_a_third(hopper: Machine, head_dim: int, key: str) -> None:
    slow = [kernel(f"bwd-sm80-bf16-d{built}-causal", "90") for built in (64, 96, 128, 192, 256)]
    fast = [kernel(f"bwd-sm90-bf16-d{built}-causal", "90a") for built in (128, 256)]
    hopper.write_kernels(archive.pack("x", slow + fast))
    assert hopper.run(f"bwd 0 bf16 causal {head_dim} 1 64 64 1 1")[0].startswith("ok")
    assert [load["key"] for load in hopper.log("load")] == [f"bwd-{key}-causal"]


def test_forced_family(hopper: Machine) -> None:
    """What the forced family lacks is served by the one that has everything."""
    general = "bwd-sm80-bf16-d128-general"
    for family, keys in (("sm80", [FWD, BWD, general]), ("sm90", [TMA, TMA_BWD, general])):
        hopper.environ = {"FLASH_ATTN_FAMILY": family}
        answers = hopper.run(f"fwd {CALL}", f"bwd {CALL}", f"bwd {CALL.replace('causal', 'general')}")
        assert all(answer.startswith("ok") for answer in answers)
        assert [load["key"] for load in hopper.log("load")] == keys


@pytest.mark.parametrize(("batch", "grid", "heads_per_group"), [(2, 48, 16), (20, 132, 88)])
def test_one_block_a_multiprocessor(hopper: Machine, batch: int, grid: int, heads_per_group: int) -> None:
    assert hopper.run(f"fwd 0 bf16 causal 128 {batch} 300 200 8 2") == ["ok"]
    [launch] = hopper.log("launch")
    assert (launch["key"], launch["grid"], launch["block"], launch["blocks_m"]) == (TMA, str(grid), "384", "3")
    assert launch["heads_per_group"] == str(heads_per_group)
    q, k, v = hopper.log("map")
    assert (q["sizes"], q["strides"], q["box"]) == (f"128,300,8,{batch}", "2048,256,614400", "64,64,1,1")
    assert (k["sizes"], k["strides"], k["box"]) == (f"128,200,2,{batch}", "512,256,102400", "64,32,1,1")
    assert (k, q["type"], q["rank"], q["swizzle"]) == (v, "9", "4", "3")


def test_backward_with_maps(hopper: Machine) -> None:
    """A block for each tile of keys, none of them split; maps of q, dout, k and v for it."""
    rows, tiles = 2 * 8 * 384, 2 * 8 * 3
    assert hopper.run(f"bwd {CALL}") == [f"ok workspace={rows * 128 + 2 * rows + tiles + 2 * 2 + 1}"]
    launches = hopper.log("launch")
    assert [launch["entry"] for launch in launches] == ["flash_bwd_preprocess", "flash_bwd", "flash_bwd_postprocess"]
    assert [launch["grid"] for launch in launches] == [str(tiles), str(2 * 7 * 2), str(tiles)]
    assert [launch["early"] for launch in launches] == ["0", "1", "1"]
    assert {(launch["key"], launch["block"], launch["blocks_n"]) for launch in launches} == {(TMA_BWD, "384", "7")}
    q, dout, k, v = hopper.log("map")
    assert (q["sizes"], q["strides"], q["box"]) == ("128,300,8,2", "2048,256,614400", "64,128,1,1")
    assert (k["sizes"], k["strides"], k["box"]) == ("128,200,2,2", "512,256,102400", "64,32,1,1")
    assert (q, k, q["type"]) == (dout, v, "9")


@pytest.mark.parametrize(
    ("call", "grid"),
    [
        ("128 20 300 200 8 2 any_order", 132),
        ("128 20 300 200 8 2", 20 * 7 * 2),  # deterministic: a block waits for those before it, and begins after them
        ("128 2 300 200 8 2 any_order", 2 * 7 * 2),
        ("256 20 300 200 8 2 any_order", 20 * 7 * 2),  # not persistent
    ],
)
def test_backward_with_a_block_a_multiprocessor(hopper: Machine, call: str, grid: int) -> None:
    hopper.write_kernels(archive.pack("x", [kernel(f"bwd-sm90-bf16-d{d}-causal", "90a") for d in (128, 256)]))
    assert hopper.run(f"bwd 0 bf16 causal {call}")[0].startswith("ok")
    assert [launch["grid"] for launch in hopper.log("launch")][1] == str(grid)


@pytest.mark.parametrize(
    ("call", "counter", "heads_per_group"),
    [
        ("causal 128 2 1920 200 8 2", 0, 16),  # short ones of one length are shared out, here all at once
        ("causal 128 20 1024 1024 8 2", 0, 33),  # two rounds of 132 tiles
        ("causal 128 20 1024 16384 8 1", 0, 33),
        ("causal 128 20 1024 16384 8 2", 0, 1),  # more K and V than stay in L2
        ("causal 128 2 1921 200 8 2", 1, 32),  # long tiles and short ones: as they come, 32 heads together
        ("general 128 2 1921 200 8 2", 1, 32),
        ("full 128 2 1920 200 8 2", 0, 1),
        ("full 128 2 1921 200 8 2", 1, 32),  # a short tile in each head
        ("full 128 2 1985 200 8 2", 0, 1),  # of two warpgroups, which both have rows
        ("causal 128 1 2048 200 8 2", 0, 8),  # a tile for each block
        ("causal 128 20 300 200 8 2 packed 6000", 1, 32),  # lengths that vary
        ("full 128 20 300 200 8 2 packed 6000", 1, 1),
        ("full 128 1 300 200 8 2 packed 300", 0, 1),
    ],
)
def test_tiles_as_they_come(hopper: Machine, call: str, counter: int, heads_per_group: int) -> None:
    assert hopper.run(f"fwd 0 bf16 {call}") == ["ok"]
    [launch] = hopper.log("launch")
    assert (launch["counter"], launch["heads_per_group"]) == (str(counter), str(heads_per_group))
    # The counter is cleared on the launch's stream, before it.
    assert [(memset["value"], memset["count"]) for memset in hopper.log("memset")] == [("00000000", "1")] * counter
    assert [memset["stream"] for memset in hopper.log("memset")] == [launch["stream"]] * counter


@pytest.mark.parametrize(("margin", "grid"), [(0, 132), (8, 124), (131, 1), (132, 1), (1 << 29, 1)])
def test_margin(hopper: Machine, margin: int, grid: int) -> None:
    """Multiprocessors are left free, down to one that works; the other family takes no notice."""
    call = f"fwd 0 bf16 causal 128 20 300 200 8 2 margin {margin}"
    assert hopper.run(call) == ["ok"]
    assert [launch["grid"] for launch in hopper.log("launch")] == [str(grid)]
    hopper.environ = {"FLASH_ATTN_FAMILY": "sm80"}
    assert hopper.run(call) == ["ok"]
    assert [launch["grid"] for launch in hopper.log("launch")] == [str(20 * 8 * 5)]


def test_margin_with_few_tiles(hopper: Machine) -> None:
    assert hopper.run("fwd 0 bf16 causal 128 2 300 200 8 2 margin 100") == ["ok"]
    assert [launch["grid"] for launch in hopper.log("launch")] == ["32"]


def test_least_latency(hopper: Machine) -> None:
    """A preference: where only the other family is built, or asked for, that one serves."""
    call = f"fwd {CALL} latency"
    assert hopper.run(call) == ["ok"]
    assert [load["key"] for load in hopper.log("load")] == [FWD]
    hopper.environ = {"FLASH_ATTN_FAMILY": "sm90"}
    assert hopper.run(call) == ["ok"]
    assert [load["key"] for load in hopper.log("load")] == [TMA]
    hopper.environ = {}
    hopper.write_kernels(archive.pack("x", fast_kernels()))
    assert hopper.run(call) == ["ok"]
    assert [load["key"] for load in hopper.log("load")] == [TMA]


@pytest.mark.parametrize("call", ["0 bf16 causal 128 2 300 0 8 2", "0 bf16 causal 128 2 0 200 8 2"])
def test_no_map_of_an_empty_tensor(hopper: Machine, call: str) -> None:
    forward, backward = hopper.run(f"fwd {call}", f"bwd {call}")
    assert forward.startswith("ok")
    assert backward.endswith("without a map")
    assert hopper.log("launch") == []


def test_strides_that_have_no_map(hopper: Machine) -> None:
    hopper.environ = {"FAKE_CUDA_FAIL": "cuTensorMapEncodeTiled=1"}
    forward, backward = hopper.run(f"fwd {CALL}", f"bwd {CALL}")
    assert forward == "ok without a map"
    assert backward.endswith("without a map")
    assert hopper.log("launch") == []
