"""Checksums of blocks outside the KV cache: computed when a block leaves it, compared when it is
used again.

Always true:
    - A block's checksum is that of its bytes when they left the KV cache, or, if it came from disk
      or another group, the checksum that it came with. It is never computed again to be kept.
    - No block is used before its bytes were compared, and a comparison holds for one use, in the
      step in which its result is known. What is not used in that step is compared again.

The engine's thread computes and compares `_AT_ONCE_BYTES` in each step. Threads do what exceeds
that, and the block waits: a new one is not on the shelf before its checksum is known
(`Shelf.filled`), and one to be used is used in a later step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from quire.worker.api.hashing import BlockHash
from quire.worker.api.kv_format import Bytes
from quire.worker.cache.checksum import checksum_of
from quire.worker.cache.copies import Slot
from quire.worker.cache.shelf import Shelf

_AT_ONCE_BYTES = 8 << 20
"""Most bytes that the engine's thread reads in a step: this takes about a millisecond."""
_SMALL_BYTES = 128 << 10
"""Blocks of at most this size it reads in any number: passing one to a thread takes longer."""


OnCorrupt = Callable[[BlockHash, Slot, bool], None]
"""Is told of a block whose bytes in a slot lack their checksum, and whether the slot keeps it."""


@dataclass(frozen=True, eq=False, slots=True)
class Check:
    """A comparison of kept blocks by a thread. Their slots are pinned until `Checker.end`."""

    slots: Sequence[Slot]
    checksums: Sequence[Future[bytes]]

    @property
    def is_done(self) -> bool:
        return self.checksums[-1].done()


