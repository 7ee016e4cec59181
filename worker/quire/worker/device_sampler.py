"""Sampling where the logits are: the tokens of `quire.worker.sampler`, without waiting for the
device.

Parameters, penalties and bans go up in one copy; tokens, and what was asked of log-probabilities,
come down in another, for which only the reader of the result waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.kernels import reference_sampling
from quire.worker.staging import Array, stage
from quire.worker.step import Floats, Ints, SamplingBatch, StepOutput, TokenLogprobs

# S rows that sample   V vocabulary   E pairs of a row and a token   R rows with log-probabilities
# K tokens of the longest list asked for


class DeviceSampler:
    """The sampler of a rank whose logits are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sample: Callable[..., Tensor] = reference_sampling.sample
        self._adjust: Callable[..., None] = reference_sampling.adjust_logits
        if device.type == "cuda":
            from quire.kernels import triton_logits, triton_sample

            self._sample = triton_sample.sample
            self._adjust = triton_logits.adjust_logits

    @torch.inference_mode()
    def sample(self, logits_SV: Tensor, batch: SamplingBatch) -> "Sampled":
        """Chooses a token for each row of float32 logits, which penalties and bans change."""
        edits = Edits.of(batch)
        wants_logprobs = batch.num_logprobs_S >= 0
        columns: list[Array] = [
            np.flatnonzero(wants_logprobs),
            batch.temperature_S,
            batch.top_k_S,
            batch.top_p_S,
            batch.min_p_S,
            batch.seed_S,
            batch.position_S,
        ]
        staged = stage([*columns, *edits.arrays()], self._device)
        rows_R, temperature_S, top_k_S, top_p_S, min_p_S, seed_S, position_S = staged[:7]
        # Of the model itself, so taken before the penalties.
        plain_RV = logits_SV[rows_R] if len(rows_R) else None
        if len(edits.rows_E):
            self._adjust(logits_SV, **dict(zip(edits.__slots__, staged[7:], strict=True)))
        token_ids_S = self._sample(
            logits_SV,
            temperature_S=temperature_S,
            top_k_S=top_k_S,
            top_p_S=top_p_S,
            min_p_S=min_p_S,
            seed_S=seed_S,
            position_S=position_S,
        )
        pieces = [token_ids_S]
        if plain_RV is not None:
            num_top = min(int(batch.num_logprobs_S.max()), logits_SV.shape[1])
            pieces += _logprobs(plain_RV, token_ids_S[rows_R], num_top=num_top)
        return Sampled(pieces, batch.num_logprobs_S)


_ROWS_AT_ONCE = 16
"""Bounds what log-probabilities take: 16 rows of 128k are 16 MiB in float64, five times over."""


class Sampled:
    """The tokens of a step, on their way to the host."""

    def __init__(self, pieces: Sequence[Tensor], num_logprobs_S: Ints) -> None:
        """``pieces``: token ids and, of the R rows that want them, log-probabilities and ranks of
        these tokens, ids and log-probabilities of the best; all of 8 bytes."""
        self.token_ids_S = pieces[0]
        """On the device: what a next step can be made from before this one has ended."""
        self._num_logprobs_S = num_logprobs_S
        self._shapes = [piece.shape for piece in pieces]
        flat = torch.cat([piece.flatten().view(torch.int64) for piece in pieces])
        self._event: torch.cuda.Event | None = None
        if flat.device.type == "cuda":
            host = torch.empty(flat.shape, dtype=torch.int64, pin_memory=True)
            self._flat = host.copy_(flat, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        else:
            self._flat = flat

    def wait(self) -> StepOutput:
        """The step's output; waits until the device has come so far."""
        if self._event is not None:
            self._event.synchronize()
        sizes = [shape.numel() for shape in self._shapes]
        parts = [
            part.reshape(shape)
            for part, shape in zip(
                np.split(self._flat.numpy(), np.cumsum(sizes)[:-1]), self._shapes, strict=True
            )
        ]
        token_ids_S = parts[0].copy()
        if len(parts) == 1:
            return StepOutput(token_ids_S)
        own_R, rank_R, top_ids_RK, top_RK = parts[1:]
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids_S)
        for index, row in enumerate(np.flatnonzero(self._num_logprobs_S >= 0).tolist()):
            count = int(self._num_logprobs_S[row])
            top = zip(
                top_ids_RK[index, :count].tolist(),
                top_RK[index, :count].view(np.float64).tolist(),
                strict=True,
            )
            logprobs[row] = TokenLogprobs(
                token_id=int(token_ids_S[row]),
                logprob=float(own_R.view(np.float64)[index]),
                rank=int(rank_R[index]),
                top=tuple(top),
            )
        return StepOutput(token_ids_S, tuple(logprobs))


