"""Converts a schedule to the arrays of the step input that is sent to the ranks.

A sequence's slowly changing data, its block table and its sampling parameters, stay in a row of
arrays while the sequence runs. A step only writes the new entries and selects rows.
"""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.worker.engine.schedule import Schedule
from quire.worker.engine.sequence import Sequence
from quire.worker.request.arrays import Ints, Longs
from quire.worker.step.messages import StepInput
from quire.worker.step.sampling_batch import SAMPLE_TYPES, Adjustments, Edits, SamplingBatch

# T tokens of the step, packed   B sequences in the step   M blocks of the longest of them
# S samples                      L tokens that are not known yet   R rows that are kept

_PARAMS = {
    name: attrgetter(f"request.sampling.{name.removesuffix('_S')}")
    for name in SAMPLE_TYPES
    if name != "position_S"  # It changes with each step.
} | {"seed_S": attrgetter("seed")}  # The sequence's, since the request may have none.
"""By array of sampling parameters: gets a sequence's entry."""
NO_FIELDS: Mapping[str, Any] = {}


class StepInputs:
    """Builds the inputs of an engine's steps. Keeps a row for each sequence that has begun."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._free_rows: list[int] = []
        self._tables_RM: Ints = np.zeros((0, 16), np.int32)
        self._params_R: dict[str, npt.NDArray[Any]] = {
            name: np.zeros(0, SAMPLE_TYPES[name]) for name in _PARAMS
        }

    def build(self, schedule: Schedule, fields: Mapping[str, Any] = NO_FIELDS) -> StepInput:
        """Builds the input of ``schedule``, which must not be submitted yet. ``fields`` are those
        of parts (`Part.chosen`). With an empty schedule, the step has no others.

        The arrays belong to the caller.
        """
        if not schedule.sequences:
            return StepInput(**_NO_TOKENS, **fields)
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
        num_samples_B = np.array(schedule.num_samples)
        sampled_B = np.flatnonzero(num_samples_B)
        samples_S = _last_tokens(query_starts_B1[1:][sampled_B], num_samples_B[sampled_B])
        late = [
            (row, seq.last_sample)
            for row, seq in enumerate(sequences[:num_decodes])
            if seq.num_computed == seq.num_tokens
        ]
        late_2L = np.array(late, dtype=np.int32).reshape(-1, 2).T.copy()
        edits_follow = any(
            num_samples and seq.lacks_edits
            for seq, num_samples in zip(sequences, schedule.num_samples, strict=True)
        )
        return StepInput(
            token_ids_T=_token_ids(schedule),
            positions_T=positions_T,
            slot_mapping_T=block_tables_BM[row_T, index_T] * np.int64(self._block_size) + offset_T,
            block_tables_BM=block_tables_BM,
            seq_lens_B=(starts_B + num_tokens_B).astype(np.int32),
            query_starts_B1=query_starts_B1.astype(np.int32),
            num_decodes=num_decodes,
            samples_S=samples_S,
            sampling=self._sampling(schedule, positions_T[samples_S], edits_follow=edits_follow),
            late_tokens_L=late_2L[0],
            late_rows_L=late_2L[1],
            edits_follow=edits_follow,
            hidden_rows_H=_hidden_rows(schedule),
            **fields,
        )

    def edits_that_follow(self, schedule: Schedule) -> Adjustments | None:
        """The adjustments of a step that was submitted without them, once its tokens in flight are
        known."""
        return _adjustments(
            schedule, lambda seq, _: None if seq in schedule.void else seq.edits_in_flight()
        )

    def forget(self, seq: Sequence) -> None:
        """Frees the row of ``seq``, which has ended."""
        if seq.row is not None:
            self._free_rows.append(seq.row)
            seq.row = None

    def _write_table(self, seq: Sequence) -> None:
        """Copies new entries of the block table of ``seq`` to its row."""
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
        for name, value_of in _PARAMS.items():
            self._params_R[name][row] = value_of(seq)

    def _sampling(
        self, schedule: Schedule, positions_S: Longs, *, edits_follow: bool
    ) -> SamplingBatch:
        """The sampling parameters. ``positions_S``: positions of the tokens to sample after."""
        sampled = [
            seq
            for seq, num_samples in zip(schedule.sequences, schedule.num_samples, strict=True)
            for _ in range(num_samples)
        ]
        given_S = _given(schedule)
        rows_S = np.array([seq.row for seq in sampled], dtype=np.int64)
        columns = {name: values_R.take(rows_S) for name, values_R in self._params_R.items()}
        columns["position_S"] = positions_S + 1
        if given_S is not None:
            scored_S = np.flatnonzero(given_S >= 0)
            columns["temperature_S"][scored_S] = 0
            columns["num_logprobs_S"][scored_S] = [
                sampled[sample].request.sampling.prompt_logprobs for sample in scored_S
            ]
        adjustments = None if edits_follow else _adjustments(schedule, Sequence.edits)
        asked = {
            sample: token_ids
            for sample in np.flatnonzero(columns["num_logprobs_S"] >= 0).tolist()
            if (given_S is None or given_S[sample] < 0)
            and (token_ids := sampled[sample].request.sampling.logprob_token_ids)
        }
        return SamplingBatch(
            **columns, adjustments=adjustments, given_S=given_S, asked=asked or None
        )


_NO_COLUMNS: dict[str, Any] = {name: np.empty(0, dtype) for name, dtype in SAMPLE_TYPES.items()}
_NO_SAMPLES = SamplingBatch(**_NO_COLUMNS)


_NO_TOKENS: dict[str, Any] = {
    **dict.fromkeys(("token_ids_T", "positions_T", "slot_mapping_T"), np.empty(0, np.int64)),
    **dict.fromkeys(("seq_lens_B", "samples_S"), np.empty(0, np.int32)),
    "block_tables_BM": np.empty((0, 0), np.int32),
    "query_starts_B1": np.zeros(1, np.int32),
    "num_decodes": 0,
    "sampling": _NO_SAMPLES,
}
"""The fields of a step that computes nothing, and only does what a part wants."""


def _last_tokens(ends_B: Longs, counts_B: Longs) -> Ints:
    """Indices of the last ``counts_B`` tokens before each of ``ends_B``, sequence by sequence."""
    before_B = counts_B.cumsum() - counts_B
    place_S = np.arange(counts_B.sum()) - before_B.repeat(counts_B)
    return ((ends_B - counts_B).repeat(counts_B) + place_S).astype(np.int32)


def _hidden_rows(schedule: Schedule) -> Ints | None:
    """The samples whose hidden states are requested; ``None`` if there are none."""
    wants_B = [seq.wants_hidden for seq in schedule.sequences]
    if not any(wants_B):
        return None
    wants_S = np.repeat(wants_B, schedule.num_samples)
    given_S = _given(schedule)
    if given_S is not None:
        wants_S &= given_S < 0
    return np.flatnonzero(wants_S).astype(np.int32)


def _given(schedule: Schedule) -> Longs | None:
    """For each sample, the prompt token that the step scores; -1 if it samples a token."""
    if not any(schedule.num_scored):
        return None
    given: list[Longs] = []
    for seq, num_samples, num_scored in zip(
        schedule.sequences, schedule.num_samples, schedule.num_scored, strict=True
    ):
        first = max(seq.num_computed, seq.num_scored) + 1
        given.append(seq.token_ids[first : first + num_scored].astype(np.int64))
        given.append(np.full(num_samples - num_scored, -1, np.int64))
    return np.concatenate(given)


def _adjustments(
    schedule: Schedule, edits_of: Callable[[Sequence, int], Edits | None]
) -> Adjustments | None:
    """The changes to the logits of the tokens that a step samples. ``edits_of`` returns them for a
    sequence and the index of a sample within the sequence."""
    found = []
    end = 0
    for seq, num_samples, num_scored in zip(
        schedule.sequences, schedule.num_samples, schedule.num_scored, strict=True
    ):
        begin, end = end + num_scored, end + num_samples
        for sample in range(begin, end):
            each = edits_of(seq, sample - begin)
            if each is not None:
                found.append((sample, each))
    return Adjustments.of(found, num_samples=end) if found else None


def _token_ids(schedule: Schedule) -> Longs:
    """The tokens of the step; 0 in place of those in flight."""
    singles = [
        seq.token_at(seq.num_computed) if seq.num_computed < seq.num_tokens else 0
        for seq in schedule.sequences[: schedule.num_decodes]
    ]
    token_ids: list[npt.NDArray[Any]] = [np.array(singles, dtype=np.int64)]
    for seq, num_tokens in zip(
        schedule.sequences[schedule.num_decodes :],
        schedule.num_tokens[schedule.num_decodes :],
        strict=True,
    ):
        token_ids.append(seq.token_ids[seq.num_computed : seq.num_computed + num_tokens])
        if seq.draft:
            token_ids.append(np.array(seq.draft, dtype=np.int64))
    return np.concatenate(token_ids, dtype=np.int64)


def _grown(array: npt.NDArray[Any], *, num_rows: int = 0, num_columns: int = 0) -> npt.NDArray[Any]:
    """A copy with at least that many rows and columns; new entries are 0."""
    more = [(0, max(0, num_rows - array.shape[0]))]
    if array.ndim == 2:
        more.append((0, max(0, num_columns - array.shape[1])))
    return np.pad(array, more)
