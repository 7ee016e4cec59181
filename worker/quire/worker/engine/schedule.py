"""The scheduler's decision for one step."""

from dataclasses import dataclass, field

from quire.worker.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: how many tokens of which sequences to compute, from ``num_computed`` on."""

    sequences: list[Sequence]
    num_tokens: list[int]
    """Tokens of each sequence: known ones, then draft tokens."""
    num_decodes: int
    """Sequences at the beginning that compute exactly one token; it may be the last of a prompt."""
    num_samples: list[int]
    """For each sequence, after how many of its last tokens a token is sampled or scored."""
    num_scored: list[int]
    """How many of ``num_samples``, the first ones, return the log-probability of the prompt's next
    token instead of sampling a token."""
    void: set[Sequence] = field(default_factory=set)
    """Sequences whose sample is discarded, because what may follow was not known in time."""

    @property
    def num_prefilled(self) -> int:
        """Tokens of prefill chunks."""
        rows = slice(self.num_decodes, None)
        pairs = zip(self.sequences[rows], self.num_tokens[rows], strict=True)
        return sum(0 if seq.draft else num_tokens for seq, num_tokens in pairs)


NOTHING = Schedule([], [], 0, [], [])


def in_row_order(chosen: list[tuple[Sequence, int]]) -> Schedule:
    """The step that computes the given number of tokens of each sequence, decodes first."""
    decodes = [seq for seq, num_tokens in chosen if num_tokens == 1]
    chunks = [(seq, num_tokens) for seq, num_tokens in chosen if num_tokens > 1]
    sequences = decodes + [seq for seq, _ in chunks]
    num_tokens_B = [1] * len(decodes) + [num_tokens for _, num_tokens in chunks]
    scored = [
        seq.num_to_score(num_tokens) if seq.must_score else 0
        for seq, num_tokens in zip(sequences, num_tokens_B, strict=True)
    ]
    return Schedule(
        sequences=sequences,
        num_tokens=num_tokens_B,
        num_decodes=len(decodes),
        num_samples=[
            num_scored + max(0, num_tokens - seq.num_uncomputed + 1)
            for seq, num_tokens, num_scored in zip(sequences, num_tokens_B, scored, strict=True)
        ],
        num_scored=scored,
    )
