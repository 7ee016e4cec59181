"""Blocks that several of a group's decodes attend to.

Always true: ``num_further`` is the sum, over the blocks that any sequence attends to, of how many
do, less one.
"""

from collections.abc import Iterable

from quire.worker.blocks.hashing import BlockHash


class Attended:
    """The blocks of the prompts of those that decode."""

    def __init__(self) -> None:
        self._num_readers: dict[BlockHash, int] = {}
        self.num_further = 0
        """Times that a sequence attends to a block to which another one attends before it."""

    def add(self, blocks: Iterable[BlockHash]) -> None:
        """A sequence begins to decode."""
        readers = self._num_readers
        for block in blocks:
            before = readers.get(block, 0)
            readers[block] = before + 1
            self.num_further += before > 0

    def remove(self, blocks: Iterable[BlockHash]) -> None:
        """It has ended."""
        readers = self._num_readers
        for block in blocks:
            left = readers[block] - 1
            if left:
                readers[block] = left
                self.num_further -= 1
            else:
                del readers[block]
