"""Audits blocks from other tiers and groups: recomputes a sample of them and compares the bytes.

Checksums detect bytes that changed during a transfer. They do not detect a group that computed
different values, or memory that changed before the checksum was computed. So when the engine is
idle, it recomputes a sample of the blocks that requests received from another tier or group. Each
is computed after the same preceding blocks, into a new block, whose bytes must be equal.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quire.worker.blocks.hashing import BlockHash, TokenIds
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.engine.part import Part, Slot
from quire.worker.engine.sequence import Sequence
from quire.worker.parts.tiers.transfers import Transfers
from quire.worker.request.outputs import Fetched
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

EVERY_REQUESTS = 16
"""One in `EVERY_REQUESTS` requests with fetched blocks has one block checked."""
_MAX_WAITING = 16
_ASKED = SamplingParams(temperature=0, max_tokens=1, seed=0)


@dataclass(frozen=True, slots=True)
class _Item:
    token_ids: TokenIds
    """All tokens up to the end of the block."""
    hashes: list[BlockHash]
    """Hashes of the chain up to the block, which is the last one."""
    request: Prepared
    origin: str
    """The tier or the group that the block came from."""
    is_peer: bool


class Audit(Part):
    """A part of the engine: chooses the sequences to run, and compares their blocks."""

    def __init__(
        self,
        transfers: Transfers,
        pool: BlockPool,
        *,
        eos_token_ids: tuple[int, ...],
        on_wrong: Callable[[frozenset[BlockHash]], None],
    ) -> None:
        """``on_wrong`` is called with the hashes of blocks whose bytes differ, after they have been
        removed from the cache."""
        self._eos_token_ids = eos_token_ids
        self._on_wrong = on_wrong
        self.num_checked = self.num_wrong = 0
        self._transfers = transfers
        self._pool = pool
        self._items: deque[_Item] = deque(maxlen=_MAX_WAITING)
        self._running: Sequence | None = None
        self._item: _Item | None = None
        self._num_seen = 0
        self._random = np.random.default_rng(0)  # Any seed will do.

    @property
    def has_work(self) -> bool:
        """Whether a check is to be made or is running."""
        return bool(self._items) or self._running is not None

    def began(self, seq: Sequence, fetched: Fetched) -> None:
        """Records that ``seq`` began with blocks that were not computed here."""
        size = self._pool.block_size
        num = (fetched.num_host_tokens + fetched.num_disk_tokens + fetched.num_peer_tokens) // size
        if not num or seq.request.adapter:  # The adapter may not be loaded later.
            return
        self._num_seen += 1
        if self._num_seen % EVERY_REQUESTS:
            return
        end = (seq.num_cached or 0) // size  # Fetched blocks are the last of the cached ones.
        index = int(self._random.integers(max(0, end - num), end))
        source = seq.request.source if fetched.num_peer_tokens else None
        tier = "disk" if fetched.num_disk_tokens else "host memory"
        self._items.append(
            _Item(
                seq.token_ids[: (index + 1) * size].copy(),
                seq.hashes[: index + 1],
                seq.request,
                tier if source is None else source.group_id,
                is_peer=source is not None,
            )
        )

    def own_sequence(self) -> Sequence | None:
        """A sequence that recomputes the next block to check; ``None`` if there is none or the
        cache no longer has it."""
        while self._items and self._running is None:
            item = self._items.popleft()
            if self._pool.find(item.hashes[-1]) is None:
                continue
            self._item = item
            self._running = seq = Sequence(
                replace(
                    item.request,
                    request_id=f"audit/{self.num_checked}",
                    prompt_token_ids=item.token_ids,
                    resumed_token_ids=item.token_ids[:0],
                    sampling=_ASKED,
                    task="generate",
                    outputs=frozenset(),
                    source=None,
                    keep_s=0.0,
                ),
                seed=0,
                max_tokens=1,
                eos_token_ids=self._eos_token_ids,
                block_size=self._pool.block_size,
                chain=None,
                owner=self,
            )
            # Without a hash, the last block is neither found in the cache nor shared.
            seq.hashes = item.hashes[:-1]
            return seq
        return None

    def owned_ran(self, seq: Sequence) -> None:
        """``seq`` still has its blocks. The recomputed block and the cached one are compared after
        the next step has copied both."""
        item, self._item, self._running = self._item, None, None
        assert item is not None
        index = len(item.hashes) - 1
        here = self._pool.find(item.hashes[-1])
        slots = self._transfers.host_tier.take(2)
        if here is None or len(slots) < 2:
            self._transfers.host_tier.give_back(slots)
            return
        self._transfers.copies.out(BlockId(int(seq.block_ids[index])), slots[0])
        self._transfers.copies.out(here, slots[1])
        self._transfers.copies.then(lambda: self._compare(item, slots))

    def _compare(self, item: _Item, slots: list[Slot]) -> None:
        one_C, other_C = self._transfers.host_blocks_XC[slots]
        is_equal = np.array_equal(one_C, other_C)
        self._transfers.host_tier.give_back(slots)
        self.num_checked += 1
        if is_equal:
            return
        self.num_wrong += 1
        self._transfers.num_corrupt_blocks += 1
        name = item.hashes[-1]
        _log.error(
            "block %s at tokens %d to %d, from %s, is not what the model computes: it and all "
            "behind it are dropped",
            name.hex()[:16],
            len(item.token_ids) - self._pool.block_size,
            len(item.token_ids) - 1,
            item.origin,
        )
        names = self._pool.disown(name)
        self._transfers.throw_away(names)
        self._on_wrong(frozenset(names))
        if item.is_peer:
            self._transfers.pulls.distrust(item.origin)
