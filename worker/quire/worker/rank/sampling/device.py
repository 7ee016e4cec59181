"""Sampling on the device of the logits. It gives the same tokens as `draw`, and does not
wait for the device.

Parameters and adjustments are copied to the device in one transfer. Tokens and requested
log-probabilities are copied back in another, for which only `Sampled.wait` waits.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from quire.kernels.reference import sampling as reference_sampling
from quire.worker.rank.sampling.logprobs import with_asked
from quire.worker.rank.staging import Array, stage
from quire.worker.request.arrays import Longs
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.step.messages import StepOutput
from quire.worker.step.sampling_batch import SAMPLE_TYPES, Adjustments, SamplingBatch

# S samples   V vocabulary   R samples with log-probabilities
# K tokens of the longest list asked for   A tokens of the longest list that a request names


class DeviceSampler:
    """The sampler of a rank whose logits are on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sample: Callable[..., Tensor] = reference_sampling.sample
        self._adjust: Callable[..., None] = reference_sampling.adjust_logits
        if device.type == "cuda":
            from quire.kernels.triton import logits as triton_logits
            from quire.kernels.triton import sample as triton_sample

            self._sample = triton_sample.sample
            self._adjust = triton_logits.adjust_logits

    @torch.inference_mode()
    def sample(
        self, logits_SV: Tensor, batch: SamplingBatch, hidden_HC: Tensor | None = None
    ) -> "Sampled":
        """Samples a token for each row of logits, of any float type. ``hidden_HC`` is copied to the
        host with the tokens.

        Adjustments change float32 logits in place; others are copied to float32 first.
        """
        drawn_by = [name for name in SAMPLE_TYPES if name != "num_logprobs_S"]
        adjusted_by = [each.name for each in fields(Adjustments)] if batch.adjustments else []
        arrays: dict[str, Array] = {
            "rows_R": np.flatnonzero(batch.num_logprobs_S >= 0),
            **{name: getattr(batch, name) for name in drawn_by},
            **{name: getattr(batch.adjustments, name) for name in adjusted_by},
        }
        if batch.given_S is not None:
            arrays["given_S"] = batch.given_S
        if batch.asked is not None:
            arrays["asked_RA"] = _padded([batch.asked.get(row, ()) for row in arrays["rows_R"]])
        staged = dict(zip(arrays, stage(list(arrays.values()), self._device), strict=True))
        rows_R = staged["rows_R"]
        # Log-probabilities are the model's, so its logits are taken before they are adjusted.
        plain_RV = logits_SV[rows_R] if len(rows_R) else None
        if adjusted_by:
            logits_SV = logits_SV.float()
            self._adjust(logits_SV, **{name: staged[name] for name in adjusted_by})
        token_ids_S = self._sample(logits_SV, **{name: staged[name] for name in drawn_by})
        if batch.given_S is not None:
            token_ids_S = torch.where(staged["given_S"] >= 0, staged["given_S"], token_ids_S)
        # The host checks these for broken logits, since it waits for the tokens anyway.
        chosen_S = logits_SV.gather(1, token_ids_S[:, None])[:, 0]
        pieces = [token_ids_S, chosen_S.double()]
        if plain_RV is not None:
            num_top = min(int(batch.num_logprobs_S.max()), logits_SV.shape[1])
            asked_RA = staged.get("asked_RA")
            pieces += _logprobs(plain_RV, token_ids_S[rows_R], asked_RA, num_top=num_top)
        if hidden_HC is not None:
            pieces.append(hidden_HC.double())
        return Sampled(pieces, batch, has_hidden=hidden_HC is not None)


_ROWS_AT_ONCE = 16
"""Limits the memory for log-probabilities: 16 rows of 128k take five times 16 MiB in float64."""


class Sampled:
    """The tokens of a step, while they are copied to the host."""

    def __init__(
        self, pieces: Sequence[Tensor], batch: SamplingBatch, *, has_hidden: bool = False
    ) -> None:
        """``pieces``, all of 8 bytes: token ids and their logits; for the R rows that request
        log-probabilities, those of the token, its rank, ids and log-probabilities of the best
        tokens, and log-probabilities of named tokens; then hidden states, if there are any."""
        self._has_hidden = has_hidden
        self.token_ids_S = pieces[0]
        """The tokens on the device, so that the next step can start before this one has ended."""
        self._num_logprobs_S = batch.num_logprobs_S
        self._asked = batch.asked or {}
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
        """Waits for the device and returns the step's output."""
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
        is_broken_S = ~(parts[1].view(np.float64) < np.inf)
        broken_rows = tuple(np.flatnonzero(is_broken_S).tolist()) if is_broken_S.any() else ()
        hidden_HC = None
        if self._has_hidden:
            hidden_HC = parts.pop().view(np.float64).astype(np.float32)
        if len(parts) == 2:
            return StepOutput(token_ids_S, broken_rows=broken_rows, hidden_HC=hidden_HC)
        own_R, rank_R, top_ids_RK, top_RK, asked_RA = parts[2:]
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids_S)
        for index, row in enumerate(np.flatnonzero(self._num_logprobs_S >= 0).tolist()):
            count = int(self._num_logprobs_S[row])
            asked = self._asked.get(row, ())
            top = zip(
                top_ids_RK[index, :count].tolist(),
                top_RK[index, :count].view(np.float64).tolist(),
                strict=True,
            )
            values = asked_RA[index, : len(asked)].view(np.float64).tolist()
            logprobs[row] = TokenLogprobs(
                token_id=int(token_ids_S[row]),
                logprob=float(own_R.view(np.float64)[index]),
                rank=int(rank_R[index]),
                top=with_asked(tuple(top), asked, values),
            )
        return StepOutput(token_ids_S, tuple(logprobs), broken_rows, hidden_HC)


def _padded(lists: Sequence[Sequence[int]]) -> Longs:
    """The lists as rows of one array, padded with zeros."""
    rows = np.zeros((len(lists), max(map(len, lists))), np.int64)
    for row, each in zip(rows, lists, strict=True):
        row[: len(each)] = each
    return rows


def _logprobs(
    logits_RV: Tensor, token_ids_R: Tensor, asked_RA: Tensor | None, *, num_top: int
) -> list[Tensor]:
    """`logprobs.token_logprobs` for several samples: the token's, its rank,
    ids and values of the best, and those of the requested tokens."""
    if asked_RA is None:
        asked_RA = token_ids_R.new_empty((len(token_ids_R), 0))
    columns: list[tuple[Tensor, ...]] = []
    for start in range(0, len(logits_RV), _ROWS_AT_ONCE):
        some_RV = logits_RV[start : start + _ROWS_AT_ONCE].double()
        ids_R = token_ids_R[start : start + _ROWS_AT_ONCE]
        logprobs_RV = some_RV - torch.logsumexp(some_RV, dim=-1, keepdim=True)
        own_R1 = logprobs_RV.gather(1, ids_R[:, None])
        rank_R = (logprobs_RV > own_R1).sum(dim=-1) + 1
        # Stable: among equals, lower ids come first.
        top_RV, ids_RV = logprobs_RV.sort(dim=-1, descending=True, stable=True)
        best = (ids_RV[:, :num_top].clone(), top_RV[:, :num_top].clone())
        asked_some = logprobs_RV.gather(1, asked_RA[start : start + _ROWS_AT_ONCE])
        columns.append((own_R1[:, 0], rank_R, *best, asked_some))
    return [torch.cat(pieces) for pieces in zip(*columns, strict=True)]
