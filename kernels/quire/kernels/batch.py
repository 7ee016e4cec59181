"""The input of one step on a rank's device, which `ProgramRunner.forward` takes."""

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.shared_prefix import SharedSplits

# T tokens   B sequences, of M blocks at most   S rows that are sampled, the last G of them greedily
# C hidden size   H rows whose hidden states are wanted   A biased and E seen pairs of row and token
# K masks of W words


@dataclass(slots=True)
class Hidden:
    """Hidden states of some of the S rows after the last norm, which are the LM head's input."""

    rows_H: Tensor
    values_HC: Tensor | None = None
    """The states, float32, which `ProgramRunner.forward` stores here."""

    def take(self, x_SC: Tensor) -> None:
        self.values_HC = x_SC[self.rows_H].float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A step's sequences on the device: the input of attention. The tensors are int32."""

    block_tables_BM: Tensor
    seq_lens_B: Tensor
    query_starts_B1: Tensor
    num_decodes: int
    """Rows ``0:num_decodes`` have one query each."""
    max_query_len: int
    max_seq_len: int
    """The longest query and sequence of all rows, as plain ints, so that the host does not wait for
    the device. Larger values give the same bits and waste a little time."""
    shared: SharedSplits | None = None
    """Decodes that read the same blocks, if there are enough of them. This may save time and does
    not change a bit."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch(Rows):
    """A step's input on the device."""

    token_ids_T: Tensor
    positions_T: Tensor
    slot_mapping_T: Tensor
    last_tokens_S: Tensor
    """Index in T of the last token of each row that is sampled."""
    hidden: Hidden | None = None
    adapter_slots_T: Tensor | None = None
    """int32: the slot of each token's adapter, or -1. ``None`` if no token has an adapter, which
    adds no cost."""


@dataclass(frozen=True, kw_only=True)
class GreedyEdits:
    """Changes to the logits of G rows before the greatest is found.

    `quire.kernels.reference.sampling.adjust_logits` defines them. The ids of each row ascend.
    Starts are int64: the index at which each row's pairs begin, and the end of the last row's.
    """

    biased_starts_G1: Tensor
    biased_ids_A: Tensor
    bias_A: Tensor
    seen_starts_G1: Tensor
    seen_ids_E: Tensor
    seen_counts_E: Tensor
    presence_G: Tensor
    frequency_G: Tensor
    repetition_G: Tensor
    mask_of_G: Tensor
    """int32: a row of ``mask_KW``, or -1."""
    mask_KW: Tensor
    first_column: int = 0
    """The token of the first column of this rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedColumns:
    """The columns of the LM head to compute for S rows; the logits of others are undefined."""

    mask_of_S: Tensor
    """int32: a row of ``mask_KW``, or -1 for all columns."""
    mask_KW: Tensor
    """int32: bit ``t % 32`` of word ``t // 32`` selects token ``t``; tokens beyond are not."""
    first_column: int = 0
    """The token of the first column of this rank."""
