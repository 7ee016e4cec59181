"""What `quire.llm.LLM` gives back. Names and meanings are vLLM's."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own natural-log probability of a token, before penalties and temperature."""

    logprob: float
    rank: int
    """1 for the most probable token of the vocabulary."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    """For each token: itself and the most probable ones by id; ``None`` unless asked for."""
    cumulative_logprob: float | None
    """The sum over ``token_ids``; ``None`` unless ``logprobs`` was asked for."""
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token that ended it; ``None`` for end-of-sequence or length."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    """``None`` where the prompt came as token ids."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens whose KV the first completion found in the cache."""
    outputs: list[CompletionOutput]
    finished: bool = True
