"""Reads prompts of the offline API."""

from collections.abc import Callable, Mapping
from typing import Any

from quire.worker.blocks.hashing import TokenIds, as_token_ids
from quire.worker.request.errors import InvalidRequest
from quire.worker.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]
"""A text, ``{"prompt": text}`` or ``{"prompt_token_ids": ids}``. A mapping may also have a
``cache_salt``: only prompts with the same salt share cached prefixes."""

_FIELDS = {"prompt", "prompt_token_ids", "cache_salt"}


def read_prompt(
    prompt: Prompt, *, tokenizer: Callable[[], Tokenizer]
) -> tuple[str | None, TokenIds, str]:
    """The prompt's text (``None`` if it was given as token ids), its token ids and its salt.

    Raises:
        InvalidRequest: It is not a valid prompt.
    """
    fields = {"prompt": prompt} if isinstance(prompt, str) else prompt
    if (
        not isinstance(fields, Mapping)
        or not set(fields) <= _FIELDS
        or set(fields) <= {"cache_salt"}
    ):
        raise InvalidRequest(
            "a prompt is a string or a mapping with 'prompt' or 'prompt_token_ids' "
            f"(and 'cache_salt'), not {prompt!r}"
        )
    text = fields.get("prompt")
    if not isinstance(text, str | None):
        raise InvalidRequest(f"prompt must be a text, not {text!r}", param="prompt")
    if "prompt_token_ids" in fields:
        token_ids = _as_ids(fields["prompt_token_ids"])
    else:
        token_ids = as_token_ids(tokenizer().encode(text) if text else [])
    return text, token_ids, fields.get("cache_salt", "")


def _as_ids(token_ids: Any) -> TokenIds:
    try:
        return as_token_ids(token_ids)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(
            f"prompt_token_ids must be integers, 0 or more: {error}", param="prompt_token_ids"
        ) from None
