"""The index of the blocks on a disk: which there are, their last use, and which to delete next.

A block's parent is always in the index too, so that no chain has a hole. So only blocks without
children are removed to make room. The index does not access files.
"""

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quire.worker.blocks.hashing import BlockHash

Named = tuple[BlockHash, BlockHash | None]
"""A block and its parent; ``None`` for the first block of a chain."""


@dataclass(slots=True)
class _Entry:
    parent: BlockHash | None
    used: int
    touched_s: float = 0.0
    children: set[BlockHash] = field(default_factory=set)
    num_pins: int = 0


class DiskIndex:
    """Blocks by name. Not thread-safe."""

    def __init__(self) -> None:
        self._entries: dict[BlockHash, _Entry] = {}
        self._num_uses = 0
        self._ends: list[tuple[int, BlockHash]] = []
        """A heap of blocks without children by their last use. It may have stale entries."""

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._entries

    def parent(self, block: BlockHash) -> BlockHash | None:
        """The block's parent. Raises KeyError if the block is not in the index."""
        return self._entries[block].parent

    def blocks(self) -> list[Named]:
        """All blocks, parents before children."""
        roots = [block for block, entry in self._entries.items() if entry.parent is None]
        return [(block, self._entries[block].parent) for block in self._below(roots)]

    def add(self, block: BlockHash, parent: BlockHash | None) -> None:
        """Adds a new block, whose parent must be in the index, as the most recently used one."""
        if parent is not None:
            self._entries[parent].children.add(block)
        self._entries[block] = _Entry(parent, 0)
        self.use(block)

    def use(self, block: BlockHash) -> None:
        self._num_uses += 1
        self._entries[block].used = self._num_uses
        self._offer(block)

    def wants_touch(self, block: BlockHash, *, now_s: float, every_s: float) -> bool:
        """Whether the block's last use should be written to disk now: the last write was at least
        ``every_s`` ago. Records the write."""
        entry = self._entries[block]
        if now_s - entry.touched_s < every_s:
            return False
        entry.touched_s = now_s
        return True

    def pin(self, block: BlockHash) -> object:
        """Protects the block from removal to make room, until `unpin` with the returned object."""
        entry = self._entries[block]
        entry.num_pins += 1
        return entry

    def unpin(self, block: BlockHash, pin: object) -> None:
        entry = self._entries.get(block)
        if entry is not None and entry is pin:  # else it was removed, for example as damaged
            entry.num_pins -= 1
            self._offer(block)

    def pop_least_used(self) -> Named | None:
        """Removes and returns the least recently used block without children or pins, if any."""
        while self._ends:
            used, block = heapq.heappop(self._ends)
            entry = self._entries.get(block)
            if entry is None or entry.used != used or entry.children or entry.num_pins:
                continue
            self._remove(block)
            return block, entry.parent
        return None

    def remove_with_descendants(self, block: BlockHash) -> list[Named]:
        """Removes a block and its descendants. Returns them, children before parents."""
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
        """These blocks and all their descendants, parents before children."""
        left = list(blocks)
        while left:
            block = left.pop()
            yield block
            left += self._entries[block].children
