"""Exceptions as OpenAI's API reports them.

An unexpected exception is logged under an incident number and reaches the client as that number.
"""

import logging
import re
import reprlib
import secrets
from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.cluster.edge.streams import UnreadResponse
from quire.cluster.errors import (
    DeadlineExceeded,
    ModelNotFound,
    NotAnOperator,
    Overloaded,
    Quarantined,
    Unauthenticated,
    Unavailable,
)
from quire.router.errors import UnknownDecision
from quire.worker.api.errors import (
    BrokenLogits,
    ContextExceeded,
    InvalidRequest,
    QueueFull,
    QuireError,
)

_log = logging.getLogger(__name__)

# A client that is gone is answered for the access log alone; nginx uses this number.
_CLIENT_CLOSED_REQUEST = 499
_MAX_CHARS = 2000
"""Longest error message."""


class BodyTooLarge(QuireError):
    """The request's body is longer than the server reads."""


class HeadTooLarge(QuireError):
    """The request's first line and headers are more than the server reads."""


class BodyTooSlow(QuireError):
    """The request's body is large and does not come."""


class NotJson(QuireError):
    """The request's body is of another type than JSON."""


class _Kind(NamedTuple):
    status: int
    type: str
    code: str | None = None


_KINDS: Mapping[type[Exception], _Kind] = {
    ContextExceeded: _Kind(400, "invalid_request_error", "context_length_exceeded"),
    InvalidRequest: _Kind(400, "invalid_request_error"),
    Unauthenticated: _Kind(401, "authentication_error", "invalid_api_key"),
    NotAnOperator: _Kind(403, "permission_error", "not_an_operator"),
    ModelNotFound: _Kind(404, "invalid_request_error", "model_not_found"),
    UnknownDecision: _Kind(404, "invalid_request_error", "decision_not_found"),
    BodyTooSlow: _Kind(408, "invalid_request_error"),
    BodyTooLarge: _Kind(413, "invalid_request_error"),
    HeadTooLarge: _Kind(431, "invalid_request_error"),
    NotJson: _Kind(415, "invalid_request_error"),
    Overloaded: _Kind(429, "rate_limit_error", "overloaded"),
    QueueFull: _Kind(429, "rate_limit_error", "queue_full"),
    BrokenLogits: _Kind(500, "server_error", "broken_logits"),
    Quarantined: _Kind(500, "server_error", "quarantined"),
    DeadlineExceeded: _Kind(504, "timeout_error", "deadline_exceeded"),
    Unavailable: _Kind(503, "service_unavailable_error", "unavailable"),
}
_UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts such as {'type': 'text', 'text': '…'}",
}
"""The kinds that a union field may have."""
_INTERNAL = _Kind(500, "server_error", "internal_error")

_ANTHROPIC_PATHS = "/v1/messages"
_ANTHROPIC_TYPES = {"server_error": "api_error", "service_unavailable_error": "overloaded_error"}
_ANTHROPIC_STATUSES = {404: "not_found_error", 413: "request_too_large"}


def error_handlers() -> dict[Any, Any]:
    """For Starlette: which function answers which exception."""
    return {
        Exception: _handle,
        QuireError: _handle,
        ValidationError: _handle,
        HTTPException: _handle_http,
        ClientDisconnect: _handle_disconnect,
    }


def error_response(error: Exception) -> Response:
    """The whole answer for ``error``."""
    kind, body = _describe(error)
    return JSONResponse(body, status_code=kind.status, headers=error_headers(error))


def error_body(error: Exception) -> dict[str, object]:
    """``{"error": …}`` for ``error``."""
    return _describe(error)[1]


def anthropic_error(body: Mapping[str, Any], *, status: int = 0) -> dict[str, object]:
    """``body``, as `error_body` has it, in the words of Anthropic's API."""
    error = body["error"]
    type_ = _ANTHROPIC_TYPES.get(error["type"], error["type"])
    said = {"type": _ANTHROPIC_STATUSES.get(status, type_), "message": error["message"]}
    return {"type": "error", "error": said}


