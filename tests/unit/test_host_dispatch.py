"""The host library without torch: archive, choice of a kernel, launches, errors; against a fake driver."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from host_support import ALL_ARCHS, ALL_KEYS, H200, RTX4090, VERSION, Machine, every_kernel, fast_kernels, kernel, pack

from buildtools import archive

FWD = "fwd-sm80-bf16-d128-causal"
BWD = "bwd-sm80-bf16-d128-causal"
# device dtype mask head_dim batch seqlen_q seqlen_k heads heads_kv
CALL = "0 bf16 causal 128 2 300 200 8 2"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One H200 with a complete kernel set."""
    made = Machine(tmp_path)
    made.write_kernels(pack())
    return made


# ---- Which kernel ----


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ("8.0", "80"),
        ("8.6", "86"),
        ("8.7", "86"),
        ("8.9", "86"),
        ("9.0", "90"),
        ("10.0", "100"),
        ("10.3", "100"),
        ("11.0", "ptx80"),
        ("12.0", "120"),
        ("12.1", "120"),
        ("13.0", "ptx80"),
    ],
)
def test_arch(machine: Machine, capability: str, arch: str) -> None:
    machine.devices = f"{capability}:232448:GPU"
    assert machine.run(f"fwd {CALL}") == ["ok"]
    assert [load["arch"] for load in machine.log("load")] == [arch]


@pytest.mark.parametrize(
    ("archs", "capability", "arch"),
    [
        (("90", "90a"), "9.0", "90a"),  # made for exactly this GPU
        (("90a", "ptx80"), "9.1", "ptx80"),  # an "a" arch runs nowhere else
        (("80", "86", "89"), "8.8", "86"),  # the highest minor that is not above
        (("86", "ptx80", "ptx90", "ptx100"), "9.0", "ptx90"),  # PTX of a newer GPU is of no use
        (("ptx90", "90"), "9.0", "90"),  # machine code before PTX
    ],
)
def test_arch_preference(machine: Machine, archs: tuple[str, ...], capability: str, arch: str) -> None:
    machine.devices = f"{capability}:232448:GPU"
    machine.write_kernels(pack(archs=archs))
    assert machine.run(f"fwd {CALL}") == ["ok"]
    assert [load["arch"] for load in machine.log("load")] == [arch]


def test_integrated_gpu_falls_back_to_ptx(machine: Machine) -> None:
    """Where the driver refuses machine code of an older minor, PTX serves."""
    machine.devices = "8.7:166912:Orin"
    machine.environ = {"FAKE_CUDA_REFUSE": "86,80"}
    assert machine.run(f"fwd {CALL}") == ["ok"]
    assert [load["arch"] for load in machine.log("load")] == ["86", "80", "ptx80"]
    machine.environ = {"FAKE_CUDA_REFUSE": "86,80,ptx80"}
    [error] = machine.run(f"fwd {CALL}")
    for part in (FWD, "Orin", "8.7", "FLASH_ATTN_CUDA_ARCHS=8.7"):
        assert part in error


def test_old_gpu(machine: Machine) -> None:
    machine.devices = "7.5:65536:NVIDIA GeForce RTX 2080"
    [error] = machine.run(f"fwd {CALL}")
    for part in ("RTX 2080", "compute capability 7.5", "8.0 or newer", FWD, "100, 120, 80, 86, 90, ptx80"):
        assert part in error
    assert machine.log("load") == []


def test_arch_not_built(machine: Machine) -> None:
    machine.write_kernels(pack(archs=("80", "120")))
    [error] = machine.run(f"fwd {CALL}")
    for part in (FWD, "NVIDIA H200", "9.0", "built for: 120, 80", "FLASH_ATTN_CUDA_ARCHS=9.0"):
        assert part in error


@pytest.mark.parametrize(("head_dim", "built"), [(8, 64), (64, 64), (72, 128), (128, 128)])
def test_smallest_head_dim_that_holds_it(machine: Machine, head_dim: int, built: int) -> None:
    answers = machine.run(f"fwd 0 fp16 full {head_dim} 1 64 64 1 1", f"bwd 0 fp16 full {head_dim} 1 64 64 1 1")
    assert answers == ["ok", f"ok workspace={64 * built + 2 * 64 + 1 + 1 + 1}"]
    assert {launch["key"] for launch in machine.log("launch")} == {
        f"fwd-sm80-fp16-d{built}-full",
        f"bwd-sm80-fp16-d{built}-full",
    }
    assert {launch["head_dim"] for launch in machine.log("launch")} == {str(head_dim)}


def test_each_key(machine: Machine) -> None:
    """Every row of the table is reached by the call that it is for, and by no other."""
    for key in ALL_KEYS:
        op, _, dtype, head_dim, mask = key.split("-")
        answers = machine.run(f"{op} 0 {dtype} {mask} {head_dim[1:]} 1 64 64 1 1")
        assert answers[0].startswith("ok")
        assert [load["key"] for load in machine.log("load")] == [key]