def _logprobs(logits_RV: Tensor, token_ids_R: Tensor, *, num_top: int) -> list[Tensor]:
    """As `quire.worker.logprobs.token_logprobs`, of several rows: own, rank, best ids, best."""
    columns: list[tuple[Tensor, ...]] = []
    for start in range(0, len(logits_RV), _ROWS_AT_ONCE):
        some_RV = logits_RV[start : start + _ROWS_AT_ONCE].double()
        ids_R = token_ids_R[start : start + _ROWS_AT_ONCE]
        logprobs_RV = some_RV - torch.logsumexp(some_RV, dim=-1, keepdim=True)
        own_R1 = logprobs_RV.gather(1, ids_R[:, None])
        rank_R = (logprobs_RV > own_R1).sum(dim=-1) + 1
        # Stable, as lower ids come first among equals.
        top_RV, ids_RV = logprobs_RV.sort(dim=-1, descending=True, stable=True)
        best = (ids_RV[:, :num_top].clone(), top_RV[:, :num_top].clone())
        columns.append((own_R1[:, 0], rank_R, *best))
    return [torch.cat(pieces) for pieces in zip(*columns, strict=True)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """The penalties and bans of a step, as `reference_sampling.adjust_logits` takes them."""

    rows_E: Ints
    token_ids_E: Ints
    counts_E: Ints
    presence_S: Floats
    frequency_S: Floats
    repetition_S: Floats

    def arrays(self) -> list[Array]:
        """In the order of the fields; none where there is nothing to change."""
        if len(self.rows_E) == 0:
            return []
        pairs = [self.rows_E, self.token_ids_E, self.counts_E]
        return [*pairs, self.presence_S, self.frequency_S, self.repetition_S]

    @classmethod
    def of(cls, batch: SamplingBatch) -> "Edits":
        num_rows = len(batch.temperature_S)
        presence_S, frequency_S = np.zeros((2, num_rows), np.float32)
        repetition_S = np.ones(num_rows, np.float32)
        rows, ids, counts = [_NO_INTS], [_NO_INTS], [_NO_INTS]

        def add(row: int, token_ids: npt.NDArray[np.int64], counted: Ints) -> None:
            rows.append(np.full(len(token_ids), row, np.int32))
            ids.append(token_ids.astype(np.int32))
            counts.append(counted)

        for penalties in batch.penalties:
            row = penalties.row
            presence_S[row], frequency_S[row] = penalties.presence, penalties.frequency
            token_ids, counted = penalties.output_ids_R, penalties.output_counts_R
            if penalties.repetition != 1:
                repetition_S[row] = penalties.repetition
                token_ids = penalties.seen_ids_R
                order = token_ids.argsort()
                place = order[token_ids[order].searchsorted(penalties.output_ids_R)]
                counted = np.zeros(len(token_ids), np.int32)
                counted[place] = penalties.output_counts_R
            if (banned := batch.banned_ids.get(row)) is not None:
                allowed = ~np.isin(token_ids, banned)
                token_ids, counted = token_ids[allowed], counted[allowed]
            add(row, token_ids, counted)
        for row, banned in batch.banned_ids.items():
            distinct = np.unique(banned)
            add(row, distinct, np.full(len(distinct), -1, np.int32))
        return cls(
            rows_E=np.concatenate(rows),
            token_ids_E=np.concatenate(ids),
            counts_E=np.concatenate(counts),
            presence_S=presence_S,
            frequency_S=frequency_S,
            repetition_S=repetition_S,
        )


_NO_INTS: Ints = np.zeros(0, np.int32)
