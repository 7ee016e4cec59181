"""A lending engine in this process, in place of another group that lends blocks over a network."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.loan import Loan
from quire.worker.parts.tiers.pull import Pull


@dataclass
class Lender:
    """Steps ``engine`` in a thread, and serves as the `Fetch` of other engines."""

    engine: GroupEngine
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_closed: bool = False
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._start(self._step)

    def __call__(self, pull: Pull) -> None:
        self._start(lambda: self._fetch(pull))

    def close(self) -> None:
        self._is_closed = True
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target)
        self._threads.append(thread)
        thread.start()

    def _step(self) -> None:
        idle = threading.Event()
        while not self._is_closed:
            with self._lock:
                if self.engine.has_work:
                    self.engine.step()
            idle.wait(0.001)

    def _fetch(self, pull: Pull) -> None:
        with self._lock:
            loan = self.engine.lend(pull.hashes, borrower_format=pull.format)
        if isinstance(loan, str):
            pull.end(loan)
            return
        num_sent = self._send(pull, loan)
        loan.close()
        pull.end("" if num_sent == len(pull.hashes) else "the other group has no more")

    def _send(self, pull: Pull, loan: Loan) -> int:
        num_sent = 0
        while num_sent < len(loan.hashes) and not (pull.is_cancelled or self._is_closed):
            slot = pull.next_slot(0.1)
            if slot is None:
                continue
            lent = None
            while lent is None and not self._is_closed:
                lent = loan.next(0.1)
            if lent is None:
                break
            pull.host_blocks_XC[slot] = loan.host_blocks_XC[lent.slot]
            loan.give_back(lent.slot)
            pull.num_bytes += pull.format.block_bytes
            pull.landed(lent.index, slot, lent.checksum)
            num_sent += 1
        return num_sent
