"""A loan: blocks that a group sends to another group.

The engine holds a reference to each block, so that none is evicted, and copies a few in each step
into slots of host memory. A consumer reads them from there in its own thread and returns the slots.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.parts.tiers.checksum import checksum_of


@dataclass(frozen=True, slots=True)
class Lent:
    """A block whose bytes are in host memory until the consumer returns the slot."""

    index: int
    """Index of the block in the loan."""
    slot: int
    checksum: bytes
    """XXH3 of its bytes when they left the KV cache, 128 bits."""
    is_kept: bool = False
    """Whether host memory kept the block already, so that no step has copied it."""


class Loan:
    """Lent blocks, parents before children. Thread-safe: used by the engine and the consumer.

    ``hashes`` are their names. ``parents`` has the name of each block's parent; ``None`` for the
    first block of a chain.
    """

    def __init__(
        self,
        hashes: BlockHashes,
        parents: list[BlockHash | None],
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        on_change: Callable[[], None],
        pause_s: Callable[[int], float] = lambda _: 0.0,
    ) -> None:
        """``on_change`` is called in the consumer's thread when it returns slots. ``pause_s`` says
        how many seconds to wait before a number of bytes of kept blocks are read."""
        self.hashes = hashes
        self.parents = parents
        self.format = format
        self.host_blocks_XC = host_blocks_XC
        self._on_change = on_change
        self._pause_s = pause_s
        self._changed = threading.Condition()
        self._ready: deque[Lent] = deque()
        self._returned: list[int] = []
        self._error = ""
        self._corrupt: list[Lent] = []
        self._is_closed = False

    # For the consumer.

    @property
    def error(self) -> str:
        """Why the loan has ended; empty while more blocks follow."""
        return self._error

    def next(self, timeout_s: float) -> Lent | None:
        """The next block, in order; ``None`` after ``timeout_s`` and once there is an `error`.
        Compares the checksum here, in parallel with the engine's steps. If it differs, the loan
        ends."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error, timeout_s)
            lent = self._ready.popleft() if self._ready else None
        if lent is None:
            return None
        block_C = self.host_blocks_XC[lent.slot]
        if lent.is_kept:
            time.sleep(self._pause_s(len(block_C)))
        if checksum_of(block_C) == lent.checksum:
            return lent
        name = self.hashes[lent.index]
        with self._changed:
            self._ready.clear()
            self._error = f"block {lent.index} ({name.hex()[:16]}) is corrupt"
            self._corrupt.append(lent)
        self.give_back(lent.slot)
        return None

    def give_back(self, slot: int) -> None:
        """Returns a slot whose bytes the consumer has read."""
        with self._changed:
            self._returned.append(slot)
        self._on_change()

    def close(self) -> None:
        """Ends the loan: the consumer wants no more blocks and reads no slot any more. Must be
        called once."""
        with self._changed:
            self._is_closed = True
        self._on_change()

    # For the engine.

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def lend(self, lent: Lent) -> None:
        with self._changed:
            if not self._error:
                self._ready.append(lent)
                self._changed.notify()

    def take_corrupt(self) -> list[Lent]:
        """Blocks whose checksum did not match, since the last call."""
        with self._changed:
            corrupt, self._corrupt = self._corrupt, []
            return corrupt

    def take_returned(self) -> list[int]:
        """Slots that were returned since the last call. When a loan is closed, all of its other
        slots are free too."""
        with self._changed:
            returned, self._returned = self._returned, []
            return returned

    def fail(self, error: str) -> None:
        """Ends the loan with an error."""
        with self._changed:
            self._error = error
            self._changed.notify()
