"""``quire chat``: a conversation with a real server."""

import asyncio
import io
from typing import Any

import pytest

from quire.cluster.cli.main import main

pytestmark = pytest.mark.anyio


async def talk(cluster: Any, monkeypatch: pytest.MonkeyPatch, *lines: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    flags = ["--address", cluster.grpc_address, "--max-tokens", "8", "--seed", "1"]
    return await asyncio.to_thread(main, ["chat", *flags])


async def test_a_conversation_goes_on_and_can_begin_again(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        lines = ("a", "a", "/clear", "a", "/stats", "/exit", "b")
        assert await talk(cluster, monkeypatch, *lines) == 0
        first, second, again, stats = capsys.readouterr().out.splitlines()
        assert first == again != second  # The second prompt includes the earlier turn.
        assert "prompt tokens" in stats
        assert "a second" in stats


async def test_an_answer_may_fill_what_is_left_of_a_short_context(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_cluster(num_groups=1, max_model_len=64) as cluster:
        monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
        command = ["chat", "--address", cluster.grpc_address, "--seed", "1"]
        assert await asyncio.to_thread(main, command) == 0, capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "a"], ["chat"]])
async def test_a_model_is_named_where_there_are_several(
    start_cluster: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        for model, said in ((cluster.gateway.model, ""), ("other", "'other' does not exist")):
            monkeypatch.setattr("sys.stdin", io.StringIO("a\n"))
            flags = ["--address", cluster.grpc_address, "--max-tokens", "2", "--model", model]
            status = await asyncio.to_thread(main, [*command, *flags])
            assert status == (1 if said else 0)
            assert said in capsys.readouterr().err


async def test_an_answer_that_fails_is_told_and_ends_a_script(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        assert await talk(cluster, monkeypatch, "x" * 5000, "a") == 1
        assert "INVALID_ARGUMENT" in capsys.readouterr().err
