"""A heap of items whose keys change. Outdated entries are dropped when they reach the top."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_SLACK = 16


class LazyHeap(Generic[T]):
    """A heap of items, each with a key; all keys must be comparable. Calls take O(log n),
    amortized; at most twice as many entries are kept as there are items."""

    def __init__(self) -> None:
        self._keys: dict[T, Any] = {}
        self._heap: list[tuple[Any, T]] = []

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[T]:
        """Iterates over the entries in no order."""
        return iter(self._keys)

    def put(self, item: T, key: Any) -> None:
        """Adds ``item``, or gives it another key. No two items have equal keys."""
        self._keys[item] = key
        heappush(self._heap, (key, item))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(key, item) for item, key in self._keys.items()]
            heapify(self._heap)

    def discard(self, item: T) -> None:
        self._keys.pop(item, None)

    def least(self) -> tuple[Any, T] | None:
        """The least key and its item; ``None`` without items."""
        while self._heap:
            key, item = self._heap[0]
            if item in self._keys and self._keys[item] == key:
                return key, item
            heappop(self._heap)
        return None
