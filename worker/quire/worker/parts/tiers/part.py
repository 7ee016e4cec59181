"""Slower tiers of blocks as a part of the engine: transfers, and the requests that wait for one."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Any

from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockId
from quire.worker.engine.part import Host, Part, Slot
from quire.worker.engine.schedule import Schedule
from quire.worker.engine.sequence import Sequence as Request
from quire.worker.parts.tiers.arriving import Arriving
from quire.worker.parts.tiers.transfers import Transfers


class Tiers(Part):
    def __init__(self, transfers: Transfers, arriving: Arriving, host: Host) -> None:
        self.transfers = transfers
        self.arriving = arriving
        self._run_copies = host.run_copies

    def admit(self, seq: Request) -> bool:
        return not self.arriving.add(seq)

    @property
    def is_preparing(self) -> bool:
        return len(self.arriving) > 0 or self.arriving.num_queued > 0

    def let_in(self, *, may_wait: bool, num_pending_tokens: int) -> Iterable[tuple[Request, None]]:
        taken = self.arriving.take(num_pending_tokens=num_pending_tokens)
        return [(seq, None) for seq in taken]

    @property
    def has_work(self) -> bool:
        return self.transfers.has_work

    def begin(self, *, is_decoding: bool, step_s: float) -> None:
        self.transfers.advance(is_decoding=is_decoding, step_s=step_s)

    @property
    def wants_short_steps(self) -> bool:
        """Whether blocks are still arriving for requests that are queued behind others. Those that
        arrive while a step runs are copied by the next step."""
        return self.arriving.num_queued > 0

    @property
    def needs_step(self) -> bool:
        return len(self.transfers.copies) > 0

    def chosen(self, schedule: Schedule) -> Mapping[str, Any]:
        return {"copies_X22": self.transfers.submitted()}

    def ran(self) -> None:
        self.transfers.finished()

    def timed(self, num_prefilled: int, seconds: float) -> None:
        if num_prefilled:
            self.arriving.computed(num_prefilled, seconds)

    def wait(self) -> None:
        is_awaited = len(self.arriving) > 0
        most_s = self.arriving.left_s if is_awaited else inf
        self.transfers.wait(for_arrivals=is_awaited, most_s=most_s)

    def forget(self, seq: Request) -> None:
        if seq in self.arriving:
            self.arriving.remove(seq)

    # `quire.worker.engine.part.Tier`

    def match(self, hashes: Sequence[BlockHash]) -> list[Slot]:
        return self.transfers.match(hashes)

    def may_use(self, slots: Sequence[Slot]) -> bool:
        """If not, a thread first compares checksums."""
        return self.transfers.checker.may_use(slots)

    def load(
        self, seq: Request, slots: list[Slot], hashes: Sequence[BlockHash], parent: BlockId | None
    ) -> list[BlockId]:
        loaded = self.transfers.load(slots, hashes, parent)
        self.arriving.loaded(seq, len(loaded))
        return loaded

    def yield_room(self) -> bool:
        return self.transfers.yield_room()

    def reset(self) -> None:
        self.transfers.reset()

    def stats(self) -> Mapping[str, Any]:
        return self.transfers.stats()

    def save(self) -> None:
        self.transfers.save_all(self._run_copies)

    def close(self) -> None:
        self.transfers.close()
