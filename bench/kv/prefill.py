"""Streams of prefill groups, while groups are stopped, drained, killed and replaced.

Three groups in processes of their own, one of which prefills; the gateway, in this process, is that
of `quire serve`, without its ports. Each request has a prompt of its own for the cache, so a
prefill group computes it and hands its stream over. Each answer must be whole, and equal to that
of a group alone.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np
from bench.kv.drain import drain_group, gateway, until_ready
from bench.kv.groups import Remote, Said, ask, config_of, random_prompt
from bench.report import markdown

from quire.cluster.config import ClusterConfig
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.group.server import GroupServer
from quire.router.config import RoutingConfig
from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.errors import QuireError
from quire.worker.request.request import Request, Tokens
from quire.worker.request.sampling_params import SamplingParams

_NUM_GROUPS = 3
_LENGTHS = (300, 450)
_NUM_PROMPTS = 40
_MAX_TOKENS = 24
_MAX_LEN = 512
_NUM_CLIENTS = 8
_STOPPED_S = (0.1, 0.1, 0.6, 3.0)
"""How long a group is stopped; one of these. The last is longer than the silence timeout."""
_PAUSE_S = 1.0
"""Between two faults."""


@dataclass
class _Answer:
    tokens: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    async def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.token_ids
        self.finish_reason = chunk.finish_reason


def prefill(*, num_requests: int, seed: int = 0) -> int:
    """Prints how many answers were whole and equal; returns 1 if one was not."""
    logging.getLogger("quire").addHandler(logging.NullHandler())
    config = config_of(
        max_model_len=_MAX_LEN, dtype="float32", kv_transfer=True, num_blocks=16 * _MAX_LEN // 16
    )
    config = replace(
        config,
        served_model_name="demo",
        num_groups=_NUM_GROUPS,
        routing=RoutingConfig(num_prefill_groups=1),
    )
    bench = _Bench(config, num_requests, np.random.default_rng(seed))
    asyncio.run(bench.run())
    print("\n".join(bench.lines()))
    return int(bench.ends["whole and equal"] < num_requests)


class _Bench:
    def __init__(self, config: ClusterConfig, num_requests: int, rng: np.random.Generator) -> None:
        self.ends: Counter[str] = Counter()
        self._faults: Counter[str] = Counter()
        self._wrong: list[str] = []
        self._config = config
        self._rng = rng
        self._left = list(range(num_requests))
        self._groups: list[Remote] = []
        self._num_started = 0
        self._prompts = [
            random_prompt(rng, int(rng.integers(*_LENGTHS))) for _ in range(_NUM_PROMPTS)
        ]

    async def run(self) -> None:
        async with contextlib.AsyncExitStack() as stack:
            twin = await stack.enter_async_context(Remote(self._config, "twin"))
            self._right = [await twin.call(_answer, prompt) for prompt in self._prompts]
            self._served = await stack.enter_async_context(gateway(self._config))
            for _ in range(_NUM_GROUPS):
                await self._start()
            await until_ready(self._served.service, _NUM_GROUPS)
            disturbing = asyncio.create_task(self._disturb())
            try:
                await asyncio.gather(*[self._ask_all() for _ in range(_NUM_CLIENTS)])
            finally:
                disturbing.cancel()
                await asyncio.gather(disturbing, return_exceptions=True)
                for group in self._groups:
                    await asyncio.to_thread(group.end)

    def lines(self) -> list[str]:
        faults = [[kind, str(num)] for kind, num in sorted(self._faults.items())]
        ends = [[kind, str(num)] for kind, num in self.ends.most_common()]
        return [
            markdown(["answers", "number"], ends),
            "",
            markdown(["fault", "times"], faults),
            *self._wrong[:10],
        ]

    async def _ask_all(self) -> None:
        while self._left:
            await self._ask(self._left.pop())

    async def _ask(self, number: int) -> None:
        index = number % len(self._prompts)
        sampling = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True, seed=1)
        prompt = (Tokens(self._prompts[index].tolist()),)
        request = Request(prompt=prompt, sampling=sampling, cache_salt=str(number))
        answer, service = _Answer(), self._served.service
        try:
            await service.run([await service.prepare(request)], answer.take)
        except QuireError as error:
            self.ends[f"error: {type(error).__name__}"] += 1
            self._wrong.append(f"request {number}: {error}")
            return
        right = self._right[index]
        if answer.tokens == right and answer.finish_reason == "length":
            self.ends["whole and equal"] += 1
            return
        is_short = answer.tokens == right[: len(answer.tokens)]
        self.ends["cut off" if is_short else "wrong"] += 1
        self._wrong.append(f"request {number}: {answer} instead of {right}")

    async def _disturb(self) -> None:
        """One fault after another, in turn."""
        while True:
            for fault in (self._stop, self._stop, self._stop, self._drain, self._stop, self._kill):
                await asyncio.sleep(_PAUSE_S)
                await fault()

    async def _stop(self) -> None:
        group = self._any()
        stopped_s = float(self._rng.choice(_STOPPED_S))
        self._faults[f"a group is stopped for {stopped_s:g} s"] += 1
        group.pause()
        try:
            await asyncio.sleep(stopped_s)
        finally:
            group.go_on()

    async def _drain(self) -> None:
        group = self._any()
        self._faults["a group is drained and replaced"] += 1
        await group.call(drain_group)
        await self._replace(group)

    async def _kill(self) -> None:
        group = self._any()
        self._faults["a group is killed and replaced"] += 1
        group.kill()
        await self._replace(group)

    def _any(self) -> Remote:
        return self._groups[int(self._rng.integers(len(self._groups)))]

    async def _replace(self, group: Remote) -> None:
        self._groups.remove(group)
        self._set_groups()
        await asyncio.to_thread(group.end)
        await self._start()

    async def _start(self) -> None:
        self._num_started += 1
        group = Remote(self._config, f"group-{self._num_started}")
        await group.start()
        self._groups.append(group)
        self._set_groups()

    def _set_groups(self) -> None:
        self._served.set_groups([group.contact for group in self._groups])


async def _answer(group: GroupServer, prompt: TokenIds) -> list[int]:
    """A group's answer to the prompt alone."""
    said: Said = await ask(group, prompt, max_tokens=_MAX_TOKENS)
    return list(said.answer[0])