def test_head_dim_not_built(machine: Machine) -> None:
    """Field case 23: built for head dim 64 alone."""
    machine.write_kernels(pack(keys=[key for key in ALL_KEYS if "-d64-" in key]))
    ok, error = machine.run("fwd 0 bf16 causal 64 1 64 64 1 1", "fwd 0 bf16 causal 96 1 64 64 1 1")
    assert ok == "ok"
    for part in (f"{FWD} is not built", "head_dim 96", "FLASH_ATTN_HEAD_DIMS", "FORCE_BUILD=1", *ALL_KEYS[:2]):
        assert part in error
    assert "d128-full" not in error


def test_one_part_of_the_key_missing(machine: Machine) -> None:
    """A subset without bf16 does not answer a bf16 call with fp16."""
    machine.write_kernels(pack(keys=[key for key in ALL_KEYS if "fp16" in key]))
    [error] = machine.run(f"fwd {CALL}")
    assert f"{FWD} is not built" in error
    assert machine.log("load") == []


def test_long_list_of_built_kernels_is_cut(machine: Machine) -> None:
    keys = [f"fwd-sm80-fp16-d{head_dim}-full" for head_dim in range(8, 256, 8)]
    machine.write_kernels(pack(keys=keys, archs=["90"]))
    [error] = machine.run(f"fwd {CALL}")
    assert f"and {len(keys) - 24} more" in error


def test_unknown_kernels_are_left_alone(machine: Machine) -> None:
    """A newer table may have ops and families that this library does not know."""
    extra = [kernel("combine-sm80-bf16-d128-full", "90"), kernel("fwd-sm999-bf16-d128-causal", "90")]
    rest = [kernel(key, arch) for key in ALL_KEYS for arch in ALL_ARCHS]
    machine.write_kernels(archive.pack("x", extra + rest))
    assert machine.run(f"fwd {CALL}") == ["ok"]
    assert [load["key"] for load in machine.log("load")] == [FWD]


def test_family(machine: Machine) -> None:
    machine.environ = {"FLASH_ATTN_FAMILY": "sm80"}
    assert machine.run(f"fwd {CALL}") == ["ok"]
    machine.environ = {"FLASH_ATTN_FAMILY": "sm70"}
    [error] = machine.run(f"fwd {CALL}")
    assert "FLASH_ATTN_FAMILY=sm70" in error
    assert "sm80" in error.replace("sm70", "")


@pytest.mark.parametrize("call", ["0 bf16 full 0 1 1 1 1 1", "0 bf16 full 12 1 1 1 1 1", "0 bf16 full 264 1 1 1 1 1"])
def test_head_dim_out_of_range(machine: Machine, call: str) -> None:
    [error] = machine.run(f"fwd {call}")
    assert "head_dim" in error


@pytest.mark.parametrize("device", [-1, 1, 127, 128, 100000])
def test_no_such_device(machine: Machine, device: int) -> None:
    [error] = machine.run(f"fwd {device} bf16 causal 128 1 1 1 1 1")
    assert f"device {device}" in error


# ---- Shared memory ----


def test_shared_memory_precheck(machine: Machine) -> None:
    """Field case 39: the bytes needed and available, before anything is loaded."""
    machine.devices = RTX4090
    machine.write_kernels(pack(smem_bytes=163840))
    [error] = machine.run(f"fwd {CALL}")
    for part in (FWD, "163840 bytes", "101376 available", "RTX 4090", "8.9"):
        assert part in error
    assert machine.log("load") == []


def test_image_that_fits_is_taken(machine: Machine) -> None:
    machine.devices = RTX4090
    large, small = kernel(FWD, "86", smem_bytes=163840), kernel(FWD, "ptx80", smem_bytes=65536)
    machine.write_kernels(archive.pack("x", [large, small]))
    assert machine.run(f"fwd {CALL}") == ["ok"]
    assert [load["arch"] for load in machine.log("load")] == ["ptx80"]


def test_static_shared_memory_counts(machine: Machine) -> None:
    machine.environ = {"FAKE_CUDA_STATIC_SMEM": "200000"}
    [error] = machine.run(f"fwd {CALL}")
    assert f"{200000 + 65536} bytes" in error
    assert len(machine.log("unload")) == 1


# ---- Loading ----


def test_loaded_once_per_key_and_device(machine: Machine) -> None:
    machine.devices = f"{H200};{RTX4090}"
    other = CALL.replace("128", "104", 1)  # another head dim, the same kernel
    answers = machine.run(f"fwd {CALL}", f"fwd {CALL}", f"fwd {other}", f"fwd 1{CALL[1:]}", f"fwd 1{CALL[1:]}")
    assert answers == ["ok"] * 5
    assert [(load["key"], load["device"], load["arch"]) for load in machine.log("load")] == [
        (FWD, "0", "90"),
        (FWD, "1", "86"),
    ]
    assert [launch["device"] for launch in machine.log("launch")] == ["0", "0", "0", "1", "1"]
    assert [retain["device"] for retain in machine.log("retain")] == ["0", "1"]


