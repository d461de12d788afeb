"""The FP8 forward in the host library without torch: its kernels, its workspace, its tensor maps; a fake driver."""

from __future__ import annotations

from pathlib import Path

import pytest
from host_support import H200, Machine, every_kernel, kernel

from buildtools import archive

KEY = "fwd-sm90-e4m3-d128-causal"
# device dtype mask head_dim batch seqlen_q seqlen_k heads heads_kv
CALL = "0 e4m3 causal 128 2 300 200 8 2"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One H200 with every kernel; blocks of FP8 kernels are of 128 queries and 32 keys."""
    made = Machine(tmp_path)
    made.write_kernels(every_kernel())
    return made


def test_launches(machine: Machine) -> None:
    """V is put into tiles, 7 for each of 2 sequences and 2 heads; then the forward."""
    tiles = 2 * 2 * 7
    assert machine.run(f"fwd {CALL}") == [f"ok workspace={tiles * 32 * 128} tiles=14"]
    assert [load["key"] for load in machine.log("load")] == [KEY]
    values, forward = machine.log("launch")
    assert (values["entry"], values["grid"], values["smem"]) == ("flash_transpose_v", f"{tiles},1", "0")
    assert (forward["entry"], forward["grid"], forward["smem"]) == ("flash_fwd", str(2 * 8 * 3), "65536")
    # A thread that transposes has 4 keys and 16 columns.
    assert (values["block"], forward["block"], forward["heads_per_group"]) == (str(32 // 4 * 128 // 16), "384", "1")
    assert (values["early"], forward["early"]) == ("0", "1")


@pytest.mark.parametrize(("head_dim", "columns", "swizzle"), [(64, 64, 2), (48, 64, 2), (128, 128, 3), (80, 128, 3)])
def test_maps(machine: Machine, head_dim: int, columns: int, swizzle: int) -> None:
    assert machine.run(f"fwd 0 e4m3 full {head_dim} 2 300 200 8 2")[0].startswith("ok")
    q, k = machine.log("map")
    row = 8 * head_dim
    assert (q["sizes"], q["strides"]) == (f"{head_dim},300,8,2", f"{row},{head_dim},{300 * row}")
    assert (k["sizes"], k["strides"]) == (f"{head_dim},200,2,2", f"{row // 4},{head_dim},{200 * row // 4}")
    assert (q["box"], k["box"]) == (f"{columns},128,1,1", f"{columns},32,1,1")
    assert {q["type"], k["type"]} == {"0"}
    assert {q["swizzle"], k["swizzle"]} == {str(swizzle)}


def test_packed_sequences_begin_tiles_of_their_own(machine: Machine) -> None:
    """1,000 packed keys: at most 1,000 / 32 tiles, and one more for each of the 5 sequences."""
    [answer] = machine.run("fwd 0 e4m3 causal 128 5 300 300 8 2 packed 1000")
    assert answer == f"ok workspace={2 * 36 * 32 * 128} tiles=36"
    values, _ = machine.log("launch")
    assert values["grid"] == f"{5 * 2 * 10},1"


def test_no_keys(machine: Machine) -> None:
    """Rows that see nothing are the forward's to write; there is nothing to put into tiles or to overlap."""
    assert machine.run("fwd 0 e4m3 causal 128 2 300 0 8 2") == ["ok workspace=0 tiles=0"]
    assert [(launch["entry"], launch["early"]) for launch in machine.log("launch")] == [("flash_fwd", "0")]
    assert len(machine.log("map")) == 1


def test_strides_that_have_no_map(machine: Machine) -> None:
    machine.environ = {"FAKE_CUDA_FAIL": "cuTensorMapEncodeTiled=1"}
    assert machine.run(f"fwd {CALL}")[0].startswith("ok without a map")
    assert machine.log("launch") == []


@pytest.mark.parametrize("capability", ["8.9", "10.0", "12.0"])
def test_other_gpus(machine: Machine, capability: str) -> None:
    machine.devices = f"{capability}:232448:NVIDIA Other"
    [answer] = machine.run(f"fwd {CALL}")
    for part in ("FP8 attention needs a GPU of compute capability 9.0", "NVIDIA Other", capability):
        assert part in answer
    assert machine.log("load") == []


@pytest.mark.parametrize("family", ["sm80", "sm90"])
def test_forced_family(machine: Machine, family: str) -> None:
    """There is one family with FP8, whatever is forced."""
    machine.environ = {"FLASH_ATTN_FAMILY": family}
    assert machine.run(f"fwd {CALL}")[0].startswith("ok")
    assert [load["key"] for load in machine.log("load")] == [KEY]


def test_head_dim_not_built(machine: Machine) -> None:
    [answer] = machine.run("fwd 0 e4m3 full 200 1 30 30 2 2")
    assert "kernel fwd-sm90-e4m3-d256-full is not built" in answer


def test_rounding(machine: Machine) -> None:
    """A kernel of its own, whatever the mask: of 12 warps and 128 columns, with 192 rows at once and 1,536 a block."""
    assert machine.run(f"round {CALL}") == [f"ok floats={2 * 2 * 2 * 2 * 128 + 3 * 2 * 2} parts=2"]
    launches = machine.log("launch")
    assert {launch["key"] for launch in launches} == {"round-sm90-e4m3-d128-general"}
    blocks = 2 * (8 + 2 + 2)  # 300 and 200 rows are a tile a head
    assert [(launch["entry"], launch["grid"]) for launch in launches] == [
        ("flash_round_sums", "16,1"),
        ("flash_round_largest", f"{blocks},1"),
        ("flash_round", f"{blocks},1"),
    ]
    assert {(launch["block"], launch["smem"], launch["early"]) for launch in launches} == {("384", "0", "1")}


def test_rounding_not_built(tmp_path: Path) -> None:
    """As any other kernel: named, with what to do."""
    machine = Machine(tmp_path)
    machine.write_kernels(archive.pack("nvrtc 12.9.86", [kernel("fwd-sm90-e4m3-d128-causal", "90a")]))
    for head_dim, missing in ((48, 64), (128, 128)):
        [answer] = machine.run(f"round 0 e4m3 causal {head_dim} 2 300 200 8 2")
        for part in (f"kernel round-sm90-e4m3-d{missing}-general is not built", f"{missing} in FLASH_ATTN_HEAD_DIMS"):
            assert part in answer
    assert machine.log("load") == []


def test_both_devices(machine: Machine) -> None:
    """FP8 and others of the same head dim do not take each other's kernels."""
    machine.devices = f"{H200};{H200}"
    calls = [f"{device} {dtype} causal 128 2 300 200 8 2" for device in (0, 1) for dtype in ("bf16", "e4m3", "fp16")]
    assert all(answer.startswith("ok") for answer in machine.run(*(f"fwd {call}" for call in calls * 2)))
    keys = [f"fwd-sm90-{dtype}-d128-causal" for dtype in ("bf16", "e4m3", "fp16")]
    assert [load["key"] for load in machine.log("load")] == keys * 2
