"""A completion's output on its way to its client, in no protocol's words."""

from dataclasses import dataclass, field

from quire.router.policies.policy import Decision
from quire.worker.api.arrays import Floats
from quire.worker.api.outputs import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What is known of a completion with its first token."""

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV the engine found in its cache."""
    decision: Decision
    explains_routing: bool
    """The client wants to know of every group that it could have gone to."""
    seed: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Times are in seconds from the request's arrival."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float
    total_time_s: float


@dataclass(slots=True)
class Chunk:
    """Tokens of one completion, in order."""

    index: int
    """Which of the client's completions it is."""
    token_offset: int
    """Output tokens before these."""
    text: str = ""
    """What these tokens complete."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """On the last one, as is ``usage``."""
    stop_reason: str | int | None = None
    """The stop string or the stop token's id that ended it."""
    start: Start | None = None
    """On the first one."""
    usage: Usage | None = None
    embedding: Floats | None = None
    """On the only one of a request that embeds."""
