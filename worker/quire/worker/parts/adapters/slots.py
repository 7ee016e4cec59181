"""Decides which LoRA adapters are in the ranks' slots, so that their requests may run.

An adapter is *active* while its requests may run. At most ``num_slots`` adapters are active. If
other adapters have requests, an adapter whose turn has lasted `TURN_STEPS` steps makes room for one
of them: its running requests keep their KV and skip steps until its next turn. So no adapter waits
for long outputs of another, and each turn is long enough for the loading not to matter.

The next turn goes alternately to the adapter with the most urgent request and to the one that has
waited longest. Requests that skip steps hold blocks that others may need, so every adapter must get
another turn, whatever the priorities of its requests.

An inactive adapter stays in its slot until another adapter needs the slot. The least recently
active adapter leaves first.
"""

from collections import Counter
from itertools import count

from quire.worker.engine.sequence import Sequence

TURN_STEPS = 16
"""A rank takes about as long as a small decode step to read and pack an adapter that it has not
kept, and 0.2 ms for one that it has (rank 16 in all linear layers, 12 layers of 768 channels). With
64 adapters and 8 slots each adapter runs for 16 of 128 steps."""


_WAITS_FOR = "adapter"


class _Adapter:
    """An adapter that current requests name."""

    def __init__(self, digest: str) -> None:
        self.digest = digest
        self.requests: dict[Sequence, None] = {}
        self.priorities: Counter[int] = Counter()
        self.slot = -1
        """The slot in which it is active; -1 while it is not active."""
        self.began = 0
        """The step in which its turn began; while it is not active, its place in the queue."""

    @property
    def priority(self) -> int:
        """The most urgent priority of its requests, which is the lowest number."""
        return min(self.priorities)


class Slots:
    """Decides which adapters are active. Loads nothing: `take_loads` says what ranks must load."""

    def __init__(self, num_slots: int) -> None:
        self._adapters: dict[str, _Adapter] = {}
        self._active: dict[str, _Adapter] = {}
        # Slots of the adapters that the ranks have, the least recently active adapter first.
        self._loaded: dict[str, int] = {}
        self._free = list(reversed(range(num_slots)))
        self._loads: dict[int, str] = {}
        self._num_slots = num_slots
        self._num_steps = 0
        self._is_oldest_next = False
        self._entries = count()
        self.num_loads = 0
        """Counter of the adapters that ranks had to load."""

    @property
    def num_named(self) -> int:
        """Number of adapters that current requests name."""
        return len(self._adapters)

    def slot_of(self, seq: Sequence) -> int:
        """The slot of the adapter of ``seq``, which may run; -1 if it has none."""
        return self._adapters[seq.request.adapter].slot if seq.request.adapter else -1

    @property
    def loaded(self) -> tuple[str, ...]:
        """Digests of the adapters that are in slots, or will be with the next step."""
        return tuple(self._loaded)

    def add(self, seq: Sequence) -> None:
        """Adds ``seq``, which has an adapter. It may run at once if the adapter is active, or if a
        slot is left and no other adapter waits."""
        digest = seq.request.adapter
        adapter = self._adapters.get(digest)
        if adapter is None:
            is_next = len(self._adapters) == len(self._active) < self._num_slots
            adapter = self._adapters[digest] = _Adapter(digest)
            adapter.began = next(self._entries)
            if is_next:
                self._activate(adapter)
        adapter.requests[seq] = None
        adapter.priorities[seq.request.priority] += 1
        if adapter.slot < 0:
            seq.waits.add(_WAITS_FOR)

    def remove(self, seq: Sequence) -> None:
        """Removes ``seq``, which has ended, if it is here."""
        adapter = self._adapters.get(seq.request.adapter)
        if adapter is None or seq not in adapter.requests:
            return
        priority = seq.request.priority
        del adapter.requests[seq]
        adapter.priorities[priority] -= 1
        if not adapter.priorities[priority]:
            del adapter.priorities[priority]
        if not adapter.requests:
            del self._adapters[adapter.digest]
            self._active.pop(adapter.digest, None)

    def advance(self) -> tuple[list[Sequence], list[Sequence]]:
        """Begins another step. Returns the requests whose adapters become active, and those whose
        adapters stop being active."""
        self._num_steps += 1
        waiting = [each for each in self._adapters.values() if each.slot < 0]
        if not waiting:
            return [], []
        resumed: list[Sequence] = []
        stopped: list[Sequence] = []
        while waiting:
            if len(self._active) >= self._num_slots:
                last = self._to_stop()
                if last is None:
                    break
                stopped += self._deactivate(last)
            adapter = min(waiting, key=lambda each: each.began)
            if not self._is_oldest_next:
                adapter = min(waiting, key=lambda each: (each.priority, each.began))
            self._is_oldest_next = not self._is_oldest_next
            waiting.remove(adapter)
            resumed += self._activate(adapter)
        return resumed, stopped

    def take_loads(self) -> tuple[tuple[int, str], ...]:
        """The slots that have got another adapter since the last call, with its digest."""
        loads, self._loads = self._loads, {}
        for slot, digest in list(loads.items()):
            # An adapter without requests may have been removed from the store.
            if digest not in self._active:
                del loads[slot], self._loaded[digest]
                self._free.append(slot)
        self.num_loads += len(loads)
        return tuple(loads.items())

    def _to_stop(self) -> _Adapter | None:
        """The active adapter to stop: of those whose turn is over, the least urgent."""
        found = [
            each for each in self._active.values() if self._num_steps - each.began >= TURN_STEPS
        ]
        return max(found, key=lambda each: (each.priority, -each.began), default=None)

    def _activate(self, adapter: _Adapter) -> list[Sequence]:
        digest = adapter.digest
        slot = self._loaded.pop(digest, -1)
        if slot < 0:
            if self._free:
                slot = self._free.pop()
            else:
                gone = next(each for each in self._loaded if each not in self._active)
                slot = self._loaded.pop(gone)
            self._loads[slot] = digest
        self._loaded[digest] = slot
        self._active[digest] = adapter
        adapter.slot, adapter.began = slot, self._num_steps
        for seq in adapter.requests:
            seq.waits.discard(_WAITS_FOR)
        return list(adapter.requests)

    def _deactivate(self, adapter: _Adapter) -> list[Sequence]:
        del self._active[adapter.digest]
        # Moves it to the end of the order in which adapters leave their slots.
        self._loaded[adapter.digest] = self._loaded.pop(adapter.digest)
        adapter.slot, adapter.began = -1, next(self._entries)
        for seq in adapter.requests:
            seq.waits.add(_WAITS_FOR)
        return list(adapter.requests)
