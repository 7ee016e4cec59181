"""Writes a schedule down as the arrays that the ranks work from. Changes nothing."""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.worker.scheduler import Schedule
from quire.worker.sequence import Sequence
from quire.worker.step import Ints, Longs, Penalties, SamplingBatch, StepInput

# T tokens of the step, packed   B sequences in the step   M blocks of the longest of them
# S sequences that sample


def build_step_input(schedule: Schedule, *, block_size: int) -> StepInput:
    """``schedule`` must not be finished yet, and must not be empty.

    Arrays of penalties are views of the sequences' own: valid until the next token is appended.
    """
    sequences = schedule.sequences
    num_tokens_B = np.array(schedule.num_tokens, dtype=np.int64)
    starts_B = np.array([seq.num_computed for seq in sequences], dtype=np.int64)
    ends_B = starts_B + num_tokens_B
    query_starts_B1 = np.zeros(len(sequences) + 1, dtype=np.int64)
    np.cumsum(num_tokens_B, out=query_starts_B1[1:])

    row_T = np.repeat(np.arange(len(sequences)), num_tokens_B)
    positions_T = np.arange(len(row_T)) + (starts_B - query_starts_B1[:-1])[row_T]
    block_tables_BM = _block_tables(sequences)
    block_T = block_tables_BM[row_T, positions_T // block_size].astype(np.int64)

    total_B = np.array([seq.num_tokens for seq in sequences], dtype=np.int64)
    sample_rows_S = np.flatnonzero(ends_B == total_B)
    return StepInput(
        token_ids_T=_token_ids(schedule),
        positions_T=positions_T,
        slot_mapping_T=block_T * block_size + positions_T % block_size,
        block_tables_BM=block_tables_BM,
        seq_lens_B=ends_B.astype(np.int32),
        query_starts_B1=query_starts_B1.astype(np.int32),
        num_decodes=schedule.num_decodes,
        sample_rows_S=sample_rows_S.astype(np.int32),
        sampling=_sampling([sequences[row] for row in sample_rows_S.tolist()]),
    )


def _block_tables(sequences: Items[Sequence]) -> Ints:
    tables_BM = np.zeros((len(sequences), max(seq.num_blocks for seq in sequences)), np.int32)
    for row, seq in enumerate(sequences):
        tables_BM[row, : seq.num_blocks] = seq.block_ids
    return tables_BM


def _token_ids(schedule: Schedule) -> Longs:
    singles = [
        seq.token_ids[seq.num_computed] for seq in schedule.sequences[: schedule.num_decodes]
    ]
    token_ids: list[npt.NDArray[Any]] = [np.array(singles, dtype=np.int64)]
    token_ids += [
        seq.token_ids[seq.num_computed : seq.num_computed + num_tokens]
        for seq, num_tokens in zip(
            schedule.sequences[schedule.num_decodes :],
            schedule.num_tokens[schedule.num_decodes :],
            strict=True,
        )
    ]
    return np.concatenate(token_ids, dtype=np.int64)


def _sampling(sequences: Items[Sequence]) -> SamplingBatch:
    params = [seq.params for seq in sequences]
    banned_ids: dict[int, Longs] = {}
    penalties: list[Penalties] = []
    for row, seq in enumerate(sequences):
        if (banned := seq.banned_ids) is not None:
            banned_ids[row] = banned
        if (penalty := seq.penalties(row=row)) is not None:
            penalties.append(penalty)
    return SamplingBatch(
        temperature_S=np.array([p.temperature for p in params], dtype=np.float32),
        top_p_S=np.array([p.top_p for p in params], dtype=np.float32),
        top_k_S=np.array([p.top_k for p in params], dtype=np.int32),
        min_p_S=np.array([p.min_p for p in params], dtype=np.float32),
        seed_S=np.array([seq.seed for seq in sequences], dtype=np.int64),
        position_S=np.array([seq.num_tokens for seq in sequences], dtype=np.int64),
        num_logprobs_S=np.array(
            [-1 if p.logprobs is None else p.logprobs for p in params], dtype=np.int32
        ),
        banned_ids=banned_ids,
        penalties=tuple(penalties),
    )
