"""Samples that need only the most probable token: the model finds it without writing logits.

That saves writing and reading a row's whole vocabulary. The other rows are sampled as usual.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.ops import Bans
from quire.worker.api.arrays import Longs
from quire.worker.sampling.draw import sample
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SamplingBatch

# S samples   G of these that are greedy   L the others   V vocabulary

Mask = npt.NDArray[np.bool_]

MIN_GREEDY_ROWS = 6
"""For fewer it does not pay: a row's logits stay in the cache until their argmax is taken."""


_MAX_BANS = 8
"""Of a row: each of its logits is compared with the greatest so far, and then with these."""


def greedy_rows(batch: SamplingBatch) -> Mask:
    """Which samples need no logits: temperature 0, no log-probabilities, and no adjustments but a
    few banned tokens."""
    greedy_S = (batch.temperature_S <= 0) & (batch.num_logprobs_S < 0)
    if batch.adjustments is not None:
        greedy_S[batch.adjustments.rows_beyond_bans(max_bans=_MAX_BANS)] = False
    return greedy_S


def bans_of(batch: SamplingBatch, greedy_S: Mask) -> Bans | None:
    """The tokens that are banned for greedy samples, in the order of these."""
    if batch.adjustments is None:
        return None
    taken = batch.adjustments.take(np.flatnonzero(greedy_S))
    if not len(taken.biased_rows_A):
        return None
    order = np.argsort(taken.biased_rows_A, kind="stable")
    counts = np.bincount(taken.biased_rows_A, minlength=int(greedy_S.sum()))
    starts = np.concatenate([[0], counts.cumsum()])
    return Bans(
        starts=torch.from_numpy(starts), columns=torch.from_numpy(taken.biased_ids_A[order])
    )


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
