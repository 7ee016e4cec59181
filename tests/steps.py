"""What the models of tests read from a step's input."""

from collections.abc import Iterator

import numpy as np

from quire.worker.step.messages import StepInput
from quire.worker.step.sampling_batch import Adjustments, Edits, SamplingBatch


def samples(step: StepInput) -> Iterator[tuple[int, int, int]]:
    """For each sample its number, its row of the step, and how many tokens stand before it."""
    rows = np.searchsorted(step.query_starts_B1, step.samples_S, side="right") - 1
    lengths = step.positions_T[step.samples_S] + 1
    yield from zip(range(len(rows)), rows.tolist(), lengths.tolist(), strict=True)


_MAX_VOCAB = 512
"""Of the models that are no real ones."""


def banned_ids(sampling: SamplingBatch, sample: int) -> list[int]:
    """The tokens that one sample must not be."""
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
