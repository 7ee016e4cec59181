"""A gateway's connection to one replica group: requests down, tokens, load and events up.

One `Attach` stream carries all requests of this gateway to the group. While it stands, the group
may be given requests. The moment it breaks, ends, stays silent for longer than its heartbeat
allows, or the group owes tokens and does not step, every request on it fails with `GroupLost` and
the client starts again from `Describe`, with growing pauses, until `run` is cancelled. What the
old stream still brings reaches nobody, and the group aborts what came over it.
"""

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass

import grpc.aio

from quire.cluster.errors import Death, GroupDied, GroupLost, GroupMismatch, HandedOver
from quire.cluster.links.event_reader import read_events
from quire.cluster.links.group_link import AttachCall, Connect, grpc_connect
from quire.cluster.links.group_listener import GroupListener
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.pulse import Ending, Pulse
from quire.cluster.links.turns import Turns
from quire.v1 import group_pb2 as pb
from quire.worker.errors import ConfigError

_log = logging.getLogger(__name__)

_CLOSED = (pb.GroupError.GROUP_FAILED, pb.GroupError.DRAINING)


@dataclass(frozen=True, kw_only=True)
class GroupClientConfig:
    silence_timeout_s: float = 2.0
    """A group that sends nothing for this long is lost. Its heartbeat must be well below."""
    step_deadline_s: float = 30.0
    """So is one that owes tokens and does not step for this long, though its heartbeats come."""
    window_tokens: int = 128
    """Tokens of a request that the group may send ahead of its reader. Above what a stream's
    decoding brings while a credit is under way, by far; below what 4096 stalled readers' deltas
    could cost a gateway, some 100 MB."""
    describe_timeout_s: float = 5.0
    """How long connecting and `Describe` may take together."""
    min_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    """The pause before the next attempt doubles from the one to the other."""
    follow_events: bool = True
    """Off, the listener is told of no block events."""

    def __post_init__(self) -> None:
        times = ("silence_timeout_s", "step_deadline_s", "describe_timeout_s")
        for name in (*times, "min_backoff_s", "max_backoff_s"):
            if not getattr(self, name) > 0:  # Nor is what is not a number.
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
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
        """Why the group is not attached, for the people who wonder."""
        self.is_draining = False
        """Whether this gateway is to take no more requests of clients, which groups are told."""
        self._listener = listener
        self._config = config
        self._connect = connect
        self._jitter = jitter
        self._turns = turns or Turns()
        self._description: pb.GroupDescription | None = None  # Set while attached.
        self._last_load: tuple[int, int, pb.Load] | None = None
        self._pulse = self._new_pulse()
        self._phase = pb.StepFrame.SERVING
        self._trouble = Ending("")  # Why the watch ended the stream.
        self._death: Death | None = None  # Ours to refute, should the same incarnation come back.
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

    def submit(
        self, submit: pb.Submit, *, on_proven: Callable[[], None] | None = None
    ) -> GroupStream:
        """Sends a request on its way; ``on_proven`` as in `GroupStream`.

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
            on_proven=on_proven,
            turns=self._turns,
            epoch=self.description.epoch,
        )
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
            self._detach(Ending("the gateway is closing"), is_trouble=False)

    async def _attach_once(self) -> Ending:
        """Returns why the stream ended, or why there was none."""
        self._pulse = self._new_pulse()
        try:
            await self._attach()
            ending = Ending("the group ended the stream")
        except GroupMismatch as error:
            ending = Ending(str(error))
        except grpc.aio.AioRpcError as error:
            # With DEADLINE_EXCEEDED it is the group that gave us up.
            is_death = error.code() != grpc.StatusCode.DEADLINE_EXCEEDED
            ending = Ending(f"{error.code().name}: {error.details()}", is_death=is_death)
        except TimeoutError:
            ending = self._trouble
        except Exception as error:
            # Whatever one group sends, the gateway goes on with the others.
            _log.exception("the connection to the group at %s failed", self.address)
            ending = Ending(repr(error))
        if not self.is_attached and ending.reason != self.last_error:
            _log.warning("group at %s is not attached: %s", self.address, ending.reason)
        return ending

    async def _attach(self) -> None:
        async with self._connect(self.address) as link:
            description = await link.Describe(
                pb.DescribeRequest(), timeout=self._config.describe_timeout_s
            )
            self._listener.check(description)
            call = link.Attach()
            helpers = [asyncio.create_task(self._write_commands(call))]
            try:
                async with asyncio.timeout(None) as deadline:
                    helpers.append(asyncio.create_task(self._watch(deadline)))
                    async for frame in call:
                        if not self.is_attached:
                            self._description, self.last_error = description, ""
                            self._refute_death()
                            self._listener.attached(self)
                            if self._config.follow_events:
                                reading = read_events(link, self, self._listener)
                                helpers.append(asyncio.create_task(reading))
                        self._take(frame)
            finally:
                for helper in helpers:
                    helper.cancel()
                await asyncio.gather(*helpers, return_exceptions=True)

    async def _write_commands(self, call: AttachCall) -> None:
        while True:
            await call.write(await self._commands.get())

    async def _watch(self, deadline: asyncio.Timeout) -> None:
        """Tells the group that we are here, and lets ``deadline`` pass where it is not."""
        pulse = self._pulse
        ending: Ending | None = None
        while ending is None:
            self._commands.put_nowait(pb.GroupCommand(is_draining=self.is_draining))
            await asyncio.sleep(pulse.beat_s)
            ending = pulse.beat(is_owed=any(s.is_owed for s in self._streams.values()))
        self._trouble = ending
        deadline.reschedule(asyncio.get_running_loop().time())

    def _take(self, frame: pb.StepFrame) -> None:
        last_load, load = self._last_load, (frame.step, frame.num_submits, frame.load)
        self._pulse.frame(frame.step if last_load is None else max(frame.step, last_load[0]))
        if last_load is None or (load != last_load and frame.step >= last_load[0]):
            # A heartbeat during a long step repeats what the last step said. Routing must not
            # take that for news that the requests sent since are in those numbers. Nor may what
            # comes late: counters that go back are taken for negative speeds.
            self._last_load = load
            num_submits = frame.num_submits if frame.HasField("num_submits") else None
            self._listener.load(self, frame.load, step=frame.step, num_submits=num_submits)
        for delta in frame.deltas:
            is_error = delta.HasField("error")
            if is_error and delta.error.code in _CLOSED:
                # Now, not once the request's reader is awake: by then, another group may have
                # the same name.
                self._listener.turned_away(self)
            key = (delta.request_id, delta.attempt)
            stream = self._streams.get(key)
            if stream is None:
                # Aborted here while the group was still at it; or given to it twice, and nobody
                # would ever read that to its end.
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
            _log.info("group %s stops, with %d requests", self._name, len(self._streams))
            self._listener.turned_away(self)
        self._phase = phase
        if phase == pb.StepFrame.HANDING_OVER and self._listener.has_other(self):
            for stream in list(self._streams.values()):
                stream.lose(HandedOver(f"the group at {self.address} drains"))
                stream.abort()

    @property
    def _name(self) -> str:
        return f"{self.description.group_id} at {self.address}"

    def _new_pulse(self) -> Pulse:
        return Pulse(
            silence_timeout_s=self._config.silence_timeout_s,
            step_deadline_s=self._config.step_deadline_s,
        )

    def _abort(self, stream: GroupStream) -> None:
        if self._streams.pop(stream.key, None) is not None:
            self._send_abort(stream.key)

    def _send_abort(self, key: tuple[str, int]) -> None:
        request_id, attempt = key
        abort = pb.Abort(request_id=request_id, attempt=attempt)
        self._commands.put_nowait(pb.GroupCommand(abort=abort))

    def _give_credit(self, stream: GroupStream, token_limit: int) -> None:
        if stream.key in self._streams:
            request_id, attempt = stream.key
            credit = pb.Credit(request_id=request_id, attempt=attempt, token_limit=token_limit)
            self._commands.put_nowait(pb.GroupCommand(credit=credit))

    def _detach(self, ending: Ending, *, is_trouble: bool = True) -> None:
        self.last_error = ending.reason
        self._commands = asyncio.Queue()  # What it still held was meant for the broken stream.
        if not self.is_attached:
            return
        _log.log(
            logging.WARNING if is_trouble and not self._phase else logging.INFO,
            "group %s is gone: %s; %d requests go on elsewhere",
            self._name,
            ending.reason,
            len(self._streams),
        )
        death = Death(self.description.group_id, self.description.epoch)
        self._death = death if ending.is_refutable else None
        self._listener.detached(self)
        self._description = self._last_load = None
        self._phase = pb.StepFrame.SERVING
        message = f"the group at {self.address} is lost: {ending.reason}"
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.lose(GroupDied(message, death) if ending.is_death else GroupLost(message))

    def _refute_death(self) -> None:
        death, self._death = self._death, None
        if death is not None and death.epoch == self.description.epoch:
            death.is_refuted = True
