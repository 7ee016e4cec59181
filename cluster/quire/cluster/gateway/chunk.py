"""A completion's output between a gateway's core and its APIs, independent of any protocol."""

from dataclasses import dataclass, field

from quire.router.policies.policy import Decision
from quire.worker.request.arrays import Floats
from quire.worker.request.outputs import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The facts of a completion that are known with its first token."""

    request_id: str
    model: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV the engine found in its cache."""
    decision: Decision
    explains_routing: bool
    """Whether the client asked for the estimated cost of each group that it could have gone to."""
    seed: int
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts and times of a finished completion. Times are seconds since the request's
    arrival."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    time_to_first_token_s: float
    total_time_s: float


@dataclass(slots=True)
class Chunk:
    """Tokens of one completion, in order."""

    index: int
    """The number of the completion in the client's request."""
    token_offset: int
    """Number of output tokens before this chunk."""
    text: str = ""
    """The text that these tokens complete."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """Set on the last chunk, as is ``usage``."""
    stop_reason: str | int | None = None
    """The stop string or the id of the stop token that ended the completion."""
    start: Start | None = None
    """Set on the first chunk."""
    usage: Usage | None = None
    embedding: Floats | None = None
    """The embedding, on the only chunk of an embedding request."""