def test_threads_load_once(machine: Machine) -> None:
    assert machine.run(f"threads {CALL}") == ["ok"]
    assert len(machine.log("load")) == 1
    assert len(machine.log("launch")) == 8


def test_load_during_capture(machine: Machine) -> None:
    """While a stream is being captured, the driver lets a thread load modules in the relaxed mode only."""
    machine.environ = {"FAKE_CUDA_CAPTURE": "1"}
    answers = machine.run(f"fwd {CALL}", f"bwd {CALL}")
    assert answers[0] == "ok"
    assert answers[1].startswith("ok")
    assert {load["mode"] for load in machine.log("load")} == {"2"}


def test_capture_mode_is_restored(machine: Machine) -> None:
    """Also after a failure: the second load finds the thread in its own mode again, not in the relaxed one."""
    assert machine.run("mode", f"fwd {CALL}", "mode") == ["ok 0", "ok", "ok 0"]
    machine.environ = {"FAKE_CUDA_FAIL": "cuModuleLoadDataEx=200"}
    _, error, mode = machine.run("mode", f"fwd {CALL}", "mode")
    assert error.startswith("error")
    assert mode == "ok 0"


def test_context_of_the_device_is_made_current_and_given_back(machine: Machine) -> None:
    """Field case 34: work on cuda:1 while cuda:0 is current."""
    machine.devices = f"{H200};{H200}"
    answers = machine.run("push 0", f"fwd 1{CALL[1:]}", "current", f"fwd {CALL}", "current")
    assert answers == ["ok", "ok", "ok 0", "ok", "ok 0"]
    assert [launch["device"] for launch in machine.log("launch")] == ["1", "0"]
    # By the test; to load; to launch. None for the device that is current.
    assert [push["device"] for push in machine.log("push")] == ["0", "1", "1"]
    assert [pop["device"] for pop in machine.log("pop")] == ["1", "1"]


def test_no_context_is_left_behind(machine: Machine) -> None:
    """A thread that has no context yet has none afterwards, whether the call worked or not."""
    assert machine.run(f"fwd {CALL}", "current") == ["ok", "ok -1"]
    machine.environ = {"FAKE_CUDA_FAIL": "cuLaunchKernel=700"}
    assert machine.run(f"fwd {CALL}", "current")[1] == "ok -1"


# ---- Launches ----


def test_forward_launch(machine: Machine) -> None:
    assert machine.run(f"fwd {CALL}") == ["ok"]
    [launch] = machine.log("launch")
    assert launch == {
        "key": FWD, "arch": "90", "entry": "flash_fwd", "grid": str(5 * 8 * 2), "block": "128", "smem": "65536",
        "stream": "0x77", "device": "0", "batch": "2", "heads": "8", "heads_kv": "2", "group": "4",
        "seqlen_q": "300", "seqlen_k": "200", "head_dim": "128", "head_dim_v": "128", "blocks_m": "5",
        "scale": "0.125000", "scale_log2": "0.180337", "heads_per_group": "0", "counter": "0", "early": "0",
    }  # fmt: skip


def test_backward_launches(machine: Machine) -> None:
    rows, tiles = 2 * 8 * 320, 2 * 8 * 5
    total = rows * 128 + 2 * rows + tiles + 2 * 2 + 1
    assert machine.run(f"bwd {CALL}") == [f"ok workspace={total}"]
    launches = machine.log("launch")
    entries = ["flash_bwd_preprocess", "flash_bwd", "flash_bwd_postprocess"]
    assert [launch["entry"] for launch in launches] == entries
    assert [launch["grid"] for launch in launches] == [str(tiles), str(2 * 7 * 2 * 2), str(tiles)]  # split
    assert [launch["smem"] for launch in launches] == ["0", "65536", "0"]
    for launch in launches:
        assert launch["key"] == BWD
        assert (launch["blocks_m"], launch["blocks_n"], launch["group"]) == ("5", "7", "4")
        assert launch["total_tiles"] == str(2 * 5)
        assert (launch["stream"], launch["deterministic"], launch["scale_log2"]) == ("0x77", "1", "0.180337")
        offsets = [int(launch[name]) for name in ("lse_log2", "delta", "semaphore", "finished")]
        assert offsets == [rows * 128, rows * 128 + rows, rows * 128 + 2 * rows, total - 2 * 2 - 1]
        assert launch["early"] == "0"


