"""How KV travels in a simulation: one group's host memory, and what it fetches from others."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from quire.simulate.network import Network, Transfer
from quire.simulate.pool import Chain
from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.errors import ConfigError

LINKS_GB_S = {"25g": 3.125, "100g": 12.5, "400g": 50.0}
"""Links by what they are called, in gigabytes a second."""


@dataclass(frozen=True, kw_only=True)
class TravelConfig:
    """Raises:
    ConfigError: A value cannot work; the message names it and what would be right.
    """

    transfer_gb_s: float = 0.0
    """Rate of each group's link to the others; at 0 none fetches from another."""
    transfer_ms: float = 2.0
    """From asking a group to its first byte, besides the step that it is in."""
    host_gb_s: float = 50.0
    """Rate of copies between a group's KV cache and its host memory."""
    host_tokens: int = 0
    """Tokens whose KV a group keeps in host memory once they leave its KV cache."""
    patience: float = 0.1
    """How much later than by computing it a request may have what it fetches, as a share."""

    @property
    def is_used(self) -> bool:
        return self.transfer_gb_s > 0 or self.host_tokens > 0

    def __post_init__(self) -> None:
        for name in ("transfer_gb_s", "transfer_ms", "host_tokens", "patience"):
            if not 0 <= getattr(self, name) < inf:  # Nor is what is not a number.
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be a number, 0 or more")
        if not 0 < self.host_gb_s < inf:
            raise ConfigError(f"host_gb_s={self.host_gb_s!r}: must be a number above 0")


class HostLog(EventLog):
    """The log of a group whose blocks go to host memory when they leave the KV cache. Those that
    were used longest ago go from there."""

    def __init__(self, *, epoch: int, num_blocks: int) -> None:
        super().__init__(epoch=epoch, num_tiers=2 if num_blocks else 1)
        self._num_blocks = num_blocks
        self._host: OrderedDict[BlockHash, None] = OrderedDict()

    def removed(self, hashes: Iterable[BlockHash], tier: int = 0) -> None:
        names = tuple(hashes)
        if tier == 0 and self._num_blocks:
            self.stored(names, 1)
            for name in names:
                self._host[name] = None
                self._host.move_to_end(name)
        super().removed(names, tier)
        while len(self._host) > self._num_blocks:
            super().removed([self._host.popitem(last=False)[0]], 1)

    def match(self, chain: Chain, begin: int, end: int) -> int:
        """Up to which block, ``end`` at most, the chain lies in host memory from ``begin`` on."""
        at = begin
        while at < end and chain[at] in self._host:
            at += 1
        for name in reversed(chain[begin:at]):  # Ends of chains go first.
            self._host.move_to_end(name)
        return at


class Offer(NamedTuple):
    """A group that has the beginning of a prompt."""

    source: int
    num_blocks: int
    starts_ms: float
    """When it can begin to send."""


@dataclass(slots=True)
class Counters:
    """Counters of travelling blocks, named as in a group's load."""

    num_host_tokens: int = 0
    num_peer_tokens: int = 0
    peer_s: float = 0.0


class Fetching:
    """What one group fetches. Requests that lack the same blocks share a transfer."""

    def __init__(
        self, *, index: int, log: HostLog, network: Network | None, patience: float, block_size: int
    ) -> None:
        self.counters = Counters()
        self._index = index
        self._log = log
        self._network = network
        self._patience = patience
        self._block_size = block_size
        self._by_first: dict[BlockHash, Transfer] = {}
        self._of: dict[int, Transfer] = {}  # By request.
        self._parked: dict[Transfer, list[int]] = {}

    @property
    def num_parked(self) -> int:
        return sum(map(len, self._parked.values()))

    def begin(
        self,
        request_id: int,
        chain: Chain,
        num_cached: int,
        most: int,
        *,
        offer: Offer | None,
        now_ms: float,
        compute_ms: float,
    ) -> int:
        """Begins to fetch what the request lacks of ``most`` blocks, and returns how many it will
        then have. ``compute_ms``: what computing a block takes."""
        end = self._log.match(chain, num_cached, most)
        if self._network is None or end >= most:
            return end
        transfer = self._by_first.get(chain[end])
        if transfer is None:
            if offer is None or offer.num_blocks <= end:
                return end
            transfer = Transfer(
                source=offer.source,
                target=self._index,
                chain=chain,
                begin=end,
                num_blocks=min(offer.num_blocks, most) - end,
                opened_ms=now_ms,
                starts_ms=max(offer.starts_ms, now_ms),
                compute_ms=compute_ms,
                patience=self._patience,
            )
            self._by_first[chain[end]] = transfer
            self._network.open(transfer)
        self._of[request_id] = transfer
        return self._shared_end(transfer, chain, transfer.num_blocks, end, most)

    def in_host(self, chain: Chain, begin: int, end: int) -> int:
        """As `HostLog.match`."""
        return self._log.match(chain, begin, end)

    def is_awaited(self, request_id: int, now_ms: float) -> bool:
        """Whether the request waits for more blocks rather than compute now. It does so until
        `resumed` names it."""
        transfer = self._of.get(request_id)
        if transfer is None or self._network is None or not transfer.is_open:
            return False
        if not self._network.want(transfer, now_ms):
            return False
        self._parked.setdefault(transfer, []).append(request_id)
        return True

    def resumed(self, transfer: Transfer) -> list[int]:
        """The requests that waited for it."""
        return self._parked.pop(transfer, [])

    def take(
        self, request_id: int, chain: Chain, num_cached: int, most: int, *, now_ms: float
    ) -> tuple[int, list[int]]:
        """Up to which block the request has what comes behind its cached ones. No more of its
        transfer is wanted from now on: who waits for it, too, goes on."""
        others: list[int] = []
        in_host = end = self._log.match(chain, num_cached, most)
        transfer = self._of.pop(request_id, None)
        if transfer is not None:
            assert self._network is not None
            end = self._shared_end(transfer, chain, transfer.landed_at(now_ms), end, most)
            self._close(transfer, now_ms)
            others = self.resumed(transfer)
        self.counters.num_host_tokens += (in_host - num_cached) * self._block_size
        self.counters.num_peer_tokens += (end - in_host) * self._block_size
        return end, others

    def _shared_end(
        self, transfer: Transfer, chain: Chain, num_blocks: int, begin: int, most: int
    ) -> int:
        """Up to which block, ``most`` at most, ``chain`` is that of the transfer's first
        ``num_blocks``; ``begin`` where that does not follow on."""
        if begin < transfer.begin:
            return begin
        end = min(transfer.begin + num_blocks, most)
        both = zip(chain[begin:end], transfer.chain[begin:end], strict=True)
        return next((begin + i for i, (a, b) in enumerate(both) if a != b), max(begin, end))

    def _close(self, transfer: Transfer, now_ms: float) -> None:
        first = transfer.chain[transfer.begin]
        if self._by_first.get(first) is not transfer or self._network is None:
            return
        del self._by_first[first]
        self._network.close(transfer, now_ms)
        self.counters.peer_s += (transfer.ended_ms - transfer.opened_ms) / 1000
