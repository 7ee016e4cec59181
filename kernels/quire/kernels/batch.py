"""The input of one step on a rank's device, on which `ProgramRunner.forward` runs a program."""

from dataclasses import dataclass

from torch import Tensor

from quire.kernels.shared_prefix import SharedSplits

# T tokens   B sequences, of M blocks at most   S rows that are sampled, the last G of them greedily
# C hidden size   H rows whose hidden states are wanted   A biased and E seen pairs of row and token
# K masks of W words


@dataclass(slots=True)
class Hidden:
    """Hidden states behind the last norm, as they go into the LM head, of some of the S rows."""

    rows_H: Tensor
    values_HC: Tensor | None = None
    """float32; `ProgramRunner.forward` puts them here."""

    def take(self, x_SC: Tensor) -> None:
        self.values_HC = x_SC[self.rows_H].float()


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """A step's sequences on the device, as attention reads them. The tensors are int32."""

    block_tables_BM: Tensor
    seq_lens_B: Tensor
    query_starts_B1: Tensor
    num_decodes: int
    """Rows ``0:num_decodes`` have one query each."""
    max_query_len: int
    max_seq_len: int
    """Over all rows, as plain ints so that nothing waits for the device. Larger ones give the same
    bits and waste a little time."""
    shared: SharedSplits | None = None
    """Decodes that read the same blocks, where there are enough of them: it may save time, and
    changes no bit."""


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
    """int32: the slot of each token's adapter, or -1. ``None`` where no token has one, which then
    costs nothing."""


@dataclass(frozen=True, kw_only=True)
class GreedyEdits:
    """What is changed in the logits of G rows before the greatest is found.

    `quire.kernels.reference_sampling.adjust_logits` says what it means. The ids of each row ascend.
    Starts are int64: where each row's pairs begin, and the end of all.
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
    """Which columns of the LM head are wanted of S rows; the others' logits mean nothing."""

    mask_of_S: Tensor
    """int32: a row of ``mask_KW``, or -1, which wants all."""
    mask_KW: Tensor
    """int32: bit ``t % 32`` of word ``t // 32`` wants token ``t``; those behind are not wanted."""
    first_column: int = 0
    """The token of the first column of this rank."""
