"""How a reranker scores pairs of texts."""

from dataclasses import dataclass
from math import tanh


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitScore:
    """How a decoder scores a document for a query, as Qwen3-Reranker does: the chat template
    renders both, and the score is how much likelier the true token follows than the false one."""

    true_token_id: int
    false_token_id: int
    add_generation_prompt: bool
    """Whether the chat template adds its generation prompt."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """How a cross-encoder scores a query and a document that it reads as one text: a classifier
    with one label, as in BGE's rerankers and those of sentence-transformers."""

    is_logistic: bool
    """Whether the score is the logistic function of the label's logit (0 to 1), or the logit."""

    def of(self, logit: float) -> float:
        """The score for the label's ``logit``."""
        return logistic(logit) if self.is_logistic else logit


def logistic(logit: float) -> float:
    """The logistic function, from 0 to 1, without overflow at any ``logit``."""
    return (1 + tanh(logit / 2)) / 2


Scoring = LogitScore | PairScore
