"""Requests at random times whatever becomes of the earlier ones, and what becomes of each.

Every request ends as one of three: *completed*, with as many tokens as it asked for; *refused*,
with RESOURCE_EXHAUSTED before any token; or *lost*, which is everything else.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import grpc
import grpc.aio

from quire.cluster.client import Server
from quire.v1 import inference_pb2 as pb

_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "harbor",
    "sea",
    "light",
    "stone",
    "river",
    "old",
    "new",
    "sees",
]
REST_S = 3.0
"""Between phases: what was sent in one ends before the next begins anyhow."""

_LOOK_S = 0.02


@dataclass
class Phase:
    """The results of the requests of one phase."""

    name: str
    offered_per_s: float = 0.0
    num_sent: int = 0
    num_refused: int = 0
    num_lost: int = 0
    begin_s: float = field(default_factory=time.monotonic)
    span_s: float = 0.0
    """Until the last one ended."""
    completed: list[tuple[float, float]] = field(default_factory=list)
    """When each was due, from the begin of the phase, and its time to first token."""
    refusal_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    """By how much the client itself was late."""
    errors: list[str] = field(default_factory=list)

    @property
    def ttft_s(self) -> list[float]:
        return [ttft_s for _, ttft_s in self.completed]

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "offered_per_s": self.offered_per_s,
            "served_per_s": len(self.completed) / self.span_s,
            "sent": self.num_sent,
            "completed": len(self.completed),
            "refused": self.num_refused,
            "lost": self.num_lost,
            "ttft_p50_s": percentile(self.ttft_s, 50),
            "ttft_p99_s": percentile(self.ttft_s, 99),
            "refusal_p50_s": percentile(self.refusal_s, 50),
            "refusal_p99_s": percentile(self.refusal_s, 99),
            "client_lag_p99_s": percentile(self.lag_s, 99),
            "errors": self.errors[:5],
        }


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The shape of the requests to send."""

    num_words: int
    mean_tokens: int
    """Output tokens of a request: from 1 to twice as many, all equally likely."""
    same_length: bool
    """All have ``mean_tokens`` instead: what began together then ends together."""
    duration_s: float
    concurrency: int
    factor: float
    seed: int


class Bench:
    """One client of a server."""

    def __init__(self, stub: Any, server: Server, workload: Workload) -> None:
        self._stub = stub
        self._metadata = server.metadata()
        self._workload = workload
        self._rng = random.Random(workload.seed)

    async def capacity_per_s(self) -> float:
        """Completions per second while there is always more to do."""
        phase = Phase("capacity")
        end_s = phase.begin_s + self._workload.duration_s
        ends: list[float] = []

        async def client() -> None:
            while time.monotonic() < end_s:
                if await self._request(phase):
                    ends.append(time.monotonic())
                else:
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workload.concurrency):
                tasks.create_task(client())
        if phase.num_lost or not ends:
            raise SystemExit(f"no capacity was measured: {phase.errors[:3]}")
        # Without the start, in which nothing ends yet, and without the end.
        first_s = phase.begin_s + self._workload.duration_s / 4
        return sum(first_s < each <= end_s for each in ends) / (end_s - first_s)

    async def open_loop(self, name: str, per_s: float) -> Phase:
        """Sends requests for the workload's time and waits for all of them."""
        phase = Phase(name, offered_per_s=per_s)
        due_s = phase.begin_s
        async with _measuring_lag(phase), asyncio.TaskGroup() as tasks:
            while (due_s := due_s + self._rng.expovariate(per_s)) < (
                phase.begin_s + self._workload.duration_s
            ):
                await asyncio.sleep(due_s - time.monotonic())
                tasks.create_task(self._request(phase, due_s=due_s))
        phase.span_s = time.monotonic() - phase.begin_s
        await asyncio.sleep(REST_S)
        return phase

    async def _request(self, phase: Phase, *, due_s: float | None = None) -> bool:
        """Whether it was completed. Times count from when it was due, so that a client that lags is
        no excuse."""
        due_s = time.monotonic() if due_s is None else due_s
        phase.num_sent += 1
        words = self._rng.choices(_WORDS, k=self._workload.num_words)
        max_tokens = self._workload.mean_tokens
        if not self._workload.same_length:
            max_tokens = self._rng.randint(1, 2 * max_tokens - 1)
        request = pb.GenerateRequest(
            text=" ".join(words),
            sampling=pb.SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, temperature=0, seed=1
            ),
        )
        ttft_s, num_tokens = 0.0, 0
        try:
            async for chunk in self._stub.Generate(request, metadata=self._metadata):
                ttft_s = ttft_s or time.monotonic() - due_s
                num_tokens += len(chunk.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and not num_tokens:
                phase.num_refused += 1
                phase.refusal_s.append(time.monotonic() - due_s)
            else:
                why = f"{error.code().name}: {error.details()}"
                self._lost(phase, due_s, f"{num_tokens} of {max_tokens} tokens: {why}")
            return False
        if num_tokens != max_tokens:
            self._lost(phase, due_s, f"{num_tokens} of {max_tokens} tokens: it ended early")
            return False
        phase.completed.append((due_s - phase.begin_s, ttft_s))
        return True

    def _lost(self, phase: Phase, due_s: float, how: str) -> None:
        phase.num_lost += 1
        phase.errors.append(
            f"due at {due_s - phase.begin_s:.2f} s, lost {time.monotonic() - due_s:.2f} s later "
            f"with {how}"
        )


@contextlib.asynccontextmanager
async def _measuring_lag(phase: Phase) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            due_s = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            phase.lag_s.append(time.monotonic() - due_s)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()


def percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[percent - 1]
