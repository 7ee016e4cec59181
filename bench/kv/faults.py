"""Requests whose blocks come from elsewhere, while everything that brings them fails.

One borrower, in this process, with host memory and a disk; lenders in others. Each request is asked
alone, after its twin, a group of the same kind that finds and fetches nothing, has computed the
prompt. So small a model gives most fetches up before a fault can show: one request in two waits for
longer, and has no part in what is said of times.
"""

import asyncio
import contextlib
import logging
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
from bench.kv.disk_faults import (
    FILE_FAULTS,
    Touched,
    failing_reads,
    file_of,
    full_disk,
    noted,
    remove_folder,
    slow_reads,
    store_of,
)
from bench.kv.fault_report import Asked, Report
from bench.kv.groups import (
    BLOCK_SIZE,
    Said,
    altered,
    answers,
    ask,
    config_of,
    gib_of,
    in_engine,
    names_of,
    peers_of,
    random_prompt,
    running,
    transfers_of,
)
from bench.kv.lenders import Lenders, stop
from bench.kv.resting import Flips, before_cache, before_disk, before_sending, in_threads
from bench.kv.wire_faults import EDITS, behave, flip_kept, wire_faults
from tests.flaky_proxy import Fault

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.group.server import GroupServer
from quire.worker.blocks.hashing import BlockHashes, TokenIds
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers import arriving
from quire.worker.request.outputs import Fetched

_CACHE_BLOCKS, _HOST_BLOCKS, _DISK_BLOCKS = 80, 64, 800
_LENDER_BLOCKS, _LENDER_HOST_BLOCKS = 100, 800
_LENGTHS = (100, 300)
_MAX_LEN = 512
_BATCH = 24
"""Prompts that a lender computes at once, before they are asked for."""
_NUM_KNOWN = 60
_RUN = 1500
"""Requests that one borrower serves; its folder is removed before the last tenth of them."""
_COMPUTED_AGAIN_EVERY = 6
_KILLED_EVERY = 500
_FULL_EVERY, _FULL_FOR = 300, 30
_STALL_S = 0.3
"""How long a borrower waits for the next byte; 2 s in service."""
_PATIENCE_S = 60.0

_CUT = "connection cut"
_BEHIND_CANCELLED = "flipped behind a cancelled request"
_IN_THREADS = 0.3
"""Share of requests whose blocks are compared by a thread, as of long prefixes."""
_CANCELLED_S = (0.0, 0.03)
"""When a request is cancelled."""
_SAVED_S = 10.0
_WIRE = (_CUT, "byte flipped on the wire", "link stalls", "slow link", *EDITS)
_MAY_COME = {"slow link", "link stalls", "lender stopped", "lender killed", "slow disk"}
"""Faults in spite of which all blocks may come, as they should be."""
_LENT = {
    "peer": 0.12,
    _CUT: 0.06,
    **dict.fromkeys(_WIRE[1:], 0.025),
    "lender stopped": 0.02,
    "lender killed": 0.0,  # Every `_KILLED_EVERY` requests.
    "lender's host memory flipped": 0.04,
    "flipped before it is sent": 0.03,
    "flipped when received": 0.03,
    "cancelled, from a peer": 0.03,
    "wrong address": 0.02,
    "wrong token": 0.02,
    "other weights": 0.03,
    "other numerics": 0.03,
}
_OWN = {
    "new": 0.1,
    "again": 0.2,
    "host memory flipped": 0.05,
    _BEHIND_CANCELLED: 0.03,
    "flipped before it is written": 0.03,
    "flipped when read": 0.03,
    "cancelled": 0.03,
    **dict.fromkeys(FILE_FAULTS, 0.025),
    "disk fails": 0.015,
    "slow disk": 0.015,
}
_KINDS = {**_LENT, **_OWN}


def faults(*, num_requests: int, model: Path = demo_model.PATH, seed: int = 0) -> int:
    """Prints the outcome of each kind of fault; returns 1 where a token was wrong, or a fault that
    could be noticed was not named. ``model`` is a folder with a checkpoint."""
    report = Report()
    logging.getLogger("quire").addHandler(logging.NullHandler())
    # What there is after Ctrl-C, which lenders get too, is reported all the same.
    try:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(_run(num_requests, model, np.random.default_rng(seed), report))
    finally:
        print("\n".join(report.lines()))
    return int(report.has_failed)


