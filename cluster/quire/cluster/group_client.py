"""A gateway's connection to one replica group: requests down, tokens, load and events up.

One `Attach` stream carries all requests of this gateway to the group. While it stands, the group
may be given requests; the moment it breaks, ends, or stays silent for longer than its heartbeat
allows, every request on it fails with `GroupLost` and the client starts again from `Describe`,
with growing pauses, until `run` is cancelled.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import grpc.aio

from quire.cluster.errors import GroupLost, GroupMismatch
from quire.cluster.group_link import AttachCall, Connect, GroupLink, grpc_connect
from quire.cluster.wire import events_from_proto
from quire.router.directory import Position
from quire.v1 import group_pb2 as pb
from quire.worker.events import EventBatch

_log = logging.getLogger(__name__)

_CLOSED = (pb.GroupError.GROUP_FAILED, pb.GroupError.DRAINING)


@dataclass(frozen=True, kw_only=True)
class GroupClientConfig:
    silence_timeout_s: float = 5.0
    """A group that sends nothing for this long is lost. Its heartbeat must be well below."""
    describe_timeout_s: float = 5.0
    """How long connecting and `Describe` may take together."""
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    """The pause before the next attempt doubles from the one to the other."""


class GroupListener(Protocol):
    """Whom a `GroupClient` tells what it learns. Called from the event loop."""

    def check(self, description: pb.GroupDescription) -> None:
        """Raises GroupMismatch where this group must not be used."""

    def attached(self, client: "GroupClient") -> None:
        """Requests can be submitted from now on."""

    def detached(self, client: "GroupClient") -> None:
        """They cannot any longer. Those under way are told only after this."""

    def turned_away(self, client: "GroupClient") -> None:
        """The group takes no more requests, until it is attached anew."""

    def load(self, client: "GroupClient", load: pb.Load) -> None:
        """The group has stepped since the last call."""

    def events(self, client: "GroupClient", batch: EventBatch) -> bool:
        """Takes events in. False: they do not follow on, begin again at `events_position`."""

    def events_position(self, client: "GroupClient") -> Position:
        """From where on to ask the group for events."""


class GroupStream:
    """The deltas of one attempt of one request."""

    def __init__(self, submit: pb.Submit, *, on_abort: Callable[["GroupStream"], None]) -> None:
        self.key = (submit.request_id, submit.attempt)
        self._on_abort = on_abort
        self._deltas: list[pb.TokenDelta] = []
        self._lost: GroupLost | None = None
        self._changed = asyncio.Event()

    async def next(self) -> list[pb.TokenDelta]:
        """All deltas that have come since the last call, at least one.

        Raises:
            GroupLost: The stream broke; no more will come.
        """
        while not self._deltas:
            if self._lost is not None:
                raise self._lost
            self._changed.clear()
            await self._changed.wait()
        deltas, self._deltas = self._deltas, []
        return deltas

    def abort(self) -> None:
        """Stops the group's work on this attempt. Does nothing once it has ended."""
        self._on_abort(self)

    def push(self, delta: pb.TokenDelta) -> None:
        self._deltas.append(delta)
        self._changed.set()

    def lose(self, error: GroupLost) -> None:
        self._lost = error
        self._changed.set()


