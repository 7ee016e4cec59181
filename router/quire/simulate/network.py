"""Blocks on their way between simulated groups, over links that they share.

Each group has one link, with the same rate out and in. A transfer gets the smaller of its two
equal shares: of what goes out of its source, and of what comes in at its target. Times are in
milliseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from quire.simulate.pool import Chain

_SLACK_MS = 1e-6
"""Times that differ by less are the same."""


@dataclass(slots=True, eq=False, kw_only=True)
class Transfer:
    """Some blocks of a chain, in order.

    A request waits for it as long as the wait makes it at most ``patience`` later than computing
    would: a share of the time in which all that was to come could be computed (`may_wait_until`).
    """

    source: int
    target: int
    chain: Chain
    begin: int
    """Which of the chain's blocks is the first."""
    num_blocks: int
    opened_ms: float
    starts_ms: float
    """When its first byte leaves."""
    compute_ms: float
    """What computing one of its blocks takes."""
    patience: float
    wanted_ms: float = inf
    """Since when somebody could have computed instead."""
    is_late: bool = False
    """Nobody is to wait for it any longer."""
    num_landed: float = 0.0
    """Blocks, as of ``at_ms``."""
    at_ms: float = 0.0
    rate: float = 0.0
    """Blocks a millisecond since then."""
    ended_ms: float = inf
    """When its last block came, or no more were wanted."""

    @property
    def is_open(self) -> bool:
        return self.ended_ms == inf

    def landed_at(self, now_ms: float) -> int:
        """Whole blocks that are there, from ``begin`` on."""
        moved = self.num_landed + self.rate * max(now_ms - self.at_ms, 0.0)
        return min(int(moved + 1e-6), self.num_blocks)

    @property
    def ends_ms(self) -> float:
        """When the last block is there, if nothing else begins or ends."""
        if not self.rate:
            return inf
        return self.at_ms + (self.num_blocks - self.num_landed) / self.rate

    @property
    def waits_until_ms(self) -> float:
        """When it is not waited for any longer, at this rate: once more time has passed than
        computing what has landed would have taken, and the share of all that was to come."""
        spared_ms = self.compute_ms * (
            self.num_landed - self.rate * self.at_ms + self.patience * self.num_blocks
        )
        speed = self.compute_ms * self.rate
        return inf if self.is_late or speed >= 1 else (self.wanted_ms + spared_ms) / (1 - speed)

    @property
    def next_ms(self) -> float:
        """When something happens to it, if nothing else begins or ends."""
        return min(self.waits_until_ms, self.ends_ms if self.rate else self.starts_ms)


class Network:
    """All transfers under way."""

    def __init__(self, *, num_groups: int, blocks_per_ms: float) -> None:
        """``blocks_per_ms``: what each link carries."""
        self._blocks_per_ms = blocks_per_ms
        self._transfers: list[Transfer] = []
        self._num_out = [0] * num_groups
        self._num_in = [0] * num_groups
        self.next_ms = inf
        """When something happens here, if nothing is opened or closed before."""

    def open(self, transfer: Transfer) -> None:
        transfer.at_ms = transfer.opened_ms
        self._transfers.append(transfer)
        self.next_ms = min(self.next_ms, transfer.next_ms)

    def want(self, transfer: Transfer, now_ms: float) -> bool:
        """Somebody waits for it from now on; says whether that makes sense."""
        transfer.wanted_ms = min(transfer.wanted_ms, now_ms)
        self.next_ms = min(self.next_ms, transfer.next_ms)
        return not transfer.is_late and transfer.waits_until_ms > now_ms + _SLACK_MS

    def close(self, transfer: Transfer, now_ms: float) -> None:
        """No more of it is wanted. It keeps what has landed."""
        if transfer.is_open:
            transfer.num_landed = transfer.landed_at(now_ms)
            self._end(transfer, now_ms)
            self._settle(now_ms)

    def advance(self, now_ms: float) -> Sequence[Transfer]:
        """Goes on to ``now_ms``, which is `next_ms` at most. Returns the transfers that ended, and
        those that are not to be waited for any longer."""
        ended = [each for each in self._transfers if each.ends_ms <= now_ms + _SLACK_MS]
        for transfer in ended:
            transfer.num_landed = transfer.num_blocks
            self._end(transfer, now_ms)
        for transfer in self._transfers:
            if not transfer.rate and transfer.starts_ms <= now_ms:
                transfer.at_ms, transfer.rate = now_ms, self._blocks_per_ms
                self._num_out[transfer.source] += 1
                self._num_in[transfer.target] += 1
        late = [each for each in self._transfers if each.waits_until_ms <= now_ms + _SLACK_MS]
        for transfer in late:
            transfer.is_late = True
        self._settle(now_ms)
        return [*ended, *late]

    def _end(self, transfer: Transfer, now_ms: float) -> None:
        transfer.ended_ms = now_ms
        self._transfers.remove(transfer)
        if transfer.rate:
            self._num_out[transfer.source] -= 1
            self._num_in[transfer.target] -= 1
            transfer.rate = 0.0

    def _settle(self, now_ms: float) -> None:
        """Counts what has moved, and shares the links out again."""
        for each in self._transfers:
            if not each.rate:
                continue
            each.num_landed += each.rate * max(now_ms - each.at_ms, 0.0)
            each.at_ms = now_ms
            most = max(self._num_out[each.source], self._num_in[each.target])
            each.rate = self._blocks_per_ms / most
        self.next_ms = min((each.next_ms for each in self._transfers), default=inf)
