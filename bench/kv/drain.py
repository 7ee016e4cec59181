"""Measures streams that move from a draining group: how long they pause, and what is recomputed.

The groups are in processes of their own; the gateway, in this process, is that of `quire serve`,
without its ports. All streams begin at one group, and the other joins before the first drains.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np
from bench.kv.groups import (
    BLOCK_SIZE,
    Remote,
    altered,
    answers,
    config_of,
    in_engine,
    random_prompt,
)
from bench.report import markdown, percentile

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.served_model import ServedModel, read_model
from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.service import ModelService
from quire.cluster.group.server import GroupServer
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import TokenIds
from quire.worker.request.engine_stats import EngineStats
from quire.worker.request.request import Request, Tokens
from quire.worker.request.sampling_params import SamplingParams

_MAX_TOKENS = 1000
_TOKENS_BEFORE, _TOKENS_BEHIND = 8, 8
"""Tokens of each stream before the drain begins, and after it has moved."""
_WAIT_S = 60.0
"""The gap that is aimed at, beside that of recomputation."""


class Moved(NamedTuple):
    gaps_s: list[float]
    """The longest gap of each stream since the drain began."""
    num_prefilled: int
    """Tokens of prompts that the taker computed, outputs so far among them."""
    num_fetched: int
    tokens: list[list[int]]
    """All tokens received, by stream."""


@dataclass
class _Stream:
    tokens: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)

    async def take(self, chunk: Chunk) -> None:
        self.tokens += chunk.token_ids
        self.times_s.append(asyncio.get_running_loop().time())

    def gap_s(self, since_s: float) -> float:
        """The longest gap from ``since_s`` on."""
        before = max((each for each in self.times_s if each < since_s), default=since_s)
        times_s = [before, *(each for each in self.times_s if each >= since_s)]
        return max(np.diff(times_s), default=0.0)


def drain(*, num_streams: int, num_tokens: int, rounds: int) -> int:
    """Prints gaps and tokens computed, moved and recomputed; returns 1 where streams differ."""
    rng = np.random.default_rng(0)
    prompts = [random_prompt(rng, num_tokens) for _ in range(num_streams)]
    found: dict[bool, list[Moved]] = {True: [], False: []}
    with tempfile.TemporaryDirectory() as name:
        model = altered(
            Path(name) / "model", max_position_embeddings=num_tokens + _MAX_TOKENS + BLOCK_SIZE
        )
        for _ in range(rounds):
            for moves_kv, moved in found.items():
                config = _config(model, num_streams, num_tokens, moves_kv=moves_kv)
                moved.append(asyncio.run(_move(config, prompts)))
    rows = [
        [name, *_figures(found[moves_kv])]
        for name, moves_kv in (("blocks moved", True), ("recomputed", False))
    ]
    header = ["", "median gap, s", "longest gap, s", "tokens computed by the taker", "fetched"]
    print(markdown(header, rows))
    gaps_s = {key: median(_gaps(each)) for key, each in found.items()}
    is_equal = all(
        _agree(moved.tokens, other.tokens) for moved in found[True] for other in found[False]
    )
    print(
        f"\n{num_streams} streams of {num_tokens} tokens, {rounds} rounds: a gap is "
        f"{gaps_s[True] / gaps_s[False]:.2f} of recomputation's; in open blocks there are at most "
        f"{num_streams * BLOCK_SIZE} tokens; tokens {'are equal' if is_equal else 'DIFFER'}"
    )
    return int(not is_equal)


def _gaps(moved: list[Moved]) -> list[float]:
    return [gap_s for each in moved for gap_s in each.gaps_s]


def _figures(moved: list[Moved]) -> list[str]:
    gaps_s = _gaps(moved)
    return [
        f"{median(gaps_s):.2f}",
        f"{percentile(gaps_s, 100):.2f}",
        f"{median(each.num_prefilled for each in moved):.0f}",
        f"{median(each.num_fetched for each in moved):.0f}",
    ]


def _agree(some: list[list[int]], others: list[list[int]]) -> bool:
    return all(
        one[: len(other)] == other[: len(one)] for one, other in zip(some, others, strict=True)
    )


def _config(model: Path, num_streams: int, num_tokens: int, *, moves_kv: bool) -> ClusterConfig:
    num_blocks = num_streams * ((num_tokens + _MAX_TOKENS) // BLOCK_SIZE + 2)
    config = config_of(model=model, dtype="bfloat16", num_blocks=num_blocks, kv_transfer=moves_kv)
    return replace(config, served_model_name="demo", num_groups=2)


async def _move(config: ClusterConfig, prompts: list[TokenIds]) -> Moved:
    async with (
        Remote(config, "giver") as giver,
        Remote(config, "taker") as taker,
        gateway(config) as served,
    ):
        service = served.service
        # A group without blocks would take the giver's when it joins, before any stream moves.
        await taker.call(answers, prompts[:1])
        served.set_groups([giver.contact])
        await until_ready(service, 1)
        streams = [_Stream() for _ in prompts]
        running = [
            asyncio.create_task(_generate(service, prompt, stream))
            for prompt, stream in zip(prompts, streams, strict=True)
        ]
        await _until_all_have(streams, [_TOKENS_BEFORE] * len(streams), running)
        served.set_groups([giver.contact, taker.contact])
        await until_ready(service, 2)
        before = await taker.call(stats)
        begin_s = asyncio.get_running_loop().time()
        await giver.call(drain_group)
        wanted = [len(stream.tokens) + _TOKENS_BEHIND for stream in streams]
        await _until_all_have(streams, wanted, running)
        after = await taker.call(stats)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        return Moved(
            [stream.gap_s(begin_s) for stream in streams],
            after.num_prefilled_tokens - before.num_prefilled_tokens,
            after.num_peer_tokens - before.num_peer_tokens,
            [stream.tokens for stream in streams],
        )


@contextlib.asynccontextmanager
async def gateway(config: ClusterConfig) -> AsyncIterator[ServedModel]:
    table = RoutingTable(block_size=config.engine.block_size, config=config.routing)
    served = ServedModel(read_model(config), table=table)
    try:
        yield served
    finally:
        await served.service.groups.close()
        served.service.close()


async def _generate(service: ModelService, prompt: TokenIds, stream: _Stream) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=_MAX_TOKENS, ignore_eos=True, seed=1)
    request = Request(prompt=(Tokens(prompt.tolist()),), sampling=sampling)
    await service.run([await service.prepare(request)], stream.take)


async def until_ready(service: ModelService, num_groups: int) -> None:
    while service.groups.num_ready != num_groups:
        await service.groups.wait_for_change(timeout_s=_WAIT_S)


async def _until_all_have(
    streams: list[_Stream], wanted: list[int], running: "list[asyncio.Task[None]]"
) -> None:
    """Raises what a stream has ended with."""
    while any(len(stream.tokens) < num for stream, num in zip(streams, wanted, strict=True)):
        for task in running:
            if task.done() and task.exception() is not None:
                task.result()
        await asyncio.sleep(0.02)


async def stats(group: GroupServer) -> EngineStats:
    return await in_engine(group, lambda engine: engine.stats())


async def drain_group(group: GroupServer) -> int:
    """Returns once all requests have left."""
    return await group._service.drain(timeout_s=_WAIT_S, handover_s=_WAIT_S)
