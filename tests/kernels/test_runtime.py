"""How the kernels live with the rest of CUDA: graphs, streams, devices, no waiting, and what is not built."""

import importlib.util
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from kernel_set import EVERY_KERNEL, KERNELS, largest_head_dim, variants

import flash_attn
from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

BACKWARD = variants("bwd")
DTYPE, CAUSAL = BACKWARD[0]


def tensors(seqlen=500, batch=2, dtype=DTYPE):
    return [torch.randn(batch, seqlen, heads, 64, device="cuda").to(dtype).requires_grad_() for heads in (4, 2, 2)]


def step(inputs, dout, causal=CAUSAL):
    out = flash_attn_func(*inputs, causal=causal, deterministic=True)
    return (out, *torch.autograd.grad(out, inputs, dout))


def assert_same_bits(found, wanted):
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(a, b), f"result {index} differs by up to {(a - b).abs().max().item():.3g}"


@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_graph_replays_with_new_numbers(dtype, causal):
    inputs = tensors(dtype=dtype)
    dout = torch.randn_like(inputs[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(inputs, dout, causal)
    for _ in range(10):
        with torch.no_grad():
            for x in (*inputs, dout):
                x.normal_()
        graph.replay()
        found = [x.detach().clone() for x in captured]
        assert_same_bits(found, step(inputs, dout, causal))


@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_whoever_takes_a_tile_makes_the_same_of_it(dtype, causal):
    """Many more tiles than multiprocessors, of sequences of one length and of very different ones, again and again."""
    q, k, v = (torch.randn(2, 3400, heads, 64, device="cuda", dtype=dtype) for heads in (16, 4, 4))
    starts = torch.tensor([0, 1, 3001, 3001, 3200, 6800], device="cuda", dtype=torch.int32)
    packed = [x.flatten(0, 1) for x in (q, k, v)]

    def forward(sm_margin=0):
        options = {"causal": causal, "return_lse": True, "sm_margin": sm_margin}
        lengths = (starts, starts, 3600, 3600)
        return *flash_attn_func(q, k, v, **options), *flash_attn_varlen_func(*packed, *lengths, **options)

    wanted = forward()
    for margin in (0, 1, 64, 10_000, *[0] * 20):
        assert_same_bits(forward(margin), wanted)


@pytest.mark.parametrize(("dtype", "causal"), BACKWARD, ids=str)
def test_whoever_takes_a_key_block_makes_the_same_of_it(dtype, causal):
    """As above. Deterministic, each key block is a thread block; dQ is then added up in one order."""
    head_dim = min(128, largest_head_dim("bwd", dtype, causal))
    inputs = [torch.randn(2, 3400, heads, head_dim, device="cuda", dtype=dtype) for heads in (16, 8, 8)]
    inputs = [x.requires_grad_() for x in inputs]
    dout = torch.randn_like(inputs[0])
    starts = torch.tensor([0, 1, 3001, 3001, 3200, 6800], device="cuda", dtype=torch.int32)

    def backward(deterministic):
        options = {"causal": causal, "deterministic": deterministic}
        out = flash_attn_func(*inputs, **options)
        packed = flash_attn_varlen_func(*(x.flatten(0, 1) for x in inputs), starts, starts, 3600, 3600, **options)
        return (*torch.autograd.grad(out, inputs, dout), *torch.autograd.grad(packed, inputs, dout.flatten(0, 1)))

    wanted = backward(True)
    for _ in range(10):
        found = backward(False)
        for dq in (0, 3):
            error = (found[dq] - wanted[dq]).float().norm() / wanted[dq].float().norm()
            assert error < 1e-3, f"{error=:.3g}"
        assert_same_bits(found[1:3] + found[4:6], wanted[1:3] + wanted[4:6])


FIRST_CALL_IN_A_CAPTURE = """
import torch
from flash_attn import flash_attn_func
dtype, causal, head_dim, backward = torch.{dtype}, {causal}, {head_dim}, {backward}
inputs = [torch.randn(2, 300, 4, head_dim, device="cuda", dtype=dtype, requires_grad=backward) for _ in range(3)]
dout = torch.randn_like(inputs[0])
def step():
    out = flash_attn_func(*inputs, causal=causal, deterministic=True)
    return (out, *(torch.autograd.grad(out, inputs, dout) if backward else ()))
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    captured = step()
graph.replay()
torch.cuda.synchronize()
assert all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
print("equal")
"""


@pytest.mark.parametrize("op", ["fwd", "bwd"])
def test_first_call_of_a_process_inside_a_capture(op, tmp_path):
    """Loading the kernels is no part of a capture, and does not end it."""
    kernel = next(kernel for kernel in KERNELS if kernel.op == op)
    dtype = str(kernel.dtype).removeprefix("torch.")
    code = FIRST_CALL_IN_A_CAPTURE.format(
        dtype=dtype, causal=kernel.causal, head_dim=kernel.head_dim, backward=op == "bwd"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout == "equal\n", done.stderr


def test_runs_on_the_current_stream():
    """The inputs are written by a stream that is far behind: only its own queue makes the kernels wait for them."""
    inputs = tensors()
    dout = torch.randn_like(inputs[0])
    fresh = [torch.randn_like(x) for x in inputs]
    wanted = step([x.clone().requires_grad_() for x in fresh], dout)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for x, new in zip(inputs, fresh, strict=True):
                x.copy_(new)
        found = step(inputs, dout)
    stream.synchronize()
    assert_same_bits(found, wanted)


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_decoding_waits_for_all_that_is_before_it(captured):
    """Its launch may begin while others end: kernels, copies, another stream's work, and decoding itself."""
    kernel = next(kernel for kernel in EVERY_KERNEL if kernel.op == "decode")
    fresh_q, fresh_k, fresh_v = (
        torch.randn(3, rows, heads, kernel.head_dim, device="cuda").to(kernel.dtype)
        for rows, heads in ((2, 4), (3000, 2), (3000, 2))
    )
    fresh_lengths, last_lengths = torch.tensor([[3000, 17, 1500], [5, 2999, 0]], device="cuda", dtype=torch.int32)
    q, k, v, lengths = (torch.zeros_like(x) for x in (fresh_q, fresh_k, fresh_v, fresh_lengths))

    def decode(q, k, v, lengths):
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, num_splits=7)

    def chain():
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        torch.cuda._sleep(2_000_000)
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            torch.cuda._sleep(4_000_000)
            lengths.copy_(fresh_lengths)
        torch.mul(fresh_k, 1, out=k)
        v.copy_(fresh_v)
        here.wait_stream(aside)
        q.copy_(fresh_q)
        first = decode(q, k, v, lengths)
        second = decode(first, k, v, lengths)
        v.neg_()
        lengths.copy_(last_lengths)
        return first, second, decode(second, k, v, lengths)

    first = decode(fresh_q, fresh_k, fresh_v, fresh_lengths)
    torch.cuda.synchronize()
    second = decode(first, fresh_k, fresh_v, fresh_lengths)
    torch.cuda.synchronize()
    wanted = first, second, decode(second, fresh_k, -fresh_v, last_lengths)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph):
            found = chain()
    for _ in range(3):
        for x in (q, k, v, lengths):
            x.zero_()
        if captured:
            graph.replay()
        else:
            found = chain()
        torch.cuda.synchronize()
        assert_same_bits(found, wanted)


def test_never_waits_for_the_gpu():
    inputs = tensors()
    dout = torch.randn_like(inputs[0])
    step(inputs, dout)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)  # about a second
        begin = time.perf_counter()
        step(inputs, dout)
        taken = time.perf_counter() - begin
        busy = not torch.cuda.current_stream().query()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert busy, f"the GPU was idle when the call returned, after {taken:.3f} s"


