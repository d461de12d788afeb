"""How the operators behave inside torch's machinery: opcheck, compile, fake tensors, autocast, checkpointing."""

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

import flash_attn
from flash_attn import _ops, _ops_cache, _ops_fp8, _ops_general, flash_attn_func
from flash_attn.layers.rotary import apply_rotary_emb


def tensors(dtype=torch.float32, requires_grad=True, seqlen=193):
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, seqlen, 4, 16), (2, seqlen, 2, 16), (2, seqlen, 2, 16)]
    return [torch.randn(s, generator=generator).to(dtype).requires_grad_(requires_grad) for s in sizes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_opcheck(dtype, causal):
    torch.library.opcheck(_ops.ATTENTION, (*tensors(dtype), 0.25, causal, False))
    q, k, v = tensors(dtype, requires_grad=False)
    torch.library.opcheck(_ops.FWD, (q, k, v, 0.25, causal))
    out, lse = _ops.FWD(q, k, v, 0.25, causal)
    torch.library.opcheck(_ops.BWD, (torch.ones_like(out), q, k, v, out, lse, 0.25, causal, True))


def loss_and_gradients(function, inputs, **arguments):
    out = function(*inputs, **arguments)
    loss = (out * torch.arange(out.shape[-1])).sum()
    return out.detach(), torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_into_one_graph(backend):
    torch._dynamo.reset()
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=backend)
    inputs = tensors()
    expected = loss_and_gradients(flash_attn_func, inputs, causal=True)
    torch.testing.assert_close(loss_and_gradients(compiled, inputs, causal=True), expected)
    with torch.no_grad():
        torch.testing.assert_close(compiled(*inputs, causal=True), expected[0])
    with torch.inference_mode():
        torch.testing.assert_close(compiled(*inputs, causal=True), expected[0])


def test_one_compiled_graph_serves_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_func, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for seqlen in (193, 64, 77):
        inputs = tensors(seqlen=seqlen)
        torch.testing.assert_close(loss_and_gradients(compiled, inputs), loss_and_gradients(flash_attn_func, inputs))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


def test_a_wrong_call_is_refused_while_compiling():
    torch._dynamo.reset()
    q, k, v = tensors()
    with pytest.raises(Exception, match="k must have q's dtype"):
        torch.compile(flash_attn_func, fullgraph=True, backend="eager")(q, k.half(), v)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_fake_results_match_real_ones(dtype):
    inputs = tensors(dtype)
    real = flash_attn_func(*inputs, return_attn_probs=True)
    meta = flash_attn_func(*[x.detach().to("meta") for x in inputs], return_attn_probs=True)
    for a, b in zip(real, meta, strict=True):
        assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_casts_float32(compiled):
    function = torch.compile(flash_attn_func, fullgraph=True, backend="aot_eager") if compiled else flash_attn_func
    inputs = tensors()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, grads = loss_and_gradients(function, inputs)
        mixed = function(inputs[0].bfloat16(), *inputs[1:])
    assert out.dtype == mixed.dtype == torch.bfloat16
    assert all(g.dtype == torch.float32 for g in grads)
    torch.testing.assert_close(out, flash_attn_func(*[x.bfloat16() for x in inputs]))
    assert function(*inputs).dtype == torch.float32


def test_autocast_leaves_half_and_double_precision_alone():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert flash_attn_func(*tensors(torch.float16)).dtype == torch.float16
        assert flash_attn_func(*tensors(torch.float64)).dtype == torch.float64


def test_activation_checkpointing():
    inputs = tensors()
    torch.testing.assert_close(
        loss_and_gradients(lambda *x: checkpoint(flash_attn_func, *x, use_reentrant=False), inputs),
        loss_and_gradients(flash_attn_func, inputs),
    )


def test_eager_and_operator_share_one_formula():
    inputs = tensors()
    torch.testing.assert_close(
        loss_and_gradients(lambda *x: _ops.ATTENTION(*x, 0.25, True, True)[0], inputs),
        loss_and_gradients(flash_attn_func, inputs, causal=True, deterministic=True),
        rtol=0,
        atol=0,
    )


