"""The launches of every kernel for each supported GPU, which `compile_check` compiles.

A case calls a kernel's own launcher on tensors without memory (`meta`) inside
`tools.kernels.captured`. So tiles, options and Triton's specialisations are those of real launches.

`shipped_cases` are for the GPUs that every launch configuration was chosen for; `portable_cases`
are for other GPUs, in bfloat16 with heads of 128.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from tools.kernels.captured import Launch, captured
from torch import Tensor

from quire.kernels.attention_options import PLAIN, AttentionOptions
from quire.kernels.grouped import GroupedWeight
from quire.kernels.ops import Embed, Linear
from quire.kernels.shared_prefix import SharedSplits
from quire.kernels.torch.linear import PlainLinear
from quire.kernels.triton import all_reduce as triton_all_reduce
from quire.kernels.triton import elementwise as triton_elementwise
from quire.kernels.triton import kv_write as triton_kv_write
from quire.kernels.triton import logits as triton_logits
from quire.kernels.triton import rotary as triton_rotary
from quire.kernels.triton import sample as triton_sample
from quire.kernels.triton.all_reduce import (
    MAX_PROGRAMS,
    MAX_RANKS,
    Peers,
    all_reduce_kernel,
    all_reduce_two_shot_kernel,
)
from quire.kernels.triton.decode import decode_attention, decode_kernel, merge_kernel
from quire.kernels.triton.elementwise import (
    rms_norm_kernel,
    silu_and_mul_kernel,
    wide_norm_kernel,
)
from quire.kernels.triton.experts import (
    ExpertWeights,
    SortedPairs,
    experts_kernel,
    multiply_down,
    multiply_up,
)
from quire.kernels.triton.grouped import GroupedLinear, grouped_kernel
from quire.kernels.triton.kv_write import write_kernel
from quire.kernels.triton.launch import (
    AMD_CAPABILITY,
    DTYPES,
    HEAD_SIZES,
    PREFILL_SPLIT_TOKENS,
    SHARED_PAIRS,
    SPLIT_TOKENS,
)
from quire.kernels.triton.logits import adjust_kernel, bias_kernel, mask_kernel
from quire.kernels.triton.low_rank import TritonLowRank, expand_kernel, shrink_kernel
from quire.kernels.triton.prefill import prefill_attention, prefill_kernel
from quire.kernels.triton.prefill_merge import prefill_merge_kernel
from quire.kernels.triton.rotary import rotary_kernel
from quire.kernels.triton.sample import sample_kernel
from quire.kernels.triton.shared import shared_kernel

CAPABILITIES = (80, 90)
"""A100 and H100/H200."""
PORTABLE_CAPABILITIES = (89, 100, 120)
"""L4 and L40S; B200; RTX 50."""
NORM_SIZES = (2048, 8192, 32768)
"""The longest row for each number of warps."""
ROWS, BLOCKS, KV_HEADS = 5, 64, 8
"""Sizes of a case that do not affect the compiled code."""
VOCAB_SIZES = (128256, 50257)
"""A multiple of 16, for which the compiler knows that rows are aligned, and another size."""


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """The launch of one kernel for one model shape."""

    name: str
    kernel: Any
    dtype: torch.dtype
    size: int
    """Size of a head, or of the row that a program handles."""
    capability: int
    start: Callable[[], object]
    """Calls the kernel's launcher, which may launch other kernels too."""

    def launch(self, *, compiles: bool = True) -> Launch:
        """Captures the kernel's launch; compiling it takes a second or two."""
        launches: list[Launch] = []
        with captured(self.capability, launches.append, compiles=compiles):
            self.start()
        (launch,) = (launch for launch in launches if launch.kernel is self.kernel)
        return launch