class Checker:
    """Used from the engine's thread. Has two threads of its own."""

    def __init__(
        self, shelf: Shelf, *, host_blocks_XC: Bytes, on_change: Callable[[], None]
    ) -> None:
        """``on_change`` is called in another thread when the results of `begin` are known."""
        self._shelf = shelf
        self._host_XC = host_blocks_XC
        self._block_bytes = host_blocks_XC.shape[1]
        self._on_change = on_change
        self._left_bytes = _AT_ONCE_BYTES  # That the engine's thread may still read in this step.
        self._new: dict[Slot, Future[bytes]] = {}  # Blocks to be kept, in order of departure.
        # Blocks that are about to be used, with their checksums; and whether they have these.
        self._asked: dict[tuple[Slot, bytes], Future[bytes]] = {}
        self._found: dict[tuple[Slot, bytes], bool] = {}
        self._check: Check | None = None
        self._writer = ThreadPoolExecutor(1, "quire-checksums")
        self._reader = ThreadPoolExecutor(1, "quire-checks")

    @property
    def has_work(self) -> bool:
        """Whether `settle` has or will have something to do."""
        return bool(self._new or self._asked or self._check)

    def left(self, slot: Slot) -> "Future[bytes]":
        """Called when a block has just been copied from the KV cache into a slot: its checksum."""
        checksum: Future[bytes]
        if self._may_read_now():
            checksum = Future()
            checksum.set_result(checksum_of(self._host_XC[slot]))
        else:
            checksum = self._submit(self._writer, slot)
        return checksum

    def filled(self, slot: Slot) -> None:
        """Called when a block has just been copied into a pinned slot that will keep it. The slot
        is filled and unpinned when its checksum is known."""
        if self._may_read_now():
            self._keep(slot, checksum_of(self._host_XC[slot]))
        else:
            self._new[slot] = self._submit(self._writer, slot)

    def of_kept(self, slot: Slot) -> "Future[bytes]":
        """The checksum of a pinned slot's block, for which `filled` was called."""
        checksum = self._new.get(slot)
        if checksum is None:
            checksum = Future()
            checksum.set_result(self._shelf.checksum(slot))
        return checksum

    def settle(self, *, waits: bool = False) -> None:
        """Must be called before each step: takes what threads have found, and forgets results that
        the last step did not use. With ``waits``, waits for all checksums of new blocks."""
        self._left_bytes = _AT_ONCE_BYTES
        self._keep_known(waits=waits)
        self._found.clear()
        for asked, checksum in list(self._asked.items()):
            if checksum.done():
                del self._asked[asked]
                self._found[asked] = checksum.result() == asked[1]
        if self._check is not None and self._check.is_done:
            self.end(self._check)
            self._check = None

    def begin(self, slots: Sequence[Slot]) -> Check | None:
        """Starts a comparison of kept blocks in a thread; `end` must follow. Returns ``None`` if
        they are few."""
        if len(slots) * self._block_bytes <= _AT_ONCE_BYTES:
            return None
        for slot in slots:
            self._shelf.pin(slot)
        checksums = [self._reader.submit(checksum_of, self._host_XC[slot]) for slot in slots]
        checksums[-1].add_done_callback(lambda _: self._on_change())
        return Check(slots, checksums)

    def end(self, check: Check) -> None:
        """Takes the results of a comparison that is done, for this step; or cancels it."""
        for slot, checksum in zip(check.slots, check.checksums, strict=True):
            checksum.cancel()
            if checksum.done() and not checksum.cancelled():
                expected = self._shelf.checksum(slot)
                self._found[slot, expected] = checksum.result() == expected
            self._shelf.unpin(slot)

    def may_use(self, slots: Sequence[Slot]) -> bool:
        """Whether `is_whole` would read few bytes of these kept blocks. If not, a thread compares
        them, and the caller asks again in the next step."""
        unknown = [slot for slot in slots if (slot, self._shelf.checksum(slot)) not in self._found]
        if len(unknown) * self._block_bytes <= _AT_ONCE_BYTES:
            return True
        if self._check is None:
            self._check = self.begin(unknown)
        return False

    def is_whole(self, slot: Slot) -> bool:
        """Whether the kept block, which is used now, has its checksum."""
        checksum = self._shelf.checksum(slot)
        found = self._found.pop((slot, checksum), None)
        return checksum_of(self._host_XC[slot]) == checksum if found is None else found

    def has(self, slot: Slot, checksum: bytes) -> bool | None:
        """Whether a block that has come into a slot, and is used now, has its checksum; ``None`` if
        a thread compares it first, and the caller asks again in the next step."""
        found = self._found.pop((slot, checksum), None)
        if found is not None or (slot, checksum) in self._asked:
            return found
        if self._may_read_now():
            return checksum_of(self._host_XC[slot]) == checksum
        self.ask(slot, checksum)
        return None

    def ask(self, slot: Slot, checksum: bytes) -> None:
        """Makes a thread compare a block that `has` will be asked for in the next step."""
        block = slot, checksum
        if block not in self._asked and block not in self._found:
            self._asked[block] = self._submit(self._reader, slot)

    def close(self) -> None:
        """Ends the threads. Checksums of new blocks are still computed."""
        if self._check is not None:
            self.end(self._check)
        self._writer.shutdown(wait=False)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _may_read_now(self) -> bool:
        if self._block_bytes <= _SMALL_BYTES:
            return True
        if self._left_bytes < self._block_bytes:
            return False
        self._left_bytes -= self._block_bytes
        return True

    def _submit(self, thread: ThreadPoolExecutor, slot: Slot) -> "Future[bytes]":
        # Without a callback, which would cost as much as the checksum of a small block: an engine
        # with nothing else to do looks every few milliseconds.
        return thread.submit(checksum_of, self._host_XC[slot])

    def _keep_known(self, *, waits: bool = False) -> None:
        while self._new:
            slot, checksum = next(iter(self._new.items()))
            if not (waits or checksum.done()):
                return
            del self._new[slot]
            self._keep(slot, checksum.result())

    def _keep(self, slot: Slot, checksum: bytes) -> None:
        self._shelf.filled(slot, checksum)
        self._shelf.unpin(slot)
