"""One direction of a call over a network that can break.

A *pipe* carries messages whole and in order while the connection stands, each after its own
latency, with at most a window of unread messages. Messages sent into a cut wait until it heals, as
with TCP's retransmissions.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any

from google.protobuf.message import Message

if TYPE_CHECKING:
    from tests.sim.calls import Call
    from tests.sim.network import Network


class Pipe:
    """One direction of a call: responses if ``from_server``, otherwise requests."""

    def __init__(self, call: "Call", source: str, target: str, *, from_server: bool) -> None:
        self.call = call
        self.source, self.target = source, target
        self.name = f"{call.name} {source}>{target}"
        self.from_server = from_server
        self._network: Network = call.network
        self._under_way: deque[Message | None] = deque()  # None is the end.
        self._num_held = 0  # Messages under way that a cut holds back.
        self._last_arrival_s = 0.0
        self._unread: deque[Message] = deque()
        self._has_ended = False
        self._changed = asyncio.Event()

    @property
    def num_unread(self) -> int:
        return len(self._under_way) + len(self._unread)

    async def write(self, message: Message) -> None:
        while self.num_unread >= self._network.config.window and self.call.is_open:
            self._changed.clear()
            await self._changed.wait()
        self.put(message)

    def put(self, message: Message | None) -> None:
        """Sends regardless of the window; ``None`` ends the stream."""
        if not self._network.can_send(self.call, from_server=self.from_server):
            return
        if message is not None:
            message = copied(message)
        self._under_way.append(message)
        arrival_s = self._network.arrival_s(self.source, self.target)
        self._last_arrival_s = max(self._last_arrival_s, arrival_s)
        self._network.loop.call_at(self._last_arrival_s, self._arrive)

    def inject(self, message: Message) -> None:
        """Makes ``message`` arrive now, though nobody sent it."""
        self._accept(message)

    def release(self) -> None:
        """Delivers messages that a cut, now healed, has held back."""
        num_held, self._num_held = self._num_held, 0
        for _ in range(num_held):
            arrival_s = self._network.arrival_s(self.source, self.target, late=True)
            self._last_arrival_s = max(self._last_arrival_s, arrival_s)
            self._network.loop.call_at(self._last_arrival_s, self._arrive)

    async def read(self) -> Message | None:
        """The next message, or None once the stream or the call has ended."""
        while not self._unread:
            if self._has_ended or not self.call.is_open:
                return None
            self._changed.clear()
            await self._changed.wait()
        message = self._unread.popleft()
        self._changed.set()
        return message

    def wake(self) -> None:
        self._changed.set()

    def _arrive(self) -> None:
        if self._network.is_cut(self.source, self.target):
            self._num_held += 1
            self._network.hold(self)
            return
        message = self._under_way.popleft()
        if message is None:
            self._has_ended = True
            self._changed.set()
            self.call.stream_ended(from_server=self.from_server)
            return
        for arriving in self._network.tamper(self, message):
            self._accept(arriving)

    def _accept(self, message: Message) -> None:
        if self._has_ended or not self.call.is_open:
            return
        self._network.trace(self.name, message)
        self._unread.append(message)
        self._changed.set()


def copied(message: Message) -> Any:
    """A copy of the message by serialization, so that the two sides share nothing."""
    return type(message).FromString(message.SerializeToString())
