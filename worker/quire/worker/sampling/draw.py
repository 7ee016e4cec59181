"""From logits to tokens. A row's token depends on its logits, parameters, seed and position only.

Two devices make that exact on any hardware and in any batch:

- A token's weight is ``floor(2**32 * exp((logit - max) / temperature))``. Sums of such integers
  in float64 are exact below 2**53, so the order in which a device adds them cannot matter.
  Tokens below 2**-32 of the most probable one are never drawn.
- The one random number of a row is a hash of (seed, position), and picks from the kept tokens
  in the order of their ids.

The vocabulary is never sorted: the 64 most probable tokens mostly hold all that top-k, top-p and
min-p keep, and for other rows, the boundary of the kept tokens is found by counting.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels.greedy import argmax
from quire.kernels.reference_sampling import adjust_logits
from quire.worker.api.arrays import Floats, Longs
from quire.worker.sampling.logprobs import token_logprobs
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SamplingBatch
from quire.worker.step.staging import stage_fields

# S samples   V vocabulary   K candidates

Doubles = npt.NDArray[np.float64]

NUM_CANDIDATES = 64
_SCALE = float(1 << 32)
_LOG_SCALE = math.log(_SCALE)
"""At temperature 1, a logit that is further below the greatest weighs nothing."""
_NUM_SLICES = 4096
_PICK_BLOCK = 256
_NO_LIMIT = np.iinfo(np.int64).max
_ROWS_AT_ONCE = 32
"""Bounds the weights in memory: 32 rows of a vocabulary of 128k are 16 MiB."""


@torch.inference_mode()
def sample(logits_SV: Tensor, batch: SamplingBatch) -> StepOutput:
    """Chooses a token for each row of float32 logits, which are left as they are."""
    num_rows = len(batch.temperature_S)
    if num_rows == 0:
        return StepOutput(np.empty(0, np.int64))
    adjusted_SV = _adjust(logits_SV, batch)
    best_ids_S = argmax(adjusted_SV)  # the first, so lowest, of equals
    best_S = adjusted_SV.gather(1, best_ids_S[:, None])[:, 0].cpu().numpy()
    broken_S = ~(best_S < math.inf)
    token_ids_S = best_ids_S.cpu().numpy()
    random_rows = np.flatnonzero(batch.temperature_S > 0)
    for start in range(0, len(random_rows), _ROWS_AT_ONCE):
        rows = random_rows[start : start + _ROWS_AT_ONCE]
        every_row = len(rows) == num_rows
        chosen = adjusted_SV if every_row else adjusted_SV[torch.from_numpy(rows)]
        drawn = _draw(chosen, _Rows.of(batch, rows))
        broken_S[rows] |= drawn < 0
        token_ids_S[rows] = np.maximum(drawn, 0)
    token_ids_S = batch.with_given(token_ids_S)
    broken_rows = tuple(np.flatnonzero(broken_S).tolist()) if broken_S.any() else ()
    if not (batch.num_logprobs_S >= 0).any():
        return StepOutput(token_ids_S, broken_rows=broken_rows)
    return StepOutput(
        token_ids_S,
        tuple(
            token_logprobs(
                logits_SV[row],
                token_id=int(token_ids_S[row]),
                num_top=int(num_top),
                asked=(batch.asked or {}).get(row, ()),
            )
            if num_top >= 0
            else None
            for row, num_top in enumerate(batch.num_logprobs_S)
        ),
        broken_rows,
    )


def uniforms(seed_S: Longs, position_S: Longs) -> Doubles:
    """A number in [0, 1) for each (seed, position): SplitMix64, begun from the hashed seed.

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


def _adjust(logits_SV: Tensor, batch: SamplingBatch) -> Tensor:
    """The logits with the batch's adjustments: a copy where there are any."""
    if batch.adjustments is None:
        return logits_SV
    logits_SV = logits_SV.clone()
    adjust_logits(logits_SV, **stage_fields(batch.adjustments, logits_SV.device))
    return logits_SV


@dataclass(frozen=True, slots=True)
class _Rows:
    """The parameters of some rows, none of them greedy."""

    temperature_S: Floats
    top_p_S: Doubles
    top_k_S: Longs
    """`_NO_LIMIT` where all tokens are kept."""
    min_p_S: Doubles
    uniform_S: Doubles

    @classmethod
    def of(cls, batch: SamplingBatch, rows: npt.NDArray[np.intp]) -> "_Rows":
        top_k_S = batch.top_k_S[rows].astype(np.int64)
        return cls(
            batch.temperature_S[rows].astype(np.float32),
            batch.top_p_S[rows].astype(np.float64),
            np.where(top_k_S > 0, top_k_S, _NO_LIMIT),
            batch.min_p_S[rows].astype(np.float64),
            uniforms(batch.seed_S[rows], batch.position_S[rows]),
        )

    def take(self, rows: npt.NDArray[np.intp] | slice) -> "_Rows":
        return _Rows(
            self.temperature_S[rows],
            self.top_p_S[rows],
            self.top_k_S[rows],
            self.min_p_S[rows],
            self.uniform_S[rows],
        )

    @property
    def keeps_all(self) -> npt.NDArray[np.bool_]:
        no_limit = self.top_k_S == _NO_LIMIT
        return np.asarray(no_limit & (self.top_p_S >= 1) & (self.min_p_S <= 0))


