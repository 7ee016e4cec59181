"""Rows of which only the most probable token is wanted: the model finds it, without logits.

That saves writing and reading a row's whole vocabulary. The other rows are sampled as ever.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from quire.worker.sampler import sample
from quire.worker.step import Longs, SamplingBatch, StepOutput

# S rows that sample   G of these that are greedy   L the others   V vocabulary

Mask = npt.NDArray[np.bool_]

MIN_GREEDY_ROWS = 6
"""For fewer it does not pay: a row's logits stay in the cache until their argmax is taken."""


def greedy_rows(batch: SamplingBatch) -> Mask:
    """Which rows need no logits: temperature 0, no penalties, bans or log-probabilities."""
    greedy_S = (batch.temperature_S <= 0) & (batch.num_logprobs_S < 0)
    greedy_S[list(batch.banned_ids)] = False
    greedy_S[[penalties.row for penalties in batch.penalties]] = False
    return greedy_S


def sample_beside(chosen: tuple[Tensor, Longs], batch: SamplingBatch, greedy_S: Mask) -> StepOutput:
    """Samples the rows that are not greedy, and puts all tokens in the order of the rows.

    ``chosen``: these rows' logits, and the tokens of the others.
    """
    logits_LV, token_ids_G = chosen
    rest_L = np.flatnonzero(~greedy_S)
    if not len(rest_L):
        return StepOutput(token_ids_G)
    sampled = sample(logits_LV, _rows_of(batch, rest_L))
    token_ids_S = np.empty(len(greedy_S), np.int64)
    token_ids_S[greedy_S] = token_ids_G
    token_ids_S[rest_L] = sampled.token_ids_S
    if not sampled.logprobs:
        return StepOutput(token_ids_S)
    logprobs = dict(zip(rest_L.tolist(), sampled.logprobs, strict=True))
    return StepOutput(token_ids_S, tuple(logprobs.get(row) for row in range(len(greedy_S))))


def _rows_of(batch: SamplingBatch, rows_L: npt.NDArray[np.intp]) -> SamplingBatch:
    """These rows of a batch; every row with bans or penalties is among them."""
    index = {row: number for number, row in enumerate(rows_L.tolist())}
    return SamplingBatch(
        temperature_S=batch.temperature_S[rows_L],
        top_p_S=batch.top_p_S[rows_L],
        top_k_S=batch.top_k_S[rows_L],
        min_p_S=batch.min_p_S[rows_L],
        seed_S=batch.seed_S[rows_L],
        position_S=batch.position_S[rows_L],
        num_logprobs_S=batch.num_logprobs_S[rows_L],
        banned_ids={index[row]: token_ids for row, token_ids in batch.banned_ids.items()},
        penalties=tuple(replace(item, row=index[item.row]) for item in batch.penalties),
    )
