import asyncio
from typing import Any

import numpy as np
import pytest

from quire.worker.errors import InvalidRequest, RankFailure
from quire.worker.request import Request
from quire.worker.sampling_params import SamplingParams

pytestmark = pytest.mark.anyio


def request(name: str, *, max_tokens: int = 10, prompt: tuple[int, ...] = (20, 21)) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.array(prompt, dtype=np.uint32),
        params=SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True),
    )


class Sink:
    """Gathers what comes for one request."""

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
