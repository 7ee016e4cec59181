"""How a reranker scores pairs of texts."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScore:
    """How a decoder scores a document for a query, as Qwen3-Reranker does: its chat template writes
    both, and the score is how much more likely the one token is behind them than the other."""

    true_token_id: int
    false_token_id: int
    add_generation_prompt: bool
    """For the chat template."""
