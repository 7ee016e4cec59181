"""The tokens that waiting and running prompts have yet to compute, each shared block counted once.

That is less than the sum over the prompts: if a hundred wait for one long prefix, one computes it.
Always true: a counted block is missing for some waiting or running prompt. The converse may fail:
if a block that a waiting prompt had found in the cache is evicted, it is counted again only when
that prompt's turn comes.
"""

from collections.abc import Iterable

from quire.worker.blocks.hashing import BlockHash
from quire.worker.engine.sequence import Sequence


class PendingPrefill:
    """Counts the missing blocks. Operations take O(1) for each block or running sequence."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._num_lacking: dict[BlockHash, int] = {}
        self._num_end_tokens = 0  # Tokens of waiting sequences behind their shareable blocks.

    def num_tokens(self, running: Iterable[Sequence]) -> int:
        """Tokens to compute. ``running`` are all running sequences; those that decode add none."""
        size = self._block_size
        num_tokens = len(self._num_lacking) * size + self._num_end_tokens
        for seq in running:
            if seq.num_uncomputed > 1:
                num_tokens += seq.num_uncomputed - size * seq.num_missing_blocks
        return num_tokens

    def queued(self, seq: Sequence) -> None:
        self._num_end_tokens += seq.num_end_tokens
        self.lost(seq.missing_blocks)

    def unqueued(self, seq: Sequence) -> None:
        """``seq`` begins to run, or will be removed. Its blocks still count."""
        self._num_end_tokens -= seq.num_end_tokens

    def gone(self, seq: Sequence) -> None:
        """``seq`` computes nothing more. To be called before its blocks are released."""
        self.found(seq.missing_blocks)

    def found(self, blocks: Iterable[BlockHash]) -> None:
        """One prompt no longer lacks ``blocks``: they came from another tier or group."""
        num_lacking = self._num_lacking
        for block in blocks:
            num = num_lacking.pop(block, 0)
            if num > 1:
                num_lacking[block] = num - 1

    def lost(self, blocks: Iterable[BlockHash]) -> None:
        """One more prompt lacks ``blocks``."""
        num_lacking = self._num_lacking
        for block in blocks:
            num_lacking[block] = num_lacking.get(block, 0) + 1

    def computed(self, blocks: Iterable[BlockHash]) -> None:
        """No prompt lacks ``blocks`` any more."""
        for block in blocks:
            self._num_lacking.pop(block, None)
