"""Measures how much a group's decodes slow down while it sends blocks, and the cost of checksums.

The sender is in a process of its own. In this one, pulls without an engine fetch as much as it can
send, from its KV cache or its host memory. Windows with and without pulls alternate, so that both
run under the same conditions.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import numpy as np
from bench.kv.groups import (
    BLOCK_SIZE,
    Remote,
    answers,
    ask,
    config_of,
    engine_of,
    gib_of,
    names_of,
    random_prompt,
)
from bench.machine import Machine
from bench.peers.checkpoints import MAX_POSITIONS, SHAPES, make_checkpoint
from bench.report import markdown

from quire.cluster.features.kv_exchange import borrowing
from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.cluster.features.kv_exchange.frames import Checksum
from quire.cluster.group.server import GroupServer
from quire.worker.blocks.hashing import BlockHashes, TokenIds
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.parts.tiers import loan
from quire.worker.parts.tiers.pull import Pull
from quire.worker.request.config import STAGING_BYTES

T = TypeVar("T")

_NUM_LENT, _LENT_TOKENS = 4, 1024
"""Number and length of the prompts that the lender has cached, which are pulled repeatedly."""
_CONTEXT_TOKENS = 64
"""Prompt length of a stream."""

_streams: set["asyncio.Task[None]"] = set()


@dataclass
class Timed:
    """How long calls took."""

    seconds: float = 0.0

    def __call__(self, function: Callable[..., T]) -> Callable[..., T]:
        def timed(*args: Any) -> T:
            begin_s = time.perf_counter()
            try:
                return function(*args)
            finally:
                self.seconds += time.perf_counter() - begin_s

        return timed


_lent_checks = Timed()
"""Time spent on checksums of blocks that this process lends."""


class Window(NamedTuple):
    """A window of a lender's time."""

    tokens_per_s: float
    checks_s: float
    num_lent_tokens: int


def disturb(
    *,
    shape: str,
    num_streams: int,
    rounds: int,
    window_s: float,
    from_host: bool,
    cache: Path,
) -> int:
    """Prints the medians of windows with pulls and without, and what checks cost. ``from_host``:
    what is lent lies in host memory alone."""
    model = make_checkpoint(SHAPES[shape], cache)
    asyncio.run(_measure(model, num_streams, rounds, window_s, from_host))
    return 0


async def _measure(
    model: Path, num_streams: int, rounds: int, window_s: float, from_host: bool
) -> None:
    num_blocks = (_NUM_LENT * _LENT_TOKENS + num_streams * MAX_POSITIONS) // BLOCK_SIZE + 64
    plain = config_of(model=model, num_blocks=num_blocks)
    config = config_of(
        model=model,
        kv_transfer=True,
        num_blocks=num_blocks,
        kv_offloading_size=gib_of(2 * num_blocks, plain) if from_host else 0.0,
    )
    rng = np.random.default_rng(0)
    lent = [random_prompt(rng, _LENT_TOKENS) for _ in range(_NUM_LENT)]
    others = num_blocks * BLOCK_SIZE // _LENT_TOKENS + 1 if from_host else 0
    alone, beside = list[Window](), list[Window]()
    rates, idle_shares = list[float](), list[float]()
    before = Machine.now()
    async with Remote(config, "lender") as lender:
        await lender.call(answers, lent)
        for _ in range(others):  # They take the room of what is lent in the KV cache.
            await lender.call(answers, [random_prompt(rng, _LENT_TOKENS)])
        format, chains = await lender.call(begin, lent)
        puller = _Puller(lender.source(lent[0]), format, chains)
        try:
            for _ in range(rounds):
                idle_shares.append(await _checks_of_one(lender, puller))
            await lender.call(begin_streams, num_streams)
            await lender.call(window, window_s)
            for _ in range(rounds):
                alone.append(await lender.call(window, window_s))
                async with puller.pulling():
                    beside.append(await lender.call(window, window_s))
                rates.append(beside[-1].num_lent_tokens / window_s)
            await lender.call(end_streams)
        finally:
            await puller.borrower.close()
    rows = [
        [name, f"{median(each.tokens_per_s for each in windows):.1f}"]
        for name, windows in (("alone", alone), ("beside pulls", beside))
    ]
    print(markdown(["", "tokens/s"], rows))
    share = median(
        some.tokens_per_s / other.tokens_per_s for some, other in zip(beside, alone, strict=True)
    )
    lent_bytes_per_s = median(rates) * format.block_bytes / BLOCK_SIZE
    print(
        f"\n{num_streams} streams, {rounds} pairs of windows of {window_s:g} s: beside pulls "
        f"{share:.3f} of alone (median of pairs); lent {lent_bytes_per_s / 1e6:.0f} MB/s\n"
        f"checks on both sides: {median(idle_shares):.1%} of a pull from an idle lender; the "
        f"lender's beside decodes: "
        f"{median(each.checks_s for each in beside) / window_s:.2%} of its time"
    )
    after = Machine.now()
    if before is not None and after is not None:
        print(f"cores in use: {after.since(before)}")


