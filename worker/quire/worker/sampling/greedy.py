"""Samples that need only the most probable token: the model finds it without writing logits.

That saves writing and reading a row's whole vocabulary. The other rows are sampled as usual.
"""

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.worker.api.arrays import Longs
from quire.worker.sampling.draw import sample
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SamplingBatch

# S samples   G of these that are greedy   L the others   V vocabulary

Mask = npt.NDArray[np.bool_]

MIN_GREEDY_ROWS = 6
"""For fewer it does not pay: a row's logits stay in the cache until their argmax is taken."""


def greedy_rows(batch: SamplingBatch) -> Mask:
    """Which samples need no logits: temperature 0, no adjustments, no log-probabilities."""
    greedy_S = (batch.temperature_S <= 0) & (batch.num_logprobs_S < 0)
    greedy_S[batch.adjusted_rows] = False
    return greedy_S


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
