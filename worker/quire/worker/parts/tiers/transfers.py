"""Transfers of blocks between the KV cache, host memory, disk and other groups.

    evicted     host memory keeps the block; it is saved to disk, with all earlier blocks of its
                chain that the disk lacks
    wanted      blocks in host memory are copied back within the step that needs them; a `Pull`
                brings blocks from disk or another group in its own threads (`pulls`)
    lent        a `Loan` sends blocks through free slots (`loans`)

A block's checksum is computed by the engine's thread right after the step that copied it out of the
KV cache, is never computed again to be kept, and is compared whenever the block is used. A block
with another checksum is discarded and computed instead. So bytes may change wherever a block rests:

    place                              checksum                    compared
    slot that keeps it                 after the copy              before the copy back, a loan's
                                                                   sending, and writing to disk
    slot, waits to be written          after the copy              before it is written
    file                               the slot's, in its header   when it is read
    slot, waits to be sent             after the copy              before it is sent
    connection                         the slot's, in its header   when it is received
    slot, received or read             the source's                before the copy into the cache

A step's checksums take a quarter of the time of its copies (`python -m bench.kv_copies`). A thread
would give a right checksum to bytes that changed before it read them.
`quire.worker.parts.tiers.checker` says when a comparison holds. What is copied into the KV cache is
registered only then, and belongs to the next step.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import Bytes, KvFormat, PeerSource
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.engine.part import Host, Slot
from quire.worker.model.facts import ModelFacts
from quire.worker.parts.tiers.checker import Check, Checker
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.copies import Copies
from quire.worker.parts.tiers.disk import BlockCorrupt, DiskReadError, DiskStore
from quire.worker.parts.tiers.disk_fetcher import DiskFetcher
from quire.worker.parts.tiers.disk_saver import DiskSaver
from quire.worker.parts.tiers.host_tier import HOST_TIER, HostTier
from quire.worker.parts.tiers.loan import Loan
from quire.worker.parts.tiers.loans import Loans
from quire.worker.parts.tiers.pull import Fetch
from quire.worker.parts.tiers.pulls import Arrival, Origin, Pulls
from quire.worker.request.arrays import Ints
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import Executor

_log = logging.getLogger(__name__)

DISK_TIER = 2
MIN_PULL_TOKENS = 32
"""Fewer tokens are computed faster than a group responds."""
_WAIT_S = 0.002
"""How long an idle engine waits for blocks before it looks for new requests."""


def num_tiers(config: EngineConfig) -> int:
    """Number of tiers of an engine: 1 (KV cache), 2 (and host memory) or 3 (and disk)."""
    if config.kv_disk_dir is not None:
        return DISK_TIER + 1
    return HOST_TIER + 1 if config.kv_offloading_size else 1


class Transfers:
    """Used from the engine's thread. Other threads use `lend_kept`, `Pull` and `Loan`."""

    def __init__(
        self,
        pool: BlockPool,
        log: EventLog,
        *,
        config: EngineConfig,
        format: KvFormat,
        host_blocks_XC: Bytes,
        identity: str,
        fetch: Fetch | None,
        clock: Callable[[], float],
    ) -> None:
        """``identity`` identifies the contents of blocks on disk, see `DiskStore`. ``fetch`` runs
        pulls from other groups; without it, none are made.

        Raises:
            ConfigError: The disk's folder cannot be used.
        """
        self.format = format
        self.copies = Copies()
        self.num_corrupt_blocks = 0
        self.num_host_tokens = 0
        self._pool = pool
        self.host_blocks_XC = host_blocks_XC
        self._changed = threading.Event()
        num_slots = len(host_blocks_XC)
        num_kept = int(config.kv_offloading_size * 2**30) // format.block_bytes
        self.host_tier = HostTier(num_slots=num_slots, max_kept=num_kept, log=log)
        self._disk: DiskStore | None = None
        self._disk_fetch: DiskFetcher | None = None
        self._saver: DiskSaver | None = None
        self._lost_on_disk: deque[DiskReadError] = deque()
        self._log = log
        self.checker = Checker(
            self.host_tier, host_blocks_XC=host_blocks_XC, on_change=self._changed.set
        )
        if config.kv_disk_dir is not None:
            self._open_disk(config.kv_disk_dir, int(config.kv_disk_size * 2**30), identity)
        self.pulls = Pulls(
            pool,
            self.host_tier,
            self.copies,
            self.checker,
            format=format,
            host_blocks_XC=host_blocks_XC,
            fetch=fetch,
            fetch_from_disk=self._disk_fetch,
            on_change=self._changed.set,
            on_corrupt=self._throw_away,
            clock=clock,
        )
        self.loans = Loans(
            pool,
            self.host_tier,
            self.copies,
            format=format,
            host_blocks_XC=host_blocks_XC,
            on_change=self._changed.set,
            on_corrupt=self._throw_away,
            clock=clock,
        )
        pool.spill = self._spill

    @property
    def has_work(self) -> bool:
        """Whether steps are needed although there are no requests."""
        is_saving = self._saver is not None and self._saver.num_coming > 0
        return bool(
            len(self.copies)
            or self.pulls.num_arrivals
            or self.loans.num_loans
            or is_saving
            or self.checker.has_work
        )

    def wait(self, *, for_arrivals: bool, most_s: float) -> None:
        """Called when the engine is idle. Waits briefly, at most ``most_s`` seconds, for a change
        by a thread, if transfers are under way or requests wait ``for_arrivals``."""
        if for_arrivals or self.has_work:
            self._changed.wait(max(0.0, min(_WAIT_S, most_s)))

    def advance(self, *, is_decoding: bool, step_s: float) -> None:
        """Processes blocks and slots that threads have delivered or returned. Must be called before
        each step, which makes the copies. ``step_s``: approximate duration of a step."""
        self._changed.clear()
        self.checker.settle()
        if self._saver is not None:
            self._settle_disk(self._saver)
        self.pulls.advance()
        self.loans.advance(is_decoding=is_decoding, step_s=step_s)

    def match(self, hashes: Sequence[BlockHash]) -> list[Slot]:
        """The slots of the longest prefix of ``hashes`` that is kept in host memory."""
        return self.host_tier.match(hashes) if self.host_tier.num_kept else []

    def load(
        self, slots: list[Slot], hashes: Sequence[BlockHash], parent: BlockId | None
    ) -> list[BlockId]:
        """Allocates blocks of the KV cache, has the next step copy kept blocks there, and registers
        them. ``parent`` is the registered block before them. Returns the blocks, which the caller
        then holds; fewer than ``slots`` if a checksum differs. There must be room for them."""
        for number, slot in enumerate(slots):
            if not self.checker.is_whole(slot):
                self._throw_away(hashes[number], slot, True)
                slots = slots[:number]
                break
        for slot in slots:
            self.host_tier.pin(slot)
        block_ids = self._pool.allocate(len(slots))
        for slot, block_id in zip(slots, block_ids, strict=True):
            self.copies.into(slot, block_id)
        num_hits = [self.host_tier.num_hits(slot) + 1 for slot in slots]
        self._pool.register(block_ids, hashes[: len(slots)], parent=parent, num_hits=num_hits)
        self.host_tier.loaded(slots)
        self.copies.then(lambda: self._unpin(slots))
        self.num_host_tokens += len(slots) * self._pool.block_size
        return block_ids

    def _unpin(self, slots: list[Slot]) -> None:
        for slot in slots:
            self.host_tier.unpin(slot)

    def check(self, hashes: Sequence[BlockHash]) -> Check | None:
        """Starts a thread's comparison of the blocks of a chain in host memory, if they are many.
        `Checker.end` must follow, in the step that uses them."""
        return self.checker.begin(self.match(hashes[len(self._pool.match(hashes)) :]))

    def want(
        self,
        hashes: Sequence[BlockHash],
        *,
        num_useful: int,
        source: PeerSource | None,
        pays: Callable[[Origin, int], bool],
    ) -> Arrival | None:
        """Fetches the first ``num_useful`` blocks of a chain that are not all in the KV cache and
        host memory. Returns ``None`` if no source has enough of them, or if fetching them does not
        pay. `Pulls.let_go` must follow for each arrival that is returned."""
        held = self._pool.match(hashes[:num_useful])
        slots = self.match(hashes[len(held) : num_useful])
        num_here = len(held) + len(slots)
        if num_here == num_useful:
            return None
        arrival = self.pulls.coming(hashes[num_here])
        if arrival is None:
            end, brings = self._end_of(hashes, num_here, num_useful, source)
            if (end - num_here) * self._pool.block_size < MIN_PULL_TOKENS:
                return None
            if not pays(self.pulls.origin(brings), end - num_here):
                return None
            if not self.pulls.has_room_for(num_here):
                return None
            self._pool.hold(held)
            if slots:
                names = hashes[len(held) : num_here]
                held += self.load(slots, names, parent=held[-1] if held else None)
                if len(held) < num_here:
                    self._pool.release(held)
                    return None
            names = BlockHashes.of(hashes[num_here:end])
            last = hashes[num_here - 1] if num_here else None
            arrival = self.pulls.begin(names, after=last, source=brings, holds=held)
            if arrival is None:
                self._pool.release(held)
                return None
        arrival.num_users += 1
        return arrival

    def _end_of(
        self,
        hashes: Sequence[BlockHash],
        begin: int,
        num_useful: int,
        source: PeerSource | None,
    ) -> tuple[int, PeerSource | None]:
        """The end of the blocks from ``begin`` on that the disk, or else another group, has; and
        which source that is."""
        if self._disk is not None:
            end = begin + self._disk.match(hashes[begin:num_useful])
            if (end - begin) * self._pool.block_size >= MIN_PULL_TOKENS:
                return end, None
        return (begin, None) if source is None else (min(num_useful, source.num_blocks), source)

    def lend(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | str:
        """Lends the longest prefix of ``hashes`` that is in the KV cache and host memory, or
        returns why not."""
        if difference := self.format.difference(borrower_format):
            return f"formats differ: the lender's blocks have {difference}"
        return self.loans.lend(hashes)

    def lend_kept(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | None:
        """Lends ``hashes`` if host memory has them all. Can be called from any thread."""
        if self.format.difference(borrower_format):
            return None
        return self.loans.lend_kept(hashes)

    def stats(self) -> dict[str, Any]:
        """Counters of `EngineStats`, by name."""
        return {
            "num_host_tokens": self.num_host_tokens,
            "num_disk_tokens": self.pulls.num_disk_tokens,
            "num_peer_tokens": self.pulls.num_peer_tokens,
            "disk_s": self.pulls.disk_s,
            "peer_s": self.pulls.peer_s,
            "num_lent_tokens": self.loans.num_lent_tokens,
            "num_corrupt_blocks": self.num_corrupt_blocks,
            "num_failed_pulls": self.pulls.num_failed,
        }

    def yield_room(self) -> bool:
        """Releases the blocks that are held for loans and arrivals, so that running sequences can
        use them. Returns whether there were any."""
        lent, arrived = self.loans.yield_room(), self.pulls.yield_room()
        return lent or arrived

    def submitted(self) -> Ints | None:
        """Called when a step is submitted. Returns the copies that it must make."""
        return self.copies.submitted()

    def finished(self) -> None:
        """Called when the oldest step under way has run."""
        self.copies.finished()

    def reset(self) -> None:
        """Forgets the blocks in host memory. Blocks on disk stay."""
        self.host_tier.reset()

    def save_all(self, run_copies: Callable[[], None]) -> None:
        """Saves blocks that are not on disk yet, those with the most hits first, for a few seconds
        at most. ``run_copies`` runs a step that makes all copies."""
        if self._saver is None:
            return
        pool = self._pool
        named = [pool.named(block_id) for block_id in pool.most_useful(pool.num_blocks)]
        self._saver.save_all([*named, *self.host_tier.named()], run_copies)

    def close(self) -> None:
        """Ends pulls, loans and threads, within seconds."""
        self._pool.spill = None
        self.loans.close()
        self.pulls.close()
        if self._saver is not None:
            self._saver.close()
        self.checker.close()
        if self._disk_fetch is not None:
            self._disk_fetch.close()
        if self._disk is not None:
            self._disk.close()

    def _open_disk(self, folder: Path, max_bytes: int, identity: str) -> None:
        self._disk = disk = DiskStore(
            folder, identity=identity, format=self.format, max_bytes=max_bytes
        )
        self._disk_fetch = DiskFetcher(disk, on_error=self._lost_on_disk.append)
        self._saver = DiskSaver(
            disk,
            self._pool,
            self.host_tier,
            self.copies,
            host_blocks_XC=self.host_blocks_XC,
            on_corrupt=self._throw_away,
        )
        self._log.stored([name for name, _ in disk.blocks()], tier=DISK_TIER)

    def _settle_disk(self, saver: DiskSaver) -> None:
        """Logs blocks that were written to disk or lost there."""
        disk = self._disk
        assert disk is not None
        stored, removed = saver.settle()
        while self._lost_on_disk:
            error = self._lost_on_disk.popleft()
            removed += error.removed
            self.num_corrupt_blocks += isinstance(error, BlockCorrupt)
        # A block may have been written and deleted since, so its current state is logged.
        self._log.stored([name for name in stored if name in disk], tier=DISK_TIER)
        self._log.removed([name for name in removed if name not in disk], tier=DISK_TIER)

    def throw_away(self, names: Sequence[BlockHash]) -> None:
        """Deletes corrupt blocks from host memory and disk."""
        for name in names:
            if name in self.host_tier:
                self.host_tier.drop(name)
            if self._disk is not None and name in self._disk:
                self._log.removed(self._disk.discard(name), tier=DISK_TIER)

    def _spill(self, block_id: BlockId, name: BlockHash, parent: BlockHash | None) -> None:
        slot = self.host_tier.keep(name, parent, num_hits=self._pool.num_hits(block_id))
        if slot is not None:
            self.copies.out(block_id, slot)
            self.copies.then(lambda: self._filled(slot))
        if self._saver is not None:
            self._saver.save(name, parent)

    def _filled(self, slot: Slot) -> None:
        self.host_tier.filled(slot, checksum_of(self.host_blocks_XC[slot]))
        self.host_tier.unpin(slot)

    def _throw_away(self, name: BlockHash, slot: Slot, is_kept: bool) -> None:
        if is_kept and self.host_tier.find(name) != slot:
            return  # It has been evicted or dropped already.
        _log.error(
            "host memory (tier 1), slot %d: block %s is corrupt and is dropped",
            slot,
            name.hex()[:16],
        )
        self.num_corrupt_blocks += 1
        if is_kept:
            self.host_tier.drop(name)


def make_transfers(
    host: Host,
    config: EngineConfig,
    model: ModelFacts,
    executor: Executor,
    *,
    fetch: Fetch | None,
) -> Transfers | None:
    """``None`` if blocks stay in the KV cache. Raises ConfigError like `Transfers`."""
    host_blocks_XC = executor.host_blocks_XC
    if host_blocks_XC is None or not config.enable_prefix_caching or model.is_encoder:
        return None
    return Transfers(
        host.pool,
        host.log,
        config=config,
        format=executor.kv_format,
        host_blocks_XC=host_blocks_XC,
        identity=f"{model.fingerprint} {model.kv_dtype} {executor.numerics}",
        fetch=fetch,
        clock=host.clock,
    )
