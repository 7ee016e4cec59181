"""Spans of calls and attempts as plain values, and the start of their export over OTLP.

Spans are built from the recorded times when a call or an attempt has ended. Without an endpoint,
OpenTelemetry is not imported. No span has any text of prompts or answers.
"""

import os
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit

from quire.worker.request.errors import ConfigError

if TYPE_CHECKING:
    from quire.cluster.features.tracing.span_export import SpanExport

Value = str | int | float | bool | list[str]
SpanKind = Literal["server", "client", "internal"]
Role = Literal["gateway", "group"]

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PACKAGES = {
    "grpc": "opentelemetry.exporter.otlp.proto.grpc",
    "http/protobuf": "opentelemetry.exporter.otlp.proto.http",
}
"""The package that implements each protocol."""


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """An ended span. Ids are in hexadecimal digits; times are in seconds since 1970."""

    name: str
    kind: SpanKind = "internal"
    trace_id: str
    span_id: str
    parent_span_id: str = ""
    """Empty for the root of a trace."""
    trace_state: str = ""
    begin_s: float
    end_s: float
    attributes: Mapping[str, Value] = field(default_factory=dict)
    error: str = ""
    """Why it failed; empty if it did not."""

    @property
    def begin_ns(self) -> int:
        return int(self.begin_s * 1e9)

    @property
    def end_ns(self) -> int:
        """The end in nanoseconds, never before the beginning."""
        return int(max(self.begin_s, self.end_s) * 1e9)


def new_span_id() -> str:
    return f"{random.getrandbits(64) or 1:016x}"


def traceparent(trace_id: str, span_id: str, *, is_sampled: bool = True) -> str:
    """The header ``traceparent`` of W3C's Trace Context."""
    return f"00-{trace_id}-{span_id}-{int(is_sampled):02x}"


def ids_in(traceparent: str) -> tuple[str, str]:
    """The trace id and span id in a header that `traceparent` returned."""
    _, trace_id, span_id, _ = traceparent.split("-")
    return trace_id, span_id


def start_tracing(endpoint: str | None, *, role: Role, instance: str) -> "SpanExport | None":
    """Starts sending this process's spans to ``endpoint``, or to the endpoint in OpenTelemetry's
    environment variables. Returns ``None`` if neither is set.

    ``instance``: the name of this gateway or group. Raises ConfigError as `protocol_to` does.
    """
    protocol = protocol_to(endpoint)
    if protocol is None:
        return None
    from quire.cluster.features.tracing.span_export import SpanExport  # Imports OpenTelemetry.

    return SpanExport(endpoint, protocol=protocol, role=role, instance=instance)


def protocol_to(endpoint: str | None) -> str | None:
    """The protocol for ``endpoint``, or for that of the environment; ``None`` if neither is set.

    Raises:
        ConfigError: The endpoint or protocol cannot be used, or its package is not installed.
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
    """Raises ConfigError if ``endpoint`` is not the address of a collector."""
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
    except ModuleNotFoundError:  # Its parent package is missing.
        return False
