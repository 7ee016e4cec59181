"""Completions without a request around them, for tests of the layers that run one."""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.fan_out import completions_of
from quire.cluster.gateway.losses import Blame, CompletionConfig, Losses
from quire.cluster.gateway.pipeline import CompletionPipeline
from quire.cluster.gateway.route import Route
from quire.cluster.gateway.send import Send
from quire.cluster.gateway.work import Completion, Parts, Run, Take, Work, layered
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.telemetry.metrics import Telemetry
from quire.router.table import RoutingTable
from quire.worker.request.request import Prepared


class NoText:
    """A tokenizer for tests that do not look at the text."""

    def detokenizer(self, **_: Any) -> Any:
        return self

    def push(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def parts_of(
    groups: Groups,
    table: RoutingTable,
    *,
    tokenizer: Any = NoText(),  # noqa: B008
    config: CompletionConfig | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Parts:
    return Parts(
        groups=groups,
        table=table,
        tokenizer=tokenizer,
        telemetry=Telemetry(groups=groups, table=table),
        config=config or CompletionConfig(),
        clock=clock,
    )


def completion_of(request: Prepared, parts: Parts) -> Completion:
    """The only completion of ``request``."""
    (one,) = completions_of(Work(requests=[request]), parts)
    return one


class Attempts:
    """The attempts of one completion, begun and lost by the test."""

    def __init__(
        self, request: Prepared, parts: Parts, pipeline: CompletionPipeline, *, blame: Blame
    ) -> None:
        self.one = completion_of(request, parts)
        self.one.losses = Losses(parts.config, blame)
        self._begun = asyncio.Semaphore(0)
        self._run = layered(
            [pipeline.resume, pipeline.isolate, Route(parts), self._notice], Send(parts)
        )
        self._task: asyncio.Task[None] | None = None

    async def begin(self, token_ids: Sequence[int]) -> GroupStream:
        """Waits for the next attempt; the first one continues after ``token_ids``. Raises as the
        layers do."""
        if self._task is None:
            self.one.output.token_ids += token_ids
            self._task = asyncio.ensure_future(self._run(self.one, self._take))
        begun = asyncio.create_task(self._begun.acquire())
        await asyncio.wait([self._task, begun], return_when=asyncio.FIRST_COMPLETED)
        begun.cancel()
        if self._task.done():
            self._task.result()
        assert self.one.stream is not None
        return self.one.stream

    def lose(self, error: Any) -> None:
        assert self.one.stream is not None
        self.one.stream.lose(error)

    def end(self) -> None:
        """Ends the completion."""
        assert self._task is not None
        self._task.cancel()

    async def _notice(self, one: Completion, take: Take, run: Run[Completion]) -> None:
        asyncio.get_running_loop().call_soon(self._begun.release)
        await run(one, take)

    async def _take(self, chunk: Chunk) -> None:
        pass
