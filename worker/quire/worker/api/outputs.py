"""Outputs of an engine, step by step, and the final ones of `quire.llm.LLM`.

Names and meanings of the latter are vLLM's.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

from quire.worker.api.arrays import Floats
from quire.worker.api.errors import QuireError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of the model itself: before penalties, temperature and top-p."""

    token_id: int
    logprob: float
    rank: int
    """1 for the most probable token of the vocabulary."""
    top: tuple[tuple[int, float], ...]
    """The most probable tokens, best first; behind them those that the request names and that are
    not among them."""


class Fetched(NamedTuple):
    """Tokens whose KV a request found outside the KV cache."""

    num_host_tokens: int = 0
    num_disk_tokens: int = 0
    num_peer_tokens: int = 0
    wait_s: float = 0.0
    """How long it waited for disk and other groups."""
    error: str = ""
    """Why blocks that were to come from its source did not; empty where all did."""

    @property
    def num_tokens(self) -> int:
        return self.num_host_tokens + self.num_disk_tokens + self.num_peer_tokens


class TokenDelta(NamedTuple):
    """The output of one step for one request."""

    request_id: str
    token_offset: int
    """Output tokens before these, resumed ones counted."""
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    """One per token, or empty where the request asked for none."""
    finish_reason: FinishReason | None
    """Set on a request's last output."""
    num_cached_tokens: int
    """Prompt tokens whose KV was in the cache when the request first ran."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """Log-probabilities of the prompt's tokens after the first, if asked for; only in the first
    output."""
    error: QuireError | None = None
    """Why the request ended before its time, with ``finish_reason`` "abort"."""
    hidden: Floats | None = None
    """A row for each token, where the request asked for hidden states. The one row of an embedding,
    with no token."""
    fetched: Fetched | None = None
    """With its first output: what of the cached tokens came from elsewhere; ``None`` where none did
    or were to."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """The model's own natural-log probability of a token, before penalties and temperature."""

    logprob: float
    rank: int | None
    """1 for the most probable token of the vocabulary; ``None`` for one that is there only because
    the request names it."""
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
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each token of the prompt, ``None`` for the first; ``None`` unless asked for."""


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
    """How alike two texts are."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """A pair of texts and its score."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Those of both texts."""
    num_cached_tokens: int
    finished: bool = True
