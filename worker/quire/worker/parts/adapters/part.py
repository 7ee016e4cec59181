"""LoRA adapters as a part of the engine: reads them, and decides which may run."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from quire.worker.engine.part import Part
from quire.worker.engine.schedule import Schedule
from quire.worker.engine.sequence import Sequence
from quire.worker.parts.adapters.reading import Read, Reading
from quire.worker.parts.adapters.slots import Slots
from quire.worker.request.errors import InvalidRequest
from quire.worker.request.request import Prepared


class Adapters(Part):
    def __init__(self, read: Read, *, max_kept: int, num_slots: int) -> None:
        self.reading = Reading(read, max_kept=max_kept)
        self._slots = Slots(num_slots)
        self._num_slots = num_slots

    def check(self, request: Prepared) -> None:
        if request.adapter:
            self.reading.check(request.adapter)

    def claim(self, seq: Sequence) -> None:
        if seq.request.adapter:
            self.reading.claim(seq)

    def admit(self, seq: Sequence) -> bool:
        return not seq.request.adapter or self.reading.add(seq)

    @property
    def is_preparing(self) -> bool:
        return len(self.reading) > 0

    def let_in(
        self, *, may_wait: bool, num_pending_tokens: int
    ) -> Iterable[tuple[Sequence, InvalidRequest | None]]:
        return self.reading.take(may_wait=may_wait)

    def queued(self, seq: Sequence) -> None:
        if seq.request.adapter:
            self._slots.add(seq)

    def next_step(self) -> tuple[list[Sequence], list[Sequence]]:
        return self._slots.advance()

    def chosen(self, schedule: Schedule) -> Mapping[str, Any]:
        if not schedule.sequences:
            return {}
        slots = [self._slots.slot_of(seq) for seq in schedule.sequences]
        return {
            "adapter_slots_A": np.array(slots if max(slots) >= 0 else (), np.int32),
            "adapter_loads": self._slots.take_loads(),
        }

    def forget(self, seq: Sequence) -> None:
        if seq.request.adapter:
            self._slots.remove(seq)
            self.reading.forget(seq)

    def stats(self) -> Mapping[str, Any]:
        return {
            "adapters": self._slots.loaded,
            "max_adapters": self._num_slots,
            "num_adapters": self._slots.num_named,
            "num_adapter_loads": self._slots.num_loads,
        }

    def close(self) -> None:
        self.reading.close()
