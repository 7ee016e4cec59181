"""What goes into an engine and what comes out of it, and which requests it cannot serve."""

import hashlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from quire.worker.errors import ConfigError, ContextExceeded, InvalidRequest
from quire.worker.hashing import TokenIds
from quire.worker.outputs import FinishReason
from quire.worker.sampling_params import MAX_SEED, SamplingParams
from quire.worker.step import TokenLogprobs

if TYPE_CHECKING:  # A gateway has neither.
    from quire.worker.config import EngineConfig
    from quire.worker.model_facts import ModelFacts


def _no_tokens() -> TokenIds:
    return np.empty(0, dtype=np.uint32)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One completion of one prompt; ``params.n`` and ``params.stop`` are the caller's matter."""

    request_id: str
    """Of no other request that the engine has at the same time."""
    prompt_token_ids: TokenIds
    params: SamplingParams
    resumed_token_ids: TokenIds = field(default_factory=_no_tokens)
    """Output that another engine has already produced: this one goes on behind it."""
    cache_salt: str = ""
    """Cached prefixes are shared only among requests of the same salt."""
    arrival_s: float | None = None
    """On the engine's clock; ``None`` is now."""
    priority: int = 0
    """Less runs sooner; 0 is the usual."""


class TokenDelta(NamedTuple):
    """What one step adds to one request."""

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


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """What an engine can take."""

    vocab_size: int
    max_model_len: int
    """Prompt + output, in tokens."""
    reason: str
    """Why it is not more, in words that go behind the number."""


def request_limits(
    config: "EngineConfig", model: "ModelFacts", *, num_blocks: int
) -> RequestLimits:
    """What an engine with so many blocks can take.

    Raises:
        ConfigError: The configuration asks for more context than the model has.
    """
    max_model_len, reason = model.max_model_len, "what the model was trained for"
    if config.max_model_len is not None:
        if config.max_model_len > max_model_len:
            raise ConfigError(
                f"max_model_len={config.max_model_len}: the model was trained for "
                f"{max_model_len}; at most that"
            )
        max_model_len, reason = config.max_model_len, "as configured"
    num_slots = num_blocks * config.block_size
    if num_slots < max_model_len:
        max_model_len = num_slots
        reason = (
            f"all that the KV cache's {num_blocks} blocks of {config.block_size} tokens hold "
            "(kv_cache_memory_bytes gives it more)"
        )
    return RequestLimits(vocab_size=model.vocab_size, max_model_len=max_model_len, reason=reason)


def check_request(request: Request, limits: RequestLimits) -> int:
    """Returns how many output tokens the request may have, resumed ones counted.

    Raises:
        InvalidRequest: The request can never be served; the message says what would be right.
    """
    num_prompt = len(request.prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("prompt is empty: at least one token")
    _check_token_ids("prompt", request.prompt_token_ids, limits.vocab_size)
    _check_token_ids("resumed output", request.resumed_token_ids, limits.vocab_size)
    stop_token_ids = np.array(request.params.stop_token_ids or ())
    _check_token_ids("stop_token_ids", stop_token_ids, limits.vocab_size)
    room = limits.max_model_len - num_prompt
    limit = f"max_model_len is {limits.max_model_len}, {limits.reason}"
    if room < 1:
        raise ContextExceeded(
            f"prompt has {num_prompt} tokens and {limit}: shorten the prompt to "
            f"{limits.max_model_len - 1} tokens or fewer, so that one of output fits behind it",
            max_model_len=limits.max_model_len,
        )
    max_tokens = room if request.params.max_tokens is None else request.params.max_tokens
    if max_tokens > room:
        raise ContextExceeded(
            f"prompt of {num_prompt} tokens + max_tokens={max_tokens} is "
            f"{num_prompt + max_tokens} tokens and {limit}: lower max_tokens to {room} or "
            "shorten the prompt",
            max_model_len=limits.max_model_len,
        )
    num_resumed = len(request.resumed_token_ids)
    if num_resumed > max_tokens:
        raise InvalidRequest(
            f"{num_resumed} resumed tokens are more than the {max_tokens} that the request may "
            "have: resume with the max_tokens that it began with"
        )
    return max_tokens


def derive_seed(seed: int, number: int) -> int:
    """The seed of the ``number``-th request that has none of its own."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


def _check_token_ids(name: str, token_ids: npt.NDArray[Any], vocab_size: int) -> None:
    foreign = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(foreign):
        position = int(foreign[0])
        raise InvalidRequest(
            f"token id {token_ids[position]} at position {position} of the {name} is not in the "
            f"vocabulary: ids are 0 to {vocab_size - 1}"
        )