def test_export():
    class Model(torch.nn.Module):
        def forward(self, q, k, v):
            return flash_attn_func(q, k, v, causal=True)

    inputs = tuple(tensors(requires_grad=False))
    program = torch.export.export(Model(), inputs)
    torch.testing.assert_close(program.module()(*inputs), flash_attn_func(*inputs, causal=True))


def test_no_work_for_gradients_nobody_wants():
    inputs = tensors()
    with torch.no_grad():
        assert flash_attn_func(*inputs).grad_fn is None
    assert flash_attn_func(*tensors(requires_grad=False)).grad_fn is None
    assert flash_attn_func(*inputs).grad_fn is not None


# Everything beside plain attention.


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def general_arguments(softcap=0.0, dropout_p=0.0):
    """What fwd_general, attention_general and attention_packed have after their tensors, block_table left out."""
    numbers = {"seqused_q": None, "seqused_k": int32(193, 50), "leftpad_k": int32(3, 0)}
    sink = torch.randn(4).requires_grad_()
    rng_state = torch.tensor([2**40 + 7, 3]) if dropout_p else None
    tensors = (None, None, *numbers.values(), torch.rand(2, 4), sink, rng_state)
    return (*tensors, 193, 193, 0.25, True, 50, -1, 100, softcap, dropout_p, 3)


@pytest.mark.parametrize("arguments", [general_arguments(softcap=5.0), general_arguments(dropout_p=0.3)])
def test_opcheck_of_every_feature(arguments):
    q, k, v = tensors()
    torch.library.opcheck(_ops_general.ATTENTION_GENERAL, (q, k, v[..., :8], *arguments, False))
    torch.library.opcheck(
        _ops_general.ATTENTION_PACKED, (q, torch.randn(2, 193, 2, 2, 16).requires_grad_(), *arguments, True)
    )
    torch.library.opcheck(
        _ops_general.ATTENTION_PACKED, (None, torch.randn(2, 193, 3, 4, 16).requires_grad_(), *arguments, True)
    )
    detached = [x.detach() if isinstance(x, torch.Tensor) else x for x in (q, k, v, *arguments)]
    torch.library.opcheck(_ops_general.FWD_GENERAL, (*detached[:8], None, *detached[8:]))
    out, lse = _ops_general.FWD_GENERAL(*detached[:8], None, *detached[8:])
    gradients = [torch.empty_like(x) for x in detached[:3]]
    torch.library.opcheck(
        _ops_general.BWD_GENERAL,
        (torch.ones_like(out), *detached[:3], out, lse, torch.ones_like(lse), *gradients, *detached[3:], True),
    )


def test_opcheck_of_packed_sequences():
    q, k, v = (x.detach()[0].requires_grad_() for x in tensors())
    bounds = int32(0, 100, 193)
    values = (100, 100, 0.25, True, -1, -1, 0, 0.0, 0.0, 0)
    arguments = (bounds, bounds, *general_arguments()[2:5], None, None, None, *values)
    torch.library.opcheck(_ops_general.ATTENTION_GENERAL, (q, k, v, *arguments, False))