def shipped_cases(
    *,
    head_sizes: Sequence[int] = HEAD_SIZES,
    dtypes: Sequence[torch.dtype] = DTYPES,
    capabilities: Sequence[int] = CAPABILITIES,
) -> Iterator[KernelCase]:
    """The launch of every kernel for these; `LaunchConfig` says what varies."""
    for dtype, head_size, capability in itertools.product(dtypes, head_sizes, capabilities):
        for name, kernel, start in _head_cases(dtype, head_size):
            yield _case(name, kernel, start, dtype, head_size, capability)
    for dtype, capability in itertools.product(dtypes, capabilities):
        for name, kernel, start, size in (
            *_row_cases(dtype),
            *_grouped_cases(dtype),
            *_low_rank_cases(dtype),
            *_all_reduce_cases(dtype),
        ):
            yield _case(name, kernel, start, dtype, size, capability)
    for capability in capabilities:
        for name, kernel, start, size in _sample_cases():
            yield _case(name, kernel, start, torch.float32, size, capability)


def portable_cases() -> Iterator[KernelCase]:
    """The launch of every kernel in bfloat16 with heads of 128, for GPUs never tested on."""
    yield from shipped_cases(
        head_sizes=(128,),
        dtypes=(torch.bfloat16,),
        capabilities=(*PORTABLE_CAPABILITIES, AMD_CAPABILITY),
    )


def _case(
    name: str,
    kernel: Any,
    start: Callable[[], object],
    dtype: torch.dtype,
    size: int,
    capability: int,
) -> KernelCase:
    return KernelCase(
        name=name, kernel=kernel, dtype=dtype, size=size, capability=capability, start=start
    )


Head = tuple[str, Any, Callable[[], object]]
Row = tuple[str, Any, Callable[[], object], int]


def _head_cases(dtype: torch.dtype, head_size: int) -> Iterator[Head]:
    # 3 heads of a KV head with heads of 64, else 4: both kinds of division are compiled.
    group = 3 if head_size == 64 else 4
    full = AttentionOptions(window=1000, soft_cap=30.0)
    decode = partial(_decode, dtype, head_size, group)
    prefill = partial(_prefill, dtype, head_size, group)
    write, rotate = partial(_write, dtype, head_size), partial(_rotate, dtype, head_size)
    yield "decode", decode_kernel, decode
    yield "prefill", prefill_kernel, prefill
    yield "decode_full", decode_kernel, partial(decode, options=full)
    yield "decode_rest", decode_kernel, partial(decode, is_shared=True)
    yield "shared", shared_kernel, partial(decode, is_shared=True)
    yield "prefill_full", prefill_kernel, partial(prefill, options=full)
    behind = partial(prefill, max_seq_len=2 * PREFILL_SPLIT_TOKENS, num_rows=1)
    yield "prefill_part", prefill_kernel, behind
    yield "prefill_part_full", prefill_kernel, partial(behind, options=full)
    yield "prefill_merge", prefill_merge_kernel, behind
    yield "merge", merge_kernel, decode
    yield "write_kv", write_kernel, write
    yield "rotary_kv", rotary_kernel, rotate
    yield "write_fp8", write_kernel, partial(write, is_float8=True)
    yield "rotary_fp8", rotary_kernel, partial(rotate, is_float8=True)
    if dtype != torch.float32:
        yield "decode_fp8", decode_kernel, partial(decode, is_float8=True)
        yield "shared_fp8", shared_kernel, partial(decode, is_shared=True, is_float8=True)
        yield "prefill_fp8", prefill_kernel, partial(prefill, is_float8=True)
        yield "prefill_part_fp8", prefill_kernel, partial(behind, is_float8=True)


def _meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _ints(*shape: int) -> Tensor:
    return _meta(*shape, dtype=torch.int32)


def _caches(dtype: torch.dtype, head_size: int, is_float8: bool) -> tuple[Tensor, Tensor]:
    dtype = torch.float8_e4m3fn if is_float8 else dtype
    k_cache, v_cache = (_meta(BLOCKS, 16, KV_HEADS, head_size, dtype=dtype) for _ in range(2))
    return k_cache, v_cache


