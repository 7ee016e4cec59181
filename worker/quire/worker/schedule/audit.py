"""Checks of blocks that were not computed here: some are computed again, and compared.

Checksums find bytes that changed on the way. They do not find a group that computed something else,
nor memory that changed before a checksum was made. So of the blocks that requests got from another
tier or group, a sample is computed again when nothing else is to be done: each behind the same
blocks before it, into a block of its own, whose bytes must be equal.
"""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from quire.worker.api.hashing import BlockHash, TokenIds
from quire.worker.api.outputs import Fetched
from quire.worker.api.request import Prepared
from quire.worker.api.sampling_params import SamplingParams
from quire.worker.cache.blocks import BlockId, BlockPool
from quire.worker.cache.copies import Slot
from quire.worker.cache.travel import Travel
from quire.worker.schedule.sequence import Sequence

_log = logging.getLogger(__name__)

EVERY_REQUESTS = 16
"""One in this number of requests that fetched blocks has a block checked."""
_MAX_WAITING = 16
_ASKED = SamplingParams(temperature=0, max_tokens=1, seed=0)


@dataclass(frozen=True, slots=True)
class _Item:
    token_ids: TokenIds
    """Up to the end of the block."""
    hashes: list[BlockHash]
    """Up to the block."""
    request: Prepared
    origin: str
    """The tier or the group that it came from."""
    is_peer: bool


class Audit:
    """Used from the engine's thread. Says which sequence to run, and judges what it computed."""

    def __init__(
        self,
        travel: Travel,
        pool: BlockPool,
        *,
        on_wrong: Callable[[frozenset[BlockHash]], None],
    ) -> None:
        """``on_wrong`` hears of blocks that are not what they should be, once nobody finds them any
        more."""
        self._on_wrong = on_wrong
        self.num_checked = self.num_wrong = 0
        self._travel = travel
        self._pool = pool
        self._items: deque[_Item] = deque(maxlen=_MAX_WAITING)
        self._running: Sequence | None = None
        self._item: _Item | None = None
        self._num_seen = 0
        self._random = np.random.default_rng(0)  # Which block is as good as any other.

    def __len__(self) -> int:
        """Checks that are yet to be made."""
        return len(self._items) + (self._running is not None)

    def is_checking(self, seq: Sequence) -> bool:
        return seq is self._running

    def fetched(self, seq: Sequence, found: Fetched) -> None:
        """``seq`` began with blocks that were not computed here."""
        size = self._pool.block_size
        num = (found.num_host_tokens + found.num_disk_tokens + found.num_peer_tokens) // size
        if not num or seq.request.adapter:  # Adapters come and go, and may not be here later.
            return
        self._num_seen += 1
        if self._num_seen % EVERY_REQUESTS:
            return
        end = (seq.num_cached or 0) // size  # They are the last of those that it found.
        index = int(self._random.integers(max(0, end - num), end))
        source = seq.request.source if found.num_peer_tokens else None
        tier = "disk" if found.num_disk_tokens else "host memory"
        self._items.append(
            _Item(
                seq.token_ids[: (index + 1) * size].copy(),
                seq.hashes[: index + 1],
                seq.request,
                tier if source is None else source.group_id,
                is_peer=source is not None,
            )
        )

    def next(self, *, eos_token_ids: tuple[int, ...]) -> Sequence | None:
        """A sequence that computes the next block again, if there is one and it is still here."""
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
                eos_token_ids=eos_token_ids,
                block_size=self._pool.block_size,
                chain=None,
            )
            # Its last block has no name: it is not found, and nobody else finds it.
            seq.hashes = item.hashes[:-1]
            return seq
        return None

    def computed(self, seq: Sequence) -> None:
        """``seq`` has run, and still has its blocks: they are compared once the next step has
        copied them."""
        item, self._item, self._running = self._item, None, None
        assert item is not None
        index = len(item.hashes) - 1
        here = self._pool.find(item.hashes[-1])
        slots = self._travel.shelf.take(2)
        if here is None or len(slots) < 2:
            self._travel.shelf.give_back(slots)
            return
        self._travel.copies.out(BlockId(int(seq.block_ids[index])), slots[0])
        self._travel.copies.out(here, slots[1])
        self._travel.copies.then(lambda: self._compare(item, slots))

    def _compare(self, item: _Item, slots: list[Slot]) -> None:
        one_C, other_C = self._travel.host_blocks_XC[slots]
        is_equal = np.array_equal(one_C, other_C)
        self._travel.shelf.give_back(slots)
        self.num_checked += 1
        if is_equal:
            return
        self.num_wrong += 1
        self._travel.num_corrupt_blocks += 1
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
        self._travel.throw_away(names)
        self._on_wrong(frozenset(names))
        if item.is_peer:
            self._travel.pulls.distrust(item.origin)
