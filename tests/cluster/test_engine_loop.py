import asyncio
import threading
from typing import Any

import pytest
from tests.prepared import prepared

from quire.cluster.group import engine_loop, server
from quire.worker.request.errors import InvalidRequest, QueueFull, RankFailure
from quire.worker.request.request import Prepared

pytestmark = pytest.mark.anyio


def request(name: str, *, max_tokens: int = 10, prompt: tuple[int, ...] = (20, 21)) -> Prepared:
    return prepared(name, prompt, seed=1, max_tokens=max_tokens, ignore_eos=True)


class Sink:
    """Collects the deltas of one request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    def __call__(self, output: Any) -> None:
        if isinstance(output, Exception):
            self.error = output
            self.ended.set()
            return
        self.token_ids += output.token_ids
        if output.finish_reason:
            self.ended.set()


async def test_outputs_reach_the_event_loop_and_then_the_thread_sleeps(
    start_group: Any, model: Any
) -> None:
    async with start_group() as group:
        results: list[Any] = []
        group.engine_loop.listen(results.append)
        sink = Sink()
        group.engine_loop.submit(request("a"), sink)
        await sink.ended.wait()
        assert sink.token_ids == model.continuation([20, 21], seed=1, max_tokens=10)
        num_results = len(results)
        await asyncio.sleep(0.1)
        assert len(results) == num_results, "an idle engine does nothing"
        assert group.engine_loop.num_requests == 0


async def test_a_refused_request_hears_why(start_group: Any) -> None:
    async with start_group() as group:
        sink = Sink()
        group.engine_loop.submit(request("a", prompt=()), sink)
        await sink.ended.wait()
        assert isinstance(sink.error, InvalidRequest)


async def test_an_aborted_request_hears_no_more(start_group: Any) -> None:
    async with start_group() as group:
        group.executor.step_s = 0.002
        sink = Sink()
        group.engine_loop.submit(request("a", max_tokens=300), sink)
        while not sink.token_ids:
            await asyncio.sleep(0.001)
        group.engine_loop.abort("a")
        num_tokens = len(sink.token_ids)
        await group.settle()
        assert len(sink.token_ids) == num_tokens
        group.engine_loop.abort("a")


async def test_a_failed_rank_is_told_to_everyone_now_and_later(start_group: Any) -> None:
    async with start_group() as group:
        group.executor.fails = True
        first, second = Sink(), Sink()
        group.engine_loop.submit(request("a"), first)
        await first.ended.wait()
        assert isinstance(await group.engine_loop.failed, RankFailure)
        group.engine_loop.submit(request("b"), second)
        assert "rank 1 died" in str(first.error)
        assert "rank 1 died" in str(second.error)
        with pytest.raises(RankFailure):
            await group.engine_loop.call(lambda engine: engine.stats())


async def test_an_engine_that_raises_anything_fails_the_group(
    start_group: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with start_group() as group:
        monkeypatch.setattr(group.executor, "execute", lambda step: 1 / 0)
        sink = Sink()
        group.engine_loop.submit(request("a"), sink)
        await sink.ended.wait()
        assert "ZeroDivisionError" in str(sink.error)
        assert "division by zero" in caplog.text


async def test_what_comes_after_the_close_is_answered_at_once(start_group: Any) -> None:
    async with start_group() as group:
        await group.engine_loop.close()
        sink = Sink()
        group.engine_loop.submit(request("a"), sink)
        assert "the group's engine is closed" in str(sink.error)
        with pytest.raises(RankFailure, match="is closed"):
            await group.engine_loop.call(lambda engine: engine.stats())


async def test_what_runs_or_waits_at_the_close_is_told_of_it(start_group: Any) -> None:
    async with start_group() as group:
        group.executor.step_s = 0.05
        sink = Sink()
        group.engine_loop.submit(request("a", max_tokens=300), sink)
        while not sink.token_ids:
            await asyncio.sleep(0.01)
        closing = asyncio.create_task(group.engine_loop.close())
        waiting = asyncio.create_task(group.engine_loop.call(lambda engine: engine.stats()))
        await closing
        assert "is closed" in str(sink.error)
        with pytest.raises(RankFailure, match="is closed"):
            await waiting


async def test_no_more_commands_wait_for_the_engine_than_a_limit(
    start_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_loop, "_MAX_INBOX", 3)
    async with start_group() as group:
        began, may_go_on = threading.Event(), threading.Event()

        def hold_up(_: Any) -> None:
            began.set()
            may_go_on.wait()

        blocked = asyncio.create_task(group.engine_loop.call(hold_up))
        await asyncio.to_thread(began.wait)
        sinks = [Sink() for _ in range(4)]
        for number, sink in enumerate(sinks):
            group.engine_loop.submit(request(str(number)), sink)
        refused = sinks[-1].error
        assert isinstance(refused, QueueFull)
        assert "3 commands wait for the engine, 3 at most" in str(refused)
        with pytest.raises(QueueFull):
            await group.engine_loop.call(lambda engine: engine.stats())
        may_go_on.set()
        await blocked
        for sink in sinks[:-1]:
            await sink.ended.wait()
            assert sink.error is None


async def test_a_reader_far_behind_in_the_groups_own_process_loses_its_request(
    start_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MAX_UNREAD", 4)
    async with start_group() as group:
        local = server.GroupServer.__new__(server.GroupServer)
        local._engine_loop = group.engine_loop
        deltas = local.generate(request("a", max_tokens=100))
        first = await anext(deltas)
        await group.settle()
        rest = [await anext(deltas) for _ in range(4)]
        with pytest.raises(QueueFull, match="4 outputs of the request wait"):
            await anext(deltas)
        assert [delta.token_offset for delta in (first, *rest)] == [0, 1, 2, 3, 4]
