"""Spans of calls and attempts as plain values, and the start of their export over OTLP.

Spans are made when a call or an attempt has ended, of what was noted on its way. Without an
endpoint nothing of OpenTelemetry is imported. No span has any text of prompts or answers.
"""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from quire.worker.api.errors import ConfigError

if TYPE_CHECKING:
    from quire.cluster.telemetry.span_export import SpanExport

Value = str | int | float | bool | list[str]
SpanKind = Literal["server", "client", "internal"]
Role = Literal["gateway", "group"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
"""By protocol, the package that speaks it."""


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """A span that has ended. Ids are hexadecimal digits; times are in seconds since 1970."""

    name: str
    kind: SpanKind = "internal"
    trace_id: str
    span_id: str
    parent_span_id: str = ""
    """Empty in the root of a trace."""
    trace_state: str = ""
    begin_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty where it did not."""

    @property
    def begin_ns(self) -> int:
        return int(self.begin_s * 1e9)

    @property
    def end_ns(self) -> int:
        """Never before it began."""
        return int(max(self.begin_s, self.end_s) * 1e9)


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def traceparent(trace_id: str, span_id: str, *, is_sampled: bool = True) -> str:
    """As W3C's Trace Context has it."""
    return f"00-{trace_id}-{span_id}-{int(is_sampled):02x}"


def ids_in(traceparent: str) -> tuple[str, str]:
    """The ids of the trace and the span in one that `traceparent` made."""
    _, trace_id, span_id, _ = traceparent.split("-")
    return trace_id, span_id


def start_tracing(endpoint: str | None, *, role: Role, instance: str) -> "SpanExport | None":
    """Begins to send this process's spans to ``endpoint``, or to that of the environment, in
    OpenTelemetry's own variables. ``None`` where neither names one.

    ``instance``: the name of this gateway or group. Raises ConfigError as `protocol_to`.
    """
    protocol = protocol_to(endpoint)
    if protocol is None:
        return None
    from quire.cluster.telemetry.span_export import SpanExport  # Imports OpenTelemetry.

    return SpanExport(endpoint, protocol=protocol, role=role, instance=instance)


def protocol_to(endpoint: str | None) -> str | None:
    """By which protocol spans are sent there, or to the endpoint of the environment; ``None`` where
    none are to be sent.

    Raises:
        ConfigError: The endpoint or protocol cannot be used, or the package that speaks it is not
            installed.
    """
    is_disabled = os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "otlp").strip().lower()
    if is_disabled or exporter == "none" or not (endpoint or _of_environment(_ENDPOINTS)):
        return None
    protocol = _of_environment(_PROTOCOLS) or "grpc"
    if protocol not in _PACKAGES:
        raise ConfigError(
            f"{_PROTOCOLS[1]}={protocol!r}: must be one of {', '.join(map(repr, _PACKAGES))}"
        )
    if endpoint:
        check_endpoint(endpoint)
    if not _is_installed(_PACKAGES[protocol]):
        raise ConfigError(
            f"traces are to be sent to {endpoint or _of_environment(_ENDPOINTS)}, and "
            f"{_PACKAGES[protocol]} is not installed: install quire-serve[otel], or set "
            "OTEL_SDK_DISABLED=true"
        )
    return protocol


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError: it is no address of a collector."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ConfigError(
            f"otlp_traces_endpoint={endpoint!r}: must be an address such as "
            "'http://collector:4317', or 'http://collector:4318/v1/traces' with "
            "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf"
        )


def _of_environment(names: tuple[str, ...]) -> str:
    return next((value for name in names if (value := os.environ.get(name, "").strip())), "")


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # Of a package around it.
        return False
