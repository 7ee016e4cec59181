"""A gateway's connection to one replica group: sends requests, receives tokens, load and events.

One `Attach` stream carries all requests of this gateway to the group. The group gets requests while
the stream is open. Every request on it fails with `GroupLost` when the stream breaks or ends, when
the group is silent for the silence timeout, or when it owes tokens and does not step. The client
then starts again from `Describe`, with growing pauses, until `run` is cancelled. Late messages of
the old stream are dropped, and the group aborts the requests that arrived on it.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc.aio

from quire.cluster.errors import Death, GroupDied, GroupLost, GroupMismatch, HandedOver
from quire.cluster.links.event_reader import read_events
from quire.cluster.links.group_link import AttachCall, Connect, GroupLink, grpc_connect
from quire.cluster.links.group_listener import GroupListener
from quire.cluster.links.group_stream import GroupStream, Turns
from quire.cluster.links.liveness import Disconnect, Liveness
from quire.cluster.supervise import end_if_cancelled
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import ConfigError

_log = logging.getLogger(__name__)

_CLOSED = (pb.GroupError.GROUP_FAILED, pb.GroupError.DRAINING)


@dataclass(frozen=True, kw_only=True)
class GroupClientConfig:
    silence_timeout_s: float = 2.0
    """A group that sends nothing for this long is lost. Groups' heartbeats must be much more
    frequent."""
    step_deadline_s: float = 30.0
    """A group that owes tokens and does not step for this long is lost despite its heartbeats."""
    window_tokens: int = 128
    """Tokens of a request that the group may send ahead of its reader. That is far more than one
    stream decodes while a credit message travels, and keeps the deltas of 4096 stalled readers
    within some 100 MB at a gateway."""
    describe_timeout_s: float = 5.0
    """How long connecting and `Describe` may take together."""
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    """The pause before the next attempt doubles from ``min_backoff_s`` to this."""
    max_unsent_commands: int = 65_536
    """Commands that may wait for a group that does not read; with one more the group counts as
    lost. 4096 requests that begin, get credit and end at the same time cause fewer."""
    follow_events: bool = True
    """Whether to read the group's block events."""

    def __post_init__(self) -> None:
        times = ("silence_timeout_s", "step_deadline_s", "describe_timeout_s")
        for name in (*times, "min_backoff_s", "max_backoff_s"):
            if not getattr(self, name) > 0:  # Refuses NaN too.
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        if self.max_unsent_commands < 1:
            value = self.max_unsent_commands
            raise ConfigError(f"max_unsent_commands={value!r}: must be 1 or more")
        if self.window_tokens < 2:
            raise ConfigError(f"window_tokens={self.window_tokens!r}: must be 2 or more")


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
        turns: Turns | None = None,
    ) -> None:
        self.address = address
        self.last_error = ""
        """Why the group is not attached, for operators."""
        self.is_draining = False
        """Whether this gateway drains, which each heartbeat tells the group."""
        self.num_requests = 0
        """Requests that the group has from all gateways."""
        self.adapters: set[str] = set()
        """Digests of adapters that the group is known to hold, while attached."""
        self._listener = listener
        self._config = config
        self._connect = connect
        self._jitter = jitter
        self._turns = turns or Turns()
        self._description: pb.GroupDescription | None = None  # Set while attached.
        self._link: GroupLink | None = None
        self._last_load: tuple[int, int, pb.Load] | None = None
        self._pulse = self._new_pulse()
        self._phase = pb.StepFrame.SERVING
        self._trouble = Disconnect("")  # Why `_end` ended the stream.
        self._death: Death | None = None  # Refuted if the same incarnation comes back.
        self._commands: asyncio.Queue[pb.GroupCommand] = asyncio.Queue()
        self._deadline: asyncio.Timeout | None = None  # Ends the current stream.
        self._streams: dict[tuple[str, int], GroupStream] = {}

    @property
    def is_attached(self) -> bool:
        return self._description is not None

    @property
    def description(self) -> pb.GroupDescription:
        """The group's description; only while attached."""
        assert self._description is not None
        return self._description

    @property
    def link(self) -> GroupLink:
        """The connection, for calls other than `Attach`. Raises GroupLost: the group is not
        attached."""
        if self._link is None or not self.is_attached:
            raise GroupLost(f"group at {self.address} is not attached: {self.last_error}")
        return self._link

    @property
    def phase(self) -> pb.StepFrame.Phase:
        """The phase that the group reported in its last frame."""
        return self._phase

    @property
    def num_streams(self) -> int:
        """Number of this gateway's requests in progress at the group."""
        return len(self._streams)

    @property
    def num_unsent_commands(self) -> int:
        return self._commands.qsize()

    def submit(
        self, submit: pb.Submit, *, on_cleared: Callable[[], None] | None = None
    ) -> GroupStream:
        """Submits a request; returns its stream of tokens. ``on_cleared`` as in `GroupStream`.

        Raises:
            GroupLost: The group is not attached.
        """
        if not self.is_attached:
            raise GroupLost(f"group at {self.address} is not attached: {self.last_error}")
        stream = GroupStream(
            submit,
            window=self._config.window_tokens,
            on_abort=self._abort,
            on_credit=self._give_credit,
            on_cleared=on_cleared,
            turns=self._turns,
            epoch=self.description.epoch,
        )
        self._streams[stream.key] = stream
        self._send(pb.GroupCommand(submit=submit))
        return stream

    def drain(self, *, is_wanted: bool) -> None:
        """Asks the group to take no new requests from any gateway, or to take them again; `phase`
        shows when it does. Only while attached."""
        self._send(pb.GroupCommand(drain=is_wanted))

    async def run(self) -> None:
        """Attaches to the group, again after each loss, until it is cancelled."""
        loop = asyncio.get_running_loop()
        pause_s = self._config.min_backoff_s
        try:
            while True:
                begin_s = loop.time()
                self._detach(await self._attach_once())
                end_if_cancelled()
                if loop.time() - begin_s > self._config.max_backoff_s:
                    pause_s = self._config.min_backoff_s  # It was attached for a while.
                # Jitter, because many gateways must not connect to a restarted group at once.
                await asyncio.sleep(pause_s * self._jitter(0.5, 1.0))
                pause_s = min(2 * pause_s, self._config.max_backoff_s)
        finally:
            self._detach(Disconnect("the gateway is closing"), is_trouble=False)

    async def _attach_once(self) -> Disconnect:
        """Attaches until the stream ends; returns why it ended, or why there was none."""
        self._pulse = self._new_pulse()
        try:
            await self._attach()
            ending = Disconnect("the group ended the stream")
        except GroupMismatch as error:
            ending = Disconnect(str(error))
        except grpc.aio.AioRpcError as error:
            # With DEADLINE_EXCEEDED the group has given up on this gateway.
            is_death = error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
            ending = Disconnect(f"{error.code().name}: {error.details()}", is_death=is_death)
        except TimeoutError:
            ending = self._trouble
        except Exception as error:
            # An error in one group's messages must not affect the other groups.
            _log.exception("the connection to the group at %s failed", self.address)
            ending = Disconnect(repr(error))
        if not self.is_attached and ending.reason != self.last_error:
            _log.warning("group at %s is not attached: %s", self.address, ending.reason)
        return ending

    async def _attach(self) -> None:
        async with self._connect(self.address) as link:
            description = await link.Describe(
                pb.DescribeRequest(), timeout=self._config.describe_timeout_s
            )
            self._listener.check(description)
            self._link = link
            call = link.Attach()
            helpers: list[asyncio.Task[None]] = []
            try:
                async with asyncio.timeout(None) as self._deadline:
                    helpers += [
                        asyncio.create_task(self._help(partial(self._write_commands, call))),
                        asyncio.create_task(self._help(self._watch)),
                    ]
                    async for frame in call:
                        if not self.is_attached:
                            self._description, self.last_error = description, ""
                            self._refute_death()
                            self._listener.attached(self)
                            if self._config.follow_events:
                                reading = partial(read_events, link, self, self._listener)
                                helpers.append(asyncio.create_task(self._help(reading)))
                        self._take(frame)
            finally:
                self._deadline = None
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    async def _help(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs a task beside the stream's reader; its failure ends the stream."""
        try:
            await work()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return  # The call is over, which its reader notices too, with the reason.
        except Exception as error:
            _log.exception("the connection to the group at %s failed", self.address)
            self._end(Disconnect(repr(error)))

    def _end(self, trouble: Disconnect) -> None:
        """Ends the current stream, if there is one."""
        deadline, self._deadline = self._deadline, None
        if deadline is not None:
            self._trouble = trouble
            deadline.reschedule(asyncio.get_running_loop().time())

    def _send(self, command: pb.GroupCommand) -> None:
        if self._commands.qsize() < self._config.max_unsent_commands:
            self._commands.put_nowait(command)
        else:
            self._end(
                Disconnect(f"{self._commands.qsize()} commands wait, and it does not read them")
            )

    async def _write_commands(self, call: AttachCall) -> None:
        while True:
            await call.write(await self._commands.get())

    async def _watch(self) -> None:
        """Sends heartbeats to the group, and ends the stream when the group is lost."""
        pulse = self._pulse
        ending: Disconnect | None = None
        while ending is None:
            self._send(pb.GroupCommand(is_draining=self.is_draining))
            await asyncio.sleep(pulse.beat_s)
            ending = pulse.beat(is_owed=any(s.is_owed for s in self._streams.values()))
        self._end(ending)

    def _take(self, frame: pb.StepFrame) -> None:
        self.num_requests = frame.num_requests
        was_draining = self._phase == pb.StepFrame.DRAINING
        if was_draining and not frame.phase and self._listener.taken_back(self):
            self._phase = frame.phase
            self._last_load = None  # The routing table has forgotten the group's load.
        last_load, load = self._last_load, (frame.step, frame.num_submits, frame.load)
        self._pulse.frame(frame.step if last_load is None else max(frame.step, last_load[0]))
        if last_load is None or (load != last_load and frame.step >= last_load[0]):
            # A heartbeat during a long step repeats the last step's load. Routing must not assume
            # that this counts the requests sent since. Late frames are ignored, too: counters that
            # decrease would look like negative speeds.
            self._last_load = load
            num_submits = frame.num_submits if frame.HasField("num_submits") else None
            self._listener.load(self, frame.load, step=frame.step, num_submits=num_submits)
        for delta in frame.deltas:
            is_error = delta.HasField("error")
            if is_error and delta.error.code in _CLOSED:
                # Now, and not when the request's reader wakes: another group may have the same
                # name by then.
                self._listener.turned_away(self)
                if delta.error.code == pb.GroupError.GROUP_FAILED:
                    self._listener.died(self._as_dead())
            key = (delta.request_id, delta.attempt)
            stream = self._streams.get(key)
            if stream is None:
                # This gateway aborted the request while the group still ran it, or the group got
                # it twice. Nothing would read its output.
                if not (is_error or delta.finish_reason):
                    self._send_abort(key)
                continue
            if not stream.push(delta):
                stream.abort()
            elif is_error or delta.finish_reason:
                del self._streams[key]
        if frame.phase:
            self._drain(frame.phase)

    def _drain(self, phase: pb.StepFrame.Phase) -> None:
        if not self._phase:
            _log.info("group %s drains, with %d requests", self._name, len(self._streams))
            self._listener.turned_away(self)
        self._phase = phase
        if phase == pb.StepFrame.HANDING_OVER and self._listener.has_other(self):
            for stream in list(self._streams.values()):
                stream.lose(HandedOver(f"the group at {self.address} drains"))
                stream.abort()

    @property
    def _name(self) -> str:
        return f"{self.description.group_id} at {self.address}"

    def _new_pulse(self) -> Liveness:
        return Liveness(
            silence_timeout_s=self._config.silence_timeout_s,
            step_deadline_s=self._config.step_deadline_s,
        )

    def _abort(self, stream: GroupStream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            self._send_abort(stream.key)

    def _send_abort(self, key: tuple[str, int]) -> None:
        request_id, attempt = key
        abort = pb.Abort(request_id=request_id, attempt=attempt)
        self._send(pb.GroupCommand(abort=abort))

    def _give_credit(self, stream: GroupStream, token_limit: int) -> None:
        if stream.key in self._streams:
            request_id, attempt = stream.key
            credit = pb.Credit(request_id=request_id, attempt=attempt, token_limit=token_limit)
            self._send(pb.GroupCommand(credit=credit))

    def _detach(self, ending: Disconnect, *, is_trouble: bool = True) -> None:
        self.last_error = ending.reason
        self._commands = asyncio.Queue()  # The old commands were meant for the broken stream.
        if not self.is_attached:
            return
        _log.log(
            logging.WARNING if is_trouble and not self._phase else logging.INFO,
            "group %s is gone: %s; %d requests go on elsewhere",
            self._name,
            ending.reason,
            len(self._streams),
        )
        death = self._as_dead()
        self._death = death if ending.is_refutable else None
        try:
            if ending.is_death and not self._phase:
                self._listener.died(death)
            self._listener.detached(self)
        finally:
            self._description = self._last_load = self._link = None
            self.adapters = set()
            self._phase = pb.StepFrame.SERVING
            message = f"the group at {self.address} is lost: {ending.reason}"
            streams, self._streams = self._streams, {}
            for stream in streams.values():
                stream.lose(GroupDied(message, death) if ending.is_death else GroupLost(message))

    def _as_dead(self) -> Death:
        return Death(self.description.group_id, self.description.epoch)

    def _refute_death(self) -> None:
        death, self._death = self._death, None
        if death is not None and death.epoch == self.description.epoch:
            death.is_refuted = True