def worded_for(path: str, body: dict[str, object], *, status: int) -> dict[str, object]:
    """``body``, an error's, as clients of ``path`` know errors."""
    is_anthropic = path == _ANTHROPIC_PATHS or path.startswith(f"{_ANTHROPIC_PATHS}/")
    return anthropic_error(body, status=status) if is_anthropic else body


def error_headers(error: Exception) -> dict[str, str]:
    """Whether and when to try again. OpenAI's clients do after each 429 and 5xx, unless told."""
    if isinstance(error, (BrokenLogits, Quarantined, DeadlineExceeded)):
        return {"x-should-retry": "false"}
    if isinstance(error, (QueueFull, Unavailable)):
        retry_after_s = error.retry_after_s if isinstance(error, Overloaded) else 1
        return {"Retry-After": str(ceil(retry_after_s))}
    return {}


async def _handle(request: Request, error: Exception) -> Response:
    kind, body = _describe(error)
    is_unread = getattr(request.state, "body_is_unread", False)
    response_type = UnreadResponse if is_unread else JSONResponse
    body = worded_for(request.url.path, body, status=kind.status)
    return response_type(body, status_code=kind.status, headers=error_headers(error))


async def _handle_http(request: Request, error: HTTPException) -> Response:
    """An unknown path or method."""
    message = f"{request.method} {request.url.path}: {error.detail}"
    if error.status_code == 404:
        paths = [route.path_format for route in request.app.routes if isinstance(route, Route)]
        message += f"; there are {', '.join(paths)}"
    elif error.headers and "Allow" in error.headers:
        message += f"; use {error.headers['Allow']}"
    body = _body(message, _Kind(error.status_code, "invalid_request_error"))
    body = worded_for(request.url.path, body, status=error.status_code)
    return JSONResponse(body, status_code=error.status_code, headers=error.headers)


async def _handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _describe(error: Exception) -> tuple[_Kind, dict[str, object]]:
    if isinstance(error, ValidationError):
        return _KINDS[InvalidRequest], _validation_body(error)
    for type_, kind in _KINDS.items():
        if isinstance(error, type_):
            return kind, _body(_message(error), kind, param=_param(error))
    incident = secrets.token_hex(4)
    _log.error("incident %s", incident, exc_info=error)
    return _INTERNAL, _body(f"internal error, incident {incident}", _INTERNAL)


def _message(error: Exception) -> str:
    if isinstance(error, ContextExceeded):
        # Those who shorten prompts by themselves look for OpenAI's words.
        return f"this model's maximum context length is {error.max_model_len} tokens: {error}"
    message = str(error)  # It may quote what a client sent, which may be megabytes.
    return message if len(message) <= _MAX_CHARS else f"{message[:_MAX_CHARS]}…"


def _validation_body(error: ValidationError) -> dict[str, object]:
    """The first of the errors; a union reports one for each of its members, of which the one that
    found a list too long is the right one."""
    errors = error.errors(include_url=False, include_context=False)
    first = next((each for each in errors if each["type"] == "too_long"), errors[0])
    kind = _KINDS[InvalidRequest]
    param = str(first["loc"][0]) if first["loc"] else None
    for field, kinds in _UNIONS.items():
        # Behind its name, a union's error has the member that refused, which nobody has asked for.
        if first["type"] != "too_long" and field in first["loc"][:-1]:
            location = first["loc"][: first["loc"].index(field) + 1]
            # The first member, a string, was given all of it.
            return _body(f"{_shown(location, first['input'])}: must be {kinds}", kind, param=param)
    if first["type"] in ("missing", "too_long"):
        message = f"{_join(first['loc'])}: {first['msg']}"
    else:
        message = f"{_shown(first['loc'], first['input'])}: {first['msg']}"
    return _body(message, kind, param=param)


def _shown(location: tuple[str | int, ...], value: object) -> str:
    return f"{_join(location)}={reprlib.repr(value)}"


def _join(location: tuple[str | int, ...]) -> str:
    return ".".join(map(str, location))


def _param(error: Exception) -> str | None:
    """The field that a message begins with: ``top_p=7 is out of range``."""
    match = re.match(r"([a-z_.]+)=", str(error)) if isinstance(error, InvalidRequest) else None
    return match[1] if match else None


def _body(message: str, kind: _Kind, *, param: str | None = None) -> dict[str, object]:
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}
