"""The block tables of sequences: finds cached blocks, allocates, registers and releases blocks.

Always true: a full block has one writer, and no block is released before the last step that uses it
has run.

A full block is registered when the step that fills it is scheduled, not when it has run: the
forward pass writes the KV of all its rows before any of them attends, so that requests of one
step share the prefix that one of them computes. A block with a token in flight has no name yet;
it is registered when the token is known.
"""

from bisect import bisect_left
from typing import NamedTuple

from quire.worker.blocks.events import BlockContent
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.engine.part import Slot, Tier
from quire.worker.engine.sequence import Sequence


class Prefix(NamedTuple):
    """The cached blocks at the beginning of a sequence: in the KV cache, then in a slower tier."""

    block_ids: list[BlockId]
    slots: list[Slot]
    """Slots in the slower tier of the blocks that follow ``block_ids``."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids) + len(self.slots)


class BlockTables:
    """Changes the tables of sequences and the pool together. Decides nothing.

    ``tier`` has more blocks; ``None`` if blocks stay in the KV cache.
    """

    def __init__(self, pool: BlockPool, tier: Tier | None = None) -> None:
        self.pool = pool
        self._tier = tier
        self.num_submitted = 0
        """Steps submitted so far. ``num_finished``: those that have run."""
        self.num_finished = 0
        # Blocks of which the pool has an equal one: (sequence, index in its table, that block).
        self._duplicates: list[tuple[Sequence, int, BlockId]] = []
        # Blocks to release, with the last step that uses them.
        self._parting: list[tuple[int, list[BlockId]]] = []

    def find_prefix(self, seq: Sequence) -> Prefix:
        """The cached blocks of ``seq``, without the last token's block: its logits are needed."""
        block_ids = self.pool.match(seq.hashes[: seq.num_shareable])
        return Prefix(block_ids, self._slots(seq, len(block_ids)))

    def num_hits(self, seq: Sequence) -> int:
        """How many blocks `find_prefix` would find. O(log n) for blocks in the pool, where chains
        have no holes."""
        hashes, is_registered = seq.hashes, self.pool.is_registered
        blocks = range(seq.num_shareable)
        num_here = bisect_left(blocks, True, key=lambda index: not is_registered(hashes[index]))
        return num_here + len(self._slots(seq, num_here))

    def acquire(self, seq: Sequence, prefix: Prefix) -> None:
        """Puts ``prefix`` into the empty table of ``seq``. The next step copies blocks from the
        slower tier; from the first that turns out to be corrupt on, they are left out."""
        block_ids, slots = prefix
        self._describe(seq, 0, prefix.num_blocks)
        self.pool.acquire(block_ids)
        if slots:
            assert self._tier is not None
            names = seq.hashes[len(block_ids) : len(block_ids) + len(slots)]
            parent = block_ids[-1] if block_ids else None
            block_ids = block_ids + self._tier.load(seq, slots, names, parent)
        seq.append_blocks(block_ids)
        seq.num_registered = len(block_ids)
        seq.num_computed = len(block_ids) * self.pool.block_size

    def may_acquire(self, prefix: Prefix) -> bool:
        """Whether `acquire` may be called. If not, the caller asks again in the next step."""
        return self._tier is None or self._tier.may_use(prefix.slots)

    def yield_room(self) -> bool:
        """Releases blocks that no sequence holds. Returns whether there were any."""
        return self._tier is not None and self._tier.yield_room()

    def _slots(self, seq: Sequence, num_here: int) -> list[Slot]:
        if self._tier is None:
            return []
        return self._tier.match(seq.hashes[num_here : seq.num_shareable])

    def num_missing(self, seq: Sequence, num_tokens: int) -> int:
        """Blocks that ``seq`` lacks for its next tokens; negative if it has some to spare."""
        return -(-(seq.num_computed + num_tokens) // self.pool.block_size) - seq.num_blocks

    def are_lacking(self, seq: Sequence, num_tokens: int) -> bool:
        """Whether ``seq`` lacks more blocks for its next tokens than the pool has available."""
        num_missing = self.num_missing(seq, num_tokens)
        return num_missing > 0 and num_missing > self.pool.num_available

    def extend(self, seq: Sequence, num_tokens: int) -> None:
        """Gives ``seq`` the blocks for its next tokens, and registers those that they fill."""
        num_missing = self.num_missing(seq, num_tokens)
        if num_missing > 0:
            seq.append_blocks(self.pool.allocate(num_missing))
        self._register(seq, seq.num_computed + num_tokens)

    def submitted(self) -> None:
        """Records that a step was submitted with the current tables."""
        self.num_submitted += 1

    def finished(self) -> None:
        """Records that the oldest step under way has run. Releases blocks that only it used."""
        self.num_finished += 1
        parting, self._parting = self._parting, []
        for step, block_ids in parting:
            self._release_after(block_ids, step)

    def token_came(self, seq: Sequence) -> None:
        """Called when a token in flight is known: registers a block that it completes."""
        if seq.num_computed // self.pool.block_size > seq.num_registered:
            self._register(seq, seq.num_computed)
            self.settle_duplicates()

    def release(self, seq: Sequence) -> None:
        """Empties the table of ``seq``. Its blocks are released now, or when the last step that
        uses them has run."""
        if seq.request.keep_s:
            num_full = min(seq.num_registered, seq.num_prompt_tokens // self.pool.block_size)
            prompt: list[BlockId] = seq.block_ids[:num_full].tolist()
            self.pool.keep(prompt, tenant=seq.request.tenant, keep_s=seq.request.keep_s)
        self._release_after(seq.take_blocks(), seq.last_step)

    def settle_duplicates(self) -> None:
        """Replaces duplicate blocks in tables by the registered blocks with the same hash."""
        for seq, index, block_id in self._duplicates:
            self._release_after([seq.replace_block(index, block_id)], seq.last_step)
        self._duplicates.clear()

    def _register(self, seq: Sequence, num_computed: int) -> None:
        """Registers the blocks that the first ``num_computed`` tokens fill, if those are known.

        A duplicate is replaced in the table only after the step that is being scheduled: in that
        step the sequence still writes to its own block.
        """
        begin = seq.num_registered
        end = min(num_computed // self.pool.block_size, len(seq.hashes))
        if end <= begin:
            return
        block_ids: list[BlockId] = seq.block_ids[begin:end].tolist()
        parent = BlockId(int(seq.block_ids[begin - 1])) if begin else None
        self._describe(seq, begin, end)
        named = self.pool.register(block_ids, seq.hashes[begin:end], parent=parent)
        seq.num_registered = end
        for index, (own, block_id) in enumerate(zip(block_ids, named, strict=True), begin):
            if own != block_id:
                self._duplicates.append((seq, index, block_id))

    def _describe(self, seq: Sequence, begin: int, end: int) -> None:
        """Describes the contents of blocks of ``seq`` to the log, if it keeps contents. Blocks from
        other tiers and groups are described by the first sequence that uses them."""
        known = self.pool.log.contents
        if known is None:
            return
        size, names = self.pool.block_size, seq.hashes[begin:end]
        if all(name in known for name in names):
            return
        tokens = seq.token_ids[begin * size : end * size].astype("<u4").tobytes()
        parent = seq.hashes[begin - 1] if begin else None
        adapter, salt = seq.request.adapter, seq.request.cache_salt
        contents = {}
        for name, place in zip(names, range(0, len(tokens), 4 * size), strict=True):
            token_ids = tokens[place : place + 4 * size]
            contents[name] = BlockContent(parent, token_ids, adapter, salt)
            parent = name
        self.pool.log.describe(contents)

    def _release_after(self, block_ids: list[BlockId], step: int) -> None:
        if step <= self.num_finished:
            self.pool.release(block_ids)
        else:
            self._parting.append((step, block_ids))
