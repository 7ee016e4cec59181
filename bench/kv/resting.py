"""Flips bits of blocks that rest in queues: to be written, to be sent, and to be copied into the KV
cache. The first two change right after the step that copied them out of the KV cache."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
from bench.kv.groups import transfers_of

from quire.cluster.group.server import GroupServer
from quire.worker.engine.part import Slot
from quire.worker.parts.tiers import checker
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.transfers import Transfers

_lend = Loan.lend


class Flips:
    """How many bits were flipped."""

    def __init__(self, transfers: Transfers, rng: np.random.Generator) -> None:
        self.num = 0
        self._transfers = transfers
        self._rng = rng

    def flip(self, slots: list[Slot]) -> None:
        """Flips a bit of one of ``slots``, the first time that there are any."""
        if not slots or self.num:
            return
        self.num += 1
        block_C = self._transfers.host_blocks_XC[slots[int(self._rng.integers(len(slots)))]]
        block_C[int(self._rng.integers(len(block_C)))] ^= 1 << int(self._rng.integers(8))


@contextlib.contextmanager
def before_disk(group: GroupServer, rng: np.random.Generator) -> Iterator[Flips]:
    """A block that waits to be written to disk changes."""
    transfers = transfers_of(group)
    saver, flips = transfers._saver, Flips(transfers, rng)
    assert saver is not None, "it keeps nothing on disk"
    begin = saver._begin

    def change(jobs: list[Any]) -> None:
        with saver._changed:  # The thread that writes takes none of them meanwhile.
            begin(jobs)
            flips.flip([job.slot for job, _ in saver._jobs])

    with mock.patch.object(saver, "_begin", change):
        yield flips


@contextlib.contextmanager
def before_cache(group: GroupServer, rng: np.random.Generator) -> Iterator[Flips]:
    """A block that was received, or read from disk, changes before the KV cache has it."""
    transfers = transfers_of(group)
    pulls, flips = transfers.pulls, Flips(transfers, rng)
    advance = pulls.advance

    def change() -> None:
        for arrival in pulls._arrivals:
            with arrival.pull._changed:
                came = [*arrival.pull._landed, *arrival.landed]
                wanted = [each for each in came if arrival.pull.hashes[each.index] not in _here()]
                if not arrival.pull.is_cancelled:
                    flips.flip([Slot(each.slot) for each in wanted])
        advance()

    def _here() -> Any:
        return transfers._pool._block_of

    with mock.patch.object(pulls, "advance", change):
        yield flips


async def before_sending(group: GroupServer, number: int | None) -> None:
    """A block of the group's next loans changes while it waits to be sent; ``None``: no more. In
    the lender's process."""

    def lend(self: Loan, lent: Lent) -> None:
        if number is not None and lent.index == number % len(self.hashes):
            self.host_blocks_XC[lent.slot, number % self.host_blocks_XC.shape[1]] ^= 1
        _lend(self, lent)

    Loan.lend = _lend if number is None else lend  # type: ignore[method-assign]


@contextlib.contextmanager
def in_threads() -> Iterator[None]:
    """All comparisons are made by a thread, as of long prefixes."""
    with (
        mock.patch.object(checker, "_AT_ONCE_BYTES", 0),
        mock.patch.object(checker, "_SMALL_BYTES", 0),
    ):
        yield
