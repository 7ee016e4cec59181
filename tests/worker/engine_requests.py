"""Builds requests for engines of the conftest's model, and runs them to their ends.

Blocks have 4 tokens in these tests, and the end token is 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tests.prepared import prepared

from quire.worker.blocks.hashing import as_token_ids
from quire.worker.group_engine import GroupEngine
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared

MakeEngine = Callable[..., tuple[GroupEngine, Any]]
Generate = Callable[..., tuple[list[int], str]]
Tokens = dict[str, list[int]]


def request(
    request_id: str,
    prompt: Sequence[int],
    *,
    max_tokens: int | None = 4,
    resumed: Sequence[int] = (),
    salt: str = "",
    **params: Any,
) -> Prepared:
    return prepared(
        request_id,
        prompt,
        resumed_token_ids=as_token_ids(resumed),
        cache_salt=salt,
        **{"max_tokens": max_tokens, "ignore_eos": True, **params},
    )


def run(engine: GroupEngine, *requests: Prepared) -> dict[str, TokenDelta]:
    """Runs ``requests`` to their ends; returns each one's last output, with all of its tokens."""
    for one in requests:
        engine.add_request(one)
    ended: dict[str, TokenDelta] = {}
    tokens: dict[str, tuple[int, ...]] = {}
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] = tokens.get(output.request_id, ()) + output.token_ids
            if output.finish_reason:
                ended[output.request_id] = output._replace(token_ids=tokens[output.request_id])
    return ended


def range_prompt(length: int, *, first: int = 2) -> list[int]:
    return [(first + index) % 50 for index in range(length)]
