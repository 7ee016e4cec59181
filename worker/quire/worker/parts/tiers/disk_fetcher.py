"""Reads the blocks of pulls from the group's disk into host memory, in its own threads."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from quire.worker.parts.tiers.disk import DiskReadError, DiskStore
from quire.worker.parts.tiers.pull import Pull

_log = logging.getLogger(__name__)

NUM_THREADS = 4
CLOSE_S = 1.0
"""How long `close` waits for threads; those blocked by a stalled disk are abandoned."""

_TURN_S, _SLOT_WAIT_S = 0.005, 0.1
"""How long a thread waits for a pull's next slot: if other pulls wait for a thread, and if not."""


class DiskFetcher:
    """A `quire.worker.parts.tiers.pull.Fetch` for pulls whose source is the disk.

    A pull without a free slot waits in a queue and occupies no thread.
    """

    def __init__(
        self, store: DiskStore, *, on_error: Callable[[DiskReadError], None] = lambda _: None
    ) -> None:
        """``on_error`` is called in a fetcher's thread before the pull ends. The error says which
        blocks are no longer on disk, and whether one was damaged."""
        self._store = store
        self._on_error = on_error
        self._jobs: deque[tuple[Pull, int]] = deque()
        """Pulls, each with the number of its blocks that have been read."""
        self._changed = threading.Condition()
        self._is_closed = False
        self._threads: list[threading.Thread] = []

    def __call__(self, pull: Pull) -> None:
        """Queues a pull. If the fetcher is closed, ends the pull instead."""
        with self._changed:
            if not self._is_closed:
                self._jobs.append((pull, 0))
                self._changed.notify()
                if len(self._threads) < NUM_THREADS:
                    thread = threading.Thread(target=self._run, name="quire-disk", daemon=True)
                    self._threads.append(thread)
                    thread.start()
                return
        pull.end("disk: closed")

    def close(self) -> None:
        """Ends all pulls. Those that wait for the disk end when it responds."""
        with self._changed:
            self._is_closed = True
            left = list(self._jobs)
            self._jobs.clear()
            self._changed.notify_all()
        for pull, _ in left:
            pull.end("disk: closed")
        deadline = time.monotonic() + CLOSE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._is_closed)
                if self._is_closed:
                    return
                pull, index = self._jobs.popleft()
            try:
                index = self._advance(pull, index)
            except BaseException as error:
                pull.end(f"disk: {type(error).__name__}: {error}")
                raise
            if index < 0:
                continue
            with self._changed:
                if not self._is_closed:
                    self._jobs.append((pull, index))
                    continue
            pull.end("disk: closed")

    def _advance(self, pull: Pull, index: int) -> int:
        """Reads blocks into the pull's slots. Returns how many of its blocks have been read; -1 if
        the pull has ended."""
        while True:
            if index == len(pull.hashes):
                pull.end()
                return -1
            slot = pull.next_slot(_TURN_S if self._jobs else _SLOT_WAIT_S)
            if pull.is_cancelled:
                pull.end()
                return -1
            if slot is None:
                return index
            try:
                checksum = self._store.read(pull.hashes[index], pull.host_blocks_XC[slot])
            except DiskReadError as error:
                _log.warning("block from disk: %s", error)
                self._on_error(error)
                name = pull.hashes[index].hex()[:16]
                pull.end(f"disk: block {index} ({name}): {error.what}")
                return -1
            pull.num_bytes += self._store.format.block_bytes
            pull.landed(index, slot, checksum)
            index += 1
            if self._is_closed:
                return index
