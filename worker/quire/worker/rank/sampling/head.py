"""Avoids computing logits in the LM head that sampling does not need.

For samples that need only the most probable token, the model finds it without writing logits, which
saves writing and reading a row of the whole vocabulary. For samples whose mask allows few tokens,
it computes only their columns. Other rows are sampled as usual.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import GreedyEdits, WantedColumns
from quire.worker.rank.sampling.draw import banned_rows, sample
from quire.worker.rank.staging import Array, stage
from quire.worker.request.arrays import Ints, Longs
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SamplingBatch

# S samples   G of these that are greedy   L the others   V vocabulary   K masks   W their words

_MAX_WANTED = 0.5
"""Greatest share of a mask's words that allow a token; rows with more are faster with all columns.
"""


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The rows of the LM head, and the logits that each needs."""

    order_S: Longs
    """The sample of each row. Rows that need all columns come first, also among greedy rows."""
    num_greedy: int
    """How many rows, the last ones, need only their greatest logit."""
    wanted: WantedColumns | None

    @property
    def greedy_G(self) -> Longs:
        return self.order_S[len(self.order_S) - self.num_greedy :]

    @property
    def others_L(self) -> Longs:
        return self.order_S[: len(self.order_S) - self.num_greedy]


def head_rows(batch: SamplingBatch) -> HeadRows | None:
    """The rows of a batch; ``None`` if all logits of all samples are needed, in order."""
    needs_all_S = batch.num_logprobs_S >= 0
    greedy_S = (batch.temperature_S <= 0) & ~needs_all_S
    mask_of_S = np.full(len(greedy_S), -1, np.int32)
    if batch.adjustments is not None and len(batch.adjustments.masked_rows_K):
        rows_K, mask_KW = batch.adjustments.masked_rows_K, batch.adjustments.mask_KW
        is_small_K = np.count_nonzero(mask_KW, axis=1) <= _MAX_WANTED * mask_KW.shape[1]
        is_small_K &= ~needs_all_S[rows_K]
        mask_of_S[rows_K[is_small_K]] = np.flatnonzero(is_small_K)
    if not greedy_S.any() and (mask_of_S < 0).all():
        return None
    order_S = np.lexsort((mask_of_S >= 0, greedy_S))
    return HeadRows(order_S, int(greedy_S.sum()), _wanted(batch, mask_of_S[order_S]))


def _wanted(batch: SamplingBatch, mask_of_S: Ints) -> WantedColumns | None:
    if (mask_of_S < 0).all():
        return None
    assert batch.adjustments is not None
    mask_of, mask_KW = stage([mask_of_S, batch.adjustments.mask_KW], torch.device("cpu"))
    return WantedColumns(mask_of_S=mask_of, mask_KW=mask_KW)


def edits_of(batch: SamplingBatch, rows: HeadRows) -> GreedyEdits | None:
    """The changes to the logits of greedy samples, in the order of their rows."""
    if batch.adjustments is None or not rows.num_greedy:
        return None
    taken = batch.adjustments.take(rows.greedy_G)
    if not len(taken.rows):
        return None
    mask_of_G = np.full(rows.num_greedy, -1, np.int32)
    mask_of_G[taken.masked_rows_K] = np.arange(len(taken.masked_rows_K))
    every = np.arange(rows.num_greedy + 1)
    arrays: dict[str, Array] = {
        "biased_starts_G1": np.searchsorted(taken.biased_rows_A, every),
        "biased_ids_A": taken.biased_ids_A,
        "bias_A": taken.bias_A,
        "seen_starts_G1": np.searchsorted(taken.seen_rows_E, every),
        "seen_ids_E": taken.seen_ids_E,
        "seen_counts_E": taken.seen_counts_E,
        "presence_G": taken.presence_S,
        "frequency_G": taken.frequency_S,
        "repetition_G": taken.repetition_S,
        "mask_of_G": mask_of_G,
        "mask_KW": taken.mask_KW,
    }
    tensors = stage(list(arrays.values()), torch.device("cpu"))
    values: dict[str, Any] = dict(zip(arrays, tensors, strict=True))
    return GreedyEdits(**values)


def sample_beside(chosen: tuple[Tensor, Longs], batch: SamplingBatch, rows: HeadRows) -> StepOutput:
    """Samples the rows that are not greedy, and returns all tokens in the order of the samples.

    ``chosen``: the logits of these rows, and the tokens of greedy rows, -1 for a row without one.
    """
    logits_LV, token_ids_G = chosen
    greedy_G, others_L = rows.greedy_G, rows.others_L
    without_token = greedy_G[token_ids_G < 0]
    banned = banned_rows(batch, without_token, num_columns=logits_LV.shape[1])
    broken_rows = tuple(np.setdiff1d(without_token, banned).tolist())
    token_ids_S = np.empty(len(rows.order_S), np.int64)
    token_ids_S[greedy_G] = np.maximum(token_ids_G, 0)
    if not len(others_L):
        return StepOutput(token_ids_S, broken_rows=broken_rows)
    sampled = sample(logits_LV, batch.take(others_L), in_place=True)
    token_ids_S[others_L] = sampled.token_ids_S
    broken_rows += tuple(others_L[list(sampled.broken_rows)].tolist())
    if not sampled.logprobs:
        return StepOutput(token_ids_S, broken_rows=broken_rows)
    logprobs = dict(zip(others_L.tolist(), sampled.logprobs, strict=True))
    every = tuple(logprobs.get(row) for row in range(len(token_ids_S)))
    return StepOutput(token_ids_S, every, broken_rows)
