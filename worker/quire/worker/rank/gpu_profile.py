"""Measures the GPU memory needed besides KV: for the largest steps, and for decode graphs."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from quire.kernels.triton.launch import PREFILL_SPLIT_TOKENS, SPLIT_TOKENS
from quire.worker.rank.graphs import DecodeGraphs
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import MAX_SCORED_TOKENS, StepInput
from quire.worker.step.sampling_batch import Adjustments, Edits, SamplingBatch


def peak_bytes(run: Callable[[StepInput], object], steps: Iterator[StepInput]) -> int:
    """Most bytes that the allocator held during these steps, including weights."""
    torch.cuda.reset_peak_memory_stats()
    for step in steps:
        run(step)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def graph_bytes(make_graphs: Callable[[], DecodeGraphs]) -> int:
    """Bytes of all graphs. The first two are captured and then freed; the others are assumed to be
    as large as the second, since they reuse the memory of the first."""
    free = [_free_bytes()]
    graphs = make_graphs()
    for bucket in list(reversed(graphs.buckets))[:2]:
        graphs.capture(bucket)
        free.append(_free_bytes())
    num_graphs = len(graphs.buckets)
    del graphs
    torch.cuda.empty_cache()
    first = free[0] - free[1]
    return first + (num_graphs - 1) * max(0, free[1] - free[-1])


def _free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def largest_steps(
    config: EngineConfig, *, block_size: int, max_model_len: int
) -> Iterator[StepInput]:
    """A step of chunks that fill the token budget, and one of decodes; each has one row of the
    greatest length.

    All tokens are in block 0 of the cache: only the memory use matters.
    """
    rows, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    row_len = min(num_tokens // rows, block_size)
    starts = np.minimum(np.arange(rows + 1) * row_len, num_tokens)
    num_blocks = -(-max_model_len // block_size)
    seq_lens = np.full(rows, row_len)
    seq_lens[0] = max_model_len
    yield _step(
        num_tokens,
        starts,
        seq_lens,
        num_decodes=0,
        num_blocks=num_blocks,
        num_scored=min(MAX_SCORED_TOKENS, num_tokens - rows),
    )
    seq_lens = np.ones(rows, np.int64)
    seq_lens[0] = max_model_len
    yield _step(rows, np.arange(rows + 1), seq_lens, num_decodes=rows, num_blocks=num_blocks)


def with_adapters(step: StepInput) -> StepInput:
    """A copy of the step in which all rows use adapter slots, which may be empty."""
    return replace(step, adapter_slots_A=np.zeros(len(step.seq_lens_B), np.int32))


def warm_up_steps(
    config: EngineConfig, *, block_size: int, max_model_len: int
) -> tuple[StepInput, StepInput, StepInput]:
    """Three steps: a decode with a chunk; a chunk of one token at a late position of its prompt;
    and decodes with a long common prefix, with every kind of sampling and with tokens of the step
    before. All tokens are in block 0.

    The first has as many tokens as a step may have, most of which belong to no row: ranks use
    another kernel to add large tensors. The second has a chunk of one token, which starts the
    fewest programs, so that each split gets its own program."""
    rows = min(2, config.max_num_seqs)
    length = min(max_model_len, 2 * SPLIT_TOKENS + 1)
    num_blocks = -(-length // block_size)
    chunk = max(1, min(config.max_num_batched_tokens - 1, length, 2 * block_size))
    # With room for one row only, that row is the chunk.
    ends = np.array([0, 1, 1 + chunk] if rows > 1 else [0, chunk])
    lens = np.array([1, chunk][-rows:])
    mixed = _step(
        config.max_num_batched_tokens, ends, lens, num_decodes=rows - 1, num_blocks=num_blocks
    )
    far = min(max_model_len, 2 * PREFILL_SPLIT_TOKENS)
    behind = _step(
        rows,
        np.arange(rows + 1),
        np.array([1, far][-rows:]),
        num_decodes=rows - 1,
        num_blocks=-(-far // block_size),
    )
    decodes = _step(
        rows, np.arange(rows + 1), np.full(rows, length), num_decodes=rows, num_blocks=num_blocks
    )
    ids = np.zeros(1, np.int64)
    edits = Edits(
        biased_ids_A=ids,
        bias_A=np.ones(1, np.float32),
        seen_ids_E=ids,
        seen_counts_E=np.ones(1, np.int32),
        presence=0.5,
        frequency=0.5,
        repetition=1.5,
        mask_W=np.full(1, -1, np.int32),
    )
    late = np.arange(rows, dtype=np.int32)
    decodes = replace(
        decodes,
        sampling=replace(
            decodes.sampling,
            adjustments=Adjustments.of([(0, edits)], num_samples=rows),
        ),
        late_tokens_L=late,
        late_rows_L=late,
    )
    return mixed, behind, decodes


def _step(
    num_tokens: int,
    starts_B1: np.ndarray[tuple[int], np.dtype[np.int64]],
    seq_lens_B: np.ndarray[tuple[int], np.dtype[np.int64]],
    *,
    num_decodes: int,
    num_blocks: int,
    num_scored: int = 0,
) -> StepInput:
    """A step with these rows. ``num_scored``: samples besides each row's last token."""
    rows = len(seq_lens_B)
    samples = np.concatenate([np.arange(num_scored), starts_B1[1:] - 1])
    return StepInput(
        token_ids_T=np.zeros(num_tokens, np.int64),
        positions_T=np.zeros(num_tokens, np.int64),
        slot_mapping_T=np.zeros(num_tokens, np.int64),
        block_tables_BM=np.zeros((rows, num_blocks), np.int32),
        seq_lens_B=seq_lens_B.astype(np.int32),
        query_starts_B1=starts_B1.astype(np.int32),
        num_decodes=num_decodes,
        samples_S=np.sort(samples).astype(np.int32),
        sampling=SamplingBatch.filled(len(samples), whole=1, real=0.5),
    )
