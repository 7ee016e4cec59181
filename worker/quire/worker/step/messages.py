"""The messages between the engine and its ranks: one `StepInput` down, one `StepOutput` up.

Ranks keep no per-request state: each step contains everything that it needs, except tokens that the
step right before it samples, which ranks remember for that long. So every rank of a group does the
same work and holds nothing that could be lost. Decodes (rows of one query token) come first.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.worker.api.arrays import Floats, Ints, Longs
from quire.worker.api.kv_format import Bytes, KvFormat
from quire.worker.api.outputs import TokenLogprobs
from quire.worker.step.sampling_batch import Adjustments, SamplingBatch

# T tokens of the step, packed   B sequences in the step   M blocks of the longest of them
# S samples                      L tokens that are not known yet
# H samples whose hidden states are wanted   X copies of blocks   C hidden size


MAX_SCORED_TOKENS = 256
"""Tokens of prompts that one step scores at most. Their logits lie in memory all at once: 128 MiB
with a vocabulary of 128k."""


def _no_rows() -> Ints:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of all ranks for one step. The arrays belong to the step and never change."""

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
    samples_S: Ints
    """The tokens of T behind which one is sampled, in ascending order. A chunk in the middle of a
    prompt has none, a decode its one token; a sequence may have several."""
    sampling: SamplingBatch
    late_tokens_L: Ints = field(default_factory=_no_rows)
    """Where T has tokens that the step before this one samples: ranks put them in."""
    late_rows_L: Ints = field(default_factory=_no_rows)
    """Which of that step's S samples is each."""
    edits_follow: bool = False
    """Logits are changed by what the step before this one samples. Rank 0 gets the adjustments
    apart, while the model runs: see `Executor.send_edits`."""
    adapter_slots_A: Ints = field(default_factory=_no_rows)
    """Each row's adapter, by its slot, -1 being none; empty where no row has one. Length B or 0."""
    adapter_loads: tuple[tuple[int, str], ...] = ()
    """Slots into which every rank puts another adapter before it computes, and the digests of what
    these are in the node's store."""
    hidden_rows_H: Ints | None = None
    """The samples whose hidden states are wanted, ascending; ``None`` where there are none."""
    copies_X22: Ints | None = None
    """Blocks that every rank copies before it computes: each one's source and target, and of these
    the tier and the block's place there. Tier 0 is the cache that rows read and write, tier 1 the
    memory of `Executor.host_blocks_XC`, within which there are no copies. One copy after the other,
    but of neighbours between the same two tiers none may read what another writes. A step may have
    copies and no tokens."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step made of its samples, in the order of `StepInput.samples_S`: a field for each
    kind of output. All but the tokens are empty where no sample wants them."""

    token_ids_S: Longs
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One per sample, or empty where none was asked for."""
    broken_rows: tuple[int, ...] = ()
    """Samples whose logits were NaN or infinite: their tokens mean nothing."""
    hidden_HC: Floats | None = None
    """The hidden states of `StepInput.hidden_rows_H`, behind the last norm."""


class Executor(Protocol):
    """The ranks of one group, as the engine sees them. Steps run in the order of `submit`."""

    @property
    def num_blocks(self) -> int:
        """Blocks that every rank's KV cache holds."""

    @property
    def num_ahead(self) -> int:
        """Steps to submit before the result of the one before them: 0, or 1 where that pays."""

    @property
    def numerics(self) -> str:
        """Everything that decides the bits of outputs besides the weights; see
        `quire.worker.model.numerics`."""

    @property
    def kv_format(self) -> KvFormat:
        """How blocks lie in `host_blocks_XC`."""

    @property
    def host_blocks_XC(self) -> Bytes | None:
        """Memory for blocks outside the cache, which this process and all ranks share: tier 1 of
        `StepInput.copies_X22`. ``None`` where `EngineConfig.host_kv_bytes` is 0, and of encoders.
        Its first `STAGING_BYTES` are touched, so that they are fast from the start."""

    def submit(self, step: StepInput) -> None:
        """Gives all ranks a step to run. At most ``1 + num_ahead`` are under way.

        Raises:
            RankFailure: A rank died or does not take it. The executor is closed.
        """

    def send_edits(self, adjustments: Adjustments | None) -> None:
        """Gives rank 0 all adjustments of the step that was submitted last, whose ``edits_follow``
        is set. The results of those before it must have been taken.

        Raises:
            RankFailure: As `submit`.
        """

    def result(self) -> StepOutput:
        """Waits for the oldest step whose result was not taken yet.

        Raises:
            RankFailure: A rank died, raised or missed its deadline. The executor is closed.
        """

    def close(self) -> None:
        """Stops every rank and frees what it held. Can be called again."""
