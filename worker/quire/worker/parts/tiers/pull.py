"""A pull: a transfer of blocks into a group's host memory, from its disk or from another group.

An engine makes a `Pull` of some blocks of one chain. A *fetcher* delivers them, in order, in its
own thread: it takes a slot of host memory, fills it, and says which block is there. The engine
copies the block into the cache with its next step and grants the slot again. So a pull of any
length needs only a few slots, and waits while the engine has no room.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.worker.blocks.hashing import BlockHashes
from quire.worker.blocks.kv_format import Bytes, KvFormat, PeerSource


@dataclass(frozen=True, slots=True)
class Landed:
    """A block that has arrived completely and whose bytes have been checked."""

    index: int
    """Index of the block in the pull."""
    slot: int
    """The block's slot in host memory."""
    checksum: bytes
    """XXH3 of its bytes, 128 bits, as sent by its source."""


Source = PeerSource | None
"""The source of a pull's blocks; ``None`` is the group's own disk."""


class Pull:
    """Blocks that an engine waits for. Thread-safe: used by the engine and the fetcher.

    Indices count from the first block of ``hashes``, and blocks land in this order.
    """

    def __init__(
        self,
        hashes: BlockHashes,
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        source: Source,
        on_change: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_change`` is called in the fetcher's thread when there is something to `take`."""
        self.hashes = hashes
        self.format = format
        self.host_blocks_XC = host_blocks_XC
        self.source = source
        self.error = ""
        """Why the pull ended early, with the source's name; for logs and explanations."""
        self.num_bytes = 0
        """Bytes received, whether checked or not."""
        self.began_s = clock()
        self.first_s: float | None = None
        """Seconds from ``began_s`` until the first block landed; ``None`` before that."""
        self._clock = clock
        self._on_change = on_change
        self._changed = threading.Condition()
        self._granted: deque[int] = deque()
        self._landed: list[Landed] = []
        self._is_cancelled = False
        self._is_over = False

    # For the fetcher.

    @property
    def is_cancelled(self) -> bool:
        """Whether the engine no longer wants the pull. The fetcher must then call `end`."""
        return self._is_cancelled

    def next_slot(self, timeout_s: float) -> int | None:
        """A slot to fill; ``None`` after ``timeout_s``, and once the pull is cancelled."""
        with self._changed:
            self._changed.wait_for(lambda: self._granted or self._is_cancelled, timeout_s)
            return self._granted.popleft() if self._granted and not self._is_cancelled else None

    def landed(self, index: int, slot: int, checksum: bytes) -> None:
        """Reports that the block's bytes are in the slot and have this checksum."""
        if self.first_s is None:
            self.first_s = self._clock() - self.began_s
        with self._changed:
            self._landed.append(Landed(index, slot, checksum))
        self._on_change()

    def end(self, error: str = "") -> None:
        """Ends the pull: no more blocks follow, and nothing writes to a slot any more. Must be
        called exactly once. ``error`` says why it ended before the last block."""
        with self._changed:
            self.error = error
            self._is_over = True
        self._on_change()

    # For the engine.

    @property
    def is_over(self) -> bool:
        """Whether the fetcher writes to no slot any more. Blocks may still be left to `take`."""
        return self._is_over

    def grant(self, slots: Sequence[int]) -> None:
        """Lets the fetcher fill more slots."""
        with self._changed:
            self._granted.extend(slots)
            self._changed.notify()

    def take(self) -> list[Landed]:
        """Blocks that have landed since the last call."""
        with self._changed:
            landed, self._landed = self._landed, []
            return landed

    def cancel(self) -> None:
        """Cancels the pull. The slots are free when `is_over` is true."""
        with self._changed:
            self._is_cancelled = True
            self._changed.notify()


Fetch = Callable[[Pull], None]
"""Makes a fetcher start a pull, and returns at once. Called from the engine's thread."""
