"""Saves blocks to disk that the KV cache evicts, with all earlier blocks of the chain that the disk
lacks. When the engine is closed, also saves the blocks that it still has.

A block's bytes are read from host memory if it is kept there, else copied through a free slot.
Without a free slot, a block is not saved: a later request recomputes it, but nothing waits. A chain
that does not fit is saved from its beginning, since a block is useless without those before it. Its
end, which is evicted first, is lost: if ends took slots before, a chain that is evicted as a whole
could lose its beginning, and so all of it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.worker.blocks.hashing import BlockHash
from quire.worker.blocks.kv_format import Bytes
from quire.worker.cache.block_pool import BlockPool
from quire.worker.engine.part import Slot
from quire.worker.parts.tiers.checker import OnCorrupt
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.copies import Copies
from quire.worker.parts.tiers.disk import DiskStore, Put
from quire.worker.parts.tiers.host_tier import HostTier

_SLOT_SHARE = 0.5
"""Share of the free slots, and of all slots, that blocks being saved may use. A step often evicts
the ends of two chains, and both need slots."""
CLOSE_S = 5.0
"""How long blocks are written when the engine is closed."""
_LOOK_S = 0.002


@dataclass(frozen=True, slots=True)
class _Job:
    name: BlockHash
    parent: BlockHash | None
    slot: Slot
    is_kept: bool
    """Whether the slot keeps the block; if not, it is freed once the block is written."""


class DiskSaver:
    """Used from the engine's thread. Has its own thread that writes."""

    def __init__(
        self,
        disk: DiskStore,
        pool: BlockPool,
        host_tier: HostTier,
        copies: Copies,
        *,
        host_blocks_XC: Bytes,
        on_corrupt: OnCorrupt,
    ) -> None:
        """`settle` calls ``on_corrupt``."""
        self._disk = disk
        self._pool = pool
        self._host_tier = host_tier
        self._copies = copies
        self._host_XC = host_blocks_XC
        self._on_corrupt = on_corrupt
        self._coming: set[BlockHash] = set()  # Blocks being saved.
        self._num_slots = 0
        self._jobs: deque[tuple[_Job, bytes]] = deque()
        """Jobs with the checksums of their blocks, which rest in their slots until then."""
        self._done: deque[tuple[_Job, Put | None]] = deque()
        """Finished jobs. ``None`` instead of a `Put` means that the block was corrupt."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    def save(self, name: BlockHash, parent: BlockHash | None) -> bool:
        """Starts to save a block of the KV cache or host memory. Returns whether it is on disk or
        being saved."""
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
                elif at in self._host_tier:
                    before = self._host_tier.parent(at)
                elif at not in self._coming and at not in self._disk:
                    return False  # Chains on disk have no holes.
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
        """Saves blocks, parents before children, and waits for at most `CLOSE_S`. ``run_copies``
        runs a step that makes all copies."""
        until_s = time.monotonic() + CLOSE_S
        for name, parent in named:
            while not self.save(name, parent) and time.monotonic() < until_s:
                if not self._coming:
                    break  # There is no room even for one block.
                run_copies()
                self._wait_for_some(until_s)
        run_copies()
        while self._coming and time.monotonic() < until_s:
            self._wait_for_some(until_s)

    def settle(self) -> tuple[list[BlockHash], list[BlockHash]]:
        """Frees the slots of finished jobs. Returns the blocks that were written to disk, and those
        that were deleted to make room."""
        stored, removed = list[BlockHash](), list[BlockHash]()
        while self._done:
            job, put = self._done.popleft()
            self._coming.discard(job.name)
            if put is not None:
                removed += put.removed
                stored += [] if put.error else [job.name]
            if job.is_kept:
                self._host_tier.unpin(job.slot)
            else:
                self._host_tier.give_back([job.slot])
                self._num_slots -= 1
            if put is None:
                is_kept = job.is_kept and self._host_tier.find(job.name) == job.slot
                self._on_corrupt(job.name, job.slot, is_kept)
        return stored, removed

    @property
    def num_coming(self) -> int:
        """Number of blocks being saved."""
        return len(self._coming)

    def close(self) -> None:
        """Ends the thread when its jobs are written, or abandons it after `CLOSE_S`."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _wait_for_some(self, until_s: float) -> None:
        """Waits until the thread has finished a job or ``until_s``; settles finished jobs."""
        while not self._done and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        self.settle()

    def _job(self, name: BlockHash, parent: BlockHash | None) -> _Job | None:
        """A job whose slot has the block's bytes once the next step has run; ``None`` if there is
        no room."""
        if len(self._coming) >= max(1.0, _SLOT_SHARE * self._host_tier.num_slots):
            return None
        kept = self._host_tier.find(name)
        if kept is not None:
            self._host_tier.pin(kept)
            return _Job(name, parent, kept, is_kept=True)
        block_id = self._pool.find(name)
        most = _SLOT_SHARE * (self._host_tier.num_free + self._num_slots)
        if block_id is None or self._num_slots >= most:
            return None
        taken = self._host_tier.take(1)
        if not taken:
            return None
        self._num_slots += 1
        self._copies.out(block_id, taken[0])
        return _Job(name, parent, taken[0], is_kept=False)

    def _begin(self, jobs: list[_Job]) -> None:
        """Passes jobs to the thread. Called when the bytes are in their slots."""
        ready = [(job, self._checksum(job)) for job in jobs]
        with self._changed:
            self._jobs += ready
            self._changed.notify()
            if self._thread is None and not self._is_closed:
                self._thread = threading.Thread(target=self._run, name="quire-save", daemon=True)
                self._thread.start()

    def _checksum(self, job: _Job) -> bytes:
        if job.is_kept:
            return self._host_tier.checksum(job.slot)
        return checksum_of(self._host_XC[job.slot])

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if not self._jobs:
                    return
                job, checksum = self._jobs.popleft()
            block_C = self._host_XC[job.slot]
            put = None
            if checksum_of(block_C) == checksum:
                put = self._disk.put(job.name, job.parent, block_C, checksum)
            self._done.append((job, put))