def test_opcheck_of_caches_and_rotary_embedding():
    q, k = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 2, 8)
    cos, sin, lengths, table = torch.rand(40, 3), torch.rand(40, 3), int32(3, 9), int32(2, 0, 1, 3).view(2, 2)
    caches = torch.randn(4, 20, 2, 8), torch.randn(4, 20, 2, 8)
    for index, pages in ((int32(2, 0), None), (None, table)):
        torch.library.opcheck(_ops_cache.APPEND, (k, k, *caches, lengths, 0, index, pages))
        torch.library.opcheck(_ops_cache.APPEND, (k, k, *caches, None, 5, index, pages))
        for lengths_or_one, padding in (((lengths, -1), int32(1, 0)), ((None, 5), None)):
            options = (
                0.3,
                True,
                *lengths_or_one,
                pages,
                0,
                5,
                -1,
                padding,
                index,
                torch.rand(4),
                torch.rand(4),
                0,
                2.0,
            )
            torch.library.opcheck(_ops_cache.DECODE, (q, *caches, *options))
            torch.library.opcheck(_ops_cache.DECODE, (q[0], *caches, *options, int32(0, 1, 3), 2))
            torch.library.opcheck(_ops_cache.KVCACHE, (q, *caches, k, k, cos, sin, True, *options))
            torch.library.opcheck(_ops_cache.KVCACHE, (q, *caches, k, k, None, None, True, *options))
            with pytest.raises(ValueError, match="q is on cpu, and another tensor on meta"):
                _ops_cache.DECODE(q, caches[0], caches[1].to("meta"), *options)
    bounds = int32(0, 2, 6)
    torch.library.opcheck(
        _ops_cache.ROTARY, (k[0], torch.empty_like(k[0]), cos, sin, None, 2, int32(0, 3), 3, False, True)
    )
    for x, options in ((q, (lengths, 0, None, 3)), (q.flatten(0, 1), (lengths, 0, bounds, 4))):
        torch.library.opcheck(_ops_cache.ROTARY_EMBEDDING, (x.requires_grad_(), cos, sin, *options, True, False))


SLOPES = torch.tensor([0.1, 0.2, 0.3, 0.4])
CALLS = {
    "window": lambda q, kv, sink: flash_attn.flash_attn_func(
        q, *kv.unbind(2), window_size=(20, 0), softcap=5.0, alibi_slopes=SLOPES, learnable_sink=sink
    ),
    "kvpacked": lambda q, kv, sink: flash_attn.flash_attn_kvpacked_func(q, kv, causal=True),
    "lse": lambda q, kv, sink: sum(
        x.sum() for x in flash_attn.flash_attn_kvpacked_func(q, kv, attention_chunk=50, return_lse=True)
    ),
    "varlen": lambda q, kv, sink: flash_attn.flash_attn_varlen_kvpacked_func(
        q.flatten(0, 1), kv.flatten(0, 1), int32(0, 90, 386), int32(0, 100, 386), 296, 286, learnable_sink=sink
    ),
    "plain lse": lambda q, kv, sink: flash_attn.flash_attn_func(q, *kv.unbind(2), return_lse=True)[1],
}


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_every_function_compiles_into_one_graph(call, backend):
    torch._dynamo.reset()
    inputs = (torch.randn(2, 193, 4, 16), torch.randn(2, 193, 2, 2, 16), torch.randn(4))
    leaves = [x.requires_grad_() for x in inputs]

    def loss(function):
        found = function(*leaves).square().sum()
        return found.detach(), *torch.autograd.grad(found, leaves, allow_unused=True)

    torch.testing.assert_close(loss(torch.compile(call, fullgraph=True, backend=backend)), loss(call))


def test_one_compiled_graph_of_packed_tensors_serves_all_lengths():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn.flash_attn_qkvpacked_func, fullgraph=True, backend=counter, dynamic=True)
    counts = []
    for seqlen in (193, 64, 77):
        qkv = torch.randn(2, seqlen, 3, 2, 16).requires_grad_()
        found, wanted = (f(qkv, causal=True) for f in (compiled, flash_attn.flash_attn_qkvpacked_func))
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(*(torch.autograd.grad(x.square().sum(), qkv) for x in (found, wanted)))
        counts.append(counter.frame_count)
    assert counts[0] == counts[-1] > 0


def test_dropout_compiles():
    torch._dynamo.reset()
    qkv = torch.randn(1, 100, 3, 2, 16).requires_grad_()
    compiled = torch.compile(flash_attn.flash_attn_qkvpacked_func, fullgraph=True, backend="aot_eager")
    out, _, probs = compiled(qkv, 0.5, return_attn_probs=True)
    v = qkv.unbind(2)[2]
    kept = probs.clamp(min=0)[:, :, :100, :100] / 0.5
    torch.testing.assert_close(torch.einsum("bhij,bjhd->bihd", kept, v), out, rtol=1e-4, atol=1e-4)
    (grad,) = torch.autograd.grad(out.sum(), qkv)
    assert grad.isfinite().all()


