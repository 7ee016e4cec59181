"""One gateway's requests at a group, and their output that was not sent yet.

A request's tokens are sent up to its reader's credit; further tokens wait here. A stalled reader
costs four bytes a token, but neither KV nor engine time, because the engine finishes the request
and frees its blocks. Waiting tokens are merged, so that a frame has at most one delta with tokens
for each request, however long the last frame took to write.

A resumed request is acknowledged first, and goes to the engine once the frame with the
acknowledgement was written. If this group dies too, the gateway then knows whether the request can
have killed it.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, replace

from quire.cluster.features.adapters.group import GroupAdapters
from quire.cluster.features.tracing.attempt_spans import AttemptSpans
from quire.cluster.features.tracing.tracing import Span
from quire.cluster.group.engine_loop import EngineLoop
from quire.cluster.group.output_buffer import Key, OutputBuffer
from quire.cluster.wire import FINISH_REASON_OF, prepared_of, stats_to_proto
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import (
    BrokenLogits,
    ConstraintRefused,
    InvalidRequest,
    QueueFull,
    QuireError,
)
from quire.worker.request.outputs import TokenDelta
from quire.worker.request.request import Prepared

_LISTENS_IN = 4  # Checks within a gateway's timeout.


@dataclass(frozen=True, slots=True)
class TracesTo:
    """Receives the spans of a group."""

    group_id: str
    add: Callable[[Iterable[Span]], None]


@dataclass(slots=True, eq=False)
class Door:
    """State shared by a group's `GatewaySession`s."""

    phase: pb.StepFrame.Phase = pb.StepFrame.SERVING
    on_drain: Callable[[bool], None] = lambda is_wanted: None
    """Called when a gateway asks the group to drain, or to take requests again."""
    adapters: GroupAdapters | None = None
    """The adapters that the group can run; ``None`` if it takes none."""
    traces: TracesTo | None = None
    """The receiver of the spans of sampled attempts; ``None`` if tracing is off."""
    isolated: OutputBuffer | None = None
    """The isolated request that is not cleared yet, from any gateway; there is at most one."""


@dataclass(frozen=True, slots=True)
class _Submitted:
    """A request that the engine does not have yet."""

    key: Key
    work: OutputBuffer
    request: Prepared
    number: int
    """The number of the request among the gateway's submits, from 1."""


