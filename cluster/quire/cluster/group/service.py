"""A replica group's gRPC service, through which gateways use its `EngineLoop`.

Each gateway has one `Attach` stream. One frame per step carries the tokens of all its requests; a
gateway that reads slowly gets fewer, larger frames. When the stream ends for any reason, or the
gateway falls silent, its requests are aborted and their blocks freed.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from quire.cluster.edge.auth import ApiKeys, GrpcAuth
from quire.cluster.edge.grpc_messages import GrpcMessages, Malformed
from quire.cluster.features.adapters.group import GroupAdapters
from quire.cluster.features.kv_events.contents import with_contents
from quire.cluster.features.kv_exchange.peers import Peers
from quire.cluster.group.engine_loop import EngineLoop, StepResult
from quire.cluster.group.event_feed import EventFeed
from quire.cluster.group.session import Door, GatewaySession, TracesTo
from quire.cluster.wire import events_to_proto
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc
from quire.worker.request.errors import AdapterError, RankFailure

_log = logging.getLogger(__name__)

_IDLE_CHECK_S = 0.02
_LAST_WRITE_S = 1.0
_LINGER_S = 1.0
"""How long a draining group stays after the last handed-over request or loan, because the next
group may still ask for its blocks."""
_OPTIONS = [
    # Without keepalive, a connection whose other end vanished would keep its call forever.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A longer message ends the stream with all its requests. A prompt of a million tokens is 4 MB,
    # gRPC's default; everything else that a client can make long has its own limit.
    ("grpc.max_receive_message_length", 256 * 2**20),
]

_REFUSAL = "without this group's token, which Serve tells the gateways of its own cluster alone"

NO_ADAPTERS = "this model takes no adapters: serve it with --enable-lora"
NO_CONTENTS = (
    "this group does not remember the tokens of its blocks: serve its model with --kv-events"
)
NO_PEERS = "this group has nothing to do with others: serve its model with --kv-transfer"

Context = grpc.aio.ServicerContext[object, object]


class GroupService(group_pb2_grpc.ReplicaGroupServicer):
    """Serves one engine to gateways.

    ``gateway_timeout_s``: silence after which a gateway's requests are aborted. ``adapters``: the
    adapters that the group can run; ``None`` if it takes none. ``peers``: its exchange of blocks
    with other groups; ``None`` without KV transfer. ``traces``: the receiver of spans.
    """

    def __init__(
        self,
        engine_loop: EngineLoop,
        description: pb.GroupDescription,
        *,
        heartbeat_s: float = 0.25,
        gateway_timeout_s: float = 6.0,
        events_heartbeat_s: float = 1.0,
        buffer_events: int = 16_384,
        adapters: GroupAdapters | None = None,
        peers: Peers | None = None,
        traces: TracesTo | None = None,
    ) -> None:
        self._engine_loop = engine_loop
        self._description = description
        self._heartbeat_s = heartbeat_s
        self._gateway_timeout_s = gateway_timeout_s
        self._feed = EventFeed(
            engine_loop, heartbeat_s=events_heartbeat_s, buffer_events=buffer_events
        )
        self._contents = engine_loop.contents
        self._names = itertools.count()
        self._adapters = adapters
        self._peers = peers
        self._door = Door(on_drain=self._on_drain, adapters=adapters, traces=traces)
        self._attachments: list[GatewaySession] = []
        self._is_stopping = False
        self._is_closing = False
        self._num_prefilled_tokens = 0
        engine_loop.listen(self._on_step)

    @property
    def num_requests(self) -> int:
        """Number of requests that run, or whose output was not completely sent."""
        num_attached = sum([attachment.num_requests for attachment in self._attachments])
        return max(self._engine_loop.num_requests, num_attached)

    async def drain(self, *, timeout_s: float, handover_s: float = 0.0) -> int:
        """Refuses new requests and lets running ones end; returns how many did not.

        In the last ``handover_s`` of ``timeout_s``, gateways are asked to continue the requests on
        other groups, if they have any; at the end, they must.
        """
        self._is_stopping = True
        self._enter(pb.StepFrame.DRAINING)
        await self._wait_until_idle(max(0.0, timeout_s - handover_s))
        is_handing_over = self.num_requests > 0
        self._enter(pb.StepFrame.HANDING_OVER)
        await self._wait_until_idle(min(handover_s, timeout_s), lingers=is_handing_over)
        num_left = self.num_requests
        self._is_closing = True
        for attachment in self._attachments:
            attachment.hand_back("the group is stopping")
            attachment.wake()
        return num_left

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.GroupDescription:
        return self._description

    # The handlers write to the context instead of yielding: a cancelled call then raises inside
    # them at once, where a suspended generator would wait for the garbage collector.

    async def Attach(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.GroupCommand], context: Context
    ) -> None:
        failed = self._engine_loop.failed
        if failed.done():  # Before any frame, after which the gateway may submit.
            await self._abort_failed(context)
        if self._is_closing:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the group is stopping")
        attachment = GatewaySession(
            self._engine_loop, self._door, name=f"gateway-{next(self._names)}"
        )
        self._attachments.append(attachment)

        def wake(_: object) -> None:
            attachment.wake()  # A gateway without requests here must learn of the failure too.

        failed.add_done_callback(wake)
        ear = asyncio.create_task(attachment.listen(self._gateway_timeout_s))
        writer = asyncio.create_task(self._write_frames(attachment, context))
        tasks = [writer, asyncio.create_task(attachment.read(request_iterator)), ear]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            is_silent = ear.done()
        finally:
            failed.remove_done_callback(wake)
            self._attachments.remove(attachment)
            attachment.close()
            # gRPC takes no status during a write, and the gateway waits for the status. A write to
            # a gateway that is gone may never return.
            try:
                await asyncio.wait([writer], timeout=_LAST_WRITE_S)
            finally:
                for task in tasks:
                    task.cancel()
                outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        if failed.done():
            await self._abort_failed(context)
        for error in outcomes:
            if isinstance(error, Malformed):
                raise error
            # gRPC's own errors mean that the gateway is gone.
            if isinstance(error, Exception) and not isinstance(error, grpc.aio.BaseError):
                _log.error("a gateway's stream failed", exc_info=error)
                message = f"the group raised {type(error).__name__}; its log has more"
                await context.abort(grpc.StatusCode.INTERNAL, message)
        if is_silent:
            message = f"the gateway said nothing for {self._gateway_timeout_s:g} s"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, message)

    async def Events(  # type: ignore[override]
        self, request: pb.EventsRequest, context: Context
    ) -> None:
        contents = self._contents
        if request.with_tokens and contents is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NO_CONTENTS)
        batches = self._feed.follow(
            epoch=request.epoch, next_seq=request.next_seq, buckets=request.buckets
        )
        try:
            async with contextlib.aclosing(batches):
                async for batch in batches:
                    if contents is None or not request.with_tokens:
                        await context.write(events_to_proto(batch))
                        continue
                    async with contextlib.aclosing(with_contents(batch, contents)) as messages:
                        async for message in messages:
                            await context.write(message)
        except RankFailure as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, f"the group failed: {error}")

    async def HoldAdapter(
        self, request: pb.HoldAdapterRequest, context: Context
    ) -> pb.HoldAdapterResponse:
        if self._adapters is None:
            return pb.HoldAdapterResponse(refusal=NO_ADAPTERS)
        return await self._adapters.hold(request.digest)

    async def WriteAdapter(
        self, request_iterator: AsyncIterator[pb.AdapterPiece], context: Context
    ) -> pb.WriteAdapterResponse:
        if self._adapters is None:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_ADAPTERS)
        else:
            try:
                await self._adapters.write(request_iterator)
            except AdapterError as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        return pb.WriteAdapterResponse()

    async def ReadAdapter(  # type: ignore[override]
        self, request: pb.ReadAdapterRequest, context: Context
    ) -> None:
        pieces = self._adapters.read(request.digest) if self._adapters is not None else None
        if pieces is None:
            message = f"the adapter {request.digest!r} is not here"
            await context.abort(grpc.StatusCode.NOT_FOUND, message)
            return
        async for piece in pieces:
            await context.write(piece)

    async def Blocks(self, request: pb.BlocksRequest, context: Context) -> pb.BlocksLoan:
        if self._peers is None:
            return pb.BlocksLoan(refusal=NO_PEERS)
        try:
            return await self._peers.lend(request)
        except ValueError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    async def Warm(self, request: pb.WarmRequest, context: Context) -> pb.WarmResponse:
        if self._peers is None:
            return pb.WarmResponse(error=NO_PEERS)
        return await self._peers.warm(request)

    async def _write_frames(self, attachment: GatewaySession, context: Context) -> None:
        """Sends frames until the session is closed, or the group fails or closes. In the latter
        cases a last frame has all that happened during the write before it."""
        while not (self._engine_loop.failed.done() or self._is_closing):
            await context.write(self._frame(attachment))
            await attachment.wait(self._heartbeat_s)
            if attachment.is_closed:
                return
        await context.write(self._frame(attachment))

    def _frame(self, attachment: GatewaySession) -> pb.StepFrame:
        frame = attachment.take_frame()
        frame.load.num_unsent_tokens = sum([each.num_unsent_tokens for each in self._attachments])
        # No gateway knows this alone, and a setting would be wrong when gateways are scaled.
        frame.load.num_gateways = sum([each.may_submit for each in self._attachments])
        frame.num_requests = self.num_requests
        return frame

    def _on_step(self, result: StepResult) -> None:
        """Sends each gateway a frame after each step that computed prompts, even without tokens:
        routing depends on a group's prefill progress and on when its steps begin."""
        if result.stats.num_prefilled_tokens != self._num_prefilled_tokens:
            self._num_prefilled_tokens = result.stats.num_prefilled_tokens
            for attachment in self._attachments:
                attachment.wake()

    def _on_drain(self, is_wanted: bool) -> None:
        if not self._is_stopping:
            self._enter(pb.StepFrame.DRAINING if is_wanted else pb.StepFrame.SERVING)

    def _enter(self, phase: pb.StepFrame.Phase) -> None:
        self._door.phase = phase
        for attachment in self._attachments:
            attachment.wake()

    async def _wait_until_idle(self, timeout_s: float, *, lingers: bool = False) -> None:
        """Waits until there are no requests and no loans. With ``lingers``, also waits `_LINGER_S`
        for loans to the groups that take over the requests, which ask only after these have left.
        """
        loop = asyncio.get_running_loop()
        idle_s = loop.time()
        linger_s = _LINGER_S if lingers and self._peers is not None else 0.0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    if self.num_requests or (self._peers is not None and self._peers.num_loans):
                        idle_s = loop.time()
                    elif loop.time() - idle_s >= linger_s:
                        return
                    await asyncio.sleep(_IDLE_CHECK_S)
        except TimeoutError:
            return

    async def _abort_failed(self, context: Context) -> None:
        message = f"the group failed: {self._engine_loop.failed.result()}"
        await context.abort(grpc.StatusCode.UNAVAILABLE, message)


def build_group_server(service: GroupService, *, token: str = "") -> grpc.aio.Server:
    """A server without ports. The caller adds a port, and starts and stops the server. ``token``
    must be in every call; an empty one accepts all calls."""
    interceptors: list[grpc.aio.ServerInterceptor] = [GrpcMessages()]
    if token:  # First, so that calls without the token learn nothing else.
        interceptors.insert(0, GrpcAuth(ApiKeys.of_token(token), why=_REFUSAL))
    server = grpc.aio.server(interceptors=interceptors, options=_OPTIONS)
    group_pb2_grpc.add_ReplicaGroupServicer_to_server(service, server)
    return server
