"""Sends spans over OTLP/HTTP, entirely with OpenTelemetry's exporter."""

from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult

from quire.cluster.features.tracing.sdk_spans import readable


class HttpExporter(OTLPSpanExporter):
    """OpenTelemetry's exporter, for `QueuedSpan`s."""

    def __init__(self, endpoint: str | None, *, resource: Resource) -> None:
        """``endpoint``: with its path; ``None`` takes the environment's endpoint."""
        super().__init__(endpoint=endpoint)
        self._resource = resource

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return super().export(readable(spans, self._resource))
