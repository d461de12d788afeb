"""Drives the built host library's questions to a compiler that is made up here; see fake_torch_gpu.cpp.

Each ``case_`` function asks for kernels of its own and raises where something is wrong. Prints a JSON object: for every
case "" or its traceback. Arguments: the host library (its kernel set beside it), this folder's parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(sys.argv[2]).parents[1]), sys.argv[2]]
from host_support import kernel  # noqa: E402

from buildtools import archive  # noqa: E402
from flash_attn import _jit, _ops  # noqa: E402

torch.ops.load_library(sys.argv[1])
LIBRARY = ctypes.CDLL(sys.argv[1])
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def call(dtype: str, head_dim: int, *, causal: bool = False) -> Any:
    x = torch.zeros(1, 2, 1, head_dim, dtype=DTYPES[dtype])
    return _ops.FWD(x, x, x, 1.0, causal)


def error_of(*arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("it did not raise")


def one_kernel(key: str, arch: str = "90") -> bytes:
    return archive.pack("nvrtc 12.9.86", [kernel(key, arch)])


def supported() -> tuple[int, str]:
    reason = ctypes.create_string_buffer(4096)
    return LIBRARY.flash_attn_supported(0, reason, ctypes.c_size_t(4096)), reason.value.decode()


class Compiler:
    """Answers with ``result``: (possible, text, archive), or what it raises. ``asked`` are the requests."""

    def __init__(self, result: Any, delay: float = 0.0) -> None:
        self.result, self.delay = result, delay
        self.asked: list[dict[str, Any]] = []

    def __call__(self, _package: Path, request: Any) -> Any:
        self.asked.append({name: getattr(request, name) for name, _ in request._fields_})
        time.sleep(self.delay)
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result


def using(result: Any, delay: float = 0.0) -> Compiler:
    compiler = Compiler(result, delay)
    vars(_jit)["_answer"] = compiler
    return compiler


def loads() -> list[str]:
    return [line for line in Path(os.environ["FAKE_CUDA_LOG"]).read_text().splitlines() if line.startswith("load")]


def case_0_nothing_is_asked_before_a_compiler_is_registered() -> None:
    text = error_of("fp16", 128)
    assert "fwd-sm80-fp16-d128-full is not built" in text
    assert "first use" not in text
    assert "compiled" not in supported()[1]
    _jit.register(LIBRARY)


def case_built_kernels_ask_nothing() -> None:
    compiler = using((False, "not asked.", None))
    call("bf16", 64)
    assert compiler.asked == []


def case_a_missing_head_dim_is_asked_for_once() -> None:
    compiler = using((True, "", one_kernel("fwd-sm80-bf16-d128-full")))
    for _ in range(3):
        call("bf16", 96)
    (asked,) = compiler.asked
    assert asked.pop("families").split(b",")[-1] == b"sm80"
    assert asked == {
        "op": b"fwd", "dtype": b"bf16", "mask": b"full", "head_dim": 96, "device": 0, "capability": 90,
        "shared_bytes": 232448, "driver_version": 12040,
    }  # fmt: skip
    assert sum("key=fwd-sm80-bf16-d128-full arch=90" in line for line in loads()) == 1
    # Another head dim that the same kernel serves: asked for, and not loaded again.
    call("bf16", 128)
    assert [request["head_dim"] for request in compiler.asked] == [96, 128]
    assert sum("key=fwd-sm80-bf16-d128-full" in line for line in loads()) == 1


def case_only_families_that_serve_the_call_are_asked_for() -> None:
    """Few scores prefer the last family where both are built; one to compile is for whatever is called later, too."""
    compiler = using((False, "not now.", None))
    for length in (1500, 64):
        x = torch.zeros(1, length, 1, 256, dtype=torch.bfloat16)
        with contextlib.suppress(RuntimeError):
            _ops.FWD(x, x, x, 1.0, True)
        assert compiler.asked[-1]["families"] == b"sm90,sm80"
    # ALiBi slopes, which the fast family has not.
    modifiers = (torch.ones(1), None, None, 64, 64, 1.0, True, -1, -1, 0, 0.0, 0.0, 0)
    with contextlib.suppress(RuntimeError):
        torch.ops.flash_attn.fwd_general(x, x, x, *(None,) * 6, *modifiers)
    assert compiler.asked[-1]["families"] == b"sm80"


def case_a_missing_arch_is_asked_for() -> None:
    compiler = using((True, "", one_kernel("fwd-sm80-fp16-d64-causal")))
    call("fp16", 64, causal=True)
    assert len(compiler.asked) == 1
    assert "load key=fwd-sm80-fp16-d64-causal arch=90 device=0 mode=2" in loads()


def case_what_the_compiler_says_is_told() -> None:
    compiler = using((False, "no NVRTC is there.", None))
    for _ in range(2):
        text = error_of("fp16", 200)
        assert "fwd-sm80-fp16-d256-full is not built" in text
        assert "It was not compiled at first use either: no NVRTC is there." in text
    assert len(compiler.asked) == 2  # asked again: it may be there by now
    compiler.result = (True, "", one_kernel("fwd-sm80-fp16-d256-full"))
    call("fp16", 200)


def case_an_exception_of_the_compiler_is_told() -> None:
    using(ZeroDivisionError("by zero"))
    assert "first use either: ZeroDivisionError: by zero." in error_of("bf16", 200)


def case_an_interrupt_reaches_the_main_thread() -> None:
    using(KeyboardInterrupt())
    try:
        text = error_of("bf16", 200)
        for _ in range(1000):  # it is delivered between two steps of the interpreter
            time.sleep(0.001)
    except KeyboardInterrupt:
        return
    raise AssertionError(f"no KeyboardInterrupt: {text}")


def case_a_damaged_archive_is_refused() -> None:
    whole = one_kernel("fwd-sm80-bf16-d256-full")
    for data, told in ((whole[:200], "points outside"), (b"", "0 bytes"), (b"x" * 500, "no kernel set")):
        using((True, "", data))
        assert told in error_of("bf16", 200)


def case_another_kernel_is_refused() -> None:
    for key, arch in (("fwd-sm80-bf16-d128-full", "90"), ("fwd-sm80-bf16-d256-full", "80")):
        using((True, "", one_kernel(key, arch)))
        assert "fwd-sm80-bf16-d256-full" in error_of("bf16", 200)


def case_threads_wait_for_one_another_without_deadlock() -> None:
    """Eight threads miss one kernel, while others hold Python's lock and use the library."""
    compiler = using((True, "", one_kernel("fwd-sm80-bf16-d128-causal")), delay=0.2)
    failures: list[BaseException] = []
    done = threading.Event()
    calls = [0]

    def miss() -> None:
        try:
            call("bf16", 128, causal=True)
        except BaseException as error:
            failures.append(error)

    def use() -> None:
        while not done.is_set():
            call("bf16", 64)  # built: goes on while a kernel is being compiled
            sum(range(1000))
            calls[0] += 1

    others = [threading.Thread(target=use) for _ in range(2)]
    threads = [threading.Thread(target=miss) for _ in range(8)]
    for thread in (*others, *threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    during = calls[0]
    done.set()
    for thread in others:
        thread.join(60)
    assert not any(thread.is_alive() for thread in (*others, *threads)), "deadlock"
    assert failures == []
    assert during > 0
    assert len(compiler.asked) <= 8
    assert sum("key=fwd-sm80-bf16-d128-causal" in line for line in loads()) == 1


def case_while_a_stream_is_captured() -> None:
    os.environ["FAKE_CUDA_CAPTURE"] = "1"
    try:
        using((True, "", one_kernel("fwd-sm80-fp16-d128-causal")))
        call("fp16", 128, causal=True)
    finally:
        del os.environ["FAKE_CUDA_CAPTURE"]
    assert "load key=fwd-sm80-fp16-d128-causal arch=90 device=0 mode=2" in loads()


def case_supported_tells_of_the_compiler() -> None:
    compiler = using((True, "by NVRTC 12.9.86 (libnvrtc.so.12).", None))
    answer, text = supported()
    assert answer == 1
    assert text.endswith(
        "is not built for this GPU. Kernels for it are compiled at first use, by NVRTC 12.9.86 (libnvrtc.so.12)."
    )
    assert compiler.asked[0]["head_dim"] == 0
    assert compiler.asked[0]["families"].split(b",")[-1] == b"sm80"
    using((False, "FLASH_ATTN_JIT=0 forbids it.", None))
    answer, text = supported()
    assert answer == 1  # some kernels run
    assert text.endswith("They cannot be compiled at first use: FLASH_ATTN_JIT=0 forbids it.")


def main() -> None:
    results: dict[str, str] = {}
    cases: dict[str, Callable[[], None]] = {n: f for n, f in globals().items() if n.startswith("case_")}
    for name, case in sorted(cases.items()):
        try:
            case()
            results[name] = ""
        except BaseException:
            results[name] = traceback.format_exc()
    print(json.dumps(results))


main()
