"""The queue of waiting requests, in the order in which their prompts are computed.

A *turn* is (priority, key, number), and the least comes first. The number is a request's place in
the order of arrival. With "fcfs" all keys are 0. With "shortest_prefill" a key is the remaining
tokens plus `AGING` times the tokens that the engine had computed when the request arrived: the
shortest first (Schrage 1968), but a request that lacks n tokens is overtaken only by requests of
its priority that arrive while the engine computes n / `AGING` tokens more. Age is counted in tokens
and not in seconds so that the order is the same on every machine.

If other prompts wait for the same block next, the remaining work is divided by their number: a
prefix that a hundred prompts share costs each of them a hundredth (least work per waiting request
first, Smith 1956).

Each operation takes O(log n) on average. Lazy deletion: stale heap entries are dropped when they
reach the top, or when they are the majority.

When a block has been computed, thousands of requests may have less to compute than their turns say.
`computed` still takes O(1): it sets the group of requests that lacked the block aside, and
`take_outdated` returns a few of them at each step, to be pushed again. Until then they keep their
turns, which are too late by about the same amount for all of them.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count, islice

from quire.worker.blocks.hashing import BlockHash
from quire.worker.engine.sequence import Sequence
from quire.worker.request.config import SchedulingPolicy

Turn = tuple[int, float, int]

AGING = 0.2
"""Each token that the engine has computed since a request's arrival offsets this many of the
request's remaining tokens."""


def turn_of(
    seq: Sequence, num_missing: int, policy: SchedulingPolicy, *, num_followers: int = 0
) -> Turn:
    """The turn of a request with ``num_missing`` tokens to compute, for whose next block
    ``num_followers`` others wait."""
    if policy == "fcfs":
        return seq.request.priority, 0.0, seq.number
    left = num_missing / (1 + num_followers)
    return seq.request.priority, left + AGING * seq.arrived_at_token, seq.number


@dataclass(slots=True, eq=False)
class _Group:
    """The requests whose first missing block is ``block``, in the order of insertion."""

    block: BlockHash
    members: dict[Sequence, None] = field(default_factory=dict)


class WaitingQueue:
    """Holds sequences with status ``WAITING``. A sequence can be removed and pushed again."""

    def __init__(self) -> None:
        self._turns: dict[Sequence, Turn] = {}
        # Lazy deletion: stale heap entries are dropped when popped. The numbers in the
        # middle make entries comparable: sequences have no order, and one may be in twice.
        self._in_turn: list[tuple[Turn, int, Sequence]] = []
        self._entries = count()
        self._group_of: dict[Sequence, _Group] = {}
        self._lacking: dict[BlockHash, _Group] = {}
        # Groups whose block has been computed since their members were pushed, oldest first.
        self._outdated: deque[_Group] = deque()

    def __len__(self) -> int:
        return len(self._turns)

    def push(self, seq: Sequence, turn: Turn, *, lacks: BlockHash | None = None) -> None:
        """Inserts ``seq``, or changes its turn. ``lacks`` is its first missing block that another
        request may compute, if there is one."""
        if self._turns.get(seq) != turn:
            self._turns[seq] = turn
            heappush(self._in_turn, (turn, next(self._entries), seq))
        group = None if lacks is None else self._lacking.get(lacks)
        if lacks is None or group is None or self._group_of.get(seq) is not group:
            self._leave_group(seq)
            if lacks is not None:
                group = self._lacking.setdefault(lacks, _Group(lacks))
                group.members[seq] = None
                self._group_of[seq] = group
        self._tidy()

    def head(self) -> tuple[Turn, Sequence]:
        """The sequence with the least turn, and the turn. The queue must not be empty."""
        while True:
            turn, _, seq = self._in_turn[0]
            if self._turns.get(seq) == turn:
                return turn, seq
            heappop(self._in_turn)

    def num_lacking(self, block: BlockHash | None) -> int:
        """How many requests have ``block`` as their first missing block."""
        return len(self._lacking[block].members) if block in self._lacking else 0

    def first_lacking(self, block: BlockHash | None) -> Sequence | None:
        """The request that was pushed first of those whose first missing block is ``block``."""
        return next(iter(self._lacking[block].members)) if block in self._lacking else None

    def computed(self, block: BlockHash) -> None:
        """Marks the requests whose first missing block was ``block`` as outdated."""
        if group := self._lacking.pop(block, None):
            self._outdated.append(group)

    def take_outdated(self, limit: int) -> list[Sequence]:
        """At most ``limit`` outdated requests. They stay in the queue, and count as lacking no
        block until they are pushed again."""
        taken: list[Sequence] = []
        while self._outdated and len(taken) < limit:
            members = self._outdated[0].members
            for seq in list(islice(members, limit - len(taken))):
                del members[seq], self._group_of[seq]
                taken.append(seq)
            if not members:
                self._outdated.popleft()
        return taken

    def remove(self, seq: Sequence) -> None:
        del self._turns[seq]
        self._leave_group(seq)
        self._tidy()

    def _leave_group(self, seq: Sequence) -> None:
        group = self._group_of.pop(seq, None)
        if group is not None:
            del group.members[seq]
            if not group.members and self._lacking.get(group.block) is group:
                del self._lacking[group.block]

    def _tidy(self) -> None:
        if len(self._in_turn) > 2 * len(self._turns) + 16:
            self._in_turn = [(turn, next(self._entries), seq) for seq, turn in self._turns.items()]
            heapify(self._in_turn)
