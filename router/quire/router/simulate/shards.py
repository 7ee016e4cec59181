"""The directory in shards: what of a trace belongs to which, and each group's log in parts.

A real group knows the chain of each block that it stores. Pools here do not, but the trace does.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from quire.router.sharding import Shard, ShardMap
from quire.router.simulate.clock import Clock
from quire.router.simulate.holders import Holders
from quire.router.simulate.pool import Chain
from quire.router.simulate.trace import Trace
from quire.worker.errors import ConfigError
from quire.worker.events import EventLog
from quire.worker.hashing import BlockHash

_SPREAD_ABOVE = 1 / 8
"""Of a shard's share of the prompts: what begins more prompts is spread over all shards, so that
no chain alone brings a shard more than that in excess."""


class Sharding:
    """Splits what groups say of their blocks."""

    def __init__(self, trace: Trace, shard_map: ShardMap) -> None:
        """Raises:
        ConfigError: Blocks of the trace do not belong to one chain each.
        """
        self.map = shard_map
        self._homes: dict[BlockHash, Shard | None] = {}  # None: all shards.
        for index, chain in enumerate(trace.chains):
            home, num_spread = shard_map.shard_of(chain), shard_map.num_spread(chain)
            for position, block in enumerate(chain):
                here = None if position < num_spread else home
                if self._homes.setdefault(block, here) != here:
                    raise ConfigError(
                        f"request {index} of {trace.name}: its block {position} is another one's "
                        "behind other blocks; give blocks names that cover all before them, or "
                        "set num_directory_shards=1"
                    )

    @classmethod
    def of(cls, trace: Trace, *, num_shards: int) -> "Sharding":
        """With what begins too many of the trace's prompts spread."""
        above = _SPREAD_ABOVE / num_shards * len(trace) if num_shards > 1 else len(trace)
        counts = Counter(block for chain in trace.chains for block in chain)
        spread = frozenset(block for block, count in counts.items() if count > above)
        return cls(trace, ShardMap(num_shards=num_shards, spread=spread))

    def split(self, blocks: Iterable[BlockHash]) -> Iterator[tuple[Shard, list[BlockHash]]]:
        """What each shard is to hear of ``blocks``, in their order; nothing, of most."""
        parts: list[list[BlockHash]] = [[] for _ in range(self.map.num_shards)]
        for block in blocks:
            home = self._homes[block]
            for part in parts if home is None else (parts[home],):
                part.append(block)
        return ((Shard(index), part) for index, part in enumerate(parts) if part)


class ShardedLog(EventLog):
    """A group's log in parts, one for each shard, each of them numbered and digested on its own."""

    def __init__(self, *, epoch: int, sharding: Sharding, capacity: int = 65_536) -> None:
        super().__init__(epoch=epoch, capacity=capacity)
        self._sharding = sharding
        self.parts: Sequence[EventLog] = [
            EventLog(epoch=epoch, capacity=capacity) for _ in range(sharding.map.num_shards)
        ]

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        for shard, part in self._sharding.split(hashes):
            self.parts[shard].stored(part)

    def removed(self, hashes: Iterable[BlockHash]) -> None:
        for shard, part in self._sharding.split(hashes):
            self.parts[shard].removed(part)


class ShardedHolders(Holders):
    """`Holders` in shards. What is lost is lost for all shards, as it is drawn before the split."""

    def __init__(
        self,
        *,
        sharding: Sharding,
        clock: Clock,
        lag_ms: float = 0.0,
        loss: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__(clock=clock, lag_ms=lag_ms, loss=loss, seed=seed)
        self._sharding = sharding
        self._shards = [Holders(clock=clock) for _ in range(sharding.map.num_shards)]

    def lengths(self, chain: Chain) -> dict[int, int]:
        self.take_late()
        return self._shards[self._sharding.map.shard_of(chain) or 0].lengths(chain)

    def apply(self, bit: int, is_stored: bool, blocks: list[BlockHash]) -> None:
        for shard, part in self._sharding.split(blocks):
            self._shards[shard].apply(bit, is_stored, part)