@pytest.mark.parametrize(
    ("call", "grids"),
    [
        ("fwd 0 fp16 full 64 80000 1 1 3 1", [240000]),  # batch above 65,535
        ("fwd 0 fp16 full 64 1 1 1 70000 1", [70000]),  # heads above 65,535
        ("fwd 0 fp16 full 64 1 1073741824 1 1 1", [16777216]),
        ("fwd 0 fp16 full 64 2 0 5 3 3", []),  # no queries: nothing to launch
        ("fwd 0 fp16 full 64 2 65 0 3 3", [12]),  # no keys: the kernel writes zeros
        ("bwd 0 fp16 full 64 2 65 0 3 3", [12, 12]),
        ("bwd 0 fp16 full 64 2 0 65 3 3", [18]),
        ("bwd 0 fp16 full 64 70000 1 1 2 1", [140000, 70000, 140000]),
        ("bwd 0 fp16 full 128 1 65 65 4 2", [8, 12, 8]),  # split: two blocks for three tiles of keys
        ("bwd 0 fp16 full 128 1 65 0 4 2", [8, 8]),
        ("fwd 0 fp16 general 64 80000 16 16 2 1 packed 1280000", [160000]),
        ("bwd 0 fp16 general 64 80000 16 16 2 1 packed 1280000", [160000, 80000, 160000]),
        ("fwd 0 fp16 full 64 0 4 4 0 0", []),
    ],
)
def test_grids(machine: Machine, call: str, grids: list[int]) -> None:
    [answer] = machine.run(call)
    assert answer.startswith("ok")
    assert [int(launch["grid"]) for launch in machine.log("launch")] == grids


@pytest.mark.parametrize(
    "call",
    [
        "fwd 0 fp16 full 64 65536 64 64 32768 1",  # 2**31, one more than a launch may have
        "fwd 0 fp16 full 64 2147483647 1073741824 1 2147483647 1",  # far above 2**64
        "bwd 0 fp16 full 64 65536 64 64 32768 32768",
        "bwd 0 fp16 full 64 65536 1 33 16384 16384",  # the grid over keys alone
        "bwd 0 fp16 full 64 1 1 1 1024 1 packed 134217728",  # the workspaces alone
    ],
)
def test_grid_beyond_a_launch(machine: Machine, call: str) -> None:
    [error] = machine.run(call)
    assert "2147483647 blocks" in error
    assert "sm80-fp16-d64-full" in error
    assert machine.log("launch") == []


def test_split_doubles_the_grid_beyond_a_launch(machine: Machine) -> None:
    call = "0 fp16 full {} 32768 1 33 16384 16384"
    ok, error = machine.run(f"bwd {call.format(64)}", f"bwd {call.format(128)}")
    assert ok.startswith("ok")
    assert "2147483647 blocks" in error


