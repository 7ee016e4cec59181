"""Outputs of an engine for each step, and the final outputs of `quire.llm.LLM`.

The final outputs have vLLM's names and meanings.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.worker.request.arrays import Floats
from quire.worker.request.errors import QuireError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The model's natural-log probabilities, before penalties, temperature and top-p."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """Token ids and log-probabilities: the most probable tokens, best first, then those of the
    tokens named by the request that are not among them."""


class Fetched(NamedTuple):
    """Tokens whose KV a request found outside the KV cache."""

    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0
    wait_s: float = 0.0
    """Seconds that the request waited for disk and other groups."""
    error: str = ""
    """Why blocks did not arrive from their source; empty if all arrived."""

    @property
    def num_tokens(self) -> int:
        return self.num_host_tokens + self.num_disk_tokens + self.num_peer_tokens


class TokenDelta(NamedTuple):
    """The output of one step for one request."""

    request_id: str
    token_offset: int
    """Output tokens before ``token_ids``, including resumed ones."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One for each token; empty if the request asked for none."""
    finish_reason: FinishReason | None
    """Set on a request's last output."""
    num_cached_tokens: int
    """Prompt tokens whose KV was in the cache when the request first ran."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens after the first, if requested; only in the first
    output."""
    error: QuireError | None = None
    """Why the request failed, with ``finish_reason`` "abort"."""
    hidden: Floats | None = None
    """Hidden states, if requested: one row for each token. For an embedding, its vector as the only
    row, without a token."""
    fetched: Fetched | None = None
    """In the first output: the cached tokens that came from other tiers or groups; ``None`` if none
    came and none were requested."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own natural-log probability of a token, before penalties and temperature."""

    logprob: float
    rank: int | None
    """1 for the most probable token of the vocabulary; ``None`` for a token that is listed only
    because the request names it."""
    decoded_token: str


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One completion of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    """For each token, by token id: itself and the most probable tokens; ``None`` unless requested.
    """
    cumulative_logprob: float | None
    """The sum of log-probabilities over ``token_ids``; ``None`` unless ``logprobs`` was requested.
    """
    finish_reason: FinishReason
    stop_reason: str | int | None
    """The stop string or stop token that ended it; ``None`` for end-of-sequence or length."""


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A prompt and its completions."""

    request_id: str
    prompt: str | None
    """The prompt's text; ``None`` if it was given as token ids."""
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens whose KV the first completion found in the cache."""
    outputs: list[CompletionOutput]
    finished: bool = True
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One entry for each prompt token, ``None`` for the first; ``None`` unless requested."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int
    """Prompt tokens whose KV was in the cache."""
    finished: bool = True


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How similar two texts are, or how relevant one is for the other."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """The tokens of both texts."""
    num_cached_tokens: int
    finished: bool = True
