"""How a reranker scores pairs of texts."""

from dataclasses import dataclass
from math import tanh


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScore:
    """How a decoder scores a document for a query, as Qwen3-Reranker does: its chat template writes
    both, and the score is how much more likely the one token is behind them than the other."""

    true_token_id: int
    false_token_id: int
    add_generation_prompt: bool
    """Whether the chat template adds its generation prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """An encoder with a classifier of one label scores a query and a document that it reads as one
    text, as BGE's rerankers and the cross-encoders of sentence-transformers do."""

    is_logistic: bool
    """The score is the logistic function of the label's logit, from 0 to 1; else the logit."""

    def of(self, logit: float) -> float:
        """The score."""
        return logistic(logit) if self.is_logistic else logit


def logistic(logit: float) -> float:
    """From 0 to 1, at any ``logit``."""
    return (1 + tanh(logit / 2)) / 2


Scoring = LogitScore | PairScore
