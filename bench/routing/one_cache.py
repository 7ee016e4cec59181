"""The upper bound of cache hits: all groups share one infinite cache.

It does not bound the balance of decodes or the order of prompts, so a policy may still be slightly
faster than this.
"""

from quire.simulate.pool import Chain
from quire.worker.blocks.events import EventLog
from quire.worker.blocks.hashing import BlockHash


class OneCache:
    """One run's groups as one infinite cache: each group's log tells what any group stored."""

    def __init__(self) -> None:
        self._stored: set[BlockHash] = set()
        self._logs: list[EventLog] = []

    def pool(self, log: EventLog) -> "_View":
        self._logs.append(log)
        return _View(self)

    def match(self, chain: Chain) -> int:
        stored = self._stored
        return next((i for i, block in enumerate(chain) if block not in stored), len(chain))

    def add(self, blocks: Chain) -> None:
        new = [block for block in blocks if block not in self._stored]
        self._stored.update(new)
        for log in self._logs if new else ():
            log.stored(new)


class _View:
    """A group's `quire.simulate.pool.Pool`."""

    num_blocks = num_available = 2**62

    def __init__(self, cache: OneCache) -> None:
        self._cache = cache

    def match(self, chain: Chain, limit: int) -> int:
        return self._cache.match(chain[:limit])

    def admit(self, request_id: int, chain: Chain, num_hits: int, num_new: int) -> bool:
        return True

    def register(self, request_id: int, chain: Chain, begin: int, end: int) -> None:
        self._cache.add(chain[begin:end])

    def release(self, request_id: int, chain: Chain, end: int) -> None:
        pass
