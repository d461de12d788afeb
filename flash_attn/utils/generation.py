"""Generation: a prompt is read at once, then a token at a time, with the keys and values of what was read kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import checks
from ..errors import ArgumentError, DeviceError, ShapeError, UnsupportedFeatureError
from ..modules.embedding import GPT2Embeddings

__all__ = [
    "DecoderOnlyOutput",
    "GenerationMixin",
    "InferenceParams",
    "decode",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
    "update_graph_cache",
]


@dataclass
class InferenceParams:
    """What the layers of a model keep of the tokens that they have seen.

    Attributes:
        max_seqlen, max_batch_size: how much room a cache has that a layer has to make.
        seqlen_offset: how many tokens each sequence has had. The caller counts them.
        batch_size_offset: the number of the batch's first sequence in the caches.
        key_value_memory_dict: layer_idx -> (batch, seqlen, 2, Hk, D).
        lengths_per_sample: int32 (B,): those numbers on the GPU, where a CUDA graph can read them.
    """

    max_seqlen: int
    max_batch_size: int
    seqlen_offset: int = 0
    batch_size_offset: int = 0
    key_value_memory_dict: dict[int, Tensor] = field(default_factory=dict)
    lengths_per_sample: Tensor | None = None

    def reset(self, max_seqlen: int, max_batch_size: int) -> None:
        """Begin anew with the same memory."""
        self.max_seqlen = max_seqlen
        self.max_batch_size = max_batch_size
        self.seqlen_offset = 0
        if self.lengths_per_sample is not None:
            self.lengths_per_sample.zero_()


def modify_logits_for_top_k_filtering(logits: Tensor, top_k: int) -> None:
    """Set the logits (..., N) that are not among the ``top_k`` largest to -inf, in place."""
    least = torch.topk(logits, top_k)[0][..., -1:]
    logits.masked_fill_(logits < least, float("-inf"))


def modify_logits_for_top_p_filtering(logits: Tensor, top_p: float) -> None:
    """Set the logits (B, N) of the least likely classes, 1 - ``top_p`` of the probability, to -inf, in place."""
    if top_p <= 0.0 or top_p >= 1.0:
        return
    ascending, classes = torch.sort(logits, descending=False)
    unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
    logits.masked_fill_(unlikely.scatter(1, classes, unlikely), float("-inf"))


def sample(logits: Tensor, top_k: int = 1, top_p: float = 0.0, temperature: float = 1.0) -> Tensor:
    """A class of each row of logits (B, N): (B,).

    Args:
        top_k: draw among so many of the likeliest; 1 takes the likeliest, 0 is no limit.
        top_p: then among the likeliest that have this probability together; 0 is no limit.
        temperature: the logits are divided by it.
    """
    if top_k == 1:
        return logits.argmax(dim=-1)
    if not 0.0 <= top_p <= 1.0 or temperature <= 0.0 or top_k < 0:
        raise ArgumentError(
            "top_p must be in [0, 1], temperature positive and top_k not negative, "
            f"got {top_p}, {temperature} and {top_k}."
        )
    logits = logits / temperature
    if top_k > 0:
        modify_logits_for_top_k_filtering(logits, min(top_k, logits.shape[-1]))
    modify_logits_for_top_p_filtering(logits, top_p)
    return torch.multinomial(torch.softmax(logits, dim=-1), num_samples=1)[:, 0]


@dataclass
class DecoderOnlyOutput:
    """``sequences`` (B, S), prompts included, and ``scores``: the logits (B, N) of each new token, or None."""

    sequences: Tensor
    scores: tuple[Tensor, ...] | None = None


@torch.inference_mode()
def decode(
    input_ids: Tensor,
    model: Any,
    max_length: int,
    top_k: int = 1,
    top_p: float = 0.0,
    temperature: float = 1.0,
    eos_token_id: int | None = None,
    teacher_outputs: Tensor | None = None,
    vocab_size: int | None = None,
    tensor_parallel: int = 1,
    cg: bool = False,
    enable_timing: bool = False,
    output_scores: bool = True,
) -> DecoderOnlyOutput:
    """Continue the prompts, which all have the same length.

    Args:
        input_ids: (B, S).
        model: called with input_ids, position_ids, inference_params and num_last_tokens; its result has logits.
        max_length: of the sequences, prompts included.
        top_k, top_p, temperature: as in :func:`sample`; the default takes the likeliest token.
        eos_token_id: stop when all sequences have this token at the same time.
        teacher_outputs: (B, length): the sequences as far as they are given, whatever the model says.
        vocab_size: classes beyond it are no tokens.
        tensor_parallel: only 1: models are not split between processes.
        cg: decode by a CUDA graph, which is captured for this batch size and kept at the model.
        enable_timing: print how long it took.
        output_scores: keep the logits.
    """
    if checks.tensor_of("input_ids", input_ids).dim() != 2:
        raise ShapeError(f"input_ids must have shape (B, S), got {checks.sizes(input_ids)}.")
    batch_size, prompt = input_ids.shape
    max_length = checks.length_of("max_length", max_length)
    if not 0 < prompt < max_length:
        raise ArgumentError(f"max_length must be more than the prompts' length, {prompt} tokens, got {max_length}.")
    _check_single(tensor_parallel)
    bound = _positions_of(model)
    if vocab_size is not None and vocab_size < 1:
        raise ArgumentError(f"vocab_size must be positive or None, got {vocab_size}.")
    if teacher_outputs is not None and (teacher_outputs.dim() != 2 or teacher_outputs.shape[0] != batch_size):
        raise ShapeError(
            f"teacher_outputs must have shape ({batch_size}, length), got {checks.sizes(teacher_outputs)}."
        )
    if cg and not input_ids.is_cuda:
        raise DeviceError(f"cg=True needs a model on a GPU, input_ids is on {input_ids.device}.")
    if cg:
        model._decoding_cache = update_graph_cache(
            model, getattr(model, "_decoding_cache", None), batch_size, prompt, max_length
        )
        params = model._decoding_cache.inference_params
        params.reset(max_length, batch_size)
    else:
        params = InferenceParams(max_seqlen=max_length, max_batch_size=batch_size)

    def logits_of(tokens: Tensor) -> Tensor:
        if params.seqlen_offset == 0:
            result = model(tokens, inference_params=params, num_last_tokens=1).logits
        else:
            if bound is not None and params.seqlen_offset >= bound:
                raise ArgumentError(
                    f"max_length must be at most {bound + 1}: the model has {bound} positions, got {max_length}."
                )
            positions = torch.full((batch_size, 1), params.seqlen_offset, device=tokens.device)
            if cg:
                result = model._decoding_cache.run(tokens, positions, params.seqlen_offset)
            else:
                result = model(tokens, position_ids=positions, inference_params=params, num_last_tokens=1).logits
        return result[:, -1, :vocab_size]  # type: ignore[no-any-return]

    def tokens_of(logits: Tensor, position: int) -> Tensor:
        if teacher_outputs is not None and position < teacher_outputs.shape[1]:
            return teacher_outputs[:, position]
        return sample(logits, top_k, top_p, temperature)

    start = _now(input_ids) if enable_timing else 0.0
    scores, sequences = [], [input_ids]
    for position in range(prompt, max_length):
        logits = logits_of(sequences[-1])
        if output_scores:
            scores.append(logits.clone())
        tokens = tokens_of(logits, position)
        sequences.append(tokens[:, None])
        params.seqlen_offset = position
        if eos_token_id is not None and bool((tokens == eos_token_id).all()):
            break
    if enable_timing:
        print(f"Prompt processing and decoding: {(_now(input_ids) - start) * 1000:.0f} ms")
    return DecoderOnlyOutput(torch.cat(sequences, dim=1), tuple(scores) if output_scores else None)


def _positions_of(model: Any) -> int | None:
    """How many positions the model has embeddings of; None where it has no bound, as with rotary embeddings."""
    found = [m for m in model.modules() if isinstance(m, GPT2Embeddings)] if isinstance(model, torch.nn.Module) else []
    bounds = [m.max_position_embeddings for m in found if m.max_position_embeddings > 0]
    return min(bounds, default=None)


def _check_single(tensor_parallel: int) -> None:
    if tensor_parallel != 1:
        raise UnsupportedFeatureError(f"tensor_parallel must be 1, got {tensor_parallel}.")


def _now(x: Tensor) -> float:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
    return time.perf_counter()


class GenerationMixin:
    """``generate`` for models."""

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None
    ) -> dict[int, Tensor]:
        raise NotImplementedError

    def generate(
        self,
        input_ids: Tensor,
        max_length: int,
        top_k: int = 1,
        top_p: float = 0.0,
        temperature: float = 1.0,
        return_dict_in_generate: bool = False,
        output_scores: bool = False,
        **kwargs: Any,
    ) -> Tensor | DecoderOnlyOutput:
        """The sequences (B, length), or a :class:`DecoderOnlyOutput`; the arguments are those of :func:`decode`."""
        output = decode(input_ids, self, max_length, top_k, top_p, temperature, output_scores=output_scores, **kwargs)
        return output if return_dict_in_generate else output.sequences


@dataclass
class DecodingCGCache:
    """A model's captured graphs: ``run(tokens (B, 1), position_ids (B, 1), lengths) -> logits (B, 1, N)``."""

    max_batch_size: int
    max_seqlen: int
    device: torch.device
    dtype: torch.dtype
    inference_params: InferenceParams
    graphs: dict[tuple[int, int], Callable[[Tensor, Tensor, int], Tensor]] = field(default_factory=dict)
    pool: Any = None
    run: Callable[[Tensor, Tensor, int], Tensor] | None = None


