"""Retention: blocks that stay cached for a time because a client requested it (``keep_s``).

A tenant may keep a share of the pool. Above the share, the blocks whose time ends first are no
longer kept. If nothing else can be evicted, kept blocks are, those first whose time ends first. So
keeping blocks never causes a request to be refused.
"""

import heapq
from collections import Counter

SHARE = 0.25
"""Share of a pool that one tenant may keep."""
_TOTAL_SHARE = 0.5
"""Share of a pool that all tenants together may keep."""


class Retention:
    """The kept blocks, with tenant and time. Each operation is O(log n) per block.

    A kept block *waits* if it could be evicted otherwise.
    """

    def __init__(self, num_blocks: int) -> None:
        self._most = max(1, int(SHARE * num_blocks))
        self._most_of_all = max(1, int(_TOTAL_SHARE * num_blocks))
        self._until_s: dict[int, tuple[float, str]] = {}
        # For each tenant, a heap of blocks by end of time, then by order of request. Entries that a
        # later one has replaced are skipped.
        self._ends: dict[str, list[tuple[float, int, int]]] = {}
        self._num_asked = 0
        self._num_kept = Counter[str]()
        self._waiting: set[int] = set()
        self._waiting_by_end: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._until_s)

    def keep(self, block_id: int, *, tenant: str, until_s: float) -> list[int]:
        """Keeps a block at least until ``until_s``. Returns waiting blocks that are no longer kept,
        because a share was exceeded."""
        before = self._until_s.get(block_id)
        if before is not None:
            if before[0] >= until_s:
                return []
            self._num_kept[before[1]] -= 1
        self._until_s[block_id] = until_s, tenant
        self._num_kept[tenant] += 1
        ends = self._ends.setdefault(tenant, [])
        self._num_asked += 1
        heapq.heappush(ends, (until_s, self._num_asked, block_id))
        if len(ends) > 2 * self._num_kept[tenant] + 64:
            ends[:] = [each for each in ends if self._until_s.get(each[2]) == (each[0], tenant)]
            heapq.heapify(ends)
        let_go = []
        if self._num_kept[tenant] > self._most:
            let_go.append(self._first_of(tenant))
        elif len(self._until_s) > self._most_of_all:
            let_go.append(self._first_of(max(self._num_kept, key=self._num_kept.__getitem__)))
        return [each for each in map(self._drop, let_go) if each is not None]

    def waits(self, block_id: int) -> bool:
        """Called when a block could be evicted. Returns whether it is kept instead; then `expire`
        or `give_up` returns it when it may be evicted."""
        kept = self._until_s.get(block_id)
        if kept is None:
            return False
        self._waiting.add(block_id)
        heapq.heappush(self._waiting_by_end, (kept[0], block_id))
        if len(self._waiting_by_end) > 2 * len(self._waiting) + 64:
            self._waiting_by_end = [(self._until_s[each][0], each) for each in self._waiting]
            heapq.heapify(self._waiting_by_end)
        return True

    def held(self, block_id: int) -> bool:
        """Called when the block is held again. Returns whether it waited."""
        is_waiting = block_id in self._waiting
        self._waiting.discard(block_id)
        return is_waiting

    def expire(self, now_s: float) -> list[int]:
        """Stops keeping blocks whose time is over. Returns those that waited."""
        ended = []
        for tenant, ends in list(self._ends.items()):
            while ends and ends[0][0] <= now_s:
                until_s, _, block_id = heapq.heappop(ends)
                if self._until_s.get(block_id) == (until_s, tenant):
                    ended.append(block_id)
            if not ends:
                del self._ends[tenant]
        return [each for each in map(self._drop, ended) if each is not None]

    def give_up(self) -> int | None:
        """Stops keeping the waiting block whose time ends first, and returns it."""
        while self._waiting_by_end:
            until_s, block_id = heapq.heappop(self._waiting_by_end)
            if block_id in self._waiting and self._until_s[block_id][0] == until_s:
                return self._drop(block_id)
        return None

    def forget(self, block_id: int) -> None:
        """Called when the block is unregistered."""
        self._drop(block_id)

    def _first_of(self, tenant: str) -> int:
        ends = self._ends[tenant]
        while True:
            until_s, _, block_id = heapq.heappop(ends)
            if self._until_s.get(block_id) == (until_s, tenant):
                return block_id

    def _drop(self, block_id: int) -> int | None:
        """Stops keeping the block. Returns it if it waited."""
        kept = self._until_s.pop(block_id, None)
        if kept is None:
            return None
        tenant = kept[1]
        self._num_kept[tenant] -= 1
        if not self._num_kept[tenant]:
            del self._num_kept[tenant]
        is_waiting = block_id in self._waiting
        self._waiting.discard(block_id)
        return block_id if is_waiting else None
