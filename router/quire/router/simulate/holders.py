"""A flat stand-in for the block directory in the simulator.

A mask of groups per block, kept up to date by the groups' events, late and with losses if so
configured. It has no sequence numbers: a lost event stays lost, which the real directory would
notice and repair.
"""

import random
from collections import deque
from collections.abc import Iterable

from quire.router.simulate.clock import Clock
from quire.router.simulate.pool import Chain
from quire.worker.api.events import EventLog
from quire.worker.api.hashing import BlockHash


class Holders:
    def __init__(
        self, *, clock: Clock, lag_ms: float = 0.0, loss: float = 0.0, seed: int = 0
    ) -> None:
        self._clock = clock
        self._lag_ms = lag_ms
        self._loss = loss
        self._rng = random.Random(seed)
        self._masks: dict[BlockHash, int] = {}
        self._late: deque[tuple[float, int, bool, list[BlockHash]]] = deque()

    def log_of(self, index: int) -> EventLog:
        """Where the pool of group ``index`` says what comes and goes."""
        return _Feed(self, 1 << index)

    def hear(self, bit: int, is_stored: bool, blocks: list[BlockHash]) -> None:
        if self._loss and self._rng.random() < self._loss:
            return
        if self._lag_ms:
            self._late.append((self._clock.now_ms + self._lag_ms, bit, is_stored, blocks))
        else:
            self.apply(bit, is_stored, blocks)

    def lengths(self, chain: Chain) -> dict[int, int]:
        """How many leading blocks each group's bit holds, of those that hold the first."""
        self.take_late()
        lengths: dict[int, int] = {}
        masks = self._masks
        alive, position = -1, 0
        for block in chain:
            still = alive & masks.get(block, 0)
            if still != alive:
                if position:
                    _note(lengths, alive & ~still, position)
                alive = still
                if not alive:
                    return lengths
            position += 1
        if position:
            _note(lengths, alive, position)
        return lengths

    def take_late(self) -> None:
        """Applies what is due by now."""
        late = self._late
        while late and late[0][0] <= self._clock.now_ms:
            _, bit, is_stored, blocks = late.popleft()
            self.apply(bit, is_stored, blocks)

    def apply(self, bit: int, is_stored: bool, blocks: list[BlockHash]) -> None:
        masks = self._masks
        if is_stored:
            for block in blocks:
                masks[block] = masks.get(block, 0) | bit
            return
        for block in blocks:
            mask = masks.get(block, 0) & ~bit
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)


class _Feed(EventLog):
    """An event log that keeps nothing."""

    def __init__(self, holders: Holders, bit: int) -> None:
        super().__init__(epoch=0)
        self._holders = holders
        self._bit = bit

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        self._tell(True, list(hashes))

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        self._tell(False, list(hashes))

    def _tell(self, is_stored: bool, blocks: list[BlockHash]) -> None:
        if blocks:
            self._holders.hear(self._bit, is_stored, blocks)


def _note(lengths: dict[int, int], mask: int, length: int) -> None:
    while mask:
        bit = mask & -mask
        lengths[bit] = length
        mask ^= bit
