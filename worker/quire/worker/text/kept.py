"""What came of the constraints that were asked for last, by tenant."""

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

from quire.worker.api.structured import Constraint

T = TypeVar("T")

_MAX_KEPT = 256
_MAX_KEPT_BYTES = 8 * 2**20
"""Of grammars' texts; what is made of them takes some times as much."""


class Kept(Generic[T]):
    """May be used from several threads. A tenant sees nothing of another one's: what it asks for
    drives out what the tenant with the most has kept for longest, as a rule its own."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[Constraint, T]] = {}
        self._num_bytes: dict[str, int] = {}
        self._lock = threading.Lock()

    def get(self, tenant: str, constraint: Constraint) -> T | None:
        with self._lock:
            own = self._kept.get(tenant)
            if own is None or constraint not in own:
                return None
            own.move_to_end(constraint)
            return own[constraint]

    def put(self, tenant: str, constraint: Constraint, found: T) -> None:
        with self._lock:
            own = self._kept.setdefault(tenant, OrderedDict())
            if constraint not in own:
                self._num_bytes[tenant] = self._num_bytes.get(tenant, 0) + len(constraint.text)
            own[constraint] = found
            while sum(map(len, self._kept.values())) > _MAX_KEPT:
                self._drop(max(self._kept, key=lambda each: len(self._kept[each])))
            while sum(self._num_bytes.values()) > _MAX_KEPT_BYTES:
                self._drop(max(self._num_bytes, key=self._num_bytes.__getitem__))

    def _drop(self, tenant: str) -> None:
        """The oldest of ``tenant``."""
        oldest, _ = self._kept[tenant].popitem(last=False)
        self._num_bytes[tenant] -= len(oldest.text)
        if not self._kept[tenant]:
            del self._kept[tenant], self._num_bytes[tenant]