def _decode(
    dtype: torch.dtype,
    head_size: int,
    group: int,
    *,
    options: AttentionOptions = PLAIN,
    is_shared: bool = False,
    is_float8: bool = False,
) -> None:
    q = _meta(ROWS, KV_HEADS * group, head_size, dtype=dtype)
    rows = SHARED_PAIRS // group
    shared = SharedSplits(num_splits_B=_ints(ROWS), rows_XR=_ints(3, rows), splits_X=_ints(3))
    decode_attention(
        q,
        *_caches(dtype, head_size, is_float8),
        torch.empty_like(q),
        block_tables_BM=_ints(ROWS, BLOCKS),
        seq_lens_B=_ints(ROWS),
        max_seq_len=2 * SPLIT_TOKENS,
        scale=0.1,
        options=options,
        shared=shared if is_shared else None,
    )


def _prefill(
    dtype: torch.dtype,
    head_size: int,
    group: int,
    *,
    options: AttentionOptions = PLAIN,
    is_float8: bool = False,
    max_seq_len: int = 50,
    num_rows: int = ROWS,
) -> None:
    q = _meta(100, KV_HEADS * group, head_size, dtype=dtype)
    prefill_attention(
        q,
        *_caches(dtype, head_size, is_float8),
        torch.empty_like(q),
        block_tables_BM=_ints(num_rows, BLOCKS),
        seq_lens_B=_ints(num_rows),
        query_starts_B1=_ints(num_rows + 1),
        first_row=0,
        max_query_len=10 * num_rows,
        max_seq_len=max_seq_len,
        scale=0.1,
        options=options,
    )


def _slots() -> Tensor:
    return _meta(ROWS, dtype=torch.int64)


def _write(dtype: torch.dtype, head_size: int, *, is_float8: bool = False) -> None:
    kv = _meta(ROWS, KV_HEADS, head_size, dtype=dtype)
    triton_kv_write.write_kv(kv, kv, *_caches(dtype, head_size, is_float8), _slots())