def test_a_decoding_step_compiles():
    torch._dynamo.reset()
    caches = torch.randn(2, 30, 2, 8), torch.randn(2, 30, 2, 8)
    q, k, cos, sin = torch.randn(2, 1, 4, 8), torch.randn(2, 1, 2, 8), torch.rand(30, 4), torch.rand(30, 4)

    def step(k_cache, v_cache, lengths):
        return flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cos, sin, lengths, causal=True)

    for lengths in (int32(3, 29), 7):
        found, wanted = ([x.clone() for x in caches] for _ in range(2))
        out = torch.compile(step, fullgraph=True, backend="aot_eager")(*found, lengths)
        torch.testing.assert_close((out, *found), (step(*wanted, lengths), *wanted))


def test_rotary_embedding_compiles():
    torch._dynamo.reset()
    x, cos, sin = torch.randn(2, 5, 4, 8).requires_grad_(), torch.rand(30, 4), torch.rand(30, 4)
    x16 = x.detach().bfloat16().requires_grad_()

    def model(x, inplace):
        return apply_rotary_emb(x * 2, cos, sin, inplace=inplace, seqlen_offsets=int32(3, 20))

    for leaf in (x, x16):
        for inplace in (False, True):
            found = torch.compile(model, fullgraph=True, backend="aot_eager")(leaf, inplace)
            wanted = model(leaf, inplace)
            torch.testing.assert_close(found, wanted)
            torch.testing.assert_close(*(torch.autograd.grad(y.square().sum(), leaf) for y in (found, wanted)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fake_results_of_general_calls_match_real_ones(dtype):
    inputs = tensors(dtype, requires_grad=False)
    bounds = int32(0, 100, 193)
    for call in (
        lambda q, k, v, bounds: flash_attn_func(q, k, v[..., :5], dropout_p=0.1, return_attn_probs=True),
        lambda q, k, v, bounds: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], bounds, bounds, 100, 100, 0.1, window_size=(3, 3), return_attn_probs=True
        ),
        lambda q, k, v, bounds: flash_attn.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True),
    ):
        real, meta = call(*inputs, bounds), call(*(x.to("meta") for x in (*inputs, bounds)))
        for a, b in zip(real, meta, strict=True):
            assert (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride())


def test_autocast_of_packed_tensors():
    qkv = torch.randn(2, 9, 3, 2, 16).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = flash_attn.flash_attn_qkvpacked_func(qkv, window_size=(3, 0))
    assert out.dtype == torch.bfloat16
    assert torch.autograd.grad(out.sum(), qkv)[0].dtype == torch.float32


@pytest.mark.parametrize("options", [{}, {"window_size": (3, 0)}])
def test_function_transforms_are_refused(options):
    q = torch.randn(2, 1, 5, 2, 8)
    with pytest.raises(RuntimeError):
        torch.func.vmap(torch.func.grad(lambda x: flash_attn_func(x, x, x, **options).sum()))(q)


VMAPPED = [
    lambda x: flash_attn_func(x, x, x, causal=True),
    lambda x: flash_attn_func(x, x, x, return_lse=True)[1],
    lambda x: flash_attn_func(x, x, x[..., :4], window_size=(2, 0)),
    lambda x: flash_attn.flash_attn_varlen_func(x[0], x[0], x[0], int32(0, 1, 5), int32(0, 1, 5), 4, 4),
    lambda x: _ops.FWD_OUTPUT(x, x, x, True),
    lambda x: _ops.FWD_OUTPUT(x, x, x),
    lambda x: _ops_general.FWD_GENERAL_OUTPUT(x[0], x[0], x[0], int32(0, 1, 5), int32(0, 1, 5), 4, 4, True),
]