async def _run(num_requests: int, model: Path, rng: np.random.Generator, report: Report) -> None:
    make = partial(config_of, model=model, max_model_len=_MAX_LEN, dtype="bfloat16")
    plain = make(enable_prefix_caching=False, num_blocks=_CACHE_BLOCKS)
    lent = make(
        kv_transfer=True,
        num_blocks=_LENDER_BLOCKS,
        kv_offloading_size=gib_of(_LENDER_HOST_BLOCKS, plain),
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = altered(folder / "other", model, weights=True)
        wrong = {
            "other weights": replace(lent, engine=replace(lent.engine, model=other)),
            "other numerics": replace(lent, engine=replace(lent.engine, dtype="float32")),
        }
        async with (
            running(_borrower(plain, folder / "twin"), "twin") as twin,
            Lenders(lent, wrong) as lenders,
        ):
            bench = _Bench(twin, lenders, rng, report)
            for begin in range(0, num_requests, _RUN):
                disk = folder / f"disk-{begin}"
                num = min(_RUN, num_requests - begin)
                await bench.run(_borrower(plain, disk), disk, num)


def _borrower(plain: ClusterConfig, disk: Path) -> ClusterConfig:
    return config_of(
        model=plain.engine.model,
        max_model_len=_MAX_LEN,
        dtype="bfloat16",
        kv_transfer=True,
        num_blocks=_CACHE_BLOCKS,
        kv_offloading_size=gib_of(_HOST_BLOCKS, plain),
        kv_disk_dir=disk,
        kv_disk_size=gib_of(_DISK_BLOCKS, plain),
    )


@dataclass
class _Known:
    token_ids: TokenIds
    names: BlockHashes


class _Heard(logging.Handler):
    """All that Quire logs, which nobody else hears."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())

    def has(self, *words: str) -> bool:
        return any(all(word in message for word in words) for message in self.messages)

    def __enter__(self) -> "_Heard":
        logging.getLogger("quire").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("quire").removeHandler(self)


class _Bench:
    def __init__(
        self,
        twin: GroupServer,
        lenders: Lenders,
        rng: np.random.Generator,
        report: Report,
    ) -> None:
        self._twin = twin
        self._lenders = lenders
        self._rng = rng
        self._report = report
        self._known: deque[_Known] = deque(maxlen=_NUM_KNOWN)
        self._wire: dict[str, Iterator[Fault]] = {}
        self._num_asked = 0
        self._num_computed = 0

    async def run(self, config: ClusterConfig, disk: Path, num_requests: int) -> None:
        """Runs the requests of one borrower."""
        self._known.clear()
        async with running(config, "borrower") as group:
            self._group = group
            borrower = peers_of(group)._borrower
            borrower._shunned_s = 0.0  # Otherwise most requests would fetch from no group.
            borrower._stall_s = _STALL_S
            block_bytes = transfers_of(group).format.block_bytes
            self._wire = self._wire or wire_faults(block_bytes=block_bytes, rng=self._rng)
            num_last = num_requests // 10
            await self._ask_all(num_requests - num_last)
            with _Heard() as heard, noted(store_of(group)) as touched:
                remove_folder(disk)
                await self._ask_all(num_last)
                await self._wait_until_saved()
            self._judge_state("folder removed", touched, is_told=heard.has(str(disk)))

    async def _ask_all(self, num_requests: int) -> None:
        while num_requests > 0:
            num = min(num_requests, _BATCH)
            num_requests -= num
            period = self._num_asked % _FULL_EVERY
            # Nothing is written where a disk has failed before.
            store = store_of(self._group)
            if period >= _FULL_EVERY - _FULL_FOR and not store.why_not:
                with _Heard() as heard, full_disk(store), noted(store) as touched:
                    await self._ask_some(num)
                    await self._wait_until_saved()
                touched.read.clear()  # Reads do not need room.
                is_told = heard.has("no blocks are written to disk")
                self._judge_state("disk full", touched, is_told=is_told)
            else:
                with _Heard():
                    await self._ask_some(num)

    def _judge_state(self, kind: str, touched: Touched, *, is_told: bool) -> None:
        """Judges a fault that lasts for several requests."""
        is_met = bool(touched.read or touched.num_writes)
        self._report.judge(kind, Fetched(), is_met=is_met, is_named=is_told)

    async def _wait_until_saved(self) -> None:
        """Waits until no block is being written to disk."""
        saver, until_s = transfers_of(self._group)._saver, time.monotonic() + _SAVED_S
        while saver is not None and saver.num_coming and time.monotonic() < until_s:
            await asyncio.sleep(0.01)

    async def _ask_some(self, num_requests: int) -> None:
        weights = np.array(list(_KINDS.values()))
        drawn = self._rng.choice(list(_KINDS), num_requests, p=weights / weights.sum())
        kinds = [str(kind) for kind in drawn]
        if (self._num_asked + num_requests) % _KILLED_EVERY < num_requests:
            kinds[-1] = "lender killed"  # The last: the next lender has other prompts.
        lent = [self._new_prompt() for kind in kinds if kind in _LENT]
        await self._lenders.lender.call(behave, None)
        await self._lenders.lender.call(answers, lent)
        prompts = iter(lent)
        for kind in kinds:
            self._num_asked += 1
            if kind in _LENT:
                await self._ask_lent(kind, next(prompts))
            else:
                await self._ask_own(kind)

    def _new_prompt(self) -> TokenIds:
        return random_prompt(self._rng, int(self._rng.integers(*_LENGTHS)))

    async def _ask_lent(self, kind: str, token_ids: TokenIds) -> None:
        """A request whose blocks a lender has, and which meets a fault of that kind."""
        num_wanted = (len(token_ids) - 1) // BLOCK_SIZE * BLOCK_SIZE
        async with self._lending(kind, token_ids) as source:
            if source is None:  # It cannot be.
                kind, source = "peer", self._lenders.lender.source(token_ids)
            if kind.startswith("cancelled"):
                await self._cancel(token_ids, source)
                kind = "peer"
            if kind == "flipped when received":
                num_before = await self._num_corrupt()
                with before_cache(self._group, self._rng) as flips:
                    said = await self._ask(kind, token_ids, source)
                if flips.num:
                    is_named = await self._num_corrupt() > num_before
                    self._report.judge(kind, said.fetched, is_named=is_named)
                return
            said = await self._ask(kind, token_ids, source)
        if kind != "peer":
            is_whole = said.fetched.num_peer_tokens == num_wanted
            self._report.judge(kind, said.fetched, is_harmless=is_whole and kind in _MAY_COME)

    @contextlib.asynccontextmanager
    async def _lending(self, kind: str, token_ids: TokenIds) -> AsyncIterator[PeerSource | None]:
        """The source of the prompt, of which nothing good comes; ``None`` where that cannot be."""
        lender, rng = self._lenders.lender, self._rng
        source = lender.source(token_ids)
        if kind in _WIRE:
            await lender.call(behave, next(self._wire[kind]))
            yield source
            await lender.call(behave, None)
        elif kind == "lender stopped":
            stopped = asyncio.create_task(stop(lender, *rng.uniform(0, (0.02, 0.3))))
            yield source
            await stopped
        elif kind == "lender killed":
            killed = asyncio.create_task(self._lenders.kill(rng.uniform(0, 0.02)))
            yield source
            await killed
        elif kind == "lender's host memory flipped":
            number = int(rng.integers(2**31))
            is_flipped = await lender.call(flip_kept, token_ids, number)
            yield source if is_flipped else None
        elif kind == "flipped before it is sent":
            await lender.call(before_sending, int(rng.integers(2**31)))
            yield source
            await lender.call(before_sending, None)
        elif kind in self._lenders.wrong:
            wrong = self._lenders.wrong[kind]
            await wrong.call(answers, [token_ids])
            yield wrong.source(token_ids)
        else:
            if kind == "wrong address":
                source = replace(source, address="127.0.0.1:1")
            elif kind == "wrong token":
                source = replace(source, token="other")
            yield source

    async def _ask_own(self, kind: str) -> None:
        """A request whose blocks the borrower has itself, or nobody."""
        if kind == "new" or not self._known:
            await self._ask("new", self._new_prompt())
        elif kind == "again":
            await self._ask(kind, self._known[self._rng.integers(len(self._known))].token_ids)
        elif kind == "cancelled":
            known = self._known[self._rng.integers(len(self._known))]
            await self._cancel(known.token_ids)
            await self._ask("again", known.token_ids)
        elif kind in ("host memory flipped", _BEHIND_CANCELLED):
            await self._ask_flipped(kind)
        elif kind == "flipped before it is written":
            await self._ask_written(kind)
        else:
            await self._ask_disk(kind)

    async def _cancel(self, token_ids: TokenIds, source: PeerSource | None = None) -> None:
        """Asks, and leaves soon."""
        asking = asyncio.create_task(ask(self._group, token_ids, source))
        await asyncio.sleep(self._rng.uniform(*_CANCELLED_S))
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

    async def _ask_written(self, kind: str) -> None:
        """A request that evicts blocks, one of which changes before it is on disk."""
        num_before = await self._num_corrupt()
        with before_disk(self._group, self._rng) as flips:
            said = await self._ask(kind, self._new_prompt())
        await self._wait_until_saved()
        if flips.num:
            self._report.judge(kind, said.fetched, is_named=await self._num_corrupt() > num_before)

    async def _ask_flipped(self, kind: str) -> None:
        for known in self._some_known():
            if kind == _BEHIND_CANCELLED:
                await self._cancel(known.token_ids)
            if await flip_kept(self._group, known.token_ids, int(self._rng.integers(2**31))):
                num_before = await self._num_corrupt()
                said = await self._ask(kind, known.token_ids)
                self._report.judge(
                    kind, said.fetched, is_named=await self._num_corrupt() > num_before
                )
                return
        await self._ask("new", self._new_prompt())

    async def _ask_disk(self, kind: str) -> None:
        store = store_of(self._group)
        for known in self._some_known():
            begin, end = await in_engine(self._group, partial(_on_disk, known.names, self._group))
            if end - begin < 2:
                continue
            harm: contextlib.AbstractContextManager[Flips | None] = contextlib.nullcontext()
            damaged = set(known.names[begin:end])
            if kind in FILE_FAULTS:
                name = known.names[int(self._rng.integers(begin, end))]
                damaged = {name}
                others = [each for each, _ in store.blocks() if each != name]
                other = others[int(self._rng.integers(len(others)))]
                with contextlib.suppress(FileNotFoundError):  # The folder was removed.
                    FILE_FAULTS[kind](
                        file_of(self._group, name), file_of(self._group, other), self._rng
                    )
            elif kind == "flipped when read":
                harm = before_cache(self._group, self._rng)
            else:
                harm = failing_reads() if kind == "disk fails" else slow_reads(read_s=0.02)
            num_before = await self._num_corrupt()
            with harm as flips, noted(store) as touched:
                said = await self._ask(kind, known.token_ids)
            if flips is not None:
                if flips.num:
                    is_named = await self._num_corrupt() > num_before
                    self._report.judge(kind, said.fetched, is_named=is_named)
                return
            is_whole = said.fetched.num_disk_tokens == (end - begin) * BLOCK_SIZE
            self._report.judge(
                kind,
                said.fetched,
                is_met=not damaged.isdisjoint(touched.read),
                is_harmless=is_whole and kind in _MAY_COME,
            )
            return
        await self._ask("new", self._new_prompt())

    def _some_known(self) -> list[_Known]:
        order = self._rng.permutation(len(self._known))[:12]
        return [self._known[index] for index in order]

    async def _num_corrupt(self) -> int:
        return (await in_engine(self._group, lambda engine: engine.stats())).num_corrupt_blocks

    async def _ask(self, kind: str, token_ids: TokenIds, source: PeerSource | None = None) -> Said:
        """Computes the prompt and then asks for it, each alone, and compares the answers."""
        computed = await self._compute(token_ids)
        is_patient = kind not in ("new", "again") and self._rng.random() < 0.5
        is_in_threads = self._rng.random() < _IN_THREADS
        with (
            mock.patch.object(
                arriving, "MIN_SLACK_S", _PATIENCE_S if is_patient else arriving.MIN_SLACK_S
            ),
            in_threads() if is_in_threads else contextlib.nullcontext(),
        ):
            said = await ask(self._group, token_ids, source)
        if not self._num_asked % _COMPUTED_AGAIN_EVERY:
            again = await self._compute(token_ids)
            self._report.computed.append(
                Asked(kind="", seconds=again.first_s, computed_s=computed.first_s)
            )
        fetched = said.fetched
        asked = Asked(
            kind=kind,
            seconds=said.first_s,
            computed_s=computed.first_s,
            wait_s=fetched.wait_s,
            told=str(tuple(fetched)),
        )
        (self._report.patient if is_patient else self._report.asked).append(asked)
        if said.answer != computed.answer:
            self._report.wrong.append(f"{kind}: {said} is not {computed.answer}")
        self._known.append(_Known(token_ids, names_of(self._group, token_ids)))
        return said

    async def _compute(self, token_ids: TokenIds) -> Said:
        self._num_computed += 1
        return await ask(self._twin, token_ids, cache_salt=str(self._num_computed))


def _on_disk(names: BlockHashes, group: GroupServer, engine: GroupEngine) -> tuple[int, int]:
    """Which of a chain's blocks would be read from disk."""
    num_here = len(engine._pool.match(names))
    num_here += len(transfers_of(group).match(names[num_here:]))
    return num_here, num_here + store_of(group).match(names[num_here:])
