"""How a reranker scores pairs of texts."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import tanh
from typing import Literal

from quire.worker.request.errors import InvalidRequest

Similarity = Literal["cosine", "dot", "euclidean", "manhattan"]


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
        return _messages(system=self.prompt, query=query, document=document)

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


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddingUse:
    """How an embedding model's texts become prompts, and how its vectors are compared."""

    similarity: Similarity = "cosine"
    is_chat: bool = False
    """Whether the chat template renders a text, as a user's message."""
    add_generation_prompt: bool = False
    """Whether the chat template adds its generation prompt."""
    prompt: str = ""
    """The system message before each text; empty for none."""
    is_lower: bool = False
    """Whether a text is written in lower case before it is tokenized."""

    def written(self, text: str) -> str:
        """The text as it is tokenized."""
        return text.lower() if self.is_lower else text

    def messages(self, text: str) -> list[dict[str, str]]:
        """The messages for the chat template."""
        return _messages(system=self.prompt, user=text)

    def check_uncut(self, num_tokens: int, kept: int | None) -> None:
        """Raises InvalidRequest if a rendered text of ``num_tokens`` is to be truncated to
        ``kept``; -1 means what the model takes, which is checked elsewhere."""
        if self.is_chat:
            check_uncut(num_tokens, kept)


def check_uncut(num_tokens: int, kept: int | None) -> None:
    """Raises InvalidRequest if a rendered chat of ``num_tokens`` is to be truncated to ``kept``."""
    if kept is not None and kept != -1 and num_tokens > kept:
        raise InvalidRequest(
            f"has {num_tokens} tokens with the model's chat template, which writes something "
            f"behind a text: truncate_prompt_tokens={kept} cannot cut it, send shorter texts",
            param="truncate_prompt_tokens",
        )


def _messages(**texts: str) -> list[dict[str, str]]:
    """A message for each role; none for an empty system message."""
    return [
        {"role": role, "content": text} for role, text in texts.items() if text or role != "system"
    ]


def logistic(logit: float) -> float:
    """The logistic function, from 0 to 1, without overflow at any ``logit``."""
    return (1 + tanh(logit / 2)) / 2


Scoring = LogitScore | PairScore
