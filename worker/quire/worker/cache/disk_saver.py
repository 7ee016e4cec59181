"""Writes blocks that the KV cache evicts to disk, with all before them that the disk lacks; and,
when the engine is closed, those that it still has.

A block's bytes are taken from host memory where they are kept, else through a free slot. What does
not find room on the way is left out: it costs a later request its computation, and nothing waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.worker.api.hashing import BlockHash
from quire.worker.api.kv_format import Bytes
from quire.worker.cache.blocks import BlockPool
from quire.worker.cache.checksum import checksum_of
from quire.worker.cache.copies import Copies, Slot
from quire.worker.cache.disk import DiskStore, Put
from quire.worker.cache.shelf import Shelf

_SLOT_SHARE = 0.25
"""Part of the free slots, and of all slots, that blocks on their way to disk may take."""
CLOSE_S = 5.0
"""How long blocks are still written when the engine is closed."""
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class _Job:
    name: BlockHash
    parent: BlockHash | None
    slot: Slot
    is_kept: bool
    """Whether the slot keeps the block; else it is free once the block is written."""


class DiskSaver:
    """Used from the engine's thread; it has one of its own, which writes."""

    def __init__(
        self,
        disk: DiskStore,
        pool: BlockPool,
        shelf: Shelf,
        copies: Copies,
        *,
        host_blocks_XC: Bytes,
        on_corrupt: Callable[[BlockHash], None],
    ) -> None:
        """``on_corrupt`` is told, by `settle`, of a kept block whose bytes are not what they
        were."""
        self._disk = disk
        self._pool = pool
        self._shelf = shelf
        self._copies = copies
        self._host_XC = host_blocks_XC
        self._on_corrupt = on_corrupt
        self._coming: set[BlockHash] = set()  # On their way.
        self._num_slots = 0
        self._jobs: deque[_Job] = deque()
        self._done: deque[tuple[_Job, Put | None]] = deque()
        """Jobs that are over; without a `Put` the bytes were corrupt."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def save(self, name: BlockHash, parent: BlockHash | None) -> bool:
        """Has a block written that the KV cache or host memory has. Whether it is on disk or on its
        way."""
        chain: list[tuple[BlockHash, BlockHash | None]] = []
        at: BlockHash | None = name
        before = parent
        while at is not None and at not in self._coming and at not in self._disk:
            chain.append((at, before))
            at = before
            if at is not None:
                here = self._pool.find(at)
                if here is not None:
                    before = self._pool.named(here)[1]
                elif at in self._shelf:
                    before = self._shelf.parent(at)
                elif at not in self._coming and at not in self._disk:
                    return False  # The disk keeps no chain with a hole.
        jobs = []
        for each, its_parent in reversed(chain):
            job = self._job(each, its_parent)
            if job is None:
                break
            jobs.append(job)
            self._coming.add(each)
        if jobs:
            self._copies.then(lambda: self._begin(jobs))
        return len(jobs) == len(chain)

    def save_all(
        self, named: Sequence[tuple[BlockHash, BlockHash | None]], run_copies: Callable[[], None]
    ) -> None:
        """Has blocks written, parents before children, and waits for that; `CLOSE_S` at most.
        ``run_copies`` runs a step that makes all copies."""
        until_s = time.monotonic() + CLOSE_S
        for name, parent in named:
            while not self.save(name, parent) and time.monotonic() < until_s:
                if not self._coming:
                    break  # It has no room at all.
                run_copies()
                self._wait_for_some(until_s)
        run_copies()
        while self._coming and time.monotonic() < until_s:
            self._wait_for_some(until_s)

    def settle(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Gives back the slots of what was written; returns which blocks came to disk, and which
        made room for them."""
        stored, removed = list[BlockHash](), list[BlockHash]()
        while self._done:
            job, put = self._done.popleft()
            self._coming.discard(job.name)
            if put is not None:
                removed += put.removed
                stored += [] if put.error else [job.name]
            if job.is_kept:
                self._shelf.unpin(job.slot)
            else:
                self._shelf.give_back([job.slot])
                self._num_slots -= 1
            if put is None:
                self._on_corrupt(job.name)
        return stored, removed

    @property
    def num_coming(self) -> int:
        """Blocks on their way."""
        return len(self._coming)

    def close(self) -> None:
        """Ends the thread, when what it has is written or after `CLOSE_S`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _wait_for_some(self, until_s: float) -> None:
        """Waits for the thread to end some job."""
        while not self._done and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self.settle()

    def _job(self, name: BlockHash, parent: BlockHash | None) -> _Job | None:
        """Where the block's bytes will be once the next step has run."""
        if len(self._coming) >= max(1.0, _SLOT_SHARE * self._shelf.num_slots):
            return None
        kept = self._shelf.find(name)
        if kept is not None:
            self._shelf.pin(kept)
            return _Job(name, parent, kept, is_kept=True)
        block_id = self._pool.find(name)
        most = _SLOT_SHARE * (self._shelf.num_free + self._num_slots)
        if block_id is None or self._num_slots >= most:
            return None
        taken = self._shelf.take(1)
        if not taken:
            return None
        self._num_slots += 1
        self._copies.out(block_id, taken[0])
        return _Job(name, parent, taken[0], is_kept=False)

    def _begin(self, jobs: list[_Job]) -> None:
        """The bytes are there."""
        with self._changed:
            self._jobs += jobs
            self._changed.notify()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="quire-save", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job = self._jobs.popleft()
            block_C = self._host_XC[job.slot]
            checksum = checksum_of(block_C)
            known = self._shelf.checksum(job.slot) if job.is_kept else b""
            put = None
            if known in (b"", checksum):
                put = self._disk.put(job.name, job.parent, block_C, checksum)
            self._done.append((job, put))