def _draw(logits_SV: Tensor, rows: _Rows) -> Longs:
    """The tokens; -1 for one that has no weight, as happens only where logits are NaN or
    infinite."""
    weights_SV = _weights(logits_SV, rows.temperature_S)
    token_ids_S = np.empty(len(logits_SV), np.int64)

    whole = np.flatnonzero(rows.keeps_all)
    if len(whole):
        kept = weights_SV if len(whole) == len(weights_SV) else weights_SV[torch.from_numpy(whole)]
        token_ids_S[whole] = _pick(kept, rows.uniform_S[whole])

    cut = np.flatnonzero(~rows.keeps_all)
    if len(cut):
        every_row = len(cut) == len(weights_SV)
        index = slice(None) if every_row else torch.from_numpy(cut)
        chosen, settled = _draw_from_candidates(logits_SV[index], weights_SV[index], rows.take(cut))
        token_ids_S[cut] = chosen
        for row in cut[~settled]:
            token_ids_S[row] = _draw_in_full(
                logits_SV[row], weights_SV[row], rows.take(slice(row, row + 1))
            )
    drawn_S = weights_SV.gather(1, torch.from_numpy(token_ids_S).to(weights_SV.device)[:, None])
    return np.where(drawn_S[:, 0].cpu().numpy() > 0, token_ids_S, -1)


def _weights(logits_SV: Tensor, temperature_S: Floats) -> Tensor:
    """``[S, V]`` integers from 0 to 2**32, in proportion to the probabilities.

    float32 holds them exactly, as its 24 bits of an exponential and a shift. Powers of 2, because
    torch's exp2 is three times as fast as its exp on CPUs.
    """
    divisor_S1 = torch.from_numpy(temperature_S * np.float32(math.log(2))).unsqueeze(1)
    exponents_SV = logits_SV - logits_SV.amax(dim=-1, keepdim=True)
    exponents_SV.div_(divisor_S1.to(logits_SV.device))
    return exponents_SV.exp2_().mul_(_SCALE).floor_()


def _pick(weights_SV: Tensor, uniform_S: Doubles) -> Longs:
    """For each row the index at which the running sum first exceeds ``uniform * total``.

    First the block of tokens, then the token in it: a running sum is twenty times as slow as a
    sum (B=32, V=32,000: 6.2 ms against 0.3 on one Zen 4 core).
    """
    padding = -weights_SV.shape[1] % _PICK_BLOCK
    padded_SV = torch.nn.functional.pad(weights_SV, (0, padding)) if padding else weights_SV
    blocks_SNB = padded_SV.reshape(len(padded_SV), -1, _PICK_BLOCK)
    sums_SN = blocks_SNB.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    totals_S1 = sums_SN[:, -1:]
    targets_S1 = torch.from_numpy(uniform_S).to(weights_SV.device).unsqueeze(1)
    targets_S1 = (targets_S1 * totals_S1).floor_().minimum(totals_S1 - 1)
    # Past the end only where a model's logits are NaN: that must not fail the other rows.
    block_S1 = torch.searchsorted(sums_SN, targets_S1, right=True).clamp_(max=sums_SN.shape[1] - 1)
    before_SN = torch.nn.functional.pad(sums_SN, (1, 0))
    block_SB = blocks_SNB[torch.arange(len(blocks_SNB), device=weights_SV.device), block_S1[:, 0]]
    sums_SB = block_SB.cumsum(dim=-1, dtype=torch.float64)
    inside_S1 = torch.searchsorted(sums_SB, targets_S1 - before_SN.gather(1, block_S1), right=True)
    picked_S1 = (block_S1 * _PICK_BLOCK + inside_S1).clamp_(max=weights_SV.shape[1] - 1)
    return np.asarray(picked_S1[:, 0].cpu().numpy(), dtype=np.int64)


