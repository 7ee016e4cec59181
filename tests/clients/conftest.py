"""The cluster in one process, for clients that people use; its model says what it is told to."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.cluster.conftest import anyio_backend, model, start_cluster, start_group, tokenizer

__all__ = ["anyio_backend", "model", "start_cluster", "start_group", "tokenizer"]

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
FORM = '{"kind": "cat", "legs": 4}'
SERVED: Any = {
    "num_groups": 1,
    "model_len": 2000,
    "num_blocks": 600,
    "config": {"tool_call_parser": "hermes", "reasoning_parser": "think"},
}


@pytest.fixture
def converses(monkeypatch: pytest.MonkeyPatch, model: Any) -> Callable[..., None]:
    """``converses(*texts)``: the model's first answer of a chat, its second, and so on."""

    def converse(*texts: str) -> None:
        (start,) = model.tokenizer.encode("<|assistant|>")
        scripts = [[*model.tokenizer.encode(text), model.eos] for text in texts]

        def next_token(context: Sequence[int], *, seed: int, banned: Sequence[int] = ()) -> int:
            num_said = list(reversed(context)).index(start)
            token: int = scripts[list(context).count(start) - 1][num_said]
            assert token not in banned
            return token

        monkeypatch.setattr(model, "next_token", next_token)

    return converse
