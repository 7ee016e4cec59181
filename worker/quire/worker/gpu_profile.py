"""What a GPU's memory must hold beside KV: the largest steps, and the graphs of decodes."""

from collections.abc import Callable, Iterator

import numpy as np
import torch

from quire.worker.config import EngineConfig
from quire.worker.decode_graphs import DecodeGraphs
from quire.worker.step import SamplingBatch, StepInput


def peak_bytes(run: Callable[[StepInput], object], steps: Iterator[StepInput]) -> int:
    """The most memory that the allocator held during these steps, weights included."""
    torch.cuda.reset_peak_memory_stats()
    for step in steps:
        run(step)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated()


def graph_bytes(make_graphs: Callable[[], DecodeGraphs]) -> int:
    """What all graphs will take: the first two are captured, the others are taken to be as large
    as the second, as they find the memory of the first there. Nothing of it is left behind."""
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
    """Chunks that fill the token budget, and decodes of which one is as long as can be.

    All tokens are in block 0 of the cache, over and over: it is memory that counts.
    """
    rows, num_tokens = config.max_num_seqs, config.max_num_batched_tokens
    row_len = min(num_tokens // rows, block_size)
    starts = np.minimum(np.arange(rows + 1) * row_len, num_tokens)
    yield _step(num_tokens, starts, np.full(rows, row_len), num_decodes=0, num_blocks=1)
    seq_lens = np.ones(rows, np.int64)
    seq_lens[0] = max_model_len
    num_blocks = -(-max_model_len // block_size)
    yield _step(rows, np.arange(rows + 1), seq_lens, num_decodes=rows, num_blocks=num_blocks)


def _step(
    num_tokens: int,
    starts_B1: np.ndarray[tuple[int], np.dtype[np.int64]],
    seq_lens_B: np.ndarray[tuple[int], np.dtype[np.int64]],
    *,
    num_decodes: int,
    num_blocks: int,
) -> StepInput:
    rows = len(seq_lens_B)
    halves = np.full(rows, 0.5, np.float32)
    ones = np.ones(rows, np.int32)
    return StepInput(
        token_ids_T=np.zeros(num_tokens, np.int64),
        positions_T=np.zeros(num_tokens, np.int64),
        slot_mapping_T=np.zeros(num_tokens, np.int64),
        block_tables_BM=np.zeros((rows, num_blocks), np.int32),
        seq_lens_B=seq_lens_B.astype(np.int32),
        query_starts_B1=starts_B1.astype(np.int32),
        num_decodes=num_decodes,
        sample_rows_S=np.arange(rows, dtype=np.int32),
        sampling=SamplingBatch(
            temperature_S=halves,
            top_p_S=halves,
            top_k_S=ones,
            min_p_S=halves,
            seed_S=ones.astype(np.int64),
            position_S=ones.astype(np.int64),
            num_logprobs_S=ones,
        ),
    )
