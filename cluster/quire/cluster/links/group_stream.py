"""Buffers the tokens of one attempt of one request until its reader takes them.

The group may be at most ``window`` tokens ahead of the reader, which limits the memory that a slow
client takes at the gateway. Tokens are contiguous: repeated ones are dropped, and a gap ends the
stream as lost.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from quire.cluster.errors import GroupLost
from quire.v1 import group_pb2 as pb

_BYTES_PER_TOKEN = 4
_PER_TURN = 2
"""Callbacks per turn. A turn has a cost of its own, less than that of passing on one chunk."""


class Turns:
    """Runs callbacks in order of arrival, a few in each turn of the event loop, and so keeps each
    turn short under any load.

    Otherwise a turn runs all callbacks that are ready, and is long if every stream of every group
    has a frame. gRPC's asyncio server needs four turns to accept a call, one call at a time, so
    requests would queue unseen in front of admission while the loop is busy. Delayed streams lose
    nothing: their tokens are sent in fewer and larger chunks, which cost less.
    """

    def __init__(self, *, per_turn: int = _PER_TURN) -> None:
        self._per_turn = per_turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_due = False

    def soon(self, callback: Callable[[], None]) -> None:
        """Schedules ``callback`` for a later turn. It must not raise."""
        self._waiting.append(callback)
        self._come_back()

    def _turn(self) -> None:
        self._is_due = False
        for _ in range(min(self._per_turn, len(self._waiting))):
            self._waiting.popleft()()
        self._come_back()

    def _come_back(self) -> None:
        if self._waiting and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)


class GroupStream:
    """The deltas of one attempt of one request.

    It sets ``submit.token_limit``, and raises the limit through ``on_credit`` as the reader reads.
    ``on_cleared`` is called once ``submit.isolated_tokens`` tokens have arrived, read or not. All
    streams of a gateway share ``turns``.
    """

    def __init__(
        self,
        submit: pb.Submit,
        *,
        window: int,
        on_abort: Callable[["GroupStream"], None],
        on_credit: Callable[["GroupStream", int], None],
        on_cleared: Callable[[], None] | None = None,
        turns: Turns | None = None,
        epoch: int = 0,
    ) -> None:
        self.epoch = epoch
        """The group's epoch, which identifies its incarnation."""
        self.key = (submit.request_id, submit.attempt)
        self.may_have_begun = submit.attempt <= 1
        """Whether the group's engine may have got the attempt. A group acknowledges each attempt
        but the first before that."""
        self._window = window
        self._on_abort = on_abort
        self._on_credit = on_credit
        self._on_cleared = on_cleared
        self._num_resumed = len(submit.resumed_token_ids) // _BYTES_PER_TOKEN
        self._cleared_at = self._num_resumed + submit.isolated_tokens
        self._num_received = self._num_taken = self._num_done = self._num_resumed
        self._token_limit = submit.token_limit = self._num_resumed + window
        self._deltas: list[pb.TokenDelta] = []
        self._lost: GroupLost | None = None
        self._turns = turns or Turns()
        self._will_wake = False
        self._is_turn = False  # Whether the reader may take the buffered deltas.
        self._waiter: asyncio.Future[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens received in this attempt, read or not."""
        return self._num_received - self._num_resumed

    @property
    def num_buffered(self) -> int:
        """Number of received tokens that the reader has not finished with."""
        return self._num_received - self._num_done

    @property
    def unread(self) -> Sequence[pb.TokenDelta]:
        """The received deltas that the reader has not taken."""
        return self._deltas

    @property
    def is_running(self) -> bool:
        """Whether the group works on the attempt, as far as is known: it neither refused it nor was
        lost."""
        return self._lost is None and not any(each.HasField("error") for each in self._deltas)

    @property
    def is_owed(self) -> bool:
        """Whether the group may send tokens. A healthy group does so within a few steps."""
        return self._num_received < self._token_limit

    async def next(self) -> list[pb.TokenDelta]:
        """Waits for deltas; returns all that have arrived since the last call, at least one.

        A call implies that the reader has finished with the deltas of the last one.

        Raises:
            GroupLost: The stream broke; no more deltas will arrive.
        """
        self._num_done = self._num_taken
        # Credit at half of the window is early enough not to delay the group, and rare enough to
        # cost next to nothing.
        if self._token_limit - self._num_done <= self._window // 2:
            self._token_limit = self._num_done + self._window
            self._on_credit(self, self._token_limit)
        while not (self._is_turn and self._deltas):
            if self._lost is not None:
                raise self._lost
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._is_turn = False
        deltas, self._deltas = self._deltas, []
        self._num_taken = self._num_received
        return deltas

    def abort(self) -> None:
        """Stops the group's work on this attempt. Does nothing once it has ended."""
        self._on_abort(self)

    def push(self, delta: pb.TokenDelta) -> bool:
        """Takes a delta from the group. False: the delta is invalid, and the stream is lost."""
        self.may_have_begun = True
        if not delta.HasField("error"):
            begin, end = delta.token_offset, delta.token_offset + len(delta.token_ids)
            if begin < self._num_received and end <= self._num_received:
                return True  # A repeated delta.
            if begin != self._num_received:
                self.lose(GroupLost(f"the group sent token {begin}, expected {self._num_received}"))
                return False
            if end > self._token_limit:
                self.lose(GroupLost(f"the group sent token {end}, beyond {self._token_limit}"))
                return False
            if end == begin and not delta.finish_reason:
                return True  # Only an acknowledgement.
            self._num_received = end
            if self._on_cleared is not None and (end >= self._cleared_at or delta.finish_reason):
                self._on_cleared()
                self._on_cleared = None
        self._deltas.append(delta)
        if not (self._is_turn or self._will_wake):
            self._will_wake = True
            self._turns.soon(self._wake)
        return True

    def lose(self, error: GroupLost) -> None:
        if self._lost is None:
            self._lost = error
        self._wake()

    def _wake(self) -> None:
        self._will_wake = False
        self._is_turn = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
