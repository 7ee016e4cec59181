"""Resolves parameters that need the tokenizer or the prompt to the numbers that engines take.

Gateways and the offline API call `spell_out` before they check a request. Engines refuse
parameters that are not resolved.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Task
from quire.worker.request.sampling_params import SamplingParams

if TYPE_CHECKING:  # An engine loads neither.
    from quire.worker.text.reasoning import ReasoningFormat
    from quire.worker.text.tokenizer import Tokenizer


def spell_out(
    params: SamplingParams,
    prompt_token_ids: TokenIds,
    *,
    tokenizer: Callable[[], "Tokenizer"],
    reasoning: Callable[["Tokenizer"], "ReasoningFormat | None"],
    max_model_len: int,
    task: Task = "generate",
) -> tuple[SamplingParams, TokenIds]:
    """Returns the resolved ``params`` and the prompt, truncated if they say so.

    ``tokenizer`` is called only if one is needed. ``reasoning`` returns the format in which its
    model marks reasoning.

    Raises:
        InvalidRequest: The model does not support a parameter.
    """
    if params.bad_words:
        params = _spell_bad_words(params, tokenizer())
    if params.truncate_prompt_tokens is not None:
        room = max_model_len - (0 if task == "embed" else params.max_tokens or 1)
        num_kept = _num_kept(params.truncate_prompt_tokens, room, max_model_len)
        if task == "embed":
            prompt_token_ids = _beginning(prompt_token_ids, num_kept, tokenizer)
        else:
            prompt_token_ids = prompt_token_ids[-num_kept:]
        params = params.changed(truncate_prompt_tokens=None)
    if params.thinking_token_budget is not None and not params.thinking_token_ids:
        known = tokenizer()
        params = _spell_thinking(params, prompt_token_ids, known, reasoning(known))
    return params, prompt_token_ids


def num_chars(params: SamplingParams) -> int:
    """Characters that `spell_out` tokenizes."""
    return sum(map(len, params.bad_words or ()))


def takes_any_length(params: SamplingParams) -> bool:
    """Whether a prompt may be longer than the context, because `spell_out` truncates it."""
    return params.truncate_prompt_tokens is not None


def check_spelled_out(params: SamplingParams) -> None:
    """Raises InvalidRequest if `spell_out` has not been called."""
    first = "call `spelling.spell_out` first"
    if params.bad_words:
        raise InvalidRequest(f"bad_words are not tokens yet: {first}", param="bad_words")
    if params.thinking_token_budget is not None and not params.thinking_token_ids:
        raise InvalidRequest(
            f"thinking_token_budget is without thinking_token_ids: {first}",
            param="thinking_token_budget",
        )
    if takes_any_length(params):
        raise InvalidRequest(
            f"truncate_prompt_tokens is still to be done: {first}", param="truncate_prompt_tokens"
        )


def _spell_bad_words(params: SamplingParams, tokenizer: "Tokenizer") -> SamplingParams:
    """Adds the tokens of each word, and of the word after a space unless those end with the same
    tokens."""
    spelled = list(params.bad_words_token_ids or ())
    spaced = []
    for word in params.bad_words or ():
        bare = tokenizer.encode(word.lstrip(), add_special_tokens=False)
        behind = tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        spelled.append(bare)
        if behind[-len(bare) :] != bare:
            spaced.append(behind)
    ids = dict.fromkeys(tuple(each) for each in [*spelled, *spaced] if each)
    return params.changed(bad_words=(), bad_words_token_ids=tuple(ids))


def _num_kept(asked: int, room: int, max_model_len: int) -> int:
    if asked > max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens={asked} is out of range: at most max_model_len, which is "
            f"{max_model_len}",
            param="truncate_prompt_tokens",
        )
    # Without any room, the check of the whole request refuses it and gives the numbers.
    return max(room, 1) if asked == -1 else asked


def _beginning(
    token_ids: TokenIds, num_kept: int, tokenizer: Callable[[], "Tokenizer"]
) -> TokenIds:
    """Truncates to the first tokens. Keeps the last token if the tokenizer appends it to every
    text: embedding models are trained on texts that end with it."""
    if len(token_ids) <= num_kept:
        return token_ids
    added = tokenizer().encode("")
    num_last = 1 if num_kept > 1 and added and added[-1] == token_ids[-1] else 0
    return np.concatenate(
        [token_ids[: num_kept - num_last], token_ids[len(token_ids) - num_last :]]
    )


def _spell_thinking(
    params: SamplingParams,
    prompt_token_ids: TokenIds,
    tokenizer: "Tokenizer",
    reasoning: "ReasoningFormat | None",
) -> SamplingParams:
    """Sets the tokens that begin and end the reasoning. Drops the budget if the prompt has ended
    the reasoning already."""
    refused = f"thinking_token_budget={params.thinking_token_budget} is not supported"
    if reasoning is None:
        raise InvalidRequest(
            f"{refused}: it is not known how this model marks its reasoning (its chat template "
            "shows no known format), leave it out",
            param="thinking_token_budget",
        )
    has_begun = reasoning.begun(tokenizer, prompt_token_ids)
    if has_begun is False:
        return params.changed(thinking_token_budget=None)
    token_ids = []
    opens = reasoning.opens_token or reasoning.opens
    for mark in [reasoning.closes] if has_begun else [opens, reasoning.closes]:
        token_id = tokenizer.token_id(mark)
        if token_id is None:
            raise InvalidRequest(
                f"{refused}: {mark} is more than one token for this model, leave it out",
                param="thinking_token_budget",
            )
        token_ids.append(token_id)
    return params.changed(thinking_token_ids=tuple(token_ids))
