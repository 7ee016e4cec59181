"""The groups that send blocks in `bench.kv.faults`, which are stopped and killed."""

import asyncio
import contextlib

from bench.kv.groups import Remote

from quire.cluster.config import ClusterConfig


class Lenders:
    """Two groups that can be killed, one of which lends, and some with other blocks."""

    def __init__(self, config: ClusterConfig, wrong: dict[str, ClusterConfig]) -> None:
        self._spare = Remote(config, "lender-1")
        self.lender = Remote(config, "lender-0")
        self.wrong = {kind: Remote(each, kind) for kind, each in wrong.items()}
        self._starting: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "Lenders":
        self._stack = contextlib.AsyncExitStack()
        for each in (self.lender, self._spare, *self.wrong.values()):
            await self._stack.enter_async_context(each)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._starting is not None:
            await self._starting
        await self._stack.aclose()

    async def kill(self, after_s: float) -> None:
        """The other one lends from then on, once it runs, while this one starts again."""
        await asyncio.sleep(after_s)
        self.lender.kill()
        if self._starting is not None:
            await self._starting
        self._starting = asyncio.create_task(self.lender.start())
        self.lender, self._spare = self._spare, self.lender


async def stop(lender: Remote, after_s: float, for_s: float) -> None:
    await asyncio.sleep(after_s)
    lender.pause()
    await asyncio.sleep(for_s)
    lender.go_on()
