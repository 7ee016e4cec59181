"""Samples that need only the most probable token: the model finds it without writing logits.

That saves writing and reading a row's whole vocabulary. The other rows are sampled as usual.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import GreedyEdits
from quire.worker.api.arrays import Longs
from quire.worker.sampling.draw import sample
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SamplingBatch
from quire.worker.step.staging import Array, stage

# S samples   G of these that are greedy   L the others   V vocabulary

Mask = npt.NDArray[np.bool_]

MIN_GREEDY_ROWS = 6
"""For fewer it does not pay: a row's logits stay in the cache until their argmax is taken."""


def greedy_rows(batch: SamplingBatch) -> Mask:
    """Which samples need no logits: temperature 0 and no log-probabilities."""
    return (batch.temperature_S <= 0) & (batch.num_logprobs_S < 0)


def edits_of(batch: SamplingBatch, greedy_S: Mask) -> GreedyEdits | None:
    """What is changed in the logits of greedy samples, in the order of these."""
    if batch.adjustments is None:
        return None
    num_greedy = int(greedy_S.sum())
    taken = batch.adjustments
    if num_greedy < len(greedy_S):
        taken = taken.take(np.flatnonzero(greedy_S))
    if not len(taken.rows):
        return None
    mask_of_G = np.full(num_greedy, -1, np.int32)
    mask_of_G[taken.masked_rows_K] = np.arange(len(taken.masked_rows_K))
    every = np.arange(num_greedy + 1)
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


def sample_beside(chosen: tuple[Tensor, Longs], batch: SamplingBatch, greedy_S: Mask) -> StepOutput:
    """Samples the rows that are not greedy, and puts all tokens in the order of the rows.

    ``chosen``: these rows' logits, and the tokens of the others, -1 where they have none.
    """
    logits_LV, token_ids_G = chosen
    rest_L = np.flatnonzero(~greedy_S)
    broken_rows: tuple[int, ...] = ()
    if (token_ids_G < 0).any():
        broken_rows = tuple(np.flatnonzero(greedy_S)[token_ids_G < 0].tolist())
        token_ids_G = np.maximum(token_ids_G, 0)
    if not len(rest_L):
        return StepOutput(token_ids_G, broken_rows=broken_rows)
    sampled = sample(logits_LV, batch.take(rest_L), in_place=True)
    token_ids_S = np.empty(len(greedy_S), np.int64)
    token_ids_S[greedy_S] = token_ids_G
    token_ids_S[rest_L] = sampled.token_ids_S
    broken_rows += tuple(rest_L[list(sampled.broken_rows)].tolist())
    if not sampled.logprobs:
        return StepOutput(token_ids_S, broken_rows=broken_rows)
    logprobs = dict(zip(rest_L.tolist(), sampled.logprobs, strict=True))
    every = tuple(logprobs.get(row) for row in range(len(greedy_S)))
    return StepOutput(token_ids_S, every, broken_rows)
