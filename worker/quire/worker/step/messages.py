"""The messages between the engine and its ranks: a `StepInput` to all, a `StepOutput` from rank 0.

Ranks keep no per-request state: each step contains everything that it needs, except tokens that the
previous step samples, which ranks remember until then. So every rank of a group does the same work
and holds no state that could be lost. Decodes (rows of one query token) come first.
"""

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.request.arrays import Floats, Ints, Longs
from quire.worker.request.outputs import TokenLogprobs
from quire.worker.step.sampling_batch import Adjustments, SamplingBatch

# T tokens of the step, packed   B sequences in the step   M blocks of the longest of them
# S samples                      L tokens that are not known yet
# H samples whose hidden states are wanted   X copies of blocks   C hidden size


MAX_SCORED_TOKENS = 256
"""Most prompt tokens that one step scores. All their logits are in memory at the same time: 128 MiB
with a vocabulary of 128k."""


def _no_rows() -> Ints:
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepInput:
    """The input of all ranks for one step. The arrays belong to the step and never change."""

    token_ids_T: Longs
    positions_T: Longs
    slot_mapping_T: Longs
    """Slot for the token's K and V: ``block id * block_size + offset in the block``."""
    block_tables_BM: Ints
    """Block ids, padded with 0."""
    seq_lens_B: Ints
    """Tokens whose KV each row attends to, including those of this step."""
    query_starts_B1: Ints
    """Row b's tokens are ``query_starts[b]:query_starts[b + 1]`` of T. Length B + 1."""
    num_decodes: int
    """Rows ``0:num_decodes`` have exactly one token; later rows are prefill chunks."""
    samples_S: Ints
    """Indices in T of the tokens after which a token is sampled, ascending. A chunk in the middle
    of a prompt has none, a decode has its token, and a sequence may have several."""
    sampling: SamplingBatch
    late_tokens_L: Ints = field(default_factory=_no_rows)
    """Indices in T of tokens that the previous step samples; ranks insert them."""
    late_rows_L: Ints = field(default_factory=_no_rows)
    """For each late token, its sample's index in S of the previous step."""
    edits_follow: bool = False
    """Whether changes to the logits depend on samples of the previous step. Rank 0 then receives
    the adjustments while the model runs: see `Executor.send_edits`."""
    adapter_slots_A: Ints = field(default_factory=_no_rows)
    """Slot of each row's adapter; -1 for none. Length B, or 0 if no row has an adapter."""
    adapter_loads: tuple[tuple[int, str], ...] = ()
    """Slots, and the digests of the adapters in the node's store that every rank loads into them
    before it computes."""
    hidden_rows_H: Ints | None = None
    """The samples whose hidden states are requested, ascending; ``None`` if there are none."""
    copies_X22: Ints | None = None
    """Blocks that every rank copies before it computes: source and target, each as a tier and the
    block's index there. Tier 0 is the KV cache, tier 1 the memory of `Executor.host_blocks_XC`,
    within which there are no copies. Copies are made in order; but among consecutive copies between
    the same two tiers, none may read what another writes. A step may have copies and no tokens."""


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The outputs of a step's samples, in the order of `StepInput.samples_S`: a field for each
    kind of output. All but the tokens are empty if no sample requests them."""

    token_ids_S: Longs
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    """One for each sample; empty if none was requested."""
    broken_rows: tuple[int, ...] = ()
    """Samples whose logits were NaN or infinite. Their tokens must be ignored."""
    hidden_HC: Floats | None = None
    """The hidden states of `StepInput.hidden_rows_H`, after the last norm."""


class Executor(Protocol):
    """The engine's interface to the ranks of one group. Steps run in the order of `submit`."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks of every rank's KV cache."""

    @property
    def num_ahead(self) -> int:
        """How many steps to submit ahead of the oldest step's result: 0, or 1 if that is faster."""

    @property
    def numerics(self) -> str:
        """Everything besides the weights that determines the bits of outputs; see
        `quire.worker.model.numerics`."""

    @property
    def kv_format(self) -> KvFormat:
        """The layout of blocks in `host_blocks_XC`."""

    @property
    def host_blocks_XC(self) -> Bytes | None:
        """Memory for blocks outside the cache, shared by this process and all ranks: tier 1 of
        `StepInput.copies_X22`. ``None`` if `EngineConfig.host_kv_bytes` is 0, and for encoders.
        Its first `STAGING_BYTES` have been touched, so that they are fast from the start."""

    def submit(self, step: StepInput) -> None:
        """Sends a step to all ranks. At most ``1 + num_ahead`` may be under way.

        Raises:
            RankFailure: A rank died or does not accept it. The executor is closed.
        """

    def send_edits(self, adjustments: Adjustments | None) -> None:
        """Sends rank 0 all adjustments of the last submitted step, which has ``edits_follow`` set.
        The results of all earlier steps must have been taken.

        Raises:
            RankFailure: As for `submit`.
        """

    def result(self) -> StepOutput:
        """Waits for the oldest step whose result has not been taken, and returns its output.

        Raises:
            RankFailure: A rank died, raised or missed its deadline. The executor is closed.
        """

    def close(self) -> None:
        """Stops every rank and frees its memory. Can be called again."""
