"""Writes a schedule down as the arrays that the ranks work from.

What a step needs of a sequence and what seldom changes, its block table and its sampling
parameters, is kept in a row of arrays for as long as the sequence is there: a step writes down
only what is new, and picks its rows.
"""

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.worker.schedule import Schedule
from quire.worker.sequence import Sequence
from quire.worker.step import Ints, Longs, Penalties, SamplingBatch, StepInput

# T tokens of the step, packed   B sequences in the step   M blocks of the longest of them
# S sequences that sample        L tokens that are not known yet   R rows that are kept

_PARAMS: dict[str, type] = {
    "temperature_S": np.float32,
    "top_p_S": np.float32,
    "top_k_S": np.int32,
    "min_p_S": np.float32,
    "seed_S": np.int64,
    "num_logprobs_S": np.int32,
}


class StepInputs:
    """Builds the inputs of an engine's steps, from rows for the sequences that have begun."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._free_rows: list[int] = []
        self._tables_RM: Ints = np.zeros((0, 16), np.int32)
        self._params_R: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(0, dtype) for name, dtype in _PARAMS.items()
        }

    def build(self, schedule: Schedule) -> StepInput:
        """``schedule`` must not be submitted yet, and must not be empty.

        Arrays of penalties are views of the sequences' own: valid until the next token is
        appended. The others belong to the caller.
        """
        sequences, num_decodes = schedule.sequences, schedule.num_decodes
        for seq in sequences:
            if seq.num_blocks_in_row != seq.num_blocks:
                self._write_table(seq)
        num_tokens_B = np.array(schedule.num_tokens, dtype=np.int64)
        starts_B = np.array([seq.num_computed for seq in sequences], dtype=np.int64)
        query_starts_B1 = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum(num_tokens_B, out=query_starts_B1[1:])
        row_T = np.arange(len(sequences)).repeat(num_tokens_B)
        positions_T = np.arange(len(row_T)) + (starts_B - query_starts_B1[:-1])[row_T]

        rows_B = np.array([seq.row for seq in sequences], dtype=np.int64)
        max_blocks = max([seq.num_blocks for seq in sequences])
        block_tables_BM = self._tables_RM[:, :max_blocks].take(rows_B, axis=0)
        index_T, offset_T = np.divmod(positions_T, self._block_size)
        late = [
            (row, seq.sampled_row)
            for row, seq in enumerate(sequences[:num_decodes])
            if seq.num_computed == seq.num_tokens
        ]
        late_2L = np.array(late, dtype=np.int32).reshape(-1, 2).T.copy()
        return StepInput(
            token_ids_T=_token_ids(schedule),
            positions_T=positions_T,
            slot_mapping_T=block_tables_BM[row_T, index_T] * np.int64(self._block_size) + offset_T,
            block_tables_BM=block_tables_BM,
            seq_lens_B=(starts_B + num_tokens_B).astype(np.int32),
            query_starts_B1=query_starts_B1.astype(np.int32),
            num_decodes=num_decodes,
            sample_rows_S=np.array(schedule.sampled_rows, dtype=np.int32),
            sampling=self._sampling([sequences[row] for row in schedule.sampled_rows]),
            late_tokens_L=late_2L[0],
            late_rows_L=late_2L[1],
        )

    def forget(self, seq: Sequence) -> None:
        """``seq`` has ended: another one can have its row."""
        if seq.row is not None:
            self._free_rows.append(seq.row)
            seq.row = None

    def _write_table(self, seq: Sequence) -> None:
        """Copies what is new in the block table of ``seq`` to its row."""
        if seq.row is None:
            self._take_row(seq)
        if seq.num_blocks > self._tables_RM.shape[1]:
            self._tables_RM = _grown(self._tables_RM, num_columns=2 * seq.num_blocks)
        begin, end = seq.num_blocks_in_row, seq.num_blocks
        self._tables_RM[seq.row, begin:end] = seq.block_ids[begin:]
        seq.num_blocks_in_row = end

    def _take_row(self, seq: Sequence) -> None:
        if not self._free_rows:
            begin, end = len(self._tables_RM), 2 * len(self._tables_RM) + 16
            self._tables_RM = _grown(self._tables_RM, num_rows=end)
            self._params_R = {
                name: _grown(values_R, num_rows=end) for name, values_R in self._params_R.items()
            }
            self._free_rows += range(begin, end)
        row = seq.row = self._free_rows.pop()
        params, of_row = seq.params, self._params_R
        of_row["temperature_S"][row] = params.temperature
        of_row["top_p_S"][row] = params.top_p
        of_row["top_k_S"][row] = params.top_k
        of_row["min_p_S"][row] = params.min_p
        of_row["seed_S"][row] = seq.seed
        of_row["num_logprobs_S"][row] = -1 if params.logprobs is None else params.logprobs

    def _sampling(self, sequences: Items[Sequence]) -> SamplingBatch:
        banned_ids: dict[int, Longs] = {}
        penalties: list[Penalties] = []
        for row, seq in enumerate(sequences):
            if seq.is_plain:
                continue
            if (banned := seq.banned_ids) is not None:
                banned_ids[row] = banned
            if (penalty := seq.penalties(row=row)) is not None:
                penalties.append(penalty)
        rows_S = np.array([seq.row for seq in sequences], dtype=np.int64)
        positions = [seq.num_tokens + seq.num_in_flight for seq in sequences]
        return SamplingBatch(
            position_S=np.array(positions, dtype=np.int64),
            banned_ids=banned_ids,
            penalties=tuple(penalties),
            **{name: values_R.take(rows_S) for name, values_R in self._params_R.items()},
        )


def _token_ids(schedule: Schedule) -> Longs:
    """The tokens of the step; 0 for those in flight."""
    singles = [
        seq.token_at(seq.num_computed) if seq.num_computed < seq.num_tokens else 0
        for seq in schedule.sequences[: schedule.num_decodes]
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


def _grown(array: npt.NDArray[Any], *, num_rows: int = 0, num_columns: int = 0) -> npt.NDArray[Any]:
    """A copy of at least so many rows and columns, what is new of them 0."""
    more = [(0, max(0, num_rows - array.shape[0]))]
    if array.ndim == 2:
        more.append((0, max(0, num_columns - array.shape[1])))
    return np.pad(array, more)
