"""Fixtures for tests with third-party clients: a cluster in one process with scripted answers."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.conftest import (
    anyio_backend,
    hurried_listeners,
    model,
    start_cluster,
    start_group,
    tokenizer,
)

__all__ = [
    "anyio_backend",
    "hurried_listeners",
    "model",
    "start_cluster",
    "start_group",
    "tokenizer",
]

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
    """``converses(*texts)`` scripts the model's first answer in a chat, its second, and so on."""

    def converse(*texts: str) -> None:
        (start,) = model.tokenizer.encode("<|assistant|>")
        scripts = [[*model.tokenizer.encode(text), model.eos] for text in texts]

        def next_token(context: Sequence[int], *, banned: Sequence[int] = (), **_: object) -> int:
            num_said = list(reversed(context)).index(start)
            token: int = scripts[list(context).count(start) - 1][num_said]
            assert token not in banned
            return token

        monkeypatch.setattr(model, "next_token", next_token)

    return converse


@pytest.fixture
def printed(start_cluster: Any, converses: Callable[..., None]) -> Callable[..., Any]:
    """``printed(folder, command, says=texts)`` runs a program in ``folder`` against a model that
    answers ``texts``, and returns its stdout. ``command`` maps the base URL to the command line."""

    async def run(
        folder: Path, command: Callable[[str], Sequence[str | Path]], *, says: Sequence[str]
    ) -> Any:
        converses(*says)
        async with start_cluster(**SERVED) as cluster:
            program, *arguments = command(f"{cluster.http_url}/v1")
            process = await asyncio.create_subprocess_exec(
                program,
                *arguments,
                cwd=folder,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            told, errors = await process.communicate()
        assert process.returncode == 0, errors.decode()
        return told.decode()

    return run
