"""Controls the clients: a process on a host of its own, whose streams are started from here."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Callable, Sequence
from multiprocessing import get_context, resource_tracker
from multiprocessing.managers import BaseManager

from bench.namespaces import Host
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream, run

_LIMIT_S = 180.0
"""Seconds after which an unfinished stream counts as broken."""
_BEGUN_TOKENS = 3
_PAUSE_S = 0.2  # After a stream that failed, before it is asked for again.


class Load:
    """Streams under way. It lives in the clients' process; here it is a proxy."""

    loop: asyncio.AbstractEventLoop

    def __init__(self, requests: list[Request], gateways: list[str], again: bool) -> None:
        self._requests = requests
        self._addresses = gateways
        self._again = again
        self._begun, self._stopped = threading.Event(), threading.Event()
        self._num_left = len(requests)
        self._streams = asyncio.run_coroutine_threadsafe(self._run(), self.loop)

    def wait_begun(self) -> None:
        """Until each of the first streams has some tokens, or has ended."""
        assert self._begun.wait(_LIMIT_S + 30), "the load did not begin"

    def stop(self) -> None:
        """Stops repeating streams: each ends with this turn."""
        self._stopped.set()

    def wait(self) -> list[Stream]:
        return self._streams.result(_LIMIT_S + 30)

    def kill(self) -> None:
        """Kills the process that owns all connections, without closing them first."""
        os.kill(os.getpid(), signal.SIGKILL)

    async def send(self, stream: Stream) -> None:
        watch = asyncio.create_task(self._watch(stream))
        try:
            await self._gateways.send(stream)
        finally:
            await watch

    async def _run(self) -> list[Stream]:
        async with Gateways(self._addresses) as self._gateways:
            if not self._again:
                return await run(self._requests, self, limit_s=_LIMIT_S)
            streams = await asyncio.gather(*map(self._repeat, self._requests))
            return [stream for some in streams for stream in some]

    async def _repeat(self, request: Request) -> list[Stream]:
        streams: list[Stream] = []
        while not self._stopped.is_set():
            streams += await run([request], self, limit_s=_LIMIT_S)
            if not streams[-1].is_complete:
                await asyncio.sleep(_PAUSE_S)
        return streams

    async def _watch(self, stream: Stream) -> None:
        while len(stream.times) < _BEGUN_TOKENS and not stream.ended_s:
            await asyncio.sleep(0.01)
        self._num_left -= 1
        if self._num_left == 0:
            self._begun.set()


class _Process(BaseManager):
    load: Callable[[list[Request], list[str], bool], Load]


_Process.register("load", Load)


class Clients:
    """A client process on ``host``."""

    def __init__(self, host: Host) -> None:
        resource_tracker.ensure_running()  # Else it began on the host, and ended with it.
        self._process = _Process(ctx=get_context("spawn"))
        with host.inside():
            self._process.start(_start_loop)

    def load(
        self, requests: Sequence[Request], gateways: Sequence[str], *, again: bool = False
    ) -> Load:
        """Sends all at once; with ``again``, each one is repeated when it ends, until stopped."""
        return self._process.load(list(requests), list(gateways), again)

    @staticmethod
    def kill(load: Load) -> None:
        """Kills the process of a load, connections and all."""
        with contextlib.suppress(EOFError, OSError):
            load.kill()


def _start_loop() -> None:
    """All loads of the process share one event loop."""
    Load.loop = asyncio.new_event_loop()
    threading.Thread(target=Load.loop.run_forever, daemon=True).start()
