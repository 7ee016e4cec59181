"""A gateway's connection to one replica group: the calls of `quire.v1.ReplicaGroup`.

A cluster uses gRPC. The simulation in ``tests/sim`` replaces it by a simulated network with faults,
under the same clients.
"""

import contextlib
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Protocol, Self, TypeVar

import grpc
import grpc.aio

from quire.cluster.tls import CERTIFICATE_NAME
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc

_Asked = TypeVar("_Asked", contravariant=True)
_Answer = TypeVar("_Answer", covariant=True)

_OPTIONS = [
    # A snapshot of a million blocks is 32 MB.
    ("grpc.max_receive_message_length", 256 * 2**20),
    # Connections of different attempts must not share anything, such as gRPC's own backoff.
    ("grpc.use_local_subchannel_pool", 1),
]


@dataclass(frozen=True, kw_only=True)
class GroupContact:
    """How to reach one group. The group makes its own token and certificate when it starts, and
    passes them with its address to the gateways through Serve's membership."""

    address: str
    """``host:port``."""
    token: str = field(default="", repr=False)
    """The token that every call must send; empty if the group requires none."""
    certificate: str = field(default="", repr=False)
    """The only certificate to accept at this address, PEM; empty if the group has no TLS."""

    @classmethod
    def of(cls, metadata: Mapping[str, object]) -> Self | None:
        """The contact in a group's `metadata`; ``None`` if that has no address."""
        said = {name: str(metadata.get(name) or "") for name in cls.__dataclass_fields__}
        return cls(**said) if said["address"] else None

    def metadata(self) -> dict[str, str]:
        return asdict(self)


class AttachCall(Protocol):
    """An `Attach` stream: commands to the group, frames from it."""

    async def write(self, request: pb.GroupCommand) -> None:
        """Sends a command; waits while too much is written and not yet sent."""

    def __aiter__(self) -> AsyncIterator[pb.StepFrame]: ...


class EventsCall(Protocol):
    """An `Events` stream: block events from the group."""

    def __aiter__(self) -> AsyncIterator[pb.EventBatch]: ...


class _Unary(Protocol[_Asked, _Answer]):
    def __call__(self, request: _Asked, /, *, timeout: float) -> Awaitable[_Answer]: ...


_Describe = _Unary[pb.DescribeRequest, pb.GroupDescription]
_Attach = Callable[[], AttachCall]
_Events = Callable[[pb.EventsRequest], EventsCall]
_HoldAdapter = _Unary[pb.HoldAdapterRequest, pb.HoldAdapterResponse]
_WriteAdapter = _Unary[AsyncIterator[pb.AdapterPiece], pb.WriteAdapterResponse]
_ReadAdapter = Callable[[pb.ReadAdapterRequest], AsyncIterable[pb.AdapterPiece]]
_Blocks = _Unary[pb.BlocksRequest, pb.BlocksLoan]
_Warm = _Unary[pb.WarmRequest, pb.WarmResponse]


class GroupLink(Protocol):
    """One connection to a group. Every call on it may raise ``grpc.aio.AioRpcError``."""

    @property
    def Describe(self) -> _Describe: ...

    @property
    def Attach(self) -> _Attach: ...

    @property
    def Events(self) -> _Events: ...

    @property
    def HoldAdapter(self) -> _HoldAdapter: ...

    @property
    def WriteAdapter(self) -> _WriteAdapter: ...

    @property
    def ReadAdapter(self) -> _ReadAdapter: ...

    @property
    def Blocks(self) -> _Blocks: ...

    @property
    def Warm(self) -> _Warm: ...


Connect = Callable[[str], contextlib.AbstractAsyncContextManager[GroupLink]]
"""Opens a connection to ``host:port``. Leaving the context ends every call on it."""


@contextlib.asynccontextmanager
async def grpc_connect(
    address: str, *, contacts: Mapping[str, GroupContact] | None = None
) -> AsyncIterator[GroupLink]:
    """Opens a new gRPC channel to the group at ``address``.

    ``contacts``: each group's token and certificate by address; a group without an entry is called
    without a token and without TLS.
    """
    contact = (contacts or {}).get(address) or GroupContact(address=address)
    if contact.certificate:
        root = grpc.ssl_channel_credentials(contact.certificate.encode())
        # The group is identified by this certificate and not by a host name.
        options = [*_OPTIONS, ("grpc.ssl_target_name_override", CERTIFICATE_NAME)]
        channel = grpc.aio.secure_channel(address, root, options=options)
    else:
        channel = grpc.aio.insecure_channel(address, options=_OPTIONS)
    async with channel:
        stub: group_pb2_grpc.ReplicaGroupAsyncStub = group_pb2_grpc.ReplicaGroupStub(channel)
        yield _Authorized(stub, token=contact.token) if contact.token else stub


class _Authorized:
    """Adds the group's token to the calls of a stub."""

    def __init__(self, stub: "group_pb2_grpc.ReplicaGroupAsyncStub", *, token: str) -> None:
        metadata = (("authorization", f"Bearer {token}"),)
        self.Describe: _Describe = partial(stub.Describe, metadata=metadata)
        self.Attach: _Attach = partial(stub.Attach, metadata=metadata)
        self.Events: _Events = partial(stub.Events, metadata=metadata)
        self.HoldAdapter: _HoldAdapter = partial(stub.HoldAdapter, metadata=metadata)
        self.WriteAdapter: _WriteAdapter = partial(stub.WriteAdapter, metadata=metadata)
        self.ReadAdapter: _ReadAdapter = partial(stub.ReadAdapter, metadata=metadata)
        self.Blocks: _Blocks = partial(stub.Blocks, metadata=metadata)
        self.Warm: _Warm = partial(stub.Warm, metadata=metadata)
