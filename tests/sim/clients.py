"""Simulated clients: the requests they send, and how they read the answers.

`asks` checks answers as they arrive; `judge` checks how requests end.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc
import grpc.aio
from tests.sim.asks import Answer, Ask, Wrong
from tests.sim.cluster import MAX_MODEL_LEN, Cluster
from tests.sim.model import POISON, HashModel


@dataclass(frozen=True, kw_only=True)
class Load:
    """The settings of a load."""

    rate: float = 1.0
    """Requests a second."""
    burst: int = 0
    """Number of requests in bursts of a second, once a minute on average, whatever the capacity."""
    mean_output: int = 30
    num_documents: int = 4
    """Number of prefixes that most prompts begin with, whose KV can be shared."""
    p_slow: float = 0.0
    """Probability that a client pauses long between reads."""
    p_cancel: float = 0.0
    p_poison: float = 0.0
    p_deadline: float = 0.0
    p_several: float = 0.0
    """Probability that a request asks for several completions."""
    priorities: tuple[int, ...] = (0,)


class Clients:
    """Sends requests to the cluster's gateways, and keeps every `Ask`."""

    def __init__(
        self,
        cluster: Cluster,
        rng: random.Random,
        *,
        load: Load,
        trace: Callable[[str], None],
    ) -> None:
        self.asks: list[Ask] = []
        self.running: dict[asyncio.Task[None], Ask] = {}
        self.wrong: list[Wrong] = []
        self.check_end: Callable[[Ask], None] = lambda ask: None
        """Raises Wrong if the request may not end as it did."""
        self._cluster = cluster
        self._model: HashModel = cluster.model
        self._rng = rng
        self._load = load
        self._trace = trace
        self._documents = [
            [rng.randrange(200) for _ in range(rng.randrange(4, 100))]
            for _ in range(load.num_documents)
        ]

    async def arrive(self, *, until_s: float) -> None:
        """Sends requests in an open loop, independent of earlier ones' ends."""
        load, loop = self._load, self._cluster.loop
        begin_s = loop.time()
        steady = self._arrivals(load.rate, 1, begin_s, until_s)
        bursts = self._arrivals(1 / 60, load.burst, begin_s, until_s)
        for at_s in sorted(steady + bursts):
            await asyncio.sleep(at_s - loop.time())
            self.ask(self.draw())

    def _arrivals(self, rate: float, size: int, from_s: float, until_s: float) -> list[float]:
        """Times of arrivals, in bursts of ``size`` within a second at a mean ``rate``."""
        times: list[float] = []
        at_s = from_s + self._rng.expovariate(rate)
        while at_s < until_s:
            times += [at_s + (self._rng.random() if size > 1 else 0.0) for _ in range(size)]
            at_s += self._rng.expovariate(rate)
        return times

    def draw(self) -> Ask:
        """Draws a request according to the load."""
        rng, load = self._rng, self._load
        prompt = list(rng.choice(self._documents)) if rng.random() < 0.8 else []
        prompt += [rng.randrange(200) for _ in range(rng.randrange(1, 40))]
        if rng.random() < load.p_poison:
            prompt.append(POISON)
        room = MAX_MODEL_LEN - len(prompt)
        max_tokens = min(room, 1 + int(rng.expovariate(1 / load.mean_output)))
        return Ask(
            number=len(self.asks),
            prompt=prompt,
            max_tokens=max_tokens,
            seed=rng.randrange(2**63) if rng.random() < 0.8 else None,
            ignore_eos=rng.random() < 0.7,
            salt=rng.choice(["", "", "tenant"]),
            begin_s=self._cluster.loop.time(),
            pauses_s=rng.choice([0.05, 0.5, 3.0]) if rng.random() < load.p_slow else 0.0,
            cancel_at=rng.randrange(max_tokens) if rng.random() < load.p_cancel else None,
            deadline_s=rng.uniform(0.1, 5) if rng.random() < load.p_deadline else None,
            leaves_late=rng.random() < 0.5,
            num_answers=rng.choice([2, 3, 5]) if rng.random() < load.p_several else 1,
            priority=rng.choice(load.priorities),
        )

    def ask(self, ask: Ask) -> asyncio.Task[None]:
        """Begins a request. Errors are collected in ``wrong``."""
        self.asks.append(ask)
        task = asyncio.get_running_loop().create_task(self._run(ask))
        self.running[task] = ask
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        ask = self.running.pop(task)
        ask.end_s = self._cluster.loop.time()
        self._trace(f"{ask.number} {ask.outcome} {ask.num_tokens} {ask.error and ask.error.code()}")
        if not task.cancelled() and (error := task.exception()) is not None:
            ask.outcome = "wrong"
            if not isinstance(error, Wrong):
                raise error
            self.wrong.append(error)

    async def _run(self, ask: Ask) -> None:
        gateways = self._cluster.gateways
        if not gateways:
            ask.outcome = "no gateway"
            return
        ask.gateway = self._rng.choice(gateways)
        ask.last_s = ask.begin_s
        ask.answers = [Answer() for _ in range(ask.num_answers)]
        network = self._cluster.network
        try:
            async with network.connect(
                ask.gateway.address, client=None, place="clients"
            ) as connection:
                deadline_s = None if ask.deadline_s is None else ask.begin_s + ask.deadline_s
                call = connection.server_stream("Generate", ask.request(), deadline_s=deadline_s)
                async with asyncio.timeout_at(None if ask.leaves_late else deadline_s):
                    async for chunk in call:
                        ask.take(chunk, self._model, now_s=self._cluster.loop.time())
                        if ask.cancel_at is not None and ask.num_tokens > ask.cancel_at:
                            ask.outcome = "cancelled"
                            return
                        if ask.pauses_s:
                            await asyncio.sleep(self._rng.expovariate(1 / ask.pauses_s))
        except TimeoutError:
            ask.outcome = "deadline"
        except grpc.aio.AioRpcError as error:
            ask.outcome, ask.error = "error", error
        else:
            if ask.outcome == "running":
                raise Wrong(f"{ask} ended without an end")
        self.check_end(ask)
