"""The Triton kernels on random cases, in memory full of NaN, and the models that use them and the attention kernels."""

import os
import types

import pytest
import torch
import torch.nn.functional as F
from memory import poison
from triton_cases import draw_loss, draw_norm, draw_rounding, run_loss, run_norm, run_rounding

from flash_attn.fp8 import quantize, rotate_and_quantize
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.ops.triton.layer_norm import layer_norm_fn, rms_norm_fn
from flash_attn.utils.generation import InferenceParams

FIRST = int(os.environ.get("FLASH_ATTN_TEST_SEED", "0"))
# Fewer of them: Triton compiles about a second for each.
CASES = int(os.environ.get("FLASH_ATTN_TEST_CASES", "200")) // 20
WORDS = 500


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_norm(seed):
    case = draw_norm(seed, rows=600, columns=9000)
    wrong = run_norm(case, before=poison)
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_loss(seed):
    case = draw_loss(seed, columns=140000)
    wrong = run_loss(case, before=poison)
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.skipif(torch.cuda.get_device_capability() < (8, 9), reason="this GPU does not convert to FP8")
@pytest.mark.parametrize("seed", range(FIRST, FIRST + CASES))
def test_rounding(seed):
    case = draw_rounding(seed)
    wrong = run_rounding(case, before=poison)
    assert not wrong, "\n".join([str(case), *wrong])


@pytest.mark.parametrize("rounded", [quantize, rotate_and_quantize])
def test_nan_stays_nan(rounded):
    """In its element, or in its whole row if that is rotated; never a finite number."""
    x = torch.randn(1, 9, 2, 64, device="cuda", dtype=torch.bfloat16)
    x[0, 4, 1, 7] = float("nan")
    found = rounded(x)[0].float().isnan()
    assert found[0, 4, 1].sum() == (1 if rounded is quantize else 64)
    found[0, 4, 1] = False
    assert not found.any()


def test_long_rows_are_for_torch():
    """What a program's registers cannot hold has the same results."""
    x, weight = torch.randn(3, 40000, device="cuda", dtype=torch.bfloat16), torch.ones(40000, device="cuda")
    wanted = F.rms_norm(x.double(), (40000,), eps=1e-6)
    assert (rms_norm_fn(x, weight, None).double() - wanted).abs().max() <= 2**-8 * wanted.abs().max()


def test_dropout_of_a_norm_is_seeded_and_captured():
    x, weight = torch.ones(64, 256, device="cuda"), torch.ones(256, device="cuda")

    def mask():
        return layer_norm_fn(x, weight, None, dropout_p=0.5, return_dropout_mask=True)[1]

    torch.manual_seed(1)
    first, second = mask(), mask()
    torch.manual_seed(1)
    assert torch.equal(mask(), first)
    assert not torch.equal(first, second)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = mask()
    masks = []
    for _ in range(2):
        graph.replay()
        masks.append(result.clone())
    assert not torch.equal(*masks)


def model_of(**changes):
    config = types.SimpleNamespace(
        vocab_size=WORDS, hidden_size=512, num_hidden_layers=3, num_attention_heads=8, max_position_embeddings=0,
        n_inner=1024, activation_function="swiglu", layer_norm_epsilon=1e-5, initializer_range=0.05, attn_pdrop=0.0,
        resid_pdrop=0.0, embd_pdrop=0.0, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, rms_norm=True,
        rotary_emb_fraction=1.0, n_head_kv=2, use_flash_attn=True, fused_dropout_add_ln=True, residual_in_fp32=True,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return GPTLMHeadModel(config, device="cuda", dtype=torch.bfloat16)


def exact_and_plain():
    """The same weights in float64, and in bfloat16 by plain torch, whose errors are the measure of ours."""
    models = [model_of(use_flash_attn=False, fused_dropout_add_ln=False, residual_in_fp32=False) for _ in range(2)]
    return models[0].double(), models[1]


def loss_of(model, ids):
    logits = model(ids).logits[:, :-1].flatten(0, 1)
    return F.cross_entropy(logits.double(), ids[:, 1:].flatten())


def test_logits_and_gradients():
    ids = torch.randint(WORDS, (2, 333), device="cuda")
    ours, (exact, plain) = model_of(), exact_and_plain()
    with torch.no_grad():
        wanted = exact(ids).logits
        error, allowed = ((model(ids).logits.double() - wanted).abs().max() for model in (ours, plain))
    assert error <= 2 * allowed
    for model in (ours, exact, plain):
        loss_of(model, ids).backward()
    for (name, found), wanted, other in zip(
        ours.named_parameters(), exact.parameters(), plain.parameters(), strict=True
    ):
        error, allowed = ((p.grad.double() - wanted.grad).norm() for p in (found, other))
        assert error <= 2 * allowed, name


def test_cache_and_graph():
    ids = torch.randint(WORDS, (3, 200), device="cuda")
    model, (exact, plain) = model_of().eval(), exact_and_plain()
    params, pieces = InferenceParams(200, 3), []
    with torch.no_grad():
        for start, end in ((0, 120), (120, 121), (121, 150), (150, 200)):
            pieces.append(model(ids[:, start:end], inference_params=params).logits)
            params.seqlen_offset = end
        wanted = exact(ids).logits
        allowed = (plain(ids).logits.double() - wanted).abs().max()
    assert (torch.cat(pieces, dim=1).double() - wanted).abs().max() <= 2 * allowed
    # A smaller batch and a shorter sequence use the memory that is there.
    for batch, length in ((3, 150), (2, 130)):
        options = {"max_length": length, "return_dict_in_generate": True, "output_scores": True}
        graph = model.generate(ids[:batch, :100], cg=True, **options)
        again = model.generate(ids[:batch, :100], cg=True, **options)
        assert torch.equal(graph.sequences, again.sequences)
        taught = model.generate(ids[:batch, :100], teacher_outputs=graph.sequences, **options)
        # The number of splits may differ, and with it the last bit.
        for found, wanted in zip(graph.scores, taught.scores, strict=True):
            assert (found - wanted).abs().max() <= 2 * allowed


@pytest.mark.parametrize("inplace", [False, True])
def test_compiled(inplace):
    """What torch.compile makes of the norm and the loss is what the kernels give."""
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    def step(x, residual, weight, labels):
        out, total = rms_norm_fn(x, weight, None, residual, prenorm=True)
        return CrossEntropyLoss(lse_square_scale=0.1, inplace_backward=inplace)(out + total, labels)

    def tensors():
        torch.manual_seed(0)
        leaves = [torch.randn(64, 512, device="cuda", requires_grad=True) for _ in range(2)]
        weight = torch.randn(512, device="cuda", requires_grad=True)
        return [*leaves, weight, torch.randint(512, (64,), device="cuda")]

    found, wanted = tensors(), tensors()
    torch.compile(step, fullgraph=True)(*found).backward()
    step(*wanted).backward()
    for one, other in zip(found[:3], wanted[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad)
