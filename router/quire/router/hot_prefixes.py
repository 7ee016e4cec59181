"""Finds the most shared prefixes with a bounded sketch.

A prompt is counted at the depths 1, 2, 4, … of its chain of blocks, so that a long one too takes
only a few entries; the entries form a tree. When the sketch is full, the half with the fewest hits
is dropped and the other half's hits are halved, so that old popularity decays.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import nlargest

from quire.worker.blocks.hashing import HASH_BYTES, BlockHash, BlockHashes


@dataclass(frozen=True, kw_only=True, slots=True)
class HotPrefix:
    """A prefix that several requests share."""

    name: BlockHash
    """The hash of the prefix's last block."""
    parent: BlockHash | None
    """The prefix of half its length, if that is in the same answer."""
    num_blocks: int
    num_hits: int
    """Requests that had the prefix; recent ones count more."""
    holders: Sequence[str]
    """The groups that have its last block in their KV cache."""


class _Entry:
    __slots__ = ("num_blocks", "num_hits", "parent")

    def __init__(self, parent: bytes, num_blocks: int) -> None:
        self.parent = parent
        self.num_blocks = num_blocks
        self.num_hits = 0


class HotPrefixes:
    """The sketch: hits per prefix. Not thread-safe."""

    def __init__(self, *, max_entries: int = 4096) -> None:
        self._max_entries = max_entries
        self._entries: dict[bytes, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def saw(self, hashes: BlockHashes) -> None:
        """Counts one request's chain of blocks."""
        data, num_blocks, parent, entries = hashes.data, 1, b"", self._entries
        while num_blocks * HASH_BYTES <= len(data):
            name = data[(num_blocks - 1) * HASH_BYTES : num_blocks * HASH_BYTES]
            entry = entries.get(name)
            if entry is None:
                if len(entries) >= self._max_entries:
                    self._thin()
                entry = entries[name] = _Entry(parent, num_blocks)
            entry.num_hits += 1
            parent = name
            num_blocks *= 2

    def top(self, limit: int, holders: Callable[[BlockHash], Iterable[str]]) -> list[HotPrefix]:
        """The ``limit`` prefixes with the most blocks × hits among those hit twice or more, along
        with their own prefixes in the sketch. ``holders`` returns the groups that have a block."""
        shared = [
            (each.num_blocks * each.num_hits, name)
            for name, each in self._entries.items()
            if each.num_hits > 1
        ]
        chosen: dict[bytes, _Entry] = {}
        for _, name in nlargest(limit, shared):
            while name in self._entries and name not in chosen:
                chosen[name] = self._entries[name]
                name = chosen[name].parent
        return [
            HotPrefix(
                name=BlockHash(name),
                parent=BlockHash(each.parent) if each.parent in chosen else None,
                num_blocks=each.num_blocks,
                num_hits=each.num_hits,
                holders=sorted(holders(BlockHash(name))),
            )
            for name, each in chosen.items()
        ]

    def _thin(self) -> None:
        by_hits = sorted(self._entries.items(), key=lambda item: item[1].num_hits)
        for name, _ in by_hits[: (len(by_hits) + 1) // 2]:
            del self._entries[name]
        for entry in self._entries.values():
            entry.num_hits = max(1, entry.num_hits // 2)
