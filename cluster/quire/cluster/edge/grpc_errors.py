"""What a call that fails tells its client: a status, and messages of `google.rpc` beside it.

    ErrorInfo    a reason for programs, such as CONTEXT_EXCEEDED, in the domain "quire"
    BadRequest   the field that an invalid argument is about, as a path within the request
    RetryInfo    when to try again, where that can help

They travel in the trailing metadata ``grpc-status-details-bin``, where clients of gRPC look for
them. An unexpected exception is logged under an incident number and reaches the client as INTERNAL
with that number, without details.
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
from quire.worker.api.errors import InvalidRequest, QuireError

_log = logging.getLogger(__name__)

# The message travels as the status's, in which gRPC writes %XX for a byte that is not printable,
# and in base64 within the details. Clients refuse trailers above 8 KB, and with them the status.
_MAX_MESSAGE_BYTES = 1500
_MAX_DESCRIPTION_BYTES = 300
_MAX_DEPTH = 4

Descriptor = Any  # A class of its own for each of protobuf's implementations.
Context = grpc.aio.ServicerContext[object, object]


@asynccontextmanager
async def statuses(
    context: Context, request: Message, *, aliases: Mapping[str, str] | None = None
) -> AsyncIterator[None]:
    """Turns what is raised inside into a gRPC status; a client that left as it was written to
    cancels, as one does that left before.

    ``aliases``: what ``request`` calls the fields that our messages name otherwise.
    """
    try:
        yield
    except grpc.aio.AbortError:
        raise
    except grpc.aio.InternalError as error:  # Of gRPC's core, where a call's connection is gone.
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
    """Ends the call: it raises. ``reason`` and ``info`` are an ErrorInfo before ``details``."""
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
    """The paths of its fields and oneofs by name, those of nested messages too; of several with
    one name, the outermost."""
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
    """When to try again: for those who read HTTP's header, and for gRPC's own retries."""
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
