"""gRPC services, and helpers of those that take requests: a call's id, headers, deadline, size."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from quire.cluster.edge.grpc_errors import Context
from quire.cluster.edge.streams import sane_client_id
from quire.cluster.errors import DeadlineExceeded, Overloaded
from quire.cluster.gateway.models import Models
from quire.cluster.serving.bounds import Hold
from quire.worker.request.errors import InvalidRequest

_SMALL_MESSAGE_BYTES = 2**16
_MAX_ITEMS = 1024
"""Most entries of a list among the sampling parameters."""


@dataclass(frozen=True, kw_only=True)
class GrpcService:
    """A gRPC service with its implementation, whose methods declare who may call them."""

    descriptor: ServiceDescriptor
    servicer: object
    add: Callable[[Any, grpc.aio.Server], None]
    """The function that protoc made for it."""


def client_id(context: Context) -> str:
    """The client's own id for the request, in ``x-request-id`` as over HTTP."""
    return next((sane_client_id(value) for value in header(context, "x-request-id")), "")


def header(context: Context, name: str) -> list[str]:
    """The text values of the call's metadata under ``name``."""
    metadata = context.invocation_metadata() or ()
    return [value for key, value in metadata if key == name and isinstance(value, str)]


def remaining_s(context: Context) -> float | None:
    """Seconds until the call's deadline; ``None`` without one. Raises DeadlineExceeded if it has
    passed."""
    left_s = context.time_remaining()
    if left_s is not None and left_s <= 0:
        raise DeadlineExceeded("the call came after its deadline")
    return left_s


def held(request: Message, models: Models, tenant: str) -> Hold:
    """Counts a large request's bytes against its tenant's share of the budget. Raises Overloaded if
    there is no room: the message is in memory already, so that waiting would not bound memory."""
    num_bytes = request.ByteSize()
    if num_bytes <= _SMALL_MESSAGE_BYTES:
        return Hold()
    hold = models.bodies.take_now(num_bytes, tenant)
    if hold is None:
        models.telemetry.refused.labels("bodies").inc()
        raise Overloaded(
            f"other large requests take all memory for them, this one has {num_bytes} bytes: try "
            "again later",
            reason="bodies",
            retry_after_s=1.0,
        )
    return hold


def check_lists(sampling: Message) -> None:
    """Raises InvalidRequest before a list beyond the limit is converted to a million objects."""
    for field, value in sampling.ListFields():
        is_list = isinstance(value, Collection) and not isinstance(value, str)
        if is_list and len(value) > _MAX_ITEMS:
            raise InvalidRequest(
                f"{field.name} has {len(value)}: at most {_MAX_ITEMS}", param=field.name
            )
