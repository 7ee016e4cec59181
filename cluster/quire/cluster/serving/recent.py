"""The blocks of prompts that a gateway admitted a moment ago.

A group computes them for the first request, or has just done so and its events are on their way:
neither the directory nor the requests in flight show them. Memory is bounded, and what is too old
is forgotten: a group may have evicted it, or the request may have left without being computed.
"""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import chain

from quire.worker.api.events import keys_of
from quire.worker.api.hashing import BlockHashes

_MAX_BLOCKS = 32_768
"""In each half; one more prompt may exceed it."""
_KEEP_S = 5.0
"""A block is known for so long at least, unless too many came since; twice as long at most."""


class RecentBlocks:
    """Two sets, of which the older is dropped when the newer is full or old."""

    def __init__(self, *, max_blocks: int = _MAX_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._new: set[int] = set()
        self._old: set[int] = set()
        self._since_s: float | None = None

    def num_known(self, prompts: Sequence[BlockHashes], *, now_s: float) -> list[int]:
        """Of each prompt, how many of its first blocks were added, or are in a prompt before it."""
        self._age(now_s)
        counts = []
        before: set[int] = set()
        for hashes in prompts:
            keys = keys_of(hashes.data)
            # A prompt is added as a whole, so that whatever precedes a known block is known too.
            counts.append(
                bisect_left(keys, True, key=lambda key: not self._knows(key) and key not in before)
            )
            before.update(keys)
        return counts

    def add(self, prompts: Sequence[BlockHashes], *, now_s: float) -> None:
        """Notes the blocks of prompts that were admitted."""
        self._age(now_s)
        self._new.update(chain.from_iterable(keys_of(hashes.data) for hashes in prompts))

    def __len__(self) -> int:
        return len(self._new) + len(self._old)

    def _knows(self, key: int) -> bool:
        return key in self._new or key in self._old

    def _age(self, now_s: float) -> None:
        if self._since_s is None:
            self._since_s = now_s
        age_s = now_s - self._since_s
        if age_s >= _KEEP_S or len(self._new) >= self._max_blocks:
            self._old = set() if age_s >= 2 * _KEEP_S else self._new
            self._new = set()
            self._since_s = now_s
