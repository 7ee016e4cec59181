"""Checks and times the memory-bound Triton kernels: their results against their twins, their time
against the bytes that they must move.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from bench.gpu.cases import Case, Shape, make_batch
from torch import Tensor

from quire.kernels.attention_options import AttentionOptions
from quire.kernels.reference import layers as reference
from quire.kernels.reference import paged as twins
from quire.kernels.reference import sampling as reference_sampling

_VOCAB_SIZE = 128_256


@dataclass(frozen=True, kw_only=True)
class StreamCase:
    """A kernel on its input. Kernel and twin return what they wrote, on tensors of their own."""

    name: str
    kernel: Callable[[], tuple[Tensor, ...]]
    twin: Callable[[], tuple[Tensor, ...]]
    num_bytes: int
    """Bytes that must be read and written, once."""


def stream_cases(shape: Shape, device: torch.device) -> Iterator[StreamCase]:
    """For a decode batch and for a chunk of a prompt."""
    for num_tokens in (64, 2048):
        yield from _layer_cases(shape, num_tokens, device)
    yield from _decode_cases(shape, 64, device)
    for num_rows in (1, 64):
        yield from _sample_cases(num_rows, _VOCAB_SIZE, device)
    yield _adjust_case(64, _VOCAB_SIZE, device)


def _layer_cases(shape: Shape, num_tokens: int, device: torch.device) -> Iterator[StreamCase]:
    """One case for each kernel of a layer besides attention."""
    from quire.kernels.triton import elementwise as triton_elementwise
    from quire.kernels.triton import rotary as triton_rotary

    num_heads, num_kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    num_channels, dtype = num_heads * head_size, shape.dtype
    rng = torch.Generator(device).manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=rng, device=device)

    x, residual = randn(2, num_tokens, num_channels).to(dtype)
    weight = randn(num_channels).to(dtype)
    yield StreamCase(
        name=f"rms_norm {num_tokens}",
        kernel=lambda: triton_elementwise.rms_norm(x, weight, eps=1e-5, residual_TC=residual),
        twin=lambda: reference.rms_norm(x, weight, eps=1e-5, residual_TC=residual),
        num_bytes=4 * x.nbytes,
    )
    gate_up = randn(num_tokens, 7 * num_channels).to(dtype)
    yield StreamCase(
        name=f"silu_and_mul {num_tokens}",
        kernel=lambda: (triton_elementwise.silu_and_mul(gate_up),),
        twin=lambda: (reference.silu_and_mul(gate_up),),
        num_bytes=gate_up.nbytes * 3 // 2,
    )
    qkv = randn(num_tokens, num_heads + 2 * num_kv_heads, head_size).to(dtype)
    angles = randn(num_tokens, head_size // 2)
    cos, sin = angles.cos(), angles.sin()
    slots = torch.randperm(2 * num_tokens, device=device)[:num_tokens]
    # In blocks of one token, any number of which is a cache of whole blocks.
    caches = torch.zeros(
        4, 2 * num_tokens, 1, num_kv_heads, head_size, dtype=dtype, device=device
    ).unbind()

    def rotate(
        function: Callable[..., Tensor], k_cache: Tensor, v_cache: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: (function(qkv, cos, sin, k_cache, v_cache, slots), k_cache, v_cache)

    yield StreamCase(
        name=f"rotate_and_write_kv {num_tokens}",
        kernel=rotate(triton_rotary.rotate_and_write_kv, caches[0], caches[1]),
        twin=rotate(twins.rotate_and_write_kv, caches[2], caches[3]),
        num_bytes=2 * qkv.nbytes + 2 * cos.nbytes + slots.nbytes,
    )


def _decode_cases(shape: Shape, num_rows: int, device: torch.device) -> Iterator[StreamCase]:
    """Decodes after 4096 tokens: over a float8 cache, in a window, with a soft cap."""
    from quire.kernels.triton.backend import TritonBackend

    batch = make_batch(Case(name="", rows=[(4096, 1)] * num_rows), shape, device)
    attend: Callable[..., Tensor] = TritonBackend().attend
    twin: Callable[..., Tensor] = twins.paged_attention
    for name, options, cache_dtype in (
        ("float8", AttentionOptions(k_scale=0.02, v_scale=0.02), torch.float8_e4m3fn),
        ("window 1024", AttentionOptions(window=1024), torch.bfloat16),
        ("soft cap 50", AttentionOptions(soft_cap=50.0), torch.bfloat16),
    ):
        arguments = (
            batch.q,
            (batch.k_cache.float() / options.k_scale).to(cache_dtype),
            (batch.v_cache.float() / options.v_scale).to(cache_dtype),
        )
        shared = {"scale": batch.scale, "options": options}
        rows = batch.step_rows(num_decodes=num_rows)
        tokens = num_rows * (options.window or 4096)
        yield StreamCase(
            name=f"decode {num_rows} x 4096, {name}",
            kernel=partial(_in_tuple, partial(attend, *arguments, rows, **shared)),
            twin=partial(_in_tuple, partial(twin, *arguments, **batch.tables(), **shared)),
            num_bytes=2 * tokens * shape.num_kv_heads * shape.head_size * cache_dtype.itemsize,
        )


def _sample_cases(num_rows: int, vocab_size: int, device: torch.device) -> Iterator[StreamCase]:
    """Sampling of rows that are greedy, that keep all tokens, and that are limited."""
    from quire.kernels.triton import sample as triton_sample

    rng = torch.Generator(device).manual_seed(0)
    logits = torch.randn(num_rows, vocab_size, generator=rng, device=device) * 3
    ones = torch.ones(num_rows, device=device)
    positions = torch.arange(num_rows, device=device)
    for name, temperature, top_k, top_p in (
        ("greedy", 0.0, 0, 1.0),
        ("no limits", 1.0, 0, 1.0),
        ("top-k 50", 1.0, 50, 1.0),
        ("top-p 0.95", 1.0, 0, 0.95),
    ):
        parameters = {
            "temperature_S": ones * temperature,
            "top_k_S": (ones * top_k).int(),
            "top_p_S": ones * top_p,
            "min_p_S": ones * 0,
            "seed_S": positions,
            "position_S": positions,
        }
        yield StreamCase(
            name=f"sample {num_rows}, {name}",
            kernel=partial(_in_tuple, partial(triton_sample.sample, logits, **parameters)),
            twin=partial(_in_tuple, partial(reference_sampling.sample, logits, **parameters)),
            num_bytes=logits.nbytes,
        )


def _adjust_case(num_rows: int, vocab_size: int, device: torch.device) -> StreamCase:
    """Penalties on 2,000 tokens of each row."""
    from quire.kernels.triton import logits as triton_logits

    rng = torch.Generator(device).manual_seed(0)
    plain = torch.randn(num_rows, vocab_size, generator=rng, device=device)
    places = torch.arange(2000 * num_rows, device=device)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    arguments = {
        "biased_rows_A": nothing,
        "biased_ids_A": nothing,
        "bias_A": nothing.float(),
        "seen_rows_E": (places // 2000).int(),
        "seen_ids_E": (places % 2000 * (vocab_size // 2000)).int(),
        "seen_counts_E": (places % 3).int(),
        "presence_S": torch.full((num_rows,), 0.1, device=device),
        "frequency_S": torch.full((num_rows,), 0.2, device=device),
        "repetition_S": torch.full((num_rows,), 1.1, device=device),
        "masked_rows_K": nothing,
        "mask_KW": nothing[:, None],
    }

    def call(function: Callable[..., None], logits: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        # Another value each time, as it changes the logits in place: the same on both sides,
        # which are called equally often before they are compared.
        def adjust() -> tuple[Tensor, ...]:
            function(logits, **arguments)
            return (logits,)

        return adjust

    return StreamCase(
        name=f"adjust {num_rows} x 2000",
        kernel=call(triton_logits.adjust_logits, plain.clone()),
        twin=call(reference_sampling.adjust_logits, plain.clone()),
        num_bytes=(12 + 8) * len(places),
    )


def _in_tuple(function: Callable[[], Tensor]) -> tuple[Tensor, ...]:
    return (function(),)
