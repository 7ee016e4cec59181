"""Sampling parameters and logit changes of a step's samples, as arrays in the step input.

A sampling parameter that is one number for each sample is a field of `SamplingBatch`. Changes to
the logits of some tokens are in `Adjustments`, which
`quire.kernels.reference.sampling.adjust_logits` defines.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt

from quire.worker.request.arrays import DTYPES, Floats, Ints, Longs

# S samples of the step   A biased and E seen pairs of a sample and a token   K masked samples
# W words of 32 tokens

MASK_BITS = 32
"""Tokens in one word of a mask."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """Changes to the logits of one sample. The tokens of each list are distinct and ascending."""

    biased_ids_A: Longs = field(default_factory=lambda: _NO_LONGS)
    bias_A: Floats = field(default_factory=lambda: _NO_FLOATS)
    """Values added to the logits; minus infinity bans the token."""
    seen_ids_E: Longs = field(default_factory=lambda: _NO_LONGS)
    seen_counts_E: Ints = field(default_factory=lambda: _NO_INTS)
    """How often each token occurs in the output; 0 for a token that is only in the prompt."""
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    mask_W: Ints | None = None
    """Bit ``t % 32`` of word ``t // 32`` allows token ``t``; tokens beyond the last word are not
    allowed. ``None`` allows all."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adjustments:
    """The `Edits` of several samples as arrays, in the order of application. The rows of each list
    are ascending."""

    biased_rows_A: Ints
    biased_ids_A: Ints
    bias_A: Floats
    seen_rows_E: Ints
    seen_ids_E: Ints
    seen_counts_E: Ints
    presence_S: Floats
    frequency_S: Floats
    repetition_S: Floats
    masked_rows_K: Ints
    mask_KW: Ints

    @classmethod
    def of(cls, edits: Sequence[tuple[int, Edits]], *, num_samples: int) -> "Adjustments":
        """Packs ``edits``: samples, ascending, with the changes to their logits."""
        penalties = np.zeros((3, num_samples), np.float32)
        penalties[2] = 1
        for row, each in edits:
            penalties[:, row] = each.presence, each.frequency, each.repetition
        masks = [(row, each.mask_W) for row, each in edits if each.mask_W is not None]
        mask_KW = np.zeros((len(masks), max((len(m) for _, m in masks), default=0)), np.int32)
        for index, (_, mask_W) in enumerate(masks):
            mask_KW[index, : len(mask_W)] = mask_W
        return cls(
            biased_rows_A=_repeated([(row, len(each.biased_ids_A)) for row, each in edits]),
            biased_ids_A=_joined([each.biased_ids_A for _, each in edits], np.int32),
            bias_A=_joined([each.bias_A for _, each in edits], np.float32),
            seen_rows_E=_repeated([(row, len(each.seen_ids_E)) for row, each in edits]),
            seen_ids_E=_joined([each.seen_ids_E for _, each in edits], np.int32),
            seen_counts_E=_joined([each.seen_counts_E for _, each in edits], np.int32),
            presence_S=penalties[0],
            frequency_S=penalties[1],
            repetition_S=penalties[2],
            masked_rows_K=np.array([row for row, _ in masks], np.int32),
            mask_KW=mask_KW,
        )

    @property
    def rows(self) -> Ints:
        """The samples whose logits are changed."""
        return np.unique(np.concatenate([self.biased_rows_A, self.seen_rows_E, self.masked_rows_K]))

    def take(self, rows_L: npt.NDArray[np.intp]) -> "Adjustments":
        """The adjustments of the samples ``rows_L``, renumbered by their index in ``rows_L``."""
        place_S = np.full(len(self.presence_S), -1, np.int32)
        place_S[rows_L] = np.arange(len(rows_L))
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        for rows, *others in _LISTS:
            places = place_S[values[rows]]
            kept = np.argsort(places, kind="stable")[np.count_nonzero(places < 0) :]
            values[rows] = places[kept]
            values |= {name: values[name][kept] for name in others}
        for name in ("presence_S", "frequency_S", "repetition_S"):
            values[name] = values[name][rows_L]
        return Adjustments(**values)


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the S samples of a step."""

    temperature_S: Floats
    top_p_S: Floats
    top_k_S: Ints
    """Most probable tokens to keep; 0 keeps all."""
    min_p_S: Floats
    seed_S: Longs
    position_S: Longs
    """Index of the token to be sampled in prompt + output: with the seed, the whole state of
    the sample's random generator."""
    num_logprobs_S: Ints
    """-1: none; 0: of the sampled token only; k: also of the k most probable tokens."""
    adjustments: Adjustments | None = None
    given_S: Longs | None = None
    """Known tokens that are only scored; -1 for a sample that is drawn, ``None`` if all are."""
    asked: Mapping[int, Sequence[int]] | None = None
    """By sample, more tokens whose log-probabilities are requested. These samples have
    ``num_logprobs`` of 0 or more."""

    @classmethod
    def filled(cls, num_samples: int, *, whole: int, real: float) -> "SamplingBatch":
        """A batch for measurements, with ``whole`` in every integer array, ``real`` in others."""
        numbers = {"i": whole, "f": real}
        columns: dict[str, Any] = {
            name: np.full(num_samples, numbers[dtype.kind], dtype)
            for name, dtype in SAMPLE_TYPES.items()
        }
        return cls(**columns)

    @property
    def adjusted_rows(self) -> Ints:
        """The samples whose logits are changed before a token is sampled."""
        return _NO_INTS if self.adjustments is None else self.adjustments.rows

    def take(self, rows_L: npt.NDArray[np.intp]) -> "SamplingBatch":
        """The batch of some samples, which must include all that have log-probabilities."""
        adjustments = None if self.adjustments is None else self.adjustments.take(rows_L)
        columns = {name: getattr(self, name)[rows_L] for name in SAMPLE_TYPES}
        given_L = None if self.given_S is None else self.given_S[rows_L]
        asked = None
        if self.asked is not None:
            asked = {
                place: self.asked[row]
                for place, row in enumerate(rows_L.tolist())
                if row in self.asked
            }
        return SamplingBatch(**columns, adjustments=adjustments, given_S=given_L, asked=asked)

    def with_given(self, token_ids_S: Longs) -> Longs:
        """The sampled tokens, replaced by the known tokens where there are some."""
        if self.given_S is None:
            return token_ids_S
        return np.where(self.given_S >= 0, self.given_S, token_ids_S)


SAMPLE_TYPES: dict[str, np.dtype[Any]] = {
    name: DTYPES[kind] for name, kind in get_type_hints(SamplingBatch).items() if kind in DTYPES
}
"""The dtype of each array of a `SamplingBatch`, by name."""

_LISTS = (
    ("biased_rows_A", "biased_ids_A", "bias_A"),
    ("seen_rows_E", "seen_ids_E", "seen_counts_E"),
    ("masked_rows_K", "mask_KW"),
)
"""Fields of `Adjustments` that belong together: the samples, then their values."""

_NO_INTS: Ints = np.zeros(0, np.int32)
_NO_LONGS: Longs = np.zeros(0, np.int64)
_NO_FLOATS: Floats = np.zeros(0, np.float32)


def _repeated(counts: list[tuple[int, int]]) -> Ints:
    rows, repeats = np.array(counts, np.int32).reshape(-1, 2).T
    return rows.repeat(repeats)


def _joined(parts: list[npt.NDArray[Any]], dtype: type) -> npt.NDArray[Any]:
    return np.concatenate([*parts, np.zeros(0, dtype)], dtype=dtype, casting="unsafe")
