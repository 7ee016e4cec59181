"""The load of `bench.rolling`: closed loops of streams of known tokens, over gRPC and HTTP."""

import asyncio
import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from bench.serving.gateways import Gateways
from bench.serving.http_server import HttpServer
from bench.serving.load import Request, Stream, Target

PROMPTS = ["A whale is", "What is a harbor?", "Once upon a time", "Paged attention is"]
NUM_SEEDS = 3
"""Each prompt is asked with this many seeds; seed 0 stands for greedy sampling."""
_TIMEOUT_S = 300.0
_PAUSE_S = 0.2  # After a stream that failed.


@dataclass
class Load:
    """Closed loops of streams, and what became of them. They run on a thread of their own."""

    grpc: str
    http: str
    max_tokens: int
    expected: dict[str, list[list[int]]] = field(default_factory=dict)
    """The right answers by the request's name: one for each numerics that was asked."""
    streams: list[tuple[str, Stream]] = field(default_factory=list)
    """The client and each stream that ended."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def learn(self) -> None:
        """Asks for every answer once, alone. May be called again where numerics changed."""

        async def learn() -> None:
            async with Gateways([self.grpc]) as gateways:
                for prompt, seed in itertools.product(PROMPTS, range(NUM_SEEDS)):
                    stream = Stream(request=self._request(prompt, seed))
                    await gateways.send(stream)
                    assert stream.is_complete, stream.error
                    self.expected.setdefault(stream.request.name, []).append(stream.tokens)

        asyncio.run(learn())

    @contextlib.contextmanager
    def running(self, num_users: int) -> Iterator[None]:
        """With so many users, until the block ends."""

        async def run() -> None:
            await asyncio.gather(*map(self._user, range(num_users)))

        thread = threading.Thread(target=lambda: asyncio.run(run()))
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    async def _user(self, number: int) -> None:
        """One stream after the other, over a connection that is kept or a new one for each."""
        protocol, is_kept = ("gRPC", "HTTP")[number % 2], number // 2 % 2 == 0
        name = f"{protocol}, {'kept' if is_kept else 'new'}"
        turns = itertools.count()
        while not self._ended.is_set():
            async with (
                Gateways([self.grpc])
                if protocol == "gRPC"
                else HttpServer(f"http://{self.http}") as target
            ):
                while await self._stream(name, target, number, next(turns)) and is_kept:
                    if self._ended.is_set():
                        return

    async def _stream(self, name: str, target: Target, number: int, turn: int) -> bool:
        prompt = PROMPTS[(number + turn) % len(PROMPTS)]
        stream = Stream(request=self._request(prompt, number // 4 % 2 * (1 + turn % 2)))
        await target.send(stream)
        self.streams.append((name, stream))
        if not stream.is_complete:
            await asyncio.sleep(_PAUSE_S)
        return stream.is_complete

    def _request(self, prompt: str, seed: int) -> Request:
        return Request(
            name=f"{prompt!r}, seed {seed}",
            text=prompt,
            max_tokens=self.max_tokens,
            temperature=0.9 if seed else 0.0,
            seed=seed,
            deadline_s=_TIMEOUT_S,
        )

    @property
    def num_answers(self) -> int:
        return sum(stream.is_complete for _, stream in list(self.streams))

    def figures(self) -> dict[str, Any]:
        exact: Counter[str] = Counter()
        broken: list[str] = []
        refused: list[str] = []
        inexact: list[str] = []
        for name, stream in self.streams:
            if not stream.is_complete:
                (broken if stream.tokens else refused).append(f"{name}: {stream.error}")
            elif stream.tokens in self.expected[stream.request.name]:
                exact[name] += 1
            else:
                inexact.append(f"{name}: {stream.request.name}")
        gaps_s = [stream.largest_gap_s for _, stream in self.streams]
        return {
            "complete": exact.total(),
            "complete_by_client": dict(exact),
            "broken": len(broken),
            "refused": len(refused),
            "inexact": len(inexact),
            "largest_gap_s": round(max(gaps_s, default=0.0), 2),
            "errors": Counter([*broken, *refused, *inexact]).most_common(8),
        }