@torch.inference_mode()
def update_graph_cache(
    model: Any,
    cache: DecodingCGCache | None,
    batch_size: int,
    seqlen_og: int,
    max_seqlen: int,
    decoding_seqlens: tuple[int, ...] = (1,),
    tensor_parallel: int = 1,
    dtype: torch.dtype | None = None,
    n_warmups: int = 2,
) -> DecodingCGCache:
    """Capture the graphs that are not there yet, for ``decoding_seqlens`` tokens at once.

    A cache of more room serves smaller batches and lengths; a graph is made for each batch size.
    """
    _check_single(tensor_parallel)
    parameter: Tensor = next(iter(model.parameters()))
    dtype = parameter.dtype if dtype is None else dtype
    if (
        cache is None
        or (cache.device, cache.dtype) != (parameter.device, dtype)
        or batch_size > cache.max_batch_size
        or max_seqlen > cache.max_seqlen
    ):
        lengths = torch.full((batch_size,), seqlen_og, dtype=torch.int32, device=parameter.device)
        memory = model.allocate_inference_cache(batch_size, max_seqlen, dtype)
        params = InferenceParams(max_seqlen, batch_size, seqlen_og, 0, memory, lengths)
        cache = DecodingCGCache(batch_size, max_seqlen, parameter.device, dtype, params)
        cache.pool = torch.cuda.graph_pool_handle()
    for seqlen in decoding_seqlens:
        if (batch_size, seqlen) not in cache.graphs:
            cache.graphs[batch_size, seqlen] = _capture(model, cache, batch_size, seqlen, seqlen_og, n_warmups)

    graphs = cache.graphs

    def run(tokens: Tensor, position_ids: Tensor, lengths: int) -> Tensor:
        if (graph := graphs.get((tokens.shape[0], tokens.shape[1]))) is None:
            raise ShapeError(f"There is no graph for tokens of shape {tuple(tokens.shape)}, only {sorted(graphs)}.")
        return graph(tokens, position_ids, lengths)

    cache.run = run
    cache.inference_params.reset(max_seqlen, batch_size)
    return cache


