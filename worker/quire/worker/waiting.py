"""Requests that wait, in the order in which their prompts are computed.

A *turn* is (priority, key, number), and the least comes first. The number is a request's place in
the order of arrival. With "fcfs" keys are all 0; with "shortest_prefill" a key is what is left to
compute plus `AGING` of the tokens that the engine had computed when the request came: the shortest
first (Schrage 1968), but a request that lacks n tokens is overtaken only by those of its priority
that come while the engine computes n / `AGING` tokens more. That is counted in tokens and not in
seconds so that the order is the same on every machine.

Each operation takes O(log n) on average: what is taken out stays in the heaps until it is on top,
or until most of them is such.
"""

from heapq import heapify, heappop, heappush
from itertools import count

from quire.worker.config import SchedulingPolicy
from quire.worker.sequence import Sequence

Turn = tuple[int, float, int]

AGING = 0.2
"""Tokens of prefill that a token computed for others since the arrival makes up for."""


def turn_of(seq: Sequence, num_missing: int, policy: SchedulingPolicy) -> Turn:
    """The place in the order of a request of which ``num_missing`` tokens are to be computed."""
    if policy == "fcfs":
        return seq.priority, 0.0, seq.number
    return seq.priority, num_missing + AGING * seq.arrived_at_token, seq.number


class WaitingQueue:
    """Holds sequences with status ``WAITING``. One that has left may come back."""

    def __init__(self) -> None:
        self._turns: dict[Sequence, Turn] = {}
        # What is no longer true of a sequence stays in until it is on top. The numbers in the
        # middle are there because sequences have no order, and one may be in twice.
        self._in_turn: list[tuple[Turn, int, Sequence]] = []
        self._by_arrival: list[tuple[float, int, Sequence]] = []
        self._entries = count()

    def __len__(self) -> int:
        return len(self._turns)

    def push(self, seq: Sequence, turn: Turn) -> None:
        """Puts in ``seq``, or gives it another turn."""
        if seq not in self._turns:
            heappush(self._by_arrival, (seq.arrival_s, next(self._entries), seq))
        self._turns[seq] = turn
        heappush(self._in_turn, (turn, next(self._entries), seq))

    def head(self) -> tuple[Turn, Sequence]:
        """Whose turn it is. There must be one."""
        while True:
            turn, _, seq = self._in_turn[0]
            if self._turns.get(seq) == turn:
                return turn, seq
            heappop(self._in_turn)

    def remove(self, seq: Sequence) -> None:
        del self._turns[seq]
        if len(self._in_turn) > 2 * len(self._turns) + 16:
            self._in_turn = [(turn, next(self._entries), seq) for seq, turn in self._turns.items()]
            heapify(self._in_turn)
        if len(self._by_arrival) > 2 * len(self._turns) + 16:
            self._by_arrival = [(seq.arrival_s, next(self._entries), seq) for seq in self._turns]
            heapify(self._by_arrival)

    def oldest_arrival_s(self) -> float | None:
        """When the one came that has waited longest; None where nobody waits."""
        while self._by_arrival and self._by_arrival[0][2] not in self._turns:
            heappop(self._by_arrival)
        return self._by_arrival[0][0] if self._by_arrival else None
