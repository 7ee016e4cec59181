"""Samples tokens from logits. A row's token only depends on its logits, parameters, seed and
position.

Three methods make this exact on any hardware and in any batch (`quire.kernels.reference.sampling`):

- A token's weight is ``floor(2**32 * exp((logit - max) / temperature))``, with Quire's own
  exponential. Sums of such integers in float64 are exact below 2**53, so the order of addition does
  not matter. Tokens below 2**-32 of the most probable one are never sampled.
- A row has one random number, a hash of (seed, position). It selects one of the kept tokens in the
  order of their ids.
- Log-probabilities are summed in a fixed order.
"""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.native import sampling
from quire.kernels.native.greedy import argmax
from quire.worker.rank.sampling.logprobs import token_logprobs
from quire.worker.rank.staging import stage_fields
from quire.worker.request.arrays import Longs
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SamplingBatch

# S samples   V vocabulary   R samples with log-probabilities

Doubles = npt.NDArray[np.float64]


@torch.inference_mode()
def sample(logits_SV: Tensor, batch: SamplingBatch, *, in_place: bool = False) -> StepOutput:
    """Samples a token for each row of float32 logits on a CPU. ``in_place``: adjustments may change
    the logits."""
    num_rows = len(batch.temperature_S)
    if num_rows == 0:
        return StepOutput(np.empty(0, np.int64))
    scored = np.flatnonzero(batch.num_logprobs_S >= 0)
    # Log-probabilities are the model's, so its logits are kept before they are adjusted.
    plain_RV = logits_SV
    if batch.adjustments is not None:
        if in_place and len(scored) and np.isin(scored, batch.adjusted_rows).any():
            plain_RV = logits_SV[torch.from_numpy(scored)]
        logits_SV = _adjust(logits_SV, batch, in_place=in_place)
    token_ids_S = _choose(logits_SV, batch)
    banned = banned_rows(batch, np.flatnonzero(token_ids_S < 0), num_columns=logits_SV.shape[1])
    token_ids_S[banned] = 0
    broken_S = token_ids_S < 0
    token_ids_S = batch.with_given(np.maximum(token_ids_S, 0))
    broken_rows = tuple(np.flatnonzero(broken_S).tolist()) if broken_S.any() else ()
    if not len(scored):
        return StepOutput(token_ids_S, broken_rows=broken_rows)
    logprobs = token_logprobs(plain_RV, token_ids_S, batch.num_logprobs_S, asked=batch.asked)
    return StepOutput(token_ids_S, logprobs, broken_rows)


def banned_rows(batch: SamplingBatch, rows: Longs, *, num_columns: int) -> Longs:
    """The ``rows`` in which every token is banned. Their logits are all minus infinity although the
    model is not broken."""
    if batch.adjustments is None or not len(rows):
        return rows[:0]
    logits = _adjust(torch.zeros(len(rows), num_columns), batch.take(rows), in_place=True)
    banned: Longs = rows[(logits == -torch.inf).all(1).numpy()]
    return banned


def uniforms(seed_S: Longs, position_S: Longs) -> Doubles:
    """A random number in [0, 1) for each (seed, position): SplitMix64, started at the hashed seed.

    Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    state = _mix(seed_S.astype(np.uint64) + golden)
    state = state + golden * (position_S.astype(np.uint64) + np.uint64(1))
    return (_mix(state) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _adjust(logits_SV: Tensor, batch: SamplingBatch, *, in_place: bool = False) -> Tensor:
    """The logits with the batch's adjustments."""
    if batch.adjustments is None:
        return logits_SV
    if not in_place:
        logits_SV = logits_SV.clone()
    sampling.adjust_logits(logits_SV, **stage_fields(batch.adjustments, logits_SV.device))
    return logits_SV


def _choose(logits_SV: Tensor, batch: SamplingBatch) -> Longs:
    """The token of each row; -1 if none can be sampled because logits are infinite or NaN."""
    rows = np.flatnonzero(batch.temperature_S > 0)
    token_ids_S = np.empty(len(logits_SV), np.int64)
    if len(rows) < len(logits_SV):
        best_ids_S = argmax(logits_SV).numpy()  # among equals, the lowest id
        best_S = logits_SV.numpy()[np.arange(len(logits_SV)), best_ids_S]
        token_ids_S[:] = np.where(np.isfinite(best_S), best_ids_S, -1)
    if len(rows):
        token_ids_S[rows] = sampling.draw(
            logits_SV,
            rows_R=rows,
            temperature_R=batch.temperature_S[rows].astype(np.float32),
            top_k_R=batch.top_k_S[rows].astype(np.int64),
            top_p_R=batch.top_p_S[rows].astype(np.float64),
            min_p_R=batch.min_p_S[rows].astype(np.float64),
            uniform_R=uniforms(batch.seed_S[rows], batch.position_S[rows]),
        )
    return token_ids_S