def _capture(
    model: Any, cache: DecodingCGCache, batch_size: int, seqlen: int, seqlen_og: int, n_warmups: int
) -> Callable[[Tensor, Tensor, int], Tensor]:
    params = cache.inference_params
    lengths: Tensor = params.lengths_per_sample  # type: ignore[assignment]
    tokens = torch.zeros((batch_size, seqlen), dtype=torch.int64, device=cache.device)
    positions = torch.zeros_like(tokens)
    # Room for the tokens that the capture writes.
    lengths.fill_(min(seqlen_og, cache.max_seqlen - seqlen))
    before = params.seqlen_offset
    params.seqlen_offset = max(1, seqlen_og)  # decoding, not a prompt

    def logits() -> Tensor:
        result: Tensor = model(tokens, position_ids=positions, inference_params=params, num_last_tokens=seqlen).logits
        return result

    with _side_stream(cache.device):
        for _ in range(n_warmups):
            logits()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=cache.pool):
        result = logits()
    params.seqlen_offset = before

    def run(new_tokens: Tensor, new_positions: Tensor, new_lengths: int) -> Tensor:
        lengths.fill_(new_lengths)
        tokens.copy_(new_tokens)
        positions.copy_(new_positions)
        graph.replay()
        return result

    return run


@contextmanager
def _side_stream(device: torch.device) -> Iterator[None]:
    """What runs before a capture runs beside the current stream, as torch asks for."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
