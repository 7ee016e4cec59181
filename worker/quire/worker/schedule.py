"""One step, as the scheduler chose it."""

from dataclasses import dataclass

from quire.worker.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: how many tokens of which sequences, from each one's ``num_computed`` on."""

    sequences: list[Sequence]
    num_tokens: list[int]
    num_decodes: int
    """So many at the beginning compute exactly one token, be it the last of a prompt."""
    sampled_rows: list[int]
    """Indices of the sequences whose next token is sampled."""


NOTHING = Schedule([], [], 0, [])


def in_row_order(chosen: list[tuple[Sequence, int]]) -> Schedule:
    """The step that computes so many tokens of each."""
    decodes = [seq for seq, num_tokens in chosen if num_tokens == 1]
    chunks = [(seq, num_tokens) for seq, num_tokens in chosen if num_tokens > 1]
    sequences = decodes + [seq for seq, _ in chunks]
    num_tokens_B = [1] * len(decodes) + [num_tokens for _, num_tokens in chunks]
    return Schedule(
        sequences=sequences,
        num_tokens=num_tokens_B,
        num_decodes=len(decodes),
        sampled_rows=[
            row
            for row, (seq, num_tokens) in enumerate(zip(sequences, num_tokens_B, strict=True))
            if num_tokens == seq.num_uncomputed
        ],
    )
