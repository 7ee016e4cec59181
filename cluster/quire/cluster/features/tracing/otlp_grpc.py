"""Sends spans over OTLP/gRPC with OpenTelemetry's exporter, but with messages encoded here.

OpenTelemetry's own encoder takes four times as long; it took two thirds of a traced call's cost.
"""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1 import trace_pb2 as pb
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from quire.cluster.features.tracing.sdk_spans import QueuedSpan, readable
from quire.cluster.features.tracing.tracing import Span

_KINDS = {
    "server": pb.Span.SPAN_KIND_SERVER,
    "client": pb.Span.SPAN_KIND_CLIENT,
    "internal": pb.Span.SPAN_KIND_INTERNAL,
}
_UNSET = pb.Status()
_IS_OURS_ASKED = hasattr(OTLPSpanExporter, "_translate_data")
"""Whether this version calls the private method that is overridden here. Otherwise it encodes the
spans itself."""


class GrpcExporter(OTLPSpanExporter):
    """OpenTelemetry's exporter, for `QueuedSpan`s."""

    def __init__(self, endpoint: str | None, *, is_plain: bool | None, resource: Resource) -> None:
        """``is_plain``: without TLS; ``None`` leaves that to ``endpoint`` and the environment."""
        super().__init__(endpoint=endpoint, insecure=is_plain)
        self._resource = resource
        some = Span(name="", trace_id="1", span_id="1", begin_s=0, end_s=0)
        self._empty = encode_spans(readable([QueuedSpan(some)], resource))
        del self._empty.resource_spans[0].scope_spans[0].spans[:]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return super().export(spans if _IS_OURS_ASKED else readable(spans, self._resource))

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        request = ExportTraceServiceRequest()
        request.CopyFrom(self._empty)
        scope = request.resource_spans[0].scope_spans[0]
        for each in data:
            assert isinstance(each, QueuedSpan)
            _write(each.span, scope)
        return request


def _write(span: Span, scope: pb.ScopeSpans) -> None:
    attributes = scope.spans.add(
        trace_id=bytes.fromhex(span.trace_id),
        span_id=bytes.fromhex(span.span_id),
        parent_span_id=bytes.fromhex(span.parent_span_id),
        trace_state=span.trace_state,
        name=span.name,
        kind=_KINDS[span.kind],
        start_time_unix_nano=span.begin_ns,
        end_time_unix_nano=span.end_ns,
        flags=pb.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK,
        status=_failed(span.error) if span.error else _UNSET,
    ).attributes
    add = attributes.add
    # Types are compared inline, which takes a third less time than `isinstance` and calls.
    for key, value in span.attributes.items():
        attribute = add()
        try:
            attribute.key = key
            to = attribute.value
            if type(value) is str:
                to.string_value = value
            elif type(value) is int:
                to.int_value = value
            elif type(value) is float:
                to.double_value = value
            elif type(value) is bool:
                to.bool_value = value
            elif isinstance(value, list):
                to.array_value.SetInParent()
                for each in value:
                    to.array_value.values.add().string_value = each
        except ValueError:  # Not valid Unicode, or an integer above 64 bits.
            del attributes[-1]


def _failed(why: str) -> pb.Status:
    return pb.Status(code=pb.Status.STATUS_CODE_ERROR, message=why)