def _rotate(dtype: torch.dtype, head_size: int, *, is_float8: bool = False) -> None:
    qkv = _meta(ROWS, 32 + 2 * KV_HEADS, head_size, dtype=dtype)
    angles = _meta(ROWS, head_size // 2)
    caches = _caches(dtype, head_size, is_float8)
    triton_rotary.rotate_and_write_kv(qkv, angles, angles, *caches, _slots())


def _row_cases(dtype: torch.dtype) -> Iterator[Row]:
    for size in NORM_SIZES:
        x = _meta(ROWS, size, dtype=dtype)
        norm = partial(triton_elementwise.rms_norm, x, x[0], eps=1e-5, residual_TC=x)
        yield "rms_norm", rms_norm_kernel, norm, size
        wide = x[0].float()
        wide_norm = partial(triton_elementwise.wide_norm, x, wide, wide, eps=1e-5, is_centred=True)
        yield "wide_norm", wide_norm_kernel, wide_norm, size
    gate_up = _meta(ROWS, 2 * 14336, dtype=dtype)
    silu = partial(triton_elementwise.silu_and_mul, gate_up)
    yield "silu_and_mul", silu_and_mul_kernel, silu, 14336
    pairs = SortedPairs.of(_ints(ROWS, 2), num_experts=8)
    for num_in, num_out in ((2048, 2880), (720, 2048)):
        weight = _meta(num_out, num_in, dtype=dtype)
        x = _meta(ROWS, num_in, dtype=dtype)
        for name, bias in (("experts_bias", (weight[:, 0],) * 8), ("experts_up", ())):
            weights = ExpertWeights.of((weight,) * 8, bias)
            yield name, experts_kernel, partial(multiply_up, x, weights, pairs), num_in
        rows = _meta(2 * ROWS, num_in, dtype=dtype)
        yield "experts_down", experts_kernel, partial(multiply_down, rows, weights, pairs), num_in


def _grouped_cases(dtype: torch.dtype) -> Iterator[Row]:
    for name, group, has_zeros in (("w4", 128, False), ("w4_zeros", 32, True), ("w4_odd", 8, True)):
        weight = GroupedWeight(
            code_OI=_meta(4096, 1024, dtype=torch.uint8),
            scale_OG=_meta(4096, 1024 // group),
            zero_OG=_meta(4096, 1024 // group, dtype=torch.uint8) if has_zeros else None,
            dtype=dtype,
        )
        layer = GroupedLinear.of(weight, _meta(4096, dtype=dtype) if has_zeros else None)
        yield name, grouped_kernel, partial(layer, _meta(ROWS, 1024, dtype=dtype)), 1024


def _low_rank_cases(dtype: torch.dtype) -> Iterator[Row]:
    for num_in in (4096, 2000):
        layer = PlainLinear(_meta(6144, num_in, dtype=dtype))
        program = (
            Embed(weight_VC=_meta(1, num_in, dtype=dtype), out="residual"),
            Linear(name="layers.0.qkv", layer=layer, x="normed", out="qkv"),
        )
        low_rank = TritonLowRank(program)
        low_rank.open(num_slots=8, max_rank=64)
        groups = low_rank.group(_ints(ROWS))
        x, product = _meta(ROWS, num_in, dtype=dtype), _meta(ROWS, 6144, dtype=dtype)
        shrink = partial(low_rank.shrink, "layers.0.qkv", x, groups)
        yield "shrink", shrink_kernel, shrink, num_in
        expand = partial(low_rank.expand, "layers.0.qkv", product, _meta(ROWS, 192), groups)
        yield "expand", expand_kernel, expand, num_in


def _all_reduce_cases(dtype: torch.dtype) -> Iterator[Row]:
    for num_ranks in (2, 4, MAX_RANKS):
        peers = Peers(
            rank=1,
            size=num_ranks,
            buffers_R=_meta(num_ranks, dtype=torch.int64),
            flags_R=_meta(num_ranks, dtype=torch.int64),
            epochs_P=_ints(MAX_PROGRAMS),
        )
        x = _meta(ROWS, 4096, dtype=dtype)
        reduce = partial(triton_all_reduce.all_reduce, x, peers)
        yield "all_reduce", all_reduce_kernel, reduce, num_ranks
        in_two = partial(triton_all_reduce.all_reduce_in_two_shots, x, peers)
        yield "all_reduce_two", all_reduce_two_shot_kernel, in_two, num_ranks


def _sample_cases() -> Iterator[Row]:
    for size in VOCAB_SIZES:
        for name, kernel in (
            ("bias", bias_kernel),
            ("adjust", adjust_kernel),
            ("mask", mask_kernel),
        ):
            yield name, kernel, partial(_adjust, size), size
        yield "sample", sample_kernel, partial(_sample, size), size


def _adjust(vocab_size: int) -> None:
    triton_logits.adjust_logits(
        _meta(ROWS, vocab_size),
        biased_rows_A=_ints(100),
        biased_ids_A=_ints(100),
        bias_A=_meta(100),
        seen_rows_E=_ints(100),
        seen_ids_E=_ints(100),
        seen_counts_E=_ints(100),
        presence_S=_meta(ROWS),
        frequency_S=_meta(ROWS),
        repetition_S=_meta(ROWS),
        masked_rows_K=_ints(2),
        mask_KW=_ints(2, vocab_size // 32),
    )


def _sample(vocab_size: int) -> None:
    triton_sample.sample(
        _meta(ROWS, vocab_size),
        temperature_S=_meta(ROWS),
        top_k_S=_ints(ROWS),
        top_p_S=_meta(ROWS),
        min_p_S=_meta(ROWS),
        seed_S=_meta(ROWS, dtype=torch.int64),
        position_S=_meta(ROWS, dtype=torch.int64),
    )