def _draw_from_candidates(
    logits_SV: Tensor, weights_SV: Tensor, rows: _Rows
) -> tuple[Longs, npt.NDArray[np.bool_]]:
    """Draws from the most probable tokens; the second result says for which rows that is exact.

    It is where everything kept lies above the last candidate, as then no token outside of them,
    not even one of equal logit, can be among the kept.
    """
    num_candidates = min(NUM_CANDIDATES, logits_SV.shape[1])
    top_SK, top_ids_SK = logits_SV.topk(num_candidates, dim=-1)
    order = np.lexsort((top_ids_SK.cpu().numpy(), -top_SK.cpu().numpy()), axis=-1)
    logits_SK, ids_SK, weights_SK = (
        np.take_along_axis(values.cpu().numpy(), order, axis=1)
        for values in (top_SK, top_ids_SK, weights_SV.gather(1, top_ids_SK).double())
    )
    kept_SK, settled = _kept(
        logits_SK,
        weights_SK,
        weights_SV.sum(dim=-1, dtype=torch.float64).cpu().numpy(),
        rows,
        is_vocabulary=num_candidates == logits_SV.shape[1],
    )
    by_id = ids_SK.argsort(axis=1)
    kept_weights = np.take_along_axis(np.where(kept_SK, weights_SK, 0.0), by_id, axis=1)
    picked_S = _pick(torch.from_numpy(kept_weights), rows.uniform_S)
    every_S = np.arange(len(picked_S))
    return ids_SK[every_S, by_id[every_S, picked_S]], settled


def _draw_in_full(logits_V: Tensor, weights_V: Tensor, row: _Rows) -> int:
    """As `_draw_from_candidates`, of one row and among the whole vocabulary."""
    top_k, top_p, min_p = int(row.top_k_S[0]), float(row.top_p_S[0]), float(row.min_p_S[0])
    temperature = float(row.temperature_S[0])
    weights_V = weights_V.double()
    if min_p > 0:
        floor = float(logits_V.max()) + temperature * math.log(min_p)
        weights_V = weights_V.where(logits_V.double() >= floor, 0)
    # Counted into slices by the distance to the greatest logit.
    below_V = logits_V.max() - logits_V
    slice_V = (below_V * (_NUM_SLICES / (_LOG_SCALE * temperature))).nan_to_num_(0.0)
    slice_V = slice_V.clamp_(max=_NUM_SLICES - 1).long()
    if top_k < len(logits_V):
        counts_V = (weights_V > 0).double()
        weights_V = weights_V * _best(counts_V, logits_V, slice_V, wanted=top_k)
    if top_p < 1:
        wanted = top_p * float(weights_V.sum())
        weights_V = weights_V * _best(weights_V, logits_V, slice_V, wanted=wanted)
    return int(_pick(weights_V[None], row.uniform_S)[0])


def _best(amounts_V: Tensor, logits_V: Tensor, slice_V: Tensor, *, wanted: float) -> Tensor:
    """Which are the fewest best tokens whose amounts add up to ``wanted``.

    Only the tokens of the slice in which that sum is reached are sorted.
    """
    sums = torch.bincount(slice_V, amounts_V, _NUM_SLICES).cumsum(dim=0)
    last = int(torch.searchsorted(sums, wanted))
    best_V = slice_V <= last
    if last == _NUM_SLICES:
        return best_V
    ids = (slice_V == last).nonzero()[:, 0]
    ids = ids[logits_V[ids].sort(descending=True, stable=True).indices]
    amounts = amounts_V[ids]
    before = (float(sums[last - 1]) if last else 0.0) + amounts.cumsum(dim=0) - amounts
    best_V[ids[before >= wanted]] = False
    return best_V


def _kept(
    logits_SK: Floats, weights_SK: Doubles, totals_S: Doubles, rows: _Rows, *, is_vocabulary: bool
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Which candidates, best first, top-k, min-p and then top-p keep; and of which rows these are
    all. As in vLLM, top-p counts the probabilities of what the other two have left.
    """
    num_candidates = logits_SK.shape[1]
    with np.errstate(divide="ignore"):
        floors_S = logits_SK[:, 0] + rows.temperature_S * np.log(rows.min_p_S)
    base_SK = (np.arange(num_candidates) < rows.top_k_S[:, None]) & (logits_SK >= floors_S[:, None])
    limited_S = (rows.top_k_S < _NO_LIMIT) | (rows.min_p_S > 0)
    base_weights_SK = np.where(base_SK, weights_SK, 0.0)
    sums_SK = base_weights_SK.cumsum(axis=1)
    base_totals_S = np.where(limited_S, sums_SK[:, -1], totals_S)
    wanted_S1 = (rows.top_p_S * base_totals_S)[:, None]
    kept_SK = base_SK & ((sums_SK - base_weights_SK < wanted_S1) | (rows.top_p_S[:, None] >= 1))
    if is_vocabulary:
        return kept_SK, np.ones(len(kept_SK), np.bool_)
    decisive_SK = np.where(limited_S[:, None], base_SK, kept_SK)
    last_S = decisive_SK.sum(axis=1) - 1
    last_logits_S = np.take_along_axis(logits_SK, last_S[:, None], axis=1)[:, 0]
    return kept_SK, last_logits_S > logits_SK[:, -1]
