"""Checksums of blocks in host memory: a thread computes them when a block has arrived, and they are
compared before the block is used again.

Short prefixes are compared in the engine's thread. A long prefix would delay other requests, so a
thread compares it first (`Checker.begin`) while its request waits.
"""

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from quire.worker.api.kv_format import Bytes
from quire.worker.cache.checksum import checksum_of
from quire.worker.cache.copies import Slot
from quire.worker.cache.shelf import Shelf

_AT_ONCE_BYTES = 8 << 20
"""Most bytes that the engine's thread compares: this takes about a millisecond."""


@dataclass(frozen=True, eq=False, slots=True)
class Check:
    """A check of kept blocks by a thread. Their slots are pinned until `Checker.end`."""

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
        """``on_change`` is called in another thread when a check is done."""
        self._shelf = shelf
        self._host_XC = host_blocks_XC
        self._on_change = on_change
        self._new: deque[tuple[Slot, Future[bytes]]] = deque()
        self._equal: set[Slot] = set()  # Checked slots that have not been used or filled since.
        self._writer = ThreadPoolExecutor(1, "quire-checksums")
        self._reader = ThreadPoolExecutor(1, "quire-checks")

    def filled(self, slot: Slot) -> None:
        """Called when a block has been copied into a pinned slot. Starts to compute the checksum of
        its bytes; the slot is unpinned when that is known."""
        self._equal.discard(slot)
        self._new.append((slot, self._writer.submit(checksum_of, self._host_XC[slot])))

    def settle(self, *, waits: bool = False) -> None:
        """Stores the checksums that have been computed. With ``waits``, waits for all of them."""
        while self._new and (waits or self._new[0][1].done()):
            slot, checksum = self._new.popleft()
            self._shelf.set_checksum(slot, checksum.result())
            self._shelf.unpin(slot)

    def begin(self, slots: Sequence[Slot]) -> Check | None:
        """Starts a check of kept blocks in a thread; `end` must follow. Returns ``None`` if they
        are few or have been checked."""
        if len(slots) * self._host_XC.shape[1] <= _AT_ONCE_BYTES or self._equal.issuperset(slots):
            return None
        for slot in slots:
            self._shelf.pin(slot)
        checksums = [self._reader.submit(checksum_of, self._host_XC[slot]) for slot in slots]
        checksums[-1].add_done_callback(lambda _: self._on_change())
        return Check(slots, checksums)

    def end(self, check: Check) -> None:
        """Stores the results of a check that is done, or cancels it."""
        for slot, checksum in zip(check.slots, check.checksums, strict=True):
            checksum.cancel()
            is_known = checksum.done() and not checksum.cancelled()
            if is_known and self._shelf.checksum(slot) in (b"", checksum.result()):
                self._equal.add(slot)
            self._shelf.unpin(slot)

    def is_whole(self, slot: Slot) -> bool:
        """Whether the kept block's bytes match its checksum, or that is not known yet."""
        if slot in self._equal:
            self._equal.discard(slot)
            return True
        known = self._shelf.checksum(slot)
        return not known or known == checksum_of(self._host_XC[slot])

    def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)
        self._reader.shutdown(wait=False, cancel_futures=True)
