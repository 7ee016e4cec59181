"""The exceptions that calls raise, by gRPC status."""

from collections.abc import Iterable
from typing import Any

import grpc


class QuireError(Exception):
    """A call failed. The message is the server's, or gRPC's if no server answered."""

    def __init__(
        self, message: str, *, code: grpc.StatusCode, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        """Seconds after which to retry, if the server says so."""


class InvalidArgument(QuireError):
    """A value is invalid; the message names it."""


class NotFound(QuireError):
    """The server does not serve the model."""


class Unauthenticated(QuireError):
    """The server requires an API key and received none or an unknown one."""


class PermissionDenied(QuireError):
    """The API key does not allow the call."""


class Overloaded(QuireError):
    """The request would have waited too long, or is too large. It was not run."""


class DeadlineExceeded(QuireError):
    """The call's deadline has passed."""


class Aborted(QuireError):
    """The request has crashed several replica groups. Do not send it again."""


class Unavailable(QuireError):
    """No server answers, no replica group takes requests, or the connection was lost."""


_KINDS: dict[grpc.StatusCode, type[QuireError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgument,
    grpc.StatusCode.NOT_FOUND: NotFound,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDenied,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.ABORTED: Aborted,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def error_of(error: grpc.RpcError) -> QuireError:
    """The exception for an error of gRPC's synchronous or asyncio API."""
    code: grpc.StatusCode = error.code()
    kind = _KINDS.get(code, QuireError)
    message = error.details() or code.name
    return kind(message, code=code, retry_after_s=_retry_after_s(error.trailing_metadata()))


def _retry_after_s(metadata: Iterable[Any] | None) -> float | None:
    said = dict(metadata or ())
    for name, unit_s in (("grpc-retry-pushback-ms", 0.001), ("retry-after", 1.0)):
        if (number := str(said.get(name))).isdecimal():
            return int(number) * unit_s
    return None