@pytest.mark.parametrize("call", VMAPPED)
def test_vmap_keeps_the_gradient(call):
    """Inside of it no tensor says that it wants one."""
    x = torch.randn(3, 1, 5, 2, 8, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    out, wanted = torch.func.vmap(call)(leaves[0]), torch.stack([call(each) for each in x])
    assert torch.equal(out, wanted)
    by_leaf = leaves[1].unbind()
    # The functions, of leaves that say so; the operators have no gradient outside of vmap.
    if call not in VMAPPED[4:]:
        grads = torch.autograd.grad(sum(call(each).square().sum() for each in by_leaf), leaves[1])
        torch.testing.assert_close(torch.autograd.grad(out.square().sum(), leaves[0]), grads)
    else:
        assert torch.autograd.grad(out.square().sum(), leaves[0])[0].abs().max() > 0
    with torch.no_grad():
        assert torch.equal(torch.func.vmap(call, in_dims=1)(x.transpose(0, 1)), wanted)
    with pytest.raises(RuntimeError):  # rather than zeros
        torch.func.grad(lambda x: torch.func.vmap(call)(x).sum())(x)


def test_public_names():
    assert set(flash_attn.__all__) >= {"__version__", "flash_attn_func", "supported"}
    assert all(hasattr(flash_attn, name) for name in flash_attn.__all__)


def outputs():
    """Each overload ``output`` with its arguments, the operator that it is the first result of, and that one's."""
    torch.manual_seed(0)
    q, k, v = tensors(torch.float16, requires_grad=False, seqlen=9)
    new, angles = torch.randn(2, 2, 2, 16).half(), torch.randn(9, 4)
    lengths, scale = torch.tensor([3, 5], dtype=torch.int32), 16**-0.5
    cache, rotary = (q, k, v), (new, new, angles.cos(), angles.sin(), True)
    packed, bounds = [x[0] for x in (q, k, v)], torch.tensor([0, 3, 9], dtype=torch.int32)
    small, ones = [x.to(torch.float8_e4m3fn) for x in (q, k, v)], [torch.rand(2, 2) for _ in range(3)]
    options = (None,) * 6 + (9, 9, scale, True, -1, -1, 0, 0.0, 0)
    return [
        (_ops.FWD_OUTPUT, (q, k, v, True), _ops.FWD, (q, k, v, scale, True)),
        (_ops.FWD_OUTPUT, (q, k, v, False, 0.3), _ops.FWD, (q, k, v, 0.3, False)),
        (
            _ops_general.FWD_GENERAL_OUTPUT,
            (*packed, bounds, bounds, 6, 6, True),
            _ops_general.FWD_GENERAL,
            (*packed, bounds, bounds, *(None,) * 7, 6, 6, scale, True, -1, -1, 0, 0.0, 0.0, 0),
        ),
        (_ops_cache.DECODE_OUTPUT, (*cache, True, lengths), _ops_cache.DECODE, (*cache, scale, True, lengths)),
        (_ops_cache.DECODE_OUTPUT, (*cache, False, None, 4), _ops_cache.DECODE, (*cache, scale, False, None, 4)),
        (
            _ops_cache.KVCACHE_OUTPUT,
            (*cache, *rotary, True, lengths, -1, None, 0.3),
            _ops_cache.KVCACHE,
            (*cache, *rotary, 0.3, True, lengths),
        ),
        (_ops_fp8.FWD_FP8_OUTPUT, (*small, *ones, True), _ops_fp8.FWD_FP8, (*small, *ones, *options)),
    ]


@pytest.mark.parametrize("number", range(len(outputs())))
def test_output_alone(number):
    output, arguments, operator, its_arguments = outputs()[number]
    assert torch.equal(output(*arguments), operator(*its_arguments)[0])
    assert torch.equal(_ops.direct(output)(*arguments), operator(*its_arguments)[0])
    if arguments[0].dtype is not torch.float8_e4m3fn:  # which opcheck has no arithmetic for
        torch.library.opcheck(output, arguments)
    with pytest.raises(ValueError, match="q is on cpu, and another tensor on meta"):
        output(arguments[0], arguments[1].to("meta"), *arguments[2:])
