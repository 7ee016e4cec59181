"""Converts Quire's spans to those of OpenTelemetry's SDK. Importing this imports OpenTelemetry."""

from collections.abc import Sequence

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
)

from quire.cluster.features.tracing.tracing import Span

_SCOPE = InstrumentationScope("quire")
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_KINDS = {
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "internal": SpanKind.INTERNAL,
}


class QueuedSpan(ReadableSpan):
    """A span that waits in the SDK's processor. That only checks whether it is sampled, so other
    attributes of a `ReadableSpan` are missing until `readable` converts it, in the thread that
    sends it."""

    _context = SpanContext(1, 1, False, _SAMPLED)

    def __init__(self, span: Span) -> None:
        self.span = span


def readable(spans: Sequence[ReadableSpan], resource: Resource) -> list[ReadableSpan]:
    """The given `QueuedSpan`s in the form that OpenTelemetry's exporters take."""
    return [_readable(each.span, resource) for each in spans if isinstance(each, QueuedSpan)]


def _readable(span: Span, resource: Resource) -> ReadableSpan:
    trace_id = int(span.trace_id, 16)
    state = TraceState.from_header([span.trace_state]) if span.trace_state else None
    parent = None
    if span.parent_span_id:
        parent = SpanContext(trace_id, int(span.parent_span_id, 16), False, _SAMPLED, state)
    return ReadableSpan(
        span.name,
        context=SpanContext(trace_id, int(span.span_id, 16), False, _SAMPLED, state),
        parent=parent,
        resource=resource,
        attributes=dict(span.attributes),
        kind=_KINDS[span.kind],
        status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=_SCOPE,
    )