class GatewaySession:
    """The state of one `Attach` stream, and closed with it."""

    def __init__(self, engine_loop: EngineLoop, door: Door, *, name: str) -> None:
        self.is_closed = False
        self.num_unsent_tokens = 0
        """Number of tokens that wait for credit or for the next frame."""
        self._engine_loop = engine_loop
        self._door = door
        self._name = name
        self._numbers = itertools.count()
        self._works: dict[Key, OutputBuffer] = {}
        self._sendable: dict[Key, OutputBuffer] = {}
        self._refusals: list[pb.TokenDelta] = []
        self._turned_away = False  # Whether a request was refused for a drain since the last frame.
        self._received: list[_Submitted] = []  # Acknowledged in the next frame.
        self._acknowledged: list[_Submitted] = []  # Acknowledged in the last frame.
        self._cleared: OutputBuffer | None = None
        self._changed = asyncio.Event()
        self._is_heard = True
        self._num_silent = 0  # Silent checks in a row.
        self._is_draining = False
        self._num_submits = 0
        self._unshown: deque[tuple[int, int]] = deque()
        # Submits that the engine's load may not count yet: their numbers in the engine loop and in
        # this session.

    @property
    def num_requests(self) -> int:
        """Number of requests whose end was not sent to the gateway."""
        return len(self._works)

    @property
    def may_submit(self) -> bool:
        """Whether the gateway may send requests. False once it drains, and while it is silent: if
        its connection was lost, it may have attached again over another one."""
        return not self._is_draining and (self._is_heard or not self._num_silent)

    async def read(self, commands: AsyncIterator[pb.GroupCommand]) -> None:
        """Executes the gateway's commands until its stream ends."""
        async for command in commands:
            self._is_heard = True
            self._is_draining |= command.is_draining
            kind = command.WhichOneof("command")
            if kind == "submit":
                self._submit(command.submit)
            elif kind == "abort":
                key = (command.abort.request_id, command.abort.attempt)
                self._forget(key, "its gateway ended it")
            elif kind == "credit":
                self._extend(command.credit)
            elif kind == "drain":
                self._door.on_drain(command.drain)

    async def listen(self, timeout_s: float) -> None:
        """Returns once the gateway has sent nothing for ``timeout_s``.

        Silence is counted in checks, so that a pause of this process counts as one check at most.
        """
        while self._num_silent < _LISTENS_IN:
            self._is_heard = False
            await asyncio.sleep(timeout_s / _LISTENS_IN)
            self._num_silent = 0 if self._is_heard else self._num_silent + 1

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is something to send, or after ``timeout_s`` for a heartbeat."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Makes `wait` return, so that a frame is sent even if it is empty."""
        self._changed.set()

    def take_frame(self) -> pb.StepFrame:
        self._changed.clear()
        acknowledged, self._acknowledged = self._acknowledged, self._received
        self._received = []
        for submitted in acknowledged:
            self._begin(submitted)
        if self._acknowledged:
            self._changed.set()  # They begin with the next frame, when this one was written.
        if self._cleared is not None:
            # Only after its tokens were written: if the next isolated request kills the group at
            # once, the gateway must know that this one was cleared.
            self._clear(self._cleared)
            self._cleared = None
        deltas = [_acknowledgement(submitted) for submitted in self._acknowledged]
        sendable, self._sendable = self._sendable, {}
        for key, work in sendable.items():
            delta = work.take()
            self.num_unsent_tokens -= len(delta.token_ids)
            deltas.append(delta)
            if delta.finish_reason:
                del self._works[key]
                self._tell(work, FINISH_REASON_OF[delta.finish_reason])
            if work is self._door.isolated and work.is_cleared:
                self._cleared = work
                self._changed.set()
        refusals, self._refusals = self._refusals, []
        phase = self._door.phase
        if self._turned_away and phase == pb.StepFrame.SERVING:
            # After such a refusal the gateway sends no requests until it sees the phase change back
            # to SERVING, so it must see another phase first.
            phase = pb.StepFrame.DRAINING
            self._changed.set()
        self._turned_away = False
        return pb.StepFrame(
            step=self._engine_loop.num_steps,
            load=stats_to_proto(self._engine_loop.stats),
            deltas=deltas + refusals,
            phase=phase,
            num_submits=self._num_shown(),
        )

    def hand_back(self, message: str) -> None:
        """Ends every request here and asks the gateway to continue it on another group."""
        for key in list(self._works):
            self._end(key, _draining(message))

    def close(self) -> None:
        self.is_closed = True
        for key in list(self._works):
            self._forget(key, "the connection to its gateway ended")
        self.wake()

    def _submit(self, submit: pb.Submit) -> None:
        key = (submit.request_id, submit.attempt)
        self._num_submits += 1
        if self._door.phase != pb.StepFrame.SERVING:
            self._turned_away = True
            self._refuse(key, _draining("the group is draining"))
            return
        if self._engine_loop.failed.done():
            # Not GROUP_FAILED: the request came after the failure and cannot have caused it.
            self._refuse(key, self._failed_before())
            return
        if key in self._works:
            return  # A duplicate of a running request. A refusal would look like its end.
        if submit.isolated_tokens and self._door.isolated is not None:
            message = "the group runs another isolated request"
            self._refuse(key, pb.GroupError(code=pb.GroupError.OTHER_ISOLATED, message=message))
            return
        # Numbered, so that late outputs of an aborted request are not attributed to this one.
        engine_id = f"{self._name}/{key[0]}/{key[1]}/{next(self._numbers)}"
        try:
            request = prepared_of(submit, request_id=engine_id)
        except InvalidRequest as error:
            self._refuse(key, _group_error(error))
            return
        adapters = self._door.adapters
        if request.adapter and adapters is not None and not adapters.has(request.adapter):
            message = f"the group's node has the adapter {request.adapter} no more"
            self._refuse(key, pb.GroupError(code=pb.GroupError.ADAPTER_MISSING, message=message))
            return
        work = OutputBuffer(engine_id, submit.token_limit)
        if submit.isolated_tokens:
            self._door.isolated = work
            work.cleared_at = len(request.resumed_token_ids) + submit.isolated_tokens
        if submit.traceparent and self._door.traces is not None:
            work.spans = AttemptSpans(
                submit.traceparent,
                trace_state=submit.tracestate,
                group_id=self._door.traces.group_id,
                num_resumed_tokens=len(request.resumed_token_ids),
            )
            request = replace(request, progress=work.spans.progress)
        self._works[key] = work
        submitted = _Submitted(key, work, request, self._num_submits)
        if submit.attempt > 1:
            self._received.append(submitted)
            self._changed.set()
        else:
            self._begin(submitted)

    def _begin(self, submitted: _Submitted) -> None:
        key, work = submitted.key, submitted.work
        if self._works.get(key) is not work:
            return  # Aborted meanwhile.
        if self._engine_loop.failed.done():
            error = self._failed_before()
            self._forget(key, error.message)
            self._refuse(key, error)
            return
        self._engine_loop.submit(submitted.request, lambda output: self._take(key, work, output))
        self._unshown.append((self._engine_loop.num_submitted, submitted.number))

    def _num_shown(self) -> int:
        while self._unshown and self._unshown[0][0] <= self._engine_loop.num_added:
            self._unshown.popleft()
        unshown = [each.number for each in self._acknowledged + self._received]
        unshown += [number for _, number in self._unshown]
        return min(unshown, default=self._num_submits + 1) - 1

    def _failed_before(self) -> pb.GroupError:
        return _draining(f"the group had failed before: {self._engine_loop.failed.result()}")

    def _extend(self, credit: pb.Credit) -> None:
        key = (credit.request_id, credit.attempt)
        work = self._works.get(key)
        if work is not None:
            work.token_limit = max(work.token_limit, credit.token_limit)
            self._offer(key, work)

    def _take(self, key: Key, work: OutputBuffer, output: TokenDelta | QuireError) -> None:
        if isinstance(output, QuireError):
            self._end(key, _group_error(output))
            return
        spans = work.spans
        if spans is not None and (output.finish_reason or not spans.has_begun):
            spans.took(output, num_steps=self._engine_loop.num_steps)
        work.add(key, output)
        self.num_unsent_tokens += len(output.token_ids)
        self._offer(key, work)

    def _offer(self, key: Key, work: OutputBuffer) -> None:
        if work.can_send:
            self._sendable[key] = work
            self._changed.set()

    def _end(self, key: Key, error: pb.GroupError) -> None:
        """Ends a request with ``error``, after sending the tokens within its credit.

        If these were not sent, another group would compute them again, and that would count as
        having got past the cause of the group's death.
        """
        work = self._works.get(key)
        if work is not None and work.can_send:
            delta = work.take()
            self.num_unsent_tokens -= len(delta.token_ids)
            self._refusals.append(delta)
        name = _name_of(error)
        if error.code == pb.GroupError.DRAINING:
            self._forget(key, error.message)
        else:  # Messages may quote the request, which spans must not have.
            is_ours = error.code == pb.GroupError.GROUP_FAILED
            self._forget(key, error.message if is_ours else name, error_type=name)
        self._refuse(key, error)

    def _forget(self, key: Key, why: str, *, error_type: str = "") -> None:
        work = self._works.pop(key, None)
        if work is None:
            return
        self._sendable.pop(key, None)
        self.num_unsent_tokens -= work.num_unsent
        self._clear(work)
        self._engine_loop.abort(work.engine_id)
        self._tell(work, why, error_type=error_type)

    def _tell(self, work: OutputBuffer, outcome: str, *, error_type: str = "") -> None:
        """Sends the spans of an attempt that has ended."""
        if work.spans is not None and self._door.traces is not None:
            spans = work.spans.ended(
                outcome,
                num_tokens=work.num_output,
                num_steps=self._engine_loop.num_steps,
                error_type=error_type,
            )
            self._door.traces.add(spans)

    def _clear(self, work: OutputBuffer) -> None:
        if self._door.isolated is work:
            self._door.isolated = None

    def _refuse(self, key: Key, error: pb.GroupError) -> None:
        self._refusals.append(pb.TokenDelta(request_id=key[0], attempt=key[1], error=error))
        self._changed.set()


def _acknowledgement(submitted: _Submitted) -> pb.TokenDelta:
    request_id, attempt = submitted.key
    num_resumed = len(submitted.request.resumed_token_ids)
    return pb.TokenDelta(request_id=request_id, attempt=attempt, token_offset=num_resumed)


def _name_of(error: pb.GroupError) -> str:
    return pb.GroupError.Code.Name(error.code).lower()


def _draining(message: str) -> pb.GroupError:
    return pb.GroupError(code=pb.GroupError.DRAINING, message=message)


def _group_error(error: QuireError) -> pb.GroupError:
    param = error.param if isinstance(error, InvalidRequest) else None
    return pb.GroupError(code=_error_code(error), message=str(error), param=param or "")


def _error_code(error: QuireError) -> pb.GroupError.Code:
    if isinstance(error, ConstraintRefused):
        return pb.GroupError.CONSTRAINT_REFUSED
    if isinstance(error, InvalidRequest):
        return pb.GroupError.INVALID_REQUEST
    if isinstance(error, BrokenLogits):
        return pb.GroupError.BROKEN_LOGITS
    return pb.GroupError.QUEUE_FULL if isinstance(error, QueueFull) else pb.GroupError.GROUP_FAILED
