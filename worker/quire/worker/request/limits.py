"""Limits on the requests that an engine can serve."""

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.errors import ConfigError, ContextExceeded, InvalidRequest
from quire.worker.request.request import Task
from quire.worker.request.sampling_params import MAX_SEED, PARAMETERS, SamplingParams
from quire.worker.request.spelling import check_spelled_out

if TYPE_CHECKING:  # A gateway loads neither.
    from quire.worker.model.facts import ModelFacts
    from quire.worker.request.config import EngineConfig

MAX_PROMPT_SCORES = 2**18
"""Most log-probabilities of one prompt. They are sent in one message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLimits:
    """The limits of one engine."""

    vocab_size: int
    max_model_len: int
    """Prompt + output, in tokens."""
    reason: str
    """Why ``max_model_len`` is not greater: text that follows the number in messages."""
    task: Task = "generate"

    @property
    def max_prompt_len(self) -> int:
        """The longest prompt, in tokens. An embedding needs no room for output."""
        return self.max_model_len - (self.task == "generate")


def request_limits(
    config: "EngineConfig", model: "ModelFacts", *, num_blocks: int
) -> RequestLimits:
    """The limits of requests that an engine with ``num_blocks`` blocks can take.

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


def check_request(
    prompt_token_ids: TokenIds,
    sampling: SamplingParams,
    limits: RequestLimits,
    *,
    resumed_token_ids: TokenIds | None = None,
) -> int:
    """Returns how many output tokens the request may have, including resumed ones.

    Raises:
        InvalidRequest: The request can never be served; the message gives the limit.
    """
    num_prompt = len(prompt_token_ids)
    if num_prompt == 0:
        raise InvalidRequest("prompt is empty: at least one token", param="prompt")
    check_token_ids("prompt", prompt_token_ids, limits.vocab_size)
    if resumed_token_ids is not None:
        check_token_ids("resumed output", resumed_token_ids, limits.vocab_size)
    for name, rule in PARAMETERS.items():
        if rule.token_ids and (token_ids := [*rule.token_ids(getattr(sampling, name))]):
            check_token_ids(name, np.array(token_ids), limits.vocab_size)
    check_spelled_out(sampling)
    if len({each[-1] for each in sampling.bad_words_token_ids or ()}) >= limits.vocab_size:
        raise InvalidRequest(
            f"bad_words_token_ids may ban all {limits.vocab_size} tokens: use fewer",
            param="bad_words",
        )
    check_prompt_length(num_prompt, limits)
    if sampling.logprob_start_len > num_prompt:
        raise InvalidRequest(
            f"logprob_start_len={sampling.logprob_start_len} is out of range: the prompt has "
            f"{num_prompt} tokens",
            param="logprob_start_len",
        )
    num_scored = num_prompt - sampling.logprob_start_len
    num_scores = num_scored * (1 + (sampling.prompt_logprobs or 0))
    if sampling.prompt_logprobs is not None and num_scores > MAX_PROMPT_SCORES:
        raise InvalidRequest(
            f"prompt of {num_prompt} tokens with prompt_logprobs={sampling.prompt_logprobs} asks "
            f"for {num_scores} log-probabilities: at most {MAX_PROMPT_SCORES} in one answer",
            param="prompt_logprobs",
        )
    room = limits.max_model_len - num_prompt
    limit = f"max_model_len is {limits.max_model_len}, {limits.reason}"
    max_tokens = room if sampling.max_tokens is None else sampling.max_tokens
    if max_tokens > room:
        raise ContextExceeded(
            f"prompt of {num_prompt} tokens + max_tokens={max_tokens} is "
            f"{num_prompt + max_tokens} tokens and {limit}: lower max_tokens to {room} or "
            "shorten the prompt",
            param="max_tokens",
            max_model_len=limits.max_model_len,
        )
    num_resumed = 0 if resumed_token_ids is None else len(resumed_token_ids)
    if num_resumed > max_tokens:
        raise InvalidRequest(
            f"{num_resumed} resumed tokens are more than the {max_tokens} that the request may "
            "have: resume with the max_tokens that it began with"
        )
    return max_tokens


def check_embedding(prompt_token_ids: TokenIds, limits: RequestLimits) -> None:
    """Checks a request for the embedding of a prompt.

    Raises:
        InvalidRequest: The request can never be served; the message gives the limit.
    """
    if not len(prompt_token_ids):
        raise InvalidRequest("input is empty: at least one token", param="input")
    check_token_ids("input", prompt_token_ids, limits.vocab_size)
    check_prompt_length(len(prompt_token_ids), limits)


def check_prompt_length(num_tokens: int, limits: RequestLimits, *, known_as: str = "") -> None:
    """Raises ContextExceeded if a prompt of ``num_tokens`` leaves no room for output.

    ``known_as`` describes its length in messages if ``num_tokens`` is not exact.
    """
    if num_tokens <= limits.max_prompt_len:
        return
    name, why = "prompt", ", so that one of output fits behind it"
    if limits.task == "embed":
        name, why = "input", ", or have it cut by truncate_prompt_tokens"
    raise ContextExceeded(
        f"{name} has {known_as or f'{num_tokens} tokens'} and max_model_len is "
        f"{limits.max_model_len}, {limits.reason}: shorten the {name} to {limits.max_prompt_len} "
        f"tokens or fewer{why}",
        param=name,
        max_model_len=limits.max_model_len,
    )


def derive_seed(seed: int, number: int) -> int:
    """The seed of the ``number``-th request without its own seed, derived from ``seed``."""
    digest = hashlib.sha256(f"{seed}/{number}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & MAX_SEED


def check_token_ids(name: str, token_ids: npt.NDArray[Any], vocab_size: int) -> None:
    """Raises:
    InvalidRequest: A token id is not in the vocabulary; the message names it.
    """
    foreign = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
    if len(foreign):
        position = int(foreign[0])
        raise InvalidRequest(
            f"token id {token_ids[position]} at position {position} of the {name} is not in the "
            f"vocabulary: ids are 0 to {vocab_size - 1}",
            param=name,
        )
