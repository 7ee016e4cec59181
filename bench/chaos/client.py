"""The clients: a process on a host of their own, told what to do on its input, a JSON line each.

    {"id": 1, "do": "load", "gateways": [...], "requests": [...], "again": false, "limit_s": 60}
    {"id": 2, "do": "stop", "load": 1}      what ``again`` had repeated ends with this turn
    {"id": 3, "do": "get", "url": "http://..."}

Each answer has the command's ``id``. A load answers twice: with ``begun`` when each of its first
streams has three tokens or has ended, and with its ``streams``.
"""

import asyncio
import json
import sys
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream, run

_BEGUN_TOKENS = 3
_PAUSE_S = 0.2  # After a stream that failed, before it is asked for again.


async def main() -> None:
    loads: dict[int, asyncio.Event] = {}
    tasks = set()
    while line := await asyncio.to_thread(sys.stdin.readline):
        command = json.loads(line)
        match command["do"]:
            case "load":
                loads[command["id"]] = asyncio.Event()
                job = _load(command, loads[command["id"]])
            case "stop":
                loads[command["load"]].set()
                continue
            case "get":
                job = _get(command)
        task = asyncio.create_task(job)
        tasks.add(task)
        task.add_done_callback(tasks.discard)


async def _load(command: Mapping[str, Any], stopped: asyncio.Event) -> None:
    requests = [Request(**request) for request in command["requests"]]
    async with Gateways(command["gateways"]) as gateways:
        target = _Watched(gateways, len(requests), command["id"])
        if command["again"]:
            streams = await _run_again(requests, target, stopped, limit_s=command["limit_s"])
        else:
            streams = await run(requests, target, limit_s=command["limit_s"])
    _answer(command["id"], streams=[asdict(stream) for stream in streams])


async def _run_again(
    requests: list[Request], target: "_Watched", stopped: asyncio.Event, *, limit_s: float
) -> list[Stream]:
    async def user(request: Request) -> list[Stream]:
        streams: list[Stream] = []
        while not stopped.is_set():
            streams += await run([request], target, limit_s=limit_s)
            if not streams[-1].is_complete:
                await asyncio.sleep(_PAUSE_S)
        return streams

    return [stream for some in await asyncio.gather(*map(user, requests)) for stream in some]


class _Watched:
    """Says when all of the first streams have begun."""

    def __init__(self, gateways: Gateways, num_streams: int, load_id: int) -> None:
        self._gateways = gateways
        self._num_left = num_streams
        self._load_id = load_id

    async def send(self, stream: Stream) -> None:
        watch = asyncio.create_task(self._watch(stream))
        try:
            await self._gateways.send(stream)
        finally:
            await watch

    async def _watch(self, stream: Stream) -> None:
        while len(stream.times) < _BEGUN_TOKENS and not stream.ended_s:
            await asyncio.sleep(0.01)
        self._num_left -= 1
        if self._num_left == 0:
            _answer(self._load_id, begun=True)


async def _get(command: Mapping[str, Any]) -> None:
    def get() -> str:
        with urllib.request.urlopen(command["url"], timeout=command["timeout_s"]) as response:
            body: bytes = response.read()
        return body.decode()

    try:
        _answer(command["id"], text=await asyncio.to_thread(get))
    except OSError as error:
        _answer(command["id"], text=None, error=str(error))


def _answer(command_id: int, **values: Any) -> None:
    print(json.dumps({"id": command_id, **values}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
