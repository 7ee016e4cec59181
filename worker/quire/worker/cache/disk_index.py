"""Which blocks a disk has, in which order they were used, and which goes next.

A block's parent is there too, always, so that no chain has a hole; so only a block without children
may go. The index knows nothing of files.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quire.worker.api.hashing import BlockHash

Named = tuple[BlockHash, BlockHash | None]
"""A block and the one before it; ``None`` where it is the first of its chain."""


@dataclass(slots=True)
class _Entry:
    parent: BlockHash | None
    used: int
    touched_s: float = 0.0
    children: set[BlockHash] = field(default_factory=set)
    num_pins: int = 0


class DiskIndex:
    """Blocks by name. Not for two threads at once."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, _Entry] = {}
        self._num_uses = 0
        self._ends: list[tuple[int, BlockHash]] = []
        """A heap of blocks without children, by their last use; and of what was once true."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._entries

    def parent(self, block: BlockHash) -> BlockHash | None:
        """Raises KeyError where it is not there."""
        return self._entries[block].parent

    def blocks(self) -> list[Named]:
        """All, parents before children."""
        roots = [block for block, entry in self._entries.items() if entry.parent is None]
        return [(block, self._entries[block].parent) for block in self._below(roots)]

    def add(self, block: BlockHash, parent: BlockHash | None) -> None:
        """A block that is not there yet, and whose parent is. It is the last one used."""
        if parent is not None:
            self._entries[parent].children.add(block)
        self._entries[block] = _Entry(parent, 0)
        self.use(block)

    def use(self, block: BlockHash) -> None:
        self._num_uses += 1
        self._entries[block].used = self._num_uses
        self._offer(block)

    def wants_touch(self, block: BlockHash, *, now_s: float, every_s: float) -> bool:
        """Whether its last use is to be noted on disk now, as it was not for so long."""
        entry = self._entries[block]
        if now_s - entry.touched_s < every_s:
            return False
        entry.touched_s = now_s
        return True

    def pin(self, block: BlockHash) -> object:
        """Until `unpin`, which takes what this returns, it does not go to make room."""
        entry = self._entries[block]
        entry.num_pins += 1
        return entry

    def unpin(self, block: BlockHash, pin: object) -> None:
        entry = self._entries.get(block)
        if entry is not None and entry is pin:  # else it was removed, as damaged ones are
            entry.num_pins -= 1
            self._offer(block)

    def pop_least_used(self) -> Named | None:
        """Removes the block without children or pins that was not used for the longest time."""
        while self._ends:
            used, block = heapq.heappop(self._ends)
            entry = self._entries.get(block)
            if entry is None or entry.used != used or entry.children or entry.num_pins:
                continue
            self._remove(block)
            return block, entry.parent
        return None

    def remove_with_descendants(self, block: BlockHash) -> list[Named]:
        """Removes what cannot be used without it too; returns all, children before parents."""
        if block not in self._entries:
            return []
        gone = [(each, self._entries[each].parent) for each in self._below([block])]
        gone.reverse()
        for each, _ in gone:
            self._remove(each)
        return gone

    def _remove(self, block: BlockHash) -> None:
        parent = self._entries.pop(block).parent
        if parent is not None:
            self._entries[parent].children.discard(block)
            self._offer(parent)

    def _offer(self, block: BlockHash) -> None:
        entry = self._entries[block]
        if entry.children or entry.num_pins:
            return
        heapq.heappush(self._ends, (entry.used, block))
        if len(self._ends) > 2 * len(self._entries) + 1024:
            self._ends = [
                (each.used, name)
                for name, each in self._entries.items()
                if not (each.children or each.num_pins)
            ]
            heapq.heapify(self._ends)

    def _below(self, blocks: Iterable[BlockHash]) -> Iterator[BlockHash]:
        """These and all their descendants, parents before children."""
        left = list(blocks)
        while left:
            block = left.pop()
            yield block
            left += self._entries[block].children
