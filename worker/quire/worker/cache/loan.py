"""Blocks that a group lends to another one, or to its own disk.

The engine holds a reference to each, so that none is evicted, and copies them, a few in each step,
into slots of host memory. A consumer takes them from there in a thread of its own and gives the
slots back.
"""

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from quire.worker.api.hashing import BlockHash, BlockHashes
from quire.worker.api.kv_format import Bytes, KvFormat
from quire.worker.cache.checksum import checksum_of


@dataclass(frozen=True, slots=True)
class Lent:
    """A block whose bytes lie in host memory until the consumer gives the slot back."""

    index: int
    """Which of the loan's blocks it is."""
    slot: int
    checksum: bytes = b""
    """XXH3 of its bytes, 128 bits; empty until the consumer has it."""


class Loan:
    """Some blocks, parents before children. Safe for threads: the engine's and the consumer's.

    ``hashes`` are their names; ``parents`` the name of the block before each, and ``None`` for the
    first of a chain.
    """

    def __init__(
        self,
        hashes: BlockHashes,
        parents: list[BlockHash | None],
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        on_change: Callable[[], None],
    ) -> None:
        """``on_change`` is called, in the consumer's thread, when there are slots to take back."""
        self.hashes = hashes
        self.parents = parents
        self.format = format
        self.host_blocks_XC = host_blocks_XC
        self._on_change = on_change
        self._changed = threading.Condition()
        self._ready: deque[Lent] = deque()
        self._returned: list[int] = []
        self._error = ""
        self._is_closed = False

    # For the consumer.

    @property
    def error(self) -> str:
        """Why no more blocks come; empty while they do."""
        return self._error

    def next(self, timeout_s: float) -> Lent | None:
        """The next block, in order; ``None`` after ``timeout_s`` and once there is an `error`. The
        checksum of one that came from the KV cache is computed here, beside the engine's steps."""
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error, timeout_s)
            lent = self._ready.popleft() if self._ready else None
        if lent is None or lent.checksum:
            return lent
        return replace(lent, checksum=checksum_of(self.host_blocks_XC[lent.slot]))

    def give_back(self, slot: int) -> None:
        """The block's bytes are not read any more."""
        with self._changed:
            self._returned.append(slot)
        self._on_change()

    def close(self) -> None:
        """No more blocks are wanted, and no slot is read any more. Must be called once."""
        with self._changed:
            self._is_closed = True
        self._on_change()

    # For the engine.

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def lend(self, lent: Lent) -> None:
        with self._changed:
            self._ready.append(lent)
            self._changed.notify()

    def take_returned(self) -> list[int]:
        """Slots that were given back since the last call. With a closed loan, all others too are
        free."""
        with self._changed:
            returned, self._returned = self._returned, []
            return returned

    def fail(self, error: str) -> None:
        """No more blocks come."""
        with self._changed:
            self._error = error
            self._changed.notify()