def test_workspace_of_packed_sequences(machine: Machine) -> None:
    """A tile more for each sequence, whatever the longest one is."""
    tiles, rows = 4 * (1000 // 64 + 3), 4 * (1000 // 64 + 3) * 64
    [answer] = machine.run("bwd 0 fp16 full 64 3 700 700 4 1 packed 1000")
    assert answer == f"ok workspace={rows * 64 + 2 * rows + tiles + 3 + 1}"
    assert {launch["total_tiles"] for launch in machine.log("launch")} == {str(1000 // 64 + 3)}


def test_largest_grid(machine: Machine) -> None:
    assert machine.run("fwd 0 fp16 full 64 2147483647 64 64 1 1") == ["ok"]
    assert [launch["grid"] for launch in machine.log("launch")] == ["2147483647"]


def test_filling(machine: Machine) -> None:
    """Of the rows that no kernel writes: on the call's stream, in the tensor's context, nothing for nothing."""
    machine.devices = f"{H200};{H200}"
    assert machine.run(f"fill 1{CALL[1:]}", "current", "fill 1 bf16 causal 128 0 1 1 1 1") == ["ok", "ok -1", "ok"]
    assert machine.log("memset") == [{"value": "ff800000", "count": "2", "stream": "0x77", "device": "1"}]
    machine.environ = {"FAKE_CUDA_FAIL": "cuMemsetD32Async=700"}
    [error] = machine.run(f"fill {CALL}")
    assert "filling lse failed: CUDA_ERROR_ILLEGAL_ADDRESS" in error


# ---- The mask kind ----


@pytest.mark.parametrize(
    ("arguments", "kind", "left", "right"),
    [
        # causal left right chunk softcap dropout_p alibi sink rng seqlen_q seqlen_k
        ("0 -1 -1 0 0 0 0 0 0 100 200", "full", 200, 100),
        ("1 -1 -1 0 0 0 0 0 0 100 200", "causal", 200, 0),
        ("1 -1 5 0 0 0 0 0 0 100 200", "causal", 200, 0),  # causal is the stricter bound
        ("0 -1 0 0 0 0 0 0 0 100 200", "causal", 200, 0),
        ("0 -1 0 0 0 0 0 0 0 1 200", "full", 200, 0),  # one query sees all keys up to its own: all
        ("0 -1 99 0 0 0 0 0 0 100 200", "full", 200, 99),
        ("0 -1 98 0 0 0 0 0 0 100 200", "general", 200, 98),
        ("0 199 -1 0 0 0 0 0 0 100 200", "full", 199, 100),
        ("0 198 -1 0 0 0 0 0 0 100 200", "general", 198, 100),
        ("1 199 0 0 0 0 0 0 0 100 200", "causal", 199, 0),
        ("1 10 0 0 0 0 0 0 0 100 200", "general", 10, 0),
        ("0 0 0 0 0 0 0 0 0 100 200", "general", 0, 0),
        ("0 9000000000 9000000000 0 0 0 0 0 0 100 200", "full", 200, 100),
        ("0 -7 -2 0 0 0 0 0 0 100 200", "full", 200, 100),
        ("1 5 -1 0 0 0 0 0 0 0 0", "causal", 0, 0),
        ("0 5 3 0 0 0 0 0 0 0 0", "full", 0, 0),
        ("0 1073741822 1073741822 0 0 0 0 0 0 1073741823 1073741823", "full", 1073741822, 1073741822),
        ("0 -1 -1 64 0 0 0 0 0 100 200", "general", 200, 100),
        ("0 -1 -1 0 15 0 0 0 0 100 200", "general", 200, 100),
        ("1 -1 -1 0 0 0 1 0 0 100 200", "general", 200, 0),
        ("1 -1 -1 0 0 0 0 1 0 100 200", "general", 200, 0),
        ("1 -1 -1 0 0 0.5 0 0 1 100 200", "general", 200, 0),
        ("1 -1 -1 0 0 0 0 0 1 100 200", "causal", 200, 0),  # a state without dropout is of no account
    ],
)
def test_mask_kind(machine: Machine, arguments: str, kind: str, left: int, right: int) -> None:
    """The general kernel only where something hides a key or changes a score that the others do not."""
    [answer] = machine.run(f"mask {arguments}")
    assert answer.startswith(f"ok {kind} left={left} right={right} ")


@pytest.mark.parametrize(
    ("dropout", "parts"),
    [
        ("0", "rng=0 threshold=0 keep_scale=0"),
        ("0.5", "rng=1 threshold=2147483648 keep_scale=2"),
        ("0.25", "rng=1 threshold=1073741824 keep_scale=1.33333"),
        ("0.9999999999", "rng=1 threshold=4294967295 keep_scale=1e+10"),
    ],
)
def test_dropout(machine: Machine, dropout: str, parts: str) -> None:
    [answer] = machine.run(f"mask 0 -1 -1 0 0 {dropout} 0 0 1 8 8")
    assert answer.endswith(parts)


@pytest.mark.parametrize("dropout", ["1", "-0.1", "2", "nan"])
def test_dropout_out_of_range(machine: Machine, dropout: str) -> None:
    [error] = machine.run(f"mask 0 -1 -1 0 0 {dropout} 0 0 1 8 8")
    assert f"dropout_p is {dropout}" in error


def test_chunk(machine: Machine) -> None:
    chunks = {0: 0, -3: 0, 7: 7, 1 << 40: (1 << 30) - 1}
    answers = machine.run(*(f"mask 0 -1 -1 {chunk} 2.5 0 0 0 0 8 8" for chunk in chunks))
    for answer, chunk in zip(answers, chunks.values(), strict=True):
        assert f" chunk={chunk} softcap=2.5 " in answer


# ---- Failures of the driver ----


@pytest.mark.parametrize(
    ("failing", "parts"),
    [
        ("cuLaunchKernel=700", ["launching", FWD, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal memory access"]),
        (
            "cuModuleLoadDataEx=200",
            ["loading", FWD, "arch 90", "INVALID_IMAGE", "12.4", "nvrtc 12.9.86", "ptxas says no"],
        ),
        ("cuModuleGetFunction=500", [FWD, "CUDA_ERROR_NOT_FOUND"]),
        ("cuFuncGetAttribute=1", [FWD, "CUDA_ERROR_INVALID_VALUE"]),
        ("cuFuncSetAttribute=1", [FWD, "shared memory", "CUDA_ERROR_INVALID_VALUE"]),
        ("cuDevicePrimaryCtxRetain=2", ["primary context", "CUDA_ERROR_OUT_OF_MEMORY"]),
        ("cuInit=803", ["initialising", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"]),
        ("cuDeviceGetCount=12345", ["unknown CUDA error", "12345"]),
    ],
)
def test_driver_failure_is_told_and_can_pass(machine: Machine, failing: str, parts: list[str]) -> None:
    """The message says what was done to which kernel; nothing of the failure is kept, so a later call works."""
    machine.environ = {"FAKE_CUDA_FAIL": failing}
    error, _, later = machine.run(f"fwd {CALL}", "env FAKE_CUDA_FAIL=", f"fwd {CALL}")
    assert error.startswith("error flash_attn: ")
    for part in parts:
        assert part in error
    assert later == "ok"


def test_kernel_that_allows_fewer_threads(machine: Machine) -> None:
    machine.environ = {"FAKE_CUDA_THREADS": "64"}
    [error] = machine.run(f"fwd {CALL}")
    for part in (FWD, "64 threads", "128"):
        assert part in error
    assert len(machine.log("unload")) == 1


def test_no_driver(machine: Machine) -> None:
    machine.driver = False
    machine.environ = {"LD_LIBRARY_PATH": "/nonexistent"}
    answers = machine.run("count", "supported 0", "capability 0", f"fwd {CALL}")
    assert "libcuda.so.1" in answers[0]
    assert answers[1].startswith("ok no ")
    assert "no NVIDIA driver" in answers[1]
    assert answers[2] == "ok -1"
    assert "no NVIDIA driver" in answers[3]


# ---- The functions for Python ----


def test_exports(machine: Machine) -> None:
    machine.devices = f"{H200};8.9:101376:Other"
    answers = machine.run("version", "count", "capability 0", "capability 1", "capability 2", "short")
    assert answers == [f"ok {VERSION}", "ok 2", "ok 90", "ok 89", "ok -1", "ok 15 intact"]


@pytest.mark.parametrize(
    ("devices", "build", "answer", "parts"),
    [
        (H200, pack, "yes", ["NVIDIA H200", "compute capability 9.0", "all 24 kernels run."]),
        ("13.0:232448:Next", pack, "yes", ["13.0", "all 24 kernels run, 24 through PTX"]),
        ("7.0:98304:V100", pack, "no", ["V100", "7.0", "8.0 or newer"]),
        (H200, lambda: pack(archs=["80", "120"]), "no", ["none of the 24", "80", "FLASH_ATTN_CUDA_ARCHS=9.0"]),
        (H200, lambda: pack(keys=[]), "no", ["no kernel"]),
        (RTX4090, lambda: pack(smem_bytes=200000), "no", ["none of the 24", "101376"]),
        (
            RTX4090,
            lambda: archive.pack("x", [kernel(FWD, "86"), kernel(BWD, "86", smem_bytes=200000)]),
            "yes",
            ["1 of 2 kernels run", f"{BWD} needs more shared memory than 101376"],
        ),
        (
            RTX4090,
            lambda: archive.pack("x", [kernel(FWD, "86"), kernel(BWD, "90")]),
            "yes",
            ["1 of 2 kernels run", f"{BWD} is not built for this GPU"],
        ),
        (H200, every_kernel, "yes", ["all 59 kernels run."]),
        (RTX4090, every_kernel, "yes", ["all 30 kernels run."]),  # those of the sm90 family are no loss
        (RTX4090, lambda: archive.pack("x", fast_kernels()), "no", ["none of the 20", "90a"]),
    ],
)
def test_supported(machine: Machine, devices: str, build: Callable[[], bytes], answer: str, parts: list[str]) -> None:
    """Field case 26: a reason at selection time, without a context and without loading anything."""
    machine.devices = devices
    machine.write_kernels(build())
    [text] = machine.run("supported 0")
    assert text.startswith(f"ok {answer} ")
    for part in parts:
        assert part in text
    assert machine.log("retain") == []
    assert machine.log("load") == []


def test_supported_without_such_a_device(machine: Machine) -> None:
    [text] = machine.run("supported 3")
    assert text.startswith("ok no ")
    assert "no device 3" in text


# ---- The archive ----


def test_archive_missing_then_there(machine: Machine) -> None:
    path = machine.folder / "flash_attn.kernels"
    path.unlink()
    error, supported = machine.run(f"fwd {CALL}", "supported 0")
    for text in (error, supported):
        assert str(path) in text
        assert "does not exist" in text


def patched(offset: int, fmt: str, *values: object) -> bytes:
    """A sound archive with ``values`` written at ``offset``."""
    data = bytearray(pack())
    struct.pack_into(fmt, data, offset, *values)
    return bytes(data)


RECORD = 64 + 128  # the second record
COUNT = len(ALL_KEYS) * len(ALL_ARCHS)


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda: b"", ["cut short", "0 bytes"]),
        (lambda: pack()[:63], ["cut short", "63 bytes"]),
        (lambda: pack()[:64], ["cut short", f"{COUNT} records"]),
        (lambda: pack()[: 64 + 128 * COUNT - 1], ["cut short"]),
        (lambda: pack()[:-64], ["points outside"]),
        (lambda: b"PK" + pack()[2:], ["no kernel set"]),
        (lambda: patched(8, "<I", 2), ["format 2", "different releases"]),
        (lambda: patched(16, "<I", 256), ["records of 256"]),
        (lambda: patched(12, "<I", 0xFFFFFFFF), ["cut short"]),
        (lambda: patched(RECORD, "<64s", b"x" * 64), ["record 1", "key"]),
        (lambda: patched(RECORD, "<64s", b""), ["record 1", "key"]),
        (lambda: patched(RECORD, "<64s", b"a"), ["record 1", "order"]),
        (lambda: patched(RECORD + 64, "<8s", b"12345678"), ["record 1", "arch"]),
        (lambda: patched(RECORD + 64, "<8s", b"sm_90"), ["record 1", "arch"]),
        (lambda: patched(RECORD + 64, "<8s", b"100"), ["record 1", "order"]),
        (lambda: patched(RECORD + 72, "<I", 0), ["record 1", "tile"]),
        (lambda: patched(RECORD + 76, "<I", 0), ["record 1", "tile"]),
        (lambda: patched(RECORD + 76, "<I", 1 << 20), ["record 1", "tile"]),
        (lambda: patched(RECORD + 80, "<I", 0), ["record 1", "tile"]),
        (lambda: patched(RECORD + 84, "<I", 100), ["record 1", "block size"]),
        (lambda: patched(RECORD + 84, "<I", 2048), ["record 1", "block size"]),
        (lambda: patched(RECORD + 88, "<I", 1 << 30), ["record 1", "shared memory"]),
        (lambda: patched(RECORD + 112, "<I", 2), ["record 1", "split"]),
        (lambda: patched(RECORD + 96, "<Q", 64), ["record 1", "outside"]),
        (lambda: patched(RECORD + 96, "<Q", 1 << 40), ["record 1", "outside"]),
        (lambda: patched(RECORD + 96, "<Q", (64 + 128 * COUNT) + 1), ["record 1", "outside"]),
        (lambda: patched(RECORD + 104, "<Q", 0), ["record 1", "outside"]),
        (lambda: patched(RECORD + 104, "<Q", (1 << 64) - 1), ["record 1", "outside"]),
    ],
)
def test_damaged_archive(machine: Machine, make: Callable[[], bytes], parts: list[str]) -> None:
    """Every damage to the index is named, by the call and by supported(), and none is followed."""
    machine.write_kernels(make())
    path = machine.folder / "flash_attn.kernels"
    for text in machine.run(f"open {path}", f"fwd {CALL}", "supported 0"):
        assert str(path) in text
        for part in parts:
            assert part in text
    assert machine.log("load") == []


def test_ptx_without_an_end(machine: Machine) -> None:
    record, text = kernel(FWD, "ptx80")
    machine.write_kernels(archive.pack("x", [(record, text.rstrip(b"\0"))]))
    [error] = machine.run(f"fwd {CALL}")
    assert "PTX without an end" in error


def test_archive_is_read(machine: Machine) -> None:
    [answer] = machine.run(f"open {machine.folder / 'flash_attn.kernels'}")
    assert answer == f"ok {COUNT} nvrtc 12.9.86"


def test_repaired_archive_is_taken_by_the_next_call(machine: Machine) -> None:
    """A failure is not kept: the process goes on once the file is in order."""
    path = machine.folder / "flash_attn.kernels"
    sound = path.rename(machine.folder / "sound")
    error, moved, later = machine.run(f"fwd {CALL}", f"move {sound} {path}", f"fwd {CALL}")
    assert "does not exist" in error
    assert (moved, later) == ("ok", "ok")


def test_messages_are_sentences(machine: Machine) -> None:
    """Every failure seen above ends as a sentence does and is not cut."""
    machine.write_kernels(pack(keys=[key for key in ALL_KEYS if "-d64-" in key]))
    for text in machine.run(f"fwd {CALL}", "supported 0", "fwd 5 bf16 full 64 1 1 1 1 1"):
        assert re.search(r"[^.]\.$", text)


# ---- KV caches ----


@pytest.mark.parametrize(
    ("call", "splits", "grids"),
    [
        ("1 1 8192 32 8 packed 1", 1, ["8,1"]),
        ("1 1 8192 32 8 packed 4", 4, ["32,1", "16,1"]),
        ("1 1 8192 32 8 packed 1000000", 128, ["1024,1", "16,1"]),
        ("1 1 8192 3 3 packed 4", 4, ["12,1", "2,1"]),  # two rows a block of flash_combine
        ("64 1 8192 32 8", 1, ["512,1"]),  # full without splitting
        ("1 1 64 32 8", 1, ["8,1"]),  # too short
        ("0 1 8192 32 8", 1, []),
        ("1 0 8192 32 8", 1, []),
    ],
)
def test_splits(machine: Machine, call: str, splits: int, grids: list[str]) -> None:
    machine.write_kernels(archive.pack("x", [kernel("decode-sm80-bf16-d128-general", "90", threads=256)]))
    assert machine.run(f"decode 0 bf16 general 128 {call}") == [f"ok splits={splits} row_warps=1"]
    launches = machine.log("launch")
    assert [launch["grid"] for launch in launches] == grids
    assert all(launch["block"] == "64" for launch in launches[1:])


@pytest.mark.parametrize(
    ("batch", "tokens", "warps"),
    [
        (16, 1, 8),  # one wave of 132 multiprocessors
        (17, 1, 4),  # two, of which the second is almost empty
        (32, 1, 4),  # two, both full: one
        (34, 1, 8),  # three; or two, of which half of the second would be empty
        (51, 1, 4),  # four, of which the last is almost empty; or two
        (64, 1, 8),
        (32, 9, 4),  # four warps share their keys
        (32, 20, 8),  # all of them do
    ],
)
def test_half_of_the_warps_where_two_blocks_do_better(machine: Machine, batch: int, tokens: int, warps: int) -> None:
    record = kernel("decode-sm80-bf16-d128-general", "90", threads=256, smem_bytes=163840)
    machine.write_kernels(archive.pack("x", [record]))
    machine.run(f"decode 0 bf16 general 128 {batch} {tokens} 8192 32 8")
    [launch] = machine.log("launch")
    assert (launch["grid"], launch["block"]) == (f"{8 * batch},1", str(32 * warps))
    assert launch["smem"] == str(163840 * warps // 8)


def test_no_half_of_the_warps_where_two_blocks_do_not_fit(machine: Machine) -> None:
    record = kernel("decode-sm80-bf16-d128-general", "90", threads=256, smem_bytes=232000)
    machine.write_kernels(archive.pack("x", [record]))
    machine.run("decode 0 bf16 general 128 17 1 8192 32 8")
    [launch] = machine.log("launch")
    assert (launch["block"], launch["smem"]) == ("256", "232000")


@pytest.mark.parametrize(
    ("tokens", "row_warps", "blocks"), [(1, 1, 8), (4, 1, 8), (5, 2, 8), (8, 2, 8), (16, 4, 8), (17, 8, 8), (33, 8, 16)]
)
def test_warps_share_the_keys_of_more_rows(machine: Machine, tokens: int, row_warps: int, blocks: int) -> None:
    """Four heads share a KV head: 16 rows a warp, eight warps a block."""
    record = kernel("decode-sm80-bf16-d128-general", "90", threads=256)
    machine.write_kernels(archive.pack("x", [record]))
    assert machine.run(f"decode 0 bf16 general 128 1 {tokens} 64 32 8") == [f"ok splits=1 row_warps={row_warps}"]
    assert [launch["grid"] for launch in machine.log("launch")] == [f"{blocks},1"]


@pytest.mark.parametrize(
    ("tokens", "family", "row_warps", "blocks"),
    [(4, "sm80", 1, 8), (5, "sm90", 4, 8), (16, "sm90", 4, 8), (17, "sm90", 8, 8), (33, "sm90", 8, 16)],
)
def test_more_rows_than_a_warp_has_are_for_warpgroups(
    machine: Machine, tokens: int, family: str, row_warps: int, blocks: int
) -> None:
    """Of the family that has them; where it is not built, see above."""
    records = [
        kernel("decode-sm80-bf16-d128-general", "90", threads=256),
        kernel("decode-sm90-bf16-d128-general", "90a", threads=256),
    ]
    machine.write_kernels(archive.pack("x", records))
    assert machine.run(f"decode 0 bf16 general 128 1 {tokens} 64 32 8") == [f"ok splits=1 row_warps={row_warps}"]
    [launch] = machine.log("launch")
    assert (launch["key"], launch["grid"]) == (f"decode-{family}-bf16-d128-general", f"{blocks},1")


@pytest.mark.parametrize(
    ("device", "arch", "version", "early"),
    [
        (H200, "90", "12080", ["1", "1"]),
        (H200, "90", "12020", ["0", "0"]),  # its graphs do not know such launches
        (H200, "ptx80", "12080", ["0", "0"]),  # code without the instruction that waits
        ("8.0:166912:NVIDIA A100", "80", "12080", ["0", "0"]),
    ],
)
def test_launches_that_begin_early(machine: Machine, device: str, arch: str, version: str, early: list[str]) -> None:
    machine.write_kernels(archive.pack("x", [kernel("decode-sm80-bf16-d128-general", arch)]))
    machine.devices, machine.environ = device, {"FAKE_CUDA_DRIVER_VERSION": version}
    machine.run("decode 0 bf16 general 128 1 1 8192 32 8 packed 4")
    assert [launch["early"] for launch in machine.log("launch")] == early


def test_splits_fill_the_gpu(machine: Machine) -> None:
    """Few rows wait for memory: one wave of blocks, on at least half of the 132 multiprocessors. Many rows compute: few
    multiprocessors have nothing to do."""
    machine.write_kernels(archive.pack("x", [kernel("decode-sm80-bf16-d128-general", "90", threads=256)]))
    for batch in range(1, 20):
        for tokens in (1, 16):
            [answer] = machine.run(f"decode 0 bf16 general 128 {batch} {tokens} 32768 32 8")
            splits = int(answer.removeprefix("ok splits=").split()[0])
            blocks = 8 * batch * splits
            waves = -(-blocks // 132)
            if tokens == 1:
                assert splits == 1 or (waves == 1 and blocks >= 66), answer
            else:
                assert blocks / (132 * waves) >= 0.7, answer
