"""The tokens that waiting and running prompts have yet to compute, each shared block counted once.

That is less than the sum over the prompts: if a hundred wait for one long prefix, one computes it.
Always true: a block that counts is lacked by a prompt at hand. Not all that are lacked may count:
of what a waiting prompt had found in the cache and was evicted since, nothing is known before that
prompt's turn.
"""

from collections.abc import Iterable

from quire.worker.api.hashing import BlockHash
from quire.worker.schedule.sequence import Sequence


class PendingPrefill:
    """Each operation takes O(1) for a block, and for a running sequence."""

    def __init__(self, *, block_size: int) -> None:
        self._block_size = block_size
        self._num_lacking: dict[BlockHash, int] = {}
        self._num_end_tokens = 0  # Of those that wait.

    def num_tokens(self, running: Iterable[Sequence]) -> int:
        """``running`` are all that do; of those that decode nothing counts."""
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
        """It begins, or will be gone: its blocks still count."""
        self._num_end_tokens -= seq.num_end_tokens

    def gone(self, seq: Sequence) -> None:
        """It computes nothing more, and has not given its blocks back yet."""
        self.found(seq.missing_blocks)

    def found(self, blocks: Iterable[BlockHash]) -> None:
        """A prompt lacks ``blocks`` no longer: they came from elsewhere."""
        num_lacking = self._num_lacking
        for block in blocks:
            num = num_lacking.pop(block, 0)
            if num > 1:
                num_lacking[block] = num - 1

    def lost(self, blocks: Iterable[BlockHash]) -> None:
        """A prompt lacks ``blocks``."""
        num_lacking = self._num_lacking
        for block in blocks:
            num_lacking[block] = num_lacking.get(block, 0) + 1

    def computed(self, blocks: Iterable[BlockHash]) -> None:
        """Nobody lacks ``blocks`` any more."""
        for block in blocks:
            self._num_lacking.pop(block, None)
