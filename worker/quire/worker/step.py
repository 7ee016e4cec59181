"""What crosses between the engine and its ranks: one `StepInput` down, one `StepOutput` up.

Ranks keep no state of requests: each step says all that it needs, but for tokens that the step
right before it samples, which ranks remember for that long. So every rank of a group does the
same work and has nothing to lose. Decodes (rows of one query token) come first.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
Longs = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

# T tokens of the step, packed   B sequences in the step   M blocks of the longest of them
# S sequences that sample        R tokens with a penalty   L tokens that are not known yet


@dataclass(frozen=True, slots=True)
class Penalties:
    """The tokens that the penalties of row ``row`` of the sampled rows apply to."""

    row: int
    presence: float
    frequency: float
    repetition: float
    output_ids_R: Longs
    """Distinct tokens of the output so far, and how often each is there."""
    output_counts_R: Ints
    seen_ids_R: Longs
    """Distinct tokens of prompt and output."""


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """The sampling parameters of the S rows that sample in a step."""

    temperature_S: Floats
    top_p_S: Floats
    top_k_S: Ints
    """0 keeps all tokens."""
    min_p_S: Floats
    seed_S: Longs
    position_S: Longs
    """Index of the token to be sampled in prompt + output: with the seed, the whole state of
    the row's random generator."""
    num_logprobs_S: Ints
    """-1: none; 0: of the sampled token only; k: of the k most probable too."""
    banned_ids: dict[int, Longs] = field(default_factory=dict)
    """Row → tokens that it must not sample now (end and stop tokens before ``min_tokens``)."""
    penalties: tuple[Penalties, ...] = ()


def _no_rows() -> Ints:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepInput:
    """What all ranks compute in one step. The arrays are the step's own: nobody changes them."""

    token_ids_T: Longs
    positions_T: Longs
    slot_mapping_T: Longs
    """Where the token's K and V go: ``block id * block_size + offset in the block``."""
    block_tables_BM: Ints
    """Block ids, padded with 0."""
    seq_lens_B: Ints
    """Tokens whose KV each row attends to, those of this step included."""
    query_starts_B1: Ints
    """Row b's tokens are ``query_starts[b]:query_starts[b + 1]`` of T. Length B + 1."""
    num_decodes: int
    """Rows ``0:num_decodes`` have exactly one token; later rows are prefill chunks."""
    sample_rows_S: Ints
    """The rows of B whose last token's logits are sampled."""
    sampling: SamplingBatch
    late_tokens_L: Ints = field(default_factory=_no_rows)
    """Where T has tokens that the step before this one samples: ranks put them in."""
    late_rows_L: Ints = field(default_factory=_no_rows)
    """Which of that step's S rows samples each."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the model itself: before penalties, temperature and top-p."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens, best first."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What rank 0 sampled in one step."""

    token_ids_S: Longs
    """In the order of `StepInput.sample_rows_S`."""
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per sampled row, or empty where no row asked."""


class Executor(Protocol):
    """The ranks of one group, as the engine sees them. Steps run in the order of `submit`."""

    @property
    def num_blocks(self) -> int:
        """Blocks that every rank's KV cache holds."""

    @property
    def num_ahead(self) -> int:
        """Steps to submit before the result of the one before them: 0, or 1 where that pays."""

    def submit(self, step: StepInput) -> None:
        """Gives all ranks a step to run. At most ``1 + num_ahead`` are under way.

        Raises:
            RankFailure: A rank died or does not take it. The executor is closed.
        """

    def result(self) -> StepOutput:
        """Waits for the oldest step whose result was not taken yet.

        Raises:
            RankFailure: A rank died, raised or missed its deadline. The executor is closed.
        """

    def close(self) -> None:
        """Stops every rank and frees what it held. Can be called again."""
