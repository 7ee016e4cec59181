"""One gateway's requests at a group, and what it has not been sent of them yet.

A request's tokens are sent as far as its reader has given credit for, and wait here beyond that:
a reader that stalls costs four bytes a token, and neither KV nor anybody else's time, since the
engine goes on and lets go of the blocks. What waits is merged, so that a frame has at most one
delta with tokens for each request, however long the last frame took to write.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.cluster.group.engine_loop import EngineLoop
from quire.cluster.group.unsent import Key, Work
from quire.cluster.wire import params_from_proto, stats_to_proto, tokens_from_bytes
from quire.v1 import group_pb2 as pb
from quire.worker.errors import InvalidRequest, QueueFull, QuireError
from quire.worker.request import Request, TokenDelta

_LISTENS_IN = 4  # Times in a gateway's timeout that it is listened for.


@dataclass(slots=True, eq=False)
class Door:
    """Whom a group lets in: what its attachments share."""

    phase: pb.StepFrame.Phase = pb.StepFrame.SERVING
    on_probation: Work | None = None
    """The one request on probation, of whichever gateway."""


class Attachment:
    """Belongs to one `Attach` stream, and is closed with it."""

    def __init__(self, engine_loop: EngineLoop, door: Door, *, name: str) -> None:
        self.num_unsent_tokens = 0
        """Output that waits, for its reader or for the next frame."""
        self._engine_loop = engine_loop
        self._door = door
        self._name = name
        self._numbers = itertools.count()
        self._works: dict[Key, Work] = {}
        self._sendable: dict[Key, Work] = {}
        self._refusals: list[pb.TokenDelta] = []
        self._proven: Work | None = None
        self._changed = asyncio.Event()
        self._is_heard = True
        self._num_silent = 0  # Parts of its timeout, in a row.
        self._is_draining = False
        self._num_submits = 0
        self._unshown: deque[tuple[int, int]] = deque()
        # Of submits that the engine's load may not count yet: their numbers there and here.

    @property
    def num_requests(self) -> int:
        """Requests whose end the gateway has not been sent."""
        return len(self._works)

    @property
    def may_submit(self) -> bool:
        """Whether requests are to be expected of the gateway. Not once it drains; nor while it is
        silent, since where its connection was lost it may have come back over another by now."""
        return not self._is_draining and (self._is_heard or not self._num_silent)

    async def read(self, commands: AsyncIterator[pb.GroupCommand]) -> None:
        """Does what the gateway says, until it says no more."""
        async for command in commands:
            self._is_heard = True
            self._is_draining |= command.is_draining
            kind = command.WhichOneof("command")
            if kind == "submit":
                self._submit(command.submit)
            elif kind == "abort":
                self._forget((command.abort.request_id, command.abort.attempt))
            elif kind == "credit":
                self._extend(command.credit)

    async def listen(self, timeout_s: float) -> None:
        """Returns once the gateway has said nothing for ``timeout_s``.

        Counted in parts: where this process itself was stopped, no time has passed.
        """
        while self._num_silent < _LISTENS_IN:
            self._is_heard = False
            await asyncio.sleep(timeout_s / _LISTENS_IN)
            self._num_silent = 0 if self._is_heard else self._num_silent + 1

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is something to send, or after ``timeout_s``, for a heartbeat."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Has a frame sent, whether or not there is anything in it."""
        self._changed.set()

    def take_frame(self) -> pb.StepFrame:
        self._changed.clear()
        if self._proven is not None:
            # Only now that what proves it was written: should the next suspect kill the group at
            # once, the gateway must know that this one was past it.
            self._acquit(self._proven)
            self._proven = None
        deltas = []
        sendable, self._sendable = self._sendable, {}
        for key, work in sendable.items():
            delta = work.take()
            self.num_unsent_tokens -= len(delta.token_ids)
            deltas.append(delta)
            if delta.finish_reason:
                del self._works[key]
            if work is self._door.on_probation and work.is_proven:
                self._proven = work
                self._changed.set()
        refusals, self._refusals = self._refusals, []
        return pb.StepFrame(
            step=self._engine_loop.num_steps,
            load=stats_to_proto(self._engine_loop.stats),
            deltas=deltas + refusals,
            phase=self._door.phase,
            num_submits=self._num_shown(),
        )

    def hand_back(self, message: str) -> None:
        """Ends every request here and asks the gateway to go on with it elsewhere."""
        for key in list(self._works):
            self._end(key, pb.GroupError.DRAINING, message)

    def close(self) -> None:
        for key in list(self._works):
            self._forget(key)

    def _submit(self, submit: pb.Submit) -> None:
        key = (submit.request_id, submit.attempt)
        self._num_submits += 1
        if self._door.phase != pb.StepFrame.SERVING:
            self._refuse(key, pb.GroupError.DRAINING, "the group is draining")
            return
        if self._engine_loop.failed.done():
            # Not GROUP_FAILED: of what killed the group before it came, it is innocent.
            message = f"the group had failed before: {self._engine_loop.failed.result()}"
            self._refuse(key, pb.GroupError.DRAINING, message)
            return
        if key in self._works:
            return  # Once more what runs already. A refusal would pass for the end of that.
        if submit.probation_tokens and self._door.on_probation is not None:
            message = "another request is on probation"
            self._refuse(key, pb.GroupError.PROBATION, message)
            return
        # Numbered, lest what the engine still does for an aborted one be taken for this one's.
        engine_id = f"{self._name}/{key[0]}/{key[1]}/{next(self._numbers)}"
        try:
            request = _request(submit, engine_id=engine_id)
        except InvalidRequest as error:
            self._refuse(key, pb.GroupError.INVALID_REQUEST, str(error))
            return
        work = Work(engine_id, submit.token_limit)
        if submit.probation_tokens:
            self._door.on_probation = work
            work.proven_at = len(request.resumed_token_ids) + submit.probation_tokens
        self._works[key] = work
        self._engine_loop.submit(request, lambda output: self._take(key, work, output))
        self._unshown.append((self._engine_loop.num_submitted, self._num_submits))

    def _num_shown(self) -> int:
        while self._unshown and self._unshown[0][0] <= self._engine_loop.num_added:
            self._unshown.popleft()
        return self._unshown[0][1] - 1 if self._unshown else self._num_submits

    def _extend(self, credit: pb.Credit) -> None:
        key = (credit.request_id, credit.attempt)
        work = self._works.get(key)
        if work is not None:
            work.token_limit = max(work.token_limit, credit.token_limit)
            self._offer(key, work)

    def _take(self, key: Key, work: Work, output: TokenDelta | QuireError) -> None:
        if isinstance(output, QuireError):
            self._end(key, _error_code(output), str(output))
            return
        work.add(key, output)
        self.num_unsent_tokens += len(output.token_ids)
        self._offer(key, work)

    def _offer(self, key: Key, work: Work) -> None:
        if work.can_send:
            self._sendable[key] = work
            self._changed.set()

    def _end(self, key: Key, code: pb.GroupError.Code, message: str) -> None:
        """Ends a request that the gateway has not ended, behind the tokens that it may have.

        They were computed. And who is resumed without them, and computes them again, is taken to
        have got past what the group died of.
        """
        work = self._works.get(key)
        if work is not None and work.can_send:
            delta = work.take()
            self.num_unsent_tokens -= len(delta.token_ids)
            self._refusals.append(delta)
        self._forget(key)
        self._refuse(key, code, message)

    def _forget(self, key: Key) -> None:
        work = self._works.pop(key, None)
        if work is None:
            return
        self._sendable.pop(key, None)
        self.num_unsent_tokens -= work.num_unsent
        self._acquit(work)
        self._engine_loop.abort(work.engine_id)

    def _acquit(self, work: Work) -> None:
        if self._door.on_probation is work:
            self._door.on_probation = None

    def _refuse(self, key: Key, code: pb.GroupError.Code, message: str) -> None:
        error = pb.GroupError(code=code, message=message)
        self._refusals.append(pb.TokenDelta(request_id=key[0], attempt=key[1], error=error))
        self._changed.set()


def _request(submit: pb.Submit, *, engine_id: str) -> Request:
    return Request(
        request_id=engine_id,
        prompt_token_ids=tokens_from_bytes(submit.prompt_token_ids),
        resumed_token_ids=tokens_from_bytes(submit.resumed_token_ids),
        params=params_from_proto(submit.sampling),
        cache_salt=submit.cache_salt,
        priority=submit.priority,
    )


def _error_code(error: QuireError) -> pb.GroupError.Code:
    if isinstance(error, InvalidRequest):
        return pb.GroupError.INVALID_REQUEST
    return pb.GroupError.QUEUE_FULL if isinstance(error, QueueFull) else pb.GroupError.GROUP_FAILED
