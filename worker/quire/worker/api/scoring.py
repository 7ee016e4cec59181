"""How a reranker scores pairs of texts."""

from collections.abc import Mapping
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
    is_logistic: bool = True
    """Whether the score is the logistic function of the log-odds (0 to 1), or the log-odds."""
    prompt: str = ""
    """The system message before each pair; empty for none."""

    @property
    def token_ids(self) -> tuple[int, int]:
        """The tokens whose log-probabilities make the score."""
        return self.true_token_id, self.false_token_id

    def messages(self, query: str, document: str) -> list[dict[str, str]]:
        """The messages for the chat template."""
        texts = {"system": self.prompt, "query": query, "document": document}
        return [
            {"role": role, "content": text}
            for role, text in texts.items()
            if text or role != "system"
        ]

    def of(self, logprobs: Mapping[int, float]) -> float:
        """The score for the log-probabilities of ``token_ids``."""
        log_odds = logprobs[self.true_token_id] - logprobs[self.false_token_id]
        return logistic(log_odds) if self.is_logistic else log_odds


@dataclass(frozen=True, kw_only=True, slots=True)
class PairScore:
    """How a cross-encoder scores a query and a document that it reads as one text: a classifier
    with one label, as in BGE's rerankers and those of sentence-transformers."""

    is_logistic: bool
    """Whether the score is the logistic function of the label's logit (0 to 1), or the logit."""
    prompt: str = ""
    """The text before each query."""

    def of(self, logit: float) -> float:
        """The score for the label's ``logit``."""
        return logistic(logit) if self.is_logistic else logit


def logistic(logit: float) -> float:
    """The logistic function, from 0 to 1, without overflow at any ``logit``."""
    return (1 + tanh(logit / 2)) / 2


Scoring = LogitScore | PairScore