class GroupClient:
    """Keeps one gateway attached to the group at ``address`` for as long as `run` runs."""

    def __init__(
        self,
        address: str,
        listener: GroupListener,
        *,
        config: GroupClientConfig,
        connect: Connect = grpc_connect,
        jitter: Callable[[float, float], float] = random.uniform,
    ) -> None:
        self.address = address
        self.last_error = ""
        """Why the group is not attached, for the people who wonder."""
        self._listener = listener
        self._config = config
        self._connect = connect
        self._jitter = jitter
        self._description: pb.GroupDescription | None = None  # Set while attached.
        self._last_load: tuple[int, pb.Load] | None = None
        self._commands: asyncio.Queue[pb.GroupCommand] = asyncio.Queue()
        self._streams: dict[tuple[str, int], GroupStream] = {}

    @property
    def is_attached(self) -> bool:
        return self._description is not None

    @property
    def description(self) -> pb.GroupDescription:
        """What the group said of itself; only while attached."""
        assert self._description is not None
        return self._description

    @property
    def num_streams(self) -> int:
        """Requests under way."""
        return len(self._streams)

    def submit(self, submit: pb.Submit) -> GroupStream:
        """Sends a request on its way.

        Raises:
            GroupLost: The group is not attached.
        """
        if not self.is_attached:
            raise GroupLost(f"group at {self.address} is not attached: {self.last_error}")
        stream = GroupStream(submit, on_abort=self._abort)
        self._streams[stream.key] = stream
        self._commands.put_nowait(pb.GroupCommand(submit=submit))
        return stream

    async def run(self) -> None:
        """Attaches, and attaches again, until it is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = self._config.min_backoff_s
        try:
            while True:
                begin_s = loop.time()
                self._detach(await self._attach_once())
                if loop.time() - begin_s > self._config.max_backoff_s:
                    pause_s = self._config.min_backoff_s  # It was well for a while.
                # Many gateways must not knock at a restarted group in the same instant.
                await asyncio.sleep(pause_s * self._jitter(0.5, 1.0))
                pause_s = min(2 * pause_s, self._config.max_backoff_s)
        finally:
            self._detach("the gateway is closing")

    async def _attach_once(self) -> str:
        """Returns why the stream ended, or why there was none."""
        try:
            await self._attach()
            reason = "the group ended the stream"
        except GroupMismatch as error:
            reason = str(error)
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details()}"
        except TimeoutError:
            reason = f"no frame for {self._config.silence_timeout_s} s"
        except Exception as error:
            # Whatever one group sends, the gateway goes on with the others.
            _log.exception("the connection to the group at %s failed", self.address)
            reason = repr(error)
        if reason != self.last_error:
            _log.warning("group at %s is not attached: %s", self.address, reason)
        return reason

    async def _attach(self) -> None:
        async with self._connect(self.address) as link:
            description = await link.Describe(
                pb.DescribeRequest(), timeout=self._config.describe_timeout_s
            )
            self._listener.check(description)
            call = link.Attach()
            helpers = [asyncio.create_task(self._write_commands(call))]
            try:
                async with asyncio.timeout(self._config.silence_timeout_s) as deadline:
                    async for frame in call:
                        now = asyncio.get_running_loop().time()
                        deadline.reschedule(now + self._config.silence_timeout_s)
                        if not self.is_attached:
                            self._description, self.last_error = description, ""
                            self._listener.attached(self)
                            helpers.append(asyncio.create_task(self._follow_events(link)))
                        self._take(frame)
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    async def _write_commands(self, call: AttachCall) -> None:
        while True:
            await call.write(await self._commands.get())

    def _take(self, frame: pb.StepFrame) -> None:
        load = (frame.step, frame.load)
        if load != self._last_load:
            # A heartbeat during a long step repeats what the last step said. Routing must not
            # take that for news that the requests sent since are in those numbers.
            self._last_load = load
            self._listener.load(self, frame.load)
        for delta in frame.deltas:
            if delta.error.code in _CLOSED:
                # Now, not once the request's reader is awake: by then, another group may have
                # the same name.
                self._listener.turned_away(self)
            key = (delta.request_id, delta.attempt)
            stream = self._streams.get(key)
            if stream is None:
                continue  # Aborted here while the group was still at it.
            if delta.finish_reason or delta.HasField("error"):
                del self._streams[key]
            stream.push(delta)

    async def _follow_events(self, link: GroupLink) -> None:
        """Feeds the listener, from where it left off; a broken or odd stream is begun again.

        Without events routing is worse but works, so their trouble never detaches the group.
        """
        while True:
            position = self._listener.events_position(self)
            request = pb.EventsRequest(
                epoch=position.epoch, next_seq=position.next_seq, buckets=position.drifted
            )
            with contextlib.suppress(grpc.aio.AioRpcError, ValueError):
                async for message in link.Events(request):
                    if not self._listener.events(self, events_from_proto(message)):
                        break
            await asyncio.sleep(self._config.min_backoff_s)

    def _abort(self, stream: GroupStream) -> None:
        if self._streams.pop(stream.key, None) is None:
            return
        request_id, attempt = stream.key
        abort = pb.Abort(request_id=request_id, attempt=attempt)
        self._commands.put_nowait(pb.GroupCommand(abort=abort))

    def _detach(self, reason: str) -> None:
        self.last_error = reason
        if not self.is_attached:
            return
        self._listener.detached(self)
        self._description = self._last_load = None
        self._commands = asyncio.Queue()  # What it still held was meant for the broken stream.
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lose(GroupLost(f"the group at {self.address} is lost: {reason}"))
