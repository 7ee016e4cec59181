"""A cache of compilation results for the most recently used constraints of each tenant."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from quire.worker.request.structured import Constraint

T = TypeVar("T")

_MAX_KEPT = 256
_MAX_COST = 8 * 2**20
"""Limit of the sum of the texts' characters and the µs of compilation. The results take several
times as many bytes of memory."""


class Kept(Generic[T]):
    """A thread-safe cache. A tenant cannot see the entries of others. If the cache is full, the
    least recently used entry of the tenant with the most entries, or highest cost, is evicted."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[Constraint, tuple[T, int]]] = {}
        self._costs: dict[str, int] = {}
        self._lock = threading.Lock()

    def get(self, tenant: str, constraint: Constraint) -> T | None:
        with self._lock:
            own = self._kept.get(tenant)
            if own is None or constraint not in own:
                return None
            own.move_to_end(constraint)
            return own[constraint][0]

    def put(self, tenant: str, constraint: Constraint, found: T, *, took_s: float = 0.0) -> None:
        """Caches ``found``. ``took_s`` is the CPU time of compilation, which bounds its memory."""
        with self._lock:
            own = self._kept.setdefault(tenant, OrderedDict())
            _, before = own.pop(constraint, (None, 0))
            cost = len(constraint.text) + int(1e6 * took_s)
            own[constraint] = found, cost
            self._costs[tenant] = self._costs.get(tenant, 0) + cost - before
            while sum(map(len, self._kept.values())) > _MAX_KEPT:
                self._drop(max(self._kept, key=lambda each: len(self._kept[each])))
            while sum(self._costs.values()) > _MAX_COST:
                self._drop(max(self._costs, key=self._costs.__getitem__))

    def _drop(self, tenant: str) -> None:
        """Evicts the least recently used entry of ``tenant``."""
        _, (_, cost) = self._kept[tenant].popitem(last=False)
        self._costs[tenant] -= cost
        if not self._kept[tenant]:
            del self._kept[tenant], self._costs[tenant]
