"""How each kind of error is reported to clients: one row for HTTP and gRPC."""

from typing import NamedTuple

from grpc import StatusCode

from quire.cluster.errors import (
    DeadlineExceeded,
    ModelNotFound,
    NotAnOperator,
    Overloaded,
    Quarantined,
    RateLimited,
    Unauthenticated,
    Unavailable,
)
from quire.router.errors import UnknownDecision
from quire.worker.request.errors import (
    AdapterError,
    BrokenLogits,
    ContextExceeded,
    InvalidRequest,
    QueueFull,
    QuireError,
)


class BodyTooLarge(QuireError):
    """The request's body is longer than the server reads."""


class HeadTooLarge(QuireError):
    """The request's first line and headers are more than the server reads."""


class UnknownExpectation(QuireError):
    """The request's header Expect asks for something unknown."""


class BodyTooSlow(QuireError):
    """The request's body is large and does not arrive in time."""


class NotJson(QuireError):
    """The request's body is not JSON."""


class Kind(NamedTuple):
    """How one kind of error is reported."""

    status: int
    """The HTTP status."""
    type: str
    """The ``type`` in OpenAI's error object."""
    code: str | None
    """The ``code`` in OpenAI's error object."""
    grpc_code: StatusCode
    reason: str
    """The ``reason`` in an ErrorInfo over gRPC."""


INVALID = Kind(400, "invalid_request_error", None, StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
INTERNAL = Kind(500, "server_error", "internal_error", StatusCode.INTERNAL, "INTERNAL")


def kind_of(error: Exception) -> Kind:
    """The kind of ``error``; `INTERNAL` for an error that no client should see."""
    return next((kind for type_, kind in _KINDS.items() if isinstance(error, type_)), INTERNAL)


def _kind(status: int, type_: str, code: str, grpc_code: StatusCode) -> Kind:
    return Kind(status, type_, code, grpc_code, code.upper())


def _unread(status: int) -> Kind:
    return INVALID._replace(status=status)


_KINDS: dict[type[Exception], Kind] = {
    ContextExceeded: INVALID._replace(code="context_length_exceeded", reason="CONTEXT_EXCEEDED"),
    InvalidRequest: INVALID,
    AdapterError: INVALID,
    Unauthenticated: _kind(
        401, "authentication_error", "invalid_api_key", StatusCode.UNAUTHENTICATED
    ),
    NotAnOperator: _kind(403, "permission_error", "not_an_operator", StatusCode.PERMISSION_DENIED),
    ModelNotFound: _kind(404, "invalid_request_error", "model_not_found", StatusCode.NOT_FOUND),
    UnknownDecision: _kind(
        404, "invalid_request_error", "decision_not_found", StatusCode.NOT_FOUND
    ),
    BodyTooSlow: _unread(408),
    BodyTooLarge: _unread(413),
    NotJson: _unread(415),
    HeadTooLarge: _unread(431),
    UnknownExpectation: _unread(417),
    RateLimited: _kind(
        429, "rate_limit_error", "rate_limit_exceeded", StatusCode.RESOURCE_EXHAUSTED
    ),
    Overloaded: _kind(429, "rate_limit_error", "overloaded", StatusCode.RESOURCE_EXHAUSTED),
    QueueFull: _kind(429, "rate_limit_error", "queue_full", StatusCode.RESOURCE_EXHAUSTED),
    BrokenLogits: _kind(500, "server_error", "broken_logits", StatusCode.INTERNAL),
    Quarantined: _kind(500, "server_error", "quarantined", StatusCode.ABORTED),
    Unavailable: _kind(503, "service_unavailable_error", "unavailable", StatusCode.UNAVAILABLE),
    DeadlineExceeded: _kind(
        504, "timeout_error", "deadline_exceeded", StatusCode.DEADLINE_EXCEEDED
    ),
}
"""By exception class. A subclass comes before its base classes."""

STATUSES = {
    400: "A field is unknown or out of its range, or the prompt is too long: `param` names it.",
    401: "There is no API key, or it is not known.",
    403: "The key is no operator's.",
    404: "The model is not served.",
    408: "The body did not come in time.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "There is no room now; `Retry-After` says when to try again.",
    500: "The request failed here; it is not tried again where `x-should-retry` is false.",
    503: "No replica group can take it now.",
    504: "Its deadline passed.",
}
"""What the HTTP statuses of errors mean."""
