"""Reads samples and banned tokens from a `StepInput`, for the made-up models of tests."""

from collections.abc import Iterator

import numpy as np

from quire.worker.step.messages import StepInput
from quire.worker.step.sampling_batch import Adjustments, Edits, SamplingBatch


def samples(step: StepInput) -> Iterator[tuple[int, int, int]]:
    """Yields for each sample its index, its row in the step, and the length of its context."""
    rows = np.searchsorted(step.query_starts_B1, step.samples_S, side="right") - 1
    lengths = step.positions_T[step.samples_S] + 1
    yield from zip(range(len(rows)), rows.tolist(), lengths.tolist(), strict=True)


_MAX_VOCAB = 512
"""Largest vocabulary of the made-up models."""


def banned_ids(sampling: SamplingBatch, sample: int) -> list[int]:
    """The token ids that bias or mask excludes for one sample."""
    if sampling.adjustments is None:
        return []
    adjustments = sampling.adjustments
    is_banned = (adjustments.biased_rows_A == sample) & np.isneginf(adjustments.bias_A)
    banned = [int(token) for token in adjustments.biased_ids_A[is_banned]]
    for mask_W in adjustments.mask_KW[adjustments.masked_rows_K == sample]:
        bits = np.unpackbits(mask_W.view(np.uint8), bitorder="little")
        banned += np.flatnonzero(bits == 0).tolist()
        banned += range(len(bits), _MAX_VOCAB)
    return banned


def banning(ids: list[int]) -> Edits:
    return Edits(
        biased_ids_A=np.array(ids, np.int64), bias_A=np.full(len(ids), -np.inf, np.float32)
    )


def adjusting(edits: dict[int, Edits], *, num_samples: int) -> Adjustments | None:
    return Adjustments.of(list(edits.items()), num_samples=num_samples) if edits else None
