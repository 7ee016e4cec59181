"""The prefixes that a router sent to each group, for policies that get no events from groups."""

from collections import OrderedDict
from collections.abc import Sequence

from quire.router.prefix_index.directory import GroupId
from quire.worker.blocks.hashing import BlockHash


class PrefixMemory:
    """The blocks sent to each group, the least recently sent being forgotten first.

    ``max_blocks`` bounds the blocks of a group.
    """

    def __init__(self, *, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[GroupId, OrderedDict[BlockHash, None]] = {}
        self._bits: dict[GroupId, int] = {}
        self._holders: dict[BlockHash, int] = {}
        self._free_bits: list[int] = []  # Of groups that were dropped.

    def lengths(self, hashes: Sequence[BlockHash], groups: Sequence[GroupId]) -> list[int]:
        """How many leading blocks were sent to each of ``groups``."""
        found: dict[int, int] = {}
        alive = -1
        for position, block in enumerate(hashes):
            still = alive & self._holders.get(block, 0)
            gone = alive & ~still
            if gone and position:
                for bit in self._bits.values():
                    if gone & bit:
                        found[bit] = position
            alive = still
            if not alive:
                break
        return [
            len(hashes) if alive & bit and hashes else found.get(bit, 0)
            for bit in (self._bits.get(group, 0) for group in groups)
        ]

    def num_blocks(self, group: GroupId) -> int:
        return len(self._blocks.get(group, ()))

    def add(self, hashes: Sequence[BlockHash], group: GroupId) -> None:
        if group not in self._bits:
            self._bits[group] = self._free_bits.pop() if self._free_bits else 1 << len(self._bits)
            self._blocks[group] = OrderedDict()
        bit, blocks = self._bits[group], self._blocks[group]
        # The end of a chain first, so that it is also forgotten first.
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
            self._holders[block] = self._holders.get(block, 0) | bit
        while len(blocks) > self._max_blocks:
            self._forget(blocks.popitem(last=False)[0], bit)

    def drop(self, group: GroupId) -> None:
        """Forgets all that was sent to the group."""
        bit = self._bits.pop(group, None)
        if bit is not None:
            self._free_bits.append(bit)
            for block in self._blocks.pop(group):
                self._forget(block, bit)

    def _forget(self, block: BlockHash, bit: int) -> None:
        self._holders[block] &= ~bit
        if not self._holders[block]:
            del self._holders[block]
