"""Exceptions as OpenAI's API reports them.

An unexpected exception is logged under an incident number, and the client receives only that
number.
"""

import logging
import reprlib
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import ceil
from typing import Any

from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from quire.cluster.edge.error_kinds import INTERNAL, INVALID, Kind, kind_of
from quire.cluster.edge.streams import UnreadResponse
from quire.cluster.errors import Unauthenticated
from quire.cluster.telemetry import timeline
from quire.worker.request.errors import ContextExceeded, InvalidRequest, QuireError

_log = logging.getLogger(__name__)

# The status, in the access log alone, of a client that disconnected; nginx uses this number.
_CLIENT_CLOSED_REQUEST = 499
_MAX_CHARS = 2000
"""Longest error message."""
_MAX_PATH = 100
"""How many characters of an unknown path are compared with the known paths."""


_UNIONS = {
    "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts such as {'type': 'text', 'text': '…'}",
}
"""The types that a union field accepts."""
ErrorForm = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
"""Converts an `error_body`, which has this status, for the clients of another API."""


@dataclass(frozen=True, kw_only=True)
class ErrorForms:
    """How an application answers errors: as OpenAI does, but for the paths given here."""

    below: Mapping[str, ErrorForm] = field(default_factory=dict)
    """By path; all paths below it are meant too."""
    prompt_fields: Mapping[str, str] = field(default_factory=dict)
    """The name of the prompt's field, by path, where it is not ``prompt``."""

    def handlers(self) -> dict[Any, Any]:
        """The function that answers each type of exception, for Starlette."""
        return {
            Exception: self._handle,
            QuireError: self._handle,
            ValidationError: self._handle,
            HTTPException: self._handle_http,
            ClientDisconnect: _handle_disconnect,
        }

    async def _handle(self, request: Request, error: Exception) -> Response:
        kind, body = _describe(error)
        is_unread = getattr(request.state, "body_is_unread", False)
        response_type = UnreadResponse if is_unread else JSONResponse
        path = request.url.path
        if isinstance(error, InvalidRequest) and error.param == "prompt":
            body["error"]["param"] = self.prompt_fields.get(path, error.param)
        said = self._formed(path, body, status=kind.status)
        return response_type(said, status_code=kind.status, headers=error_headers(error))

    async def _handle_http(self, request: Request, error: HTTPException) -> Response:
        """The answer to an unknown path or method."""
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            routes = [route.path_format for route in request.app.routes if isinstance(route, Route)]
            paths = [path for path in routes if path != "/" and not path.startswith("/ui/")]
            near = _meant(request.url.path, paths)
            message += f"; is {near} meant?" if near else "; GET /docs shows all paths"
        elif error.headers and "Allow" in error.headers:
            message += f"; use {error.headers['Allow']}"
        said = self._formed(request.url.path, _body(message, INVALID), status=error.status_code)
        return JSONResponse(said, status_code=error.status_code, headers=error.headers)

    def _formed(self, path: str, body: Mapping[str, Any], *, status: int) -> Mapping[str, Any]:
        for above, form in self.below.items():
            if path == above or path.startswith(f"{above}/"):
                return form(body, status)
        return body


def error_response(error: Exception) -> Response:
    """The whole answer for ``error``."""
    kind, body = _describe(error)
    return JSONResponse(body, status_code=kind.status, headers=error_headers(error))


def error_body(error: Exception) -> dict[str, dict[str, object]]:
    """``{"error": …}`` for ``error``."""
    return _describe(error)[1]


def error_headers(error: Exception) -> dict[str, str]:
    """Headers for retries: whether and when. OpenAI's clients retry each 429 and 5xx unless told
    not to."""
    if not isinstance(error, QuireError):
        return {}
    if isinstance(error, Unauthenticated):
        return {"WWW-Authenticate": "Bearer"}
    if error.retry_after_s is not None:
        return {"Retry-After": str(ceil(error.retry_after_s))}
    return {"x-should-retry": "false"} if kind_of(error).status >= 500 else {}


def _meant(path: str, paths: Sequence[str]) -> str | None:
    """The path that a client may have meant: base URLs are written with and without ``/v1``."""
    inner = f"/v1/{path.strip('/').removeprefix('v1/')}"
    if inner in paths:
        return inner
    return next(iter(get_close_matches(path[:_MAX_PATH], paths, n=1, cutoff=0.8)), None)


async def _handle_disconnect(request: Request, error: ClientDisconnect) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


def _describe(error: Exception) -> tuple[Kind, dict[str, dict[str, object]]]:
    if isinstance(error, ValidationError):
        timeline.current().error = INVALID.reason
        return INVALID, _validation_body(error)
    kind = kind_of(error)
    timeline.current().error = kind.reason
    if kind is not INTERNAL:
        param = error.param if isinstance(error, InvalidRequest) else None
        return kind, _body(_message(error), kind, param=param)
    incident = secrets.token_hex(4)
    _log.error("incident %s", incident, exc_info=error)
    return kind, _body(f"internal error, incident {incident}", kind)


def _message(error: Exception) -> str:
    if isinstance(error, ContextExceeded):
        # Clients that shorten prompts by themselves search for OpenAI's wording.
        return f"this model's maximum context length is {error.max_model_len} tokens: {error}"
    message = str(error)  # It may quote megabytes that a client sent.
    return message if len(message) <= _MAX_CHARS else f"{message[:_MAX_CHARS]}…"


def _validation_body(error: ValidationError) -> dict[str, dict[str, object]]:
    """The first of the validation errors. A union reports an error for each of its members; if one
    member found a list too long, that error is chosen."""
    errors = error.errors(include_url=False, include_context=False)
    first = next((each for each in errors if each["type"] == "too_long"), errors[0])
    param = str(first["loc"][0]) if first["loc"] else None
    for name, kinds in _UNIONS.items():
        # After the field's name, a union's location names the member, which means nothing to a
        # client.
        if first["type"] != "too_long" and name in first["loc"][:-1]:
            location = first["loc"][: first["loc"].index(name) + 1]
            # The first member, a string, received all of the value.
            message = f"{_shown(location, first['input'])}: must be {kinds}"
            return _body(message, INVALID, param=param)
    if first["type"] in ("missing", "too_long"):
        message = f"{_join(first['loc'])}: {first['msg']}"
    else:
        message = f"{_shown(first['loc'], first['input'])}: {first['msg']}"
    return _body(message, INVALID, param=param)


def _shown(location: tuple[str | int, ...], value: object) -> str:
    return f"{_join(location)}={reprlib.repr(value)}"


def _join(location: tuple[str | int, ...]) -> str:
    return ".".join(map(str, location))


def _body(message: str, kind: Kind, *, param: str | None = None) -> dict[str, dict[str, object]]:
    return {"error": {"message": message, "type": kind.type, "param": param, "code": kind.code}}
