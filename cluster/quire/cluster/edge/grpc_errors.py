"""Errors of gRPC calls: a status, with details in messages of `google.rpc`.

    ErrorInfo    a reason for programs, such as CONTEXT_EXCEEDED, in the domain "quire"
    BadRequest   the field that an invalid argument is about, as a path within the request
    RetryInfo    when to try again, if that can help

The details travel in the trailing metadata ``grpc-status-details-bin``, where gRPC clients look for
them. An unexpected exception is logged under an incident number; the client receives INTERNAL with
that number and no details.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import lru_cache
from math import ceil
from typing import Any

import grpc
import grpc.aio
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.message import Message
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from quire.cluster.edge.error_kinds import INTERNAL, kind_of
from quire.cluster.errors import Overloaded
from quire.cluster.telemetry import timeline
from quire.worker.request.errors import InvalidRequest, QuireError

_log = logging.getLogger(__name__)

# The message travels twice: in the status, where gRPC writes %XX for each byte that is not
# printable, and in base64 within the details. Clients refuse trailers above 8 KB, and lose the
# status with them.
_MAX_MESSAGE_BYTES = 1500
_MAX_DESCRIPTION_BYTES = 300
_MAX_DEPTH = 4

Descriptor = Any  # Each protobuf implementation has its own class.
Context = grpc.aio.ServicerContext[object, object]


@asynccontextmanager
async def statuses(
    context: Context, request: Message, *, aliases: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Turns exceptions inside the block into gRPC statuses. A write to a client that has
    disconnected cancels the call, as an earlier disconnect does.

    ``aliases``: names of ``request``'s fields that differ from Quire's own messages, by our name.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as error:  # Raised by gRPC's core if the connection is gone.
        raise asyncio.CancelledError from error
    except Exception as error:
        kind = kind_of(error)
        if kind is not INTERNAL:
            details = list(_details(error, request, aliases or {}))
            metadata = _retry_metadata(error)
            await refuse(
                context, kind.grpc_code, kind.reason, str(error), details=details, metadata=metadata
            )
        incident = secrets.token_hex(4)
        _log.exception("incident %s", incident)
        await refuse(
            context,
            grpc.StatusCode.INTERNAL,
            "INTERNAL",
            f"internal error, incident {incident}",
            info={"incident": incident},
        )


async def refuse(
    context: Context,
    code: grpc.StatusCode,
    reason: str,
    message: str,
    *,
    info: Mapping[str, str] | None = None,
    details: list[Message] | None = None,
    metadata: tuple[tuple[str, str], ...] = (),
) -> None:
    """Ends the call by raising. ``reason`` and ``info`` become an ErrorInfo ahead of
    ``details``."""
    timeline.current().error = reason
    message = _cut(message, _MAX_MESSAGE_BYTES)
    status = Status(code=code.value[0], message=message)
    info = {**(info or {})}
    for detail in [ErrorInfo(reason=reason, domain="quire", metadata=info), *(details or ())]:
        packed = Packed()
        packed.Pack(detail)
        status.details.append(packed)
    binary = ("grpc-status-details-bin", status.SerializeToString())
    await context.abort(code, message, (*metadata, binary))


def _details(error: Exception, request: Message, aliases: Mapping[str, str]) -> Iterator[Message]:
    if isinstance(error, InvalidRequest):
        name = (error.param or "").partition("[")[0]
        path = _paths(request.DESCRIPTOR).get(aliases.get(name, name))
        if path is not None:
            description = _cut(str(error), _MAX_DESCRIPTION_BYTES)
            violation = BadRequest.FieldViolation(field=path, description=description)
            yield BadRequest(field_violations=[violation])
    if isinstance(error, QuireError) and error.retry_after_s is not None:
        retry = RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        yield retry


@lru_cache(maxsize=64)
def _paths(message: Descriptor) -> dict[str, str]:
    """The paths of the message's fields and oneofs by name, including nested messages. If several
    have the same name, the outermost is taken."""
    found: dict[str, str] = {}
    level = [("", message)]
    for _ in range(_MAX_DEPTH):
        below = []
        for prefix, each in level:
            for name in (*each.fields_by_name, *each.oneofs_by_name):
                found.setdefault(name, prefix + name)
            below += [
                (f"{prefix}{field.name}.", field.message_type)
                for field in each.fields
                if field.message_type is not None
            ]
        level = below
    return found


def _retry_metadata(error: Exception) -> tuple[tuple[str, str], ...]:
    """When to retry: as HTTP's header, and in the form that gRPC's own retries read."""
    if not isinstance(error, Overloaded):
        return ()
    pushback_ms = round(error.retry_after_s * 1000)
    return (
        ("retry-after", str(ceil(error.retry_after_s))),
        ("grpc-retry-pushback-ms", str(pushback_ms)),
    )


def _cut(text: str, max_bytes: int) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= max_bytes:
        return text
    return encoded[:max_bytes].decode(errors="ignore") + " …"