def test_threads_share_the_kernels():
    """Many threads call at once, each on its own stream."""
    from concurrent.futures import ThreadPoolExecutor

    inputs = [x.detach() for x in tensors()]
    wanted = flash_attn_func(*inputs, causal=CAUSAL)
    torch.cuda.synchronize()

    def work(_):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                out = flash_attn_func(*inputs, causal=CAUSAL)
            torch.cuda.current_stream().synchronize()
            return torch.equal(out, wanted)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_supported():
    major, minor = torch.cuda.get_device_capability()
    for device in ("cuda", 0, torch.device("cuda", 0)):
        answer, reason = flash_attn.supported(device)
        assert answer is True
        assert f"{major}.{minor}" in reason
    answer, reason = flash_attn.supported(torch.cuda.device_count())
    assert answer is False
    assert reason


def test_doctor_finds_nothing_wrong(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "flash_attn", "doctor"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert torch.cuda.get_device_name() in done.stdout
    assert all(kernel.key in done.stdout for kernel in KERNELS)


def test_mixed_devices_and_dtypes_are_refused():
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(ValueError, match="k must be on q's device: q is on cuda:0, k is on cpu"):
        flash_attn_func(q, k.cpu(), v)
    with pytest.raises(ValueError, match=r"v must have q's dtype: q is .*float16, v is torch\.float32"):
        flash_attn_func(q, k, v.float())
    with pytest.raises(
        ValueError, match=r"q must be one of float16, bfloat16, float8_e4m3fn on cuda, got torch\.float32"
    ):
        flash_attn_func(q.float(), k.float(), v.float())


def test_calls_of_caches_are_refused_as_on_the_cpu():
    """On a GPU the host library is the one that looks at the tensors, and the long way says what is wrong with them."""
    path = Path(__file__).resolve().parents[1] / "unit" / "test_api_validation.py"
    spec = importlib.util.spec_from_file_location("api_validation", path)
    unit = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(unit)

    def moved(x, device):
        """As expanded as it was, which a copy is not."""
        once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
        return once.to(device, torch.bfloat16 if x.dtype == torch.float32 else x.dtype).expand(x.shape)

    def refusal(arguments, device):
        given = {
            name: moved(x, device) if isinstance(x, torch.Tensor) and x.device.type == "cpu" else x
            for name, x in arguments.items()
        }
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            flash_attn.flash_attn_with_kvcache(**given)
        return type(caught.value), str(caught.value).replace("cuda:0", "cpu")

    assert len(unit.BAD_CACHE) > 30
    for _, changes, _ in unit.BAD_CACHE:
        arguments = unit.cached(**changes)
        assert refusal(arguments, "cuda") == refusal(arguments, "cpu"), changes


def test_operators_called_directly_check_what_would_corrupt_memory():
    q, k, v = (x.detach() for x in tensors())
    fwd = torch.ops.flash_attn.fwd
    for bad in (
        (q[:, :, :3], k, v),
        (q, k[:1], v),
        (q, k, v[:, :100]),
        (q, k, v.float()),
        (q[0], k, v),
    ):
        with pytest.raises(RuntimeError):
            fwd(*bad, 1.0, False)
