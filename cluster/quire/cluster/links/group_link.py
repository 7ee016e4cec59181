"""How a gateway reaches one replica group: the calls of `quire.v1.ReplicaGroup`, over anything.

A cluster speaks gRPC. The simulation in ``tests/sim`` has a network of its own, in which the same
clients meet every fault that a network has.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio

from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc

_OPTIONS = [
    # A snapshot of a million blocks is 32 MB.
    ("grpc.max_receive_message_length", 256 * 2**20),
    # Connections of different attempts share nothing, least of all gRPC's own backoff.
    ("grpc.use_local_subchannel_pool", 1),
]


class AttachCall(Protocol):
    """An `Attach` stream: commands down, frames up."""

    async def write(self, request: pb.GroupCommand) -> None:
        """Waits where too much was written and not yet sent."""

    def __aiter__(self) -> AsyncIterator[pb.StepFrame]: ...


class EventsCall(Protocol):
    """An `Events` stream."""

    def __aiter__(self) -> AsyncIterator[pb.EventBatch]: ...


class _Describe(Protocol):
    def __call__(
        self, request: pb.DescribeRequest, *, timeout: float
    ) -> Awaitable[pb.GroupDescription]: ...


class _Attach(Protocol):
    def __call__(self) -> AttachCall: ...


class _Events(Protocol):
    def __call__(self, request: pb.EventsRequest) -> EventsCall: ...


class GroupLink(Protocol):
    """One connection to a group. Every call on it may raise ``grpc.aio.AioRpcError``."""

    @property
    def Describe(self) -> _Describe: ...

    @property
    def Attach(self) -> _Attach: ...

    @property
    def Events(self) -> _Events: ...


Connect = Callable[[str], contextlib.AbstractAsyncContextManager[GroupLink]]
"""Opens a connection to ``host:port``. Leaving it ends every call on it."""


@contextlib.asynccontextmanager
async def grpc_connect(
    address: str, *, credentials: grpc.ChannelCredentials | None = None
) -> AsyncIterator[GroupLink]:
    """A gRPC channel of its own, with TLS where there are ``credentials``."""
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=_OPTIONS)
    async with channel:
        yield group_pb2_grpc.ReplicaGroupStub(channel)
