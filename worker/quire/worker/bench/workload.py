"""A benchmark's workload: prompts in order of arrival, each with its output length.

Prompts are token ids, so that no measurement includes the tokenizer or the chat template. Every
request generates exactly ``max_tokens``, ignoring the end token, so that all runs do the same work.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from quire.worker.blocks.hashing import BlockHash, TokenIds, as_token_ids, hash_blocks
from quire.worker.request.errors import InvalidRequest, QuireError
from quire.worker.text.tokenizer import Tokenizer

_PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkItem:
    """One request."""

    token_ids: TokenIds
    max_tokens: int
    arrival_s: float | None = None
    """Arrival time by the file's own clock; ``None`` if the file has none."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.token_ids) + self.max_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """Requests in order of arrival, and a description of their origin."""

    title: str
    items: tuple[WorkItem, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all prompts and outputs: the KV slots that they need without sharing."""
        return sum(item.num_tokens for item in self.items)

    @property
    def longest(self) -> int:
        """Tokens of the longest request, output included."""
        return max(item.num_tokens for item in self.items)


def synthetic_workload(
    *,
    num_prefixes: int,
    prefix_len: int,
    own_len: int,
    output_len: int,
    num_requests: int,
    vocab_size: int,
    seed: int,
) -> Workload:
    """Requests of random tokens that each begin with one of ``num_prefixes`` system prompts.

    All system prompts have the same number of requests, plus or minus one, in random order.

    Raises:
        InvalidRequest: A count or a length is too small.
    """
    for name, value, least in (
        ("num_prefixes", num_prefixes, 1),
        ("prefix_len", prefix_len, 0),
        ("own_len", own_len, 1),
        ("output_len", output_len, 1),
        ("num_requests", num_requests, 1),
    ):
        if value < least:
            raise InvalidRequest(f"{name}={value}: must be {least} or more")
    rng = np.random.default_rng(seed)
    prefixes = rng.integers(vocab_size, size=(num_prefixes, prefix_len), dtype=np.uint32)
    owns = rng.integers(vocab_size, size=(num_requests, own_len), dtype=np.uint32)
    chosen = rng.permutation(np.arange(num_requests) % num_prefixes)
    items = tuple(
        WorkItem(token_ids=np.concatenate([prefixes[prefix], own]), max_tokens=output_len)
        for prefix, own in zip(chosen, owns, strict=True)
    )
    title = (
        f"{num_requests} requests: {num_prefixes} system prompts of {prefix_len} tokens, "
        f"{own_len} own, {output_len} out"
    )
    return Workload(title=title, items=items)


def read_workload(
    file: Path, *, tokenizer: Callable[[], Tokenizer], output_len: int, limit: int | None = None
) -> Workload:
    """Reads one request a line: ``{"prompt": …}``, ``{"messages": …}`` or
    ``{"prompt_token_ids": …}``, each with an optional ``max_tokens`` or ``max_completion_tokens``
    (else ``output_len``), and an optional ``arrival_s``.

    ``tokenizer`` is called once, and only if a line has text. Other keys are ignored.

    Raises:
        InvalidRequest: The file cannot be read, or a line is not a request; the message names it.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InvalidRequest(
            f"workload {file}: {reason}; give a text file with one JSON object a line"
        ) from None
    loaded: list[Tokenizer] = []

    def get_tokenizer() -> Tokenizer:
        if not loaded:
            loaded.append(tokenizer())
        return loaded[0]

    items: list[WorkItem] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(_read_line(line, get_tokenizer, output_len))
        except (QuireError, ValueError) as error:
            raise InvalidRequest(f"workload {file}, line {number}: {error}") from None
        if len(items) == limit:
            break
    if not items:
        raise InvalidRequest(f"workload {file} has no requests: one JSON object a line")
    return Workload(title=f"{len(items)} requests of {file.name}", items=tuple(items))


def infinite_cache_hits(
    requests: Iterable[tuple[TokenIds, TokenIds]], *, block_size: int
) -> list[int]:
    """Prompt tokens that would be hits in a cache that never evicts, for each ``(prompt, output)``
    in order of arrival.

    The hit is the longest chain of full blocks that a prompt shares with any earlier request,
    output included, as if that had ended already. As in the engine, the last token of a prompt is
    always computed, and the last token of an output never is.
    """
    root = BlockHash(bytes(32))
    seen: set[BlockHash] = set()
    hits: list[int] = []
    for prompt, output in requests:
        hashes = hash_blocks(
            np.concatenate([prompt, output[:-1]]), block_size=block_size, root=root
        )
        usable = hashes[: (len(prompt) - 1) // block_size]
        num_found = next((i for i, name in enumerate(usable) if name not in seen), len(usable))
        hits.append(num_found * block_size)
        seen.update(hashes)
    return hits


def _read_line(line: str, tokenizer: Callable[[], Tokenizer], output_len: int) -> WorkItem:
    try:
        fields: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"not JSON: {error}") from None
    keys = [key for key in _PROMPT_KEYS if isinstance(fields, dict) and key in fields]
    if len(keys) != 1:
        raise InvalidRequest(f"must be an object with one of {', '.join(_PROMPT_KEYS)}")
    value = fields[keys[0]]
    # Both names of OpenAI's API; max_completion_tokens is the newer one.
    given = (fields.get(name) for name in ("max_tokens", "max_completion_tokens"))
    max_tokens = next((value for value in given if value is not None), output_len)
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        raise InvalidRequest(f"max_tokens={max_tokens!r}: must be an integer, 1 or more")
    token_ids = _token_ids(keys[0], value, tokenizer)
    if len(token_ids) == 0:
        raise InvalidRequest(f"{keys[0]} is empty: at least one token")
    arrival_s = fields.get("arrival_s")
    if arrival_s is not None and not _is_time(arrival_s):
        raise InvalidRequest(f"arrival_s={arrival_s!r}: must be a number of seconds")
    return WorkItem(token_ids=token_ids, max_tokens=max_tokens, arrival_s=arrival_s)


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _token_ids(key: str, value: Any, tokenizer: Callable[[], Tokenizer]) -> TokenIds:
    if key == "prompt":
        if not isinstance(value, str):
            raise InvalidRequest(f"prompt must be a string, not {value!r}")
        return as_token_ids(tokenizer().encode(value))
    if key == "messages":
        if not isinstance(value, list) or not all(isinstance(turn, dict) for turn in value):
            raise InvalidRequest("messages must be a list of objects with role and content")
        return as_token_ids(tokenizer().apply_chat_template(value))
    if not isinstance(value, list) or not all(type(token) is int and token >= 0 for token in value):
        raise InvalidRequest("prompt_token_ids must be a list of integers, 0 or more")
    try:
        return as_token_ids(value)
    except OverflowError as error:
        raise InvalidRequest(f"prompt_token_ids: {error}") from None
