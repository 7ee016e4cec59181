"""A replica group's gRPC service over its `EngineLoop`: what gateways see of a group.

Each gateway has one `Attach` stream. What its requests brought in a step travels in one frame; a
gateway that reads slowly gets the same in fewer, larger frames. When the stream ends, however it
ends, the engine no longer holds anything for it.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from quire.cluster.engine_loop import EngineLoop, StepResult
from quire.cluster.event_feed import EventFeed
from quire.cluster.wire import (
    events_to_proto,
    logprobs_to_proto,
    params_from_proto,
    stats_to_proto,
    tokens_from_bytes,
)
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc, inference_pb2
from quire.worker.errors import InvalidRequest, QueueFull, QuireError, RankFailure
from quire.worker.request import Request, TokenDelta

_FINISH_REASONS = {
    "stop": inference_pb2.FINISH_REASON_STOP,
    "length": inference_pb2.FINISH_REASON_LENGTH,
    "abort": inference_pb2.FINISH_REASON_ABORT,
}

Context = grpc.aio.ServicerContext[object, object]


class GroupService(group_pb2_grpc.ReplicaGroupServicer):
    """Serves one engine to gateways."""

    def __init__(
        self,
        engine_loop: EngineLoop,
        description: pb.GroupDescription,
        *,
        heartbeat_s: float = 0.25,
        events_heartbeat_s: float = 1.0,
        digest_s: float = 10.0,
        buffer_events: int = 16_384,
    ) -> None:
        self.draining = False
        """New requests are turned away; those that run go on to their end."""
        self._engine_loop = engine_loop
        self._description = description
        self._heartbeat_s = heartbeat_s
        self._feed = EventFeed(
            engine_loop,
            heartbeat_s=events_heartbeat_s,
            digest_s=digest_s,
            buffer_events=buffer_events,
        )
        self._names = itertools.count()

    async def drain(self, *, timeout_s: float) -> int:
        """Turns new requests away and waits for the others; returns how many are left."""
        self.draining = True
        idle = asyncio.Event()

        def on_step(_: StepResult) -> None:
            if not self._engine_loop.num_requests:
                idle.set()

        stop = self._engine_loop.listen(on_step)
        try:
            async with asyncio.timeout(timeout_s):
                if self._engine_loop.num_requests:
                    await idle.wait()
        except TimeoutError:
            pass
        finally:
            stop()
        return self._engine_loop.num_requests

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.GroupDescription:
        return self._description

    # The handlers write to the context instead of yielding: a cancelled call then raises inside
    # them at once, where a suspended generator would wait for the garbage collector.

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GroupCommand], context: Context
    ) -> None:
        failed = self._engine_loop.failed
        if failed.done():  # Before any frame, which would tell the gateway that it may submit.
            await self._abort_failed(context)
        attachment = _Attachment(self, self._engine_loop, name=f"gateway-{next(self._names)}")
        reader = asyncio.create_task(attachment.read(request_iterator))
        try:
            await context.write(attachment.take_frame())
            while not (reader.done() or failed.done()):
                await attachment.wait(self._heartbeat_s)
                await context.write(attachment.take_frame())
            if failed.done():
                # It may have failed during the last write: its requests are told all the same.
                await context.write(attachment.take_frame())
                await self._abort_failed(context)
        finally:
            attachment.close()
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def Events(  # type: ignore[override]
        self, request: pb.EventsRequest, context: Context
    ) -> None:
        batches = self._feed.follow(
            epoch=request.epoch, next_seq=request.next_seq, buckets=request.buckets
        )
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    await context.write(events_to_proto(batch))
        except RankFailure as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the group failed: {error}")

    async def _abort_failed(self, context: Context) -> None:
        message = f"the group failed: {self._engine_loop.failed.result()}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, message)


class _Attachment:
    """One gateway's requests, and the deltas that it has not been sent yet."""

    def __init__(self, service: GroupService, engine_loop: EngineLoop, *, name: str) -> None:
        self._service = service
        self._engine_loop = engine_loop
        self._name = name
        self._deltas: list[pb.TokenDelta] = []
        self._requests: dict[tuple[str, int], str] = {}
        self._changed = asyncio.Event()

    async def read(self, commands: AsyncIterator[pb.GroupCommand]) -> None:
        """Does what the gateway says, until it says no more."""
        try:
            async for command in commands:
                if command.HasField("submit"):
                    self._submit(command.submit)
                else:
                    self._abort(command.abort)
        finally:
            self._changed.set()

    async def wait(self, timeout_s: float) -> None:
        """Returns when there are deltas, or after ``timeout_s``: it is time for a heartbeat."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return

    def take_frame(self) -> pb.StepFrame:
        self._changed.clear()
        deltas, self._deltas = self._deltas, []
        return pb.StepFrame(
            step=self._engine_loop.num_steps,
            load=stats_to_proto(self._engine_loop.stats),
            deltas=deltas,
        )

    def close(self) -> None:
        for engine_id in self._requests.values():
            self._engine_loop.abort(engine_id)
        self._requests.clear()

    def _submit(self, submit: pb.Submit) -> None:
        key = (submit.request_id, submit.attempt)
        if self._service.draining:
            self._refuse(key, pb.GroupError.DRAINING, "the group is draining")
            return
        if key in self._requests:
            self._refuse(
                key,
                pb.GroupError.INVALID_REQUEST,
                f"request {key[0]!r}, attempt {key[1]}, is running already",
            )
            return
        engine_id = f"{self._name}/{key[0]}/{key[1]}"
        try:
            request = _request(submit, engine_id=engine_id)
        except InvalidRequest as error:
            self._refuse(key, pb.GroupError.INVALID_REQUEST, str(error))
            return
        self._requests[key] = engine_id
        self._engine_loop.submit(request, lambda output: self._take(key, output))

    def _abort(self, abort: pb.Abort) -> None:
        engine_id = self._requests.pop((abort.request_id, abort.attempt), None)
        if engine_id is not None:
            self._engine_loop.abort(engine_id)

    def _take(self, key: tuple[str, int], output: TokenDelta | QuireError) -> None:
        if isinstance(output, QuireError):
            self._requests.pop(key, None)
            self._refuse(key, _error_code(output), str(output))
            return
        if output.finish_reason is not None:
            self._requests.pop(key, None)
        self._send(
            pb.TokenDelta(
                request_id=key[0],
                attempt=key[1],
                token_offset=output.token_offset,
                token_ids=output.token_ids,
                logprobs=logprobs_to_proto(output.logprobs),
                finish_reason=_FINISH_REASONS.get(output.finish_reason or ""),
                num_cached_tokens=output.num_cached_tokens,
            )
        )

    def _refuse(self, key: tuple[str, int], code: pb.GroupError.Code, message: str) -> None:
        error = pb.GroupError(code=code, message=message)
        self._send(pb.TokenDelta(request_id=key[0], attempt=key[1], error=error))

    def _send(self, delta: pb.TokenDelta) -> None:
        self._deltas.append(delta)
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
