"""Compares blocks outside the KV cache with their checksums before they are used again.

No block is used before its bytes were compared, and a comparison holds for one use, in the step in
which its result is known. What is not used in that step is compared again.

The engine's thread compares `_AT_ONCE_BYTES` in each step. A thread compares what exceeds that, and
the block is used in a later step.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from quire.worker.blocks.hashing import BlockHash
from quire.worker.blocks.kv_format import Bytes
from quire.worker.engine.part import Slot
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.host_tier import HostTier

_AT_ONCE_BYTES = 8 << 20
"""Most bytes that the engine's thread compares in a step: this takes about a millisecond."""
_SMALL_BYTES = 128 << 10
"""Blocks of at most this size it compares in any number: passing one to a thread takes longer."""


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
    """Used from the engine's thread. Has a thread of its own."""

    def __init__(
        self, host_tier: HostTier, *, host_blocks_XC: Bytes, on_change: Callable[[], None]
    ) -> None:
        """``on_change`` is called in the other thread when the results of `begin` are known."""
        self._host_tier = host_tier
        self._host_XC = host_blocks_XC
        self._block_bytes = host_blocks_XC.shape[1]
        self._on_change = on_change
        self._left_bytes = _AT_ONCE_BYTES  # That the engine's thread may still read in this step.
        # Blocks that are about to be used, with their checksums; and whether they have these.
        self._asked: dict[tuple[Slot, bytes], Future[bytes]] = {}
        self._found: dict[tuple[Slot, bytes], bool] = {}
        self._check: Check | None = None
        self._reader = ThreadPoolExecutor(1, "quire-checks")

    @property
    def has_work(self) -> bool:
        """Whether `settle` has or will have something to do."""
        return bool(self._asked or self._check)

    def settle(self) -> None:
        """Must be called before each step: takes what the thread has found, and forgets results
        that the last step did not use."""
        self._left_bytes = _AT_ONCE_BYTES
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
            self._host_tier.pin(slot)
        checksums = [self._reader.submit(checksum_of, self._host_XC[slot]) for slot in slots]
        checksums[-1].add_done_callback(lambda _: self._on_change())
        return Check(slots, checksums)

    def end(self, check: Check) -> None:
        """Takes the results of a comparison that is done, for this step; or cancels it."""
        for slot, checksum in zip(check.slots, check.checksums, strict=True):
            checksum.cancel()
            if checksum.done() and not checksum.cancelled():
                expected = self._host_tier.checksum(slot)
                self._found[slot, expected] = checksum.result() == expected
            self._host_tier.unpin(slot)

    def may_use(self, slots: Sequence[Slot]) -> bool:
        """Whether `is_whole` would read few bytes of these kept blocks. If not, a thread compares
        them, and the caller asks again in the next step."""
        unknown = [
            slot for slot in slots if (slot, self._host_tier.checksum(slot)) not in self._found
        ]
        if len(unknown) * self._block_bytes <= _AT_ONCE_BYTES:
            return True
        if self._check is None:
            # All of them: what is known now will be forgotten in the next step.
            self._check = self.begin(slots)
        return False

    def is_whole(self, slot: Slot) -> bool:
        """Whether the kept block, which is used now, has its checksum."""
        checksum = self._host_tier.checksum(slot)
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
            # Without a callback, which would cost as much as the checksum of a small block: an
            # engine with nothing else to do looks every few milliseconds.
            self._asked[block] = self._reader.submit(checksum_of, self._host_XC[slot])

    def close(self) -> None:
        """Ends the thread."""
        if self._check is not None:
            self.end(self._check)
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _may_read_now(self) -> bool:
        if self._block_bytes <= _SMALL_BYTES:
            return True
        if self._left_bytes < self._block_bytes:
            return False
        self._left_bytes -= self._block_bytes
        return True
