"""The access log: one line for each ended call, on the logger ``quire.access``, without any prompt
or answer text.

In JSON, the parts are fields of the line. Answered polls of the gateway itself, which ``quire top``
and ``/ui`` make every few seconds, have the level DEBUG; all other calls have INFO.
"""

import json
import logging
from typing import Any

from quire.cluster.telemetry.timeline import Timeline

_log = logging.getLogger("quire.access")

_MAX_CHARS = 256
"""Most characters of a part that a client chose."""
_LOOKS = ("/quire.v1.Admin/ListGroups", "/v1/routing/decisions", "/ui")
"""Calls that Quire's own tools poll; ``/ui/`` has the page's files and its events."""


def log_access(call: Timeline) -> None:
    """Writes the line of an ended call."""
    level = logging.DEBUG if _is_look(call) else logging.INFO
    if _log.isEnabledFor(level):
        fields = fields_of(call)
        _log.log(level, "%s", _line(fields), extra=fields)


def _is_look(call: Timeline) -> bool:
    is_of_tools = call.path in _LOOKS or call.path.startswith("/ui/")
    return is_of_tools and call.status in ("200", "OK")


def fields_of(call: Timeline) -> dict[str, Any]:
    """The parts of a line; empty ones are left out. Times are in milliseconds."""
    first_s, outcomes = call.first_token_s, call.outcomes
    fields = {
        "method": _bounded(call.method),
        "path": _bounded(call.path),
        "status": call.status,
        "request_id": call.request_id,
        "client_request_id": _bounded(call.client_id),
        "client": _bounded(call.client),
        "tenant": call.tenant,
        "key": call.key_name,
        "model": _bounded(call.model),
        "error": call.error,
        "finish": "+".join(outcomes),
        "groups": ",".join(call.groups),
        "trace_id": call.trace_id,
    }
    told: dict[str, Any] = {name: value for name, value in fields.items() if value}
    if call.model:
        told["prompt_tokens"] = call.num_prompt_tokens
        told["cached_tokens"] = call.num_cached_tokens
        told["output_tokens"] = call.num_output_tokens
    if call.queue_s is not None:
        told["queue_ms"] = _ms(call.queue_s)
    if first_s is not None:
        told["ttft_ms"] = _ms(first_s - call.arrival_s)
    if call.ended_s is not None:
        told["total_ms"] = _ms(call.ended_s - call.arrival_s)
    return told


def _line(fields: dict[str, Any]) -> str:
    """The line as text. A part with a space or a control character is quoted as in JSON."""
    head = " ".join(
        _quoted(fields[name]) for name in ("method", "path", "status") if name in fields
    )
    rest = (
        f"{name}={_quoted(value)}"
        for name, value in fields.items()
        if name not in ("method", "path", "status")
    )
    return " ".join([head, *rest])


def _quoted(value: object) -> str:
    text = str(value)
    is_plain = text.isascii() and text.isprintable() and not set(text) & set(' "=')
    return text if is_plain else json.dumps(text)


def _bounded(text: str) -> str:
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}…"


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 1)