async def _checks_of_one(lender: Remote, puller: "_Puller") -> float:
    """The share of its time that a pull takes for checks, here and there."""
    await lender.call(take_checks)
    own = Timed()
    with mock.patch.object(borrowing, "Checksum", partial(_TimedChecksum, own)):
        begin_s = time.perf_counter()
        await asyncio.to_thread(puller.pull)
        seconds = time.perf_counter() - begin_s
    return (own.seconds + await lender.call(take_checks)) / seconds


class _TimedChecksum:
    def __init__(self, timed: Timed) -> None:
        checksum = Checksum()
        self.update = timed(checksum.update)
        self.digest = timed(checksum.digest)


class _Puller:
    """Pulls the chains in turn, without an engine."""

    def __init__(self, source: PeerSource, format: KvFormat, chains: list[BlockHashes]) -> None:
        self.borrower = Borrower()
        self._source = source
        self._chains = itertools.cycle(chains)
        self._format = format
        self._memory_XC = np.zeros((STAGING_BYTES // format.block_bytes, format.block_bytes), "u1")

    @contextlib.asynccontextmanager
    async def pulling(self) -> AsyncIterator[None]:
        """Pulls repeatedly, on a thread, for the block."""
        ended = threading.Event()

        def run() -> None:
            while not ended.is_set():
                self.pull()

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            await asyncio.to_thread(thread.join)

    def pull(self) -> None:
        """Pulls the next chain, whole."""
        over = threading.Event()

        def take() -> None:
            pulled.grant([landed.slot for landed in pulled.take()])
            if pulled.is_over:
                over.set()

        names = next(self._chains)
        pulled = Pull(
            names,
            format=self._format,
            host_blocks_XC=self._memory_XC,
            source=replace(self._source, num_blocks=len(names)),
            on_change=take,
        )
        pulled.grant(range(len(self._memory_XC)))
        self.borrower.fetch(pulled)
        over.wait()
        assert not pulled.error, pulled.error


# In the lender's process.


async def begin(group: GroupServer, prompts: list[TokenIds]) -> tuple[KvFormat, list[BlockHashes]]:
    """How its blocks lie, and the names of those of each prompt. Times its checks from now on."""
    loan.checksum_of = _lent_checks(loan.checksum_of)  # type: ignore[attr-defined]
    return engine_of(group)._executor.kv_format, [names_of(group, each) for each in prompts]


async def begin_streams(group: GroupServer, num_streams: int) -> None:
    """Starts streams that run until `end_streams`."""

    async def stream(number: int) -> None:
        for turn in itertools.count():
            rng = np.random.default_rng((number, turn))
            tokens = random_prompt(rng, _CONTEXT_TOKENS)
            await ask(group, tokens, max_tokens=MAX_POSITIONS - _CONTEXT_TOKENS)

    _streams.update(asyncio.create_task(stream(number)) for number in range(num_streams))
    await asyncio.sleep(0.5)  # Until all have begun.


async def end_streams(group: GroupServer) -> None:
    for task in _streams:
        task.cancel()
    await asyncio.gather(*_streams, return_exceptions=True)
    _streams.clear()


async def window(group: GroupServer, seconds: float) -> Window:
    """What it does for so long."""
    await take_checks(group)
    begin_s = time.perf_counter()
    before = group.stats
    await asyncio.sleep(seconds)
    after = group.stats
    return Window(
        (after.num_output_tokens - before.num_output_tokens) / (time.perf_counter() - begin_s),
        await take_checks(group),
        after.num_lent_tokens - before.num_lent_tokens,
    )


async def take_checks(group: GroupServer) -> float:
    """Seconds that checksums of lent blocks took since the last call."""
    seconds, _lent_checks.seconds = _lent_checks.seconds, 0.0
    return seconds
