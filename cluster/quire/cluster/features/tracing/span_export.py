"""Exports spans over OTLP from a thread, and continues clients' traces.

Imported only if tracing is on, since it imports OpenTelemetry. OpenTelemetry's own environment
variables configure sampling, the resource, and the exporter's headers, certificates and timeouts.
At most `MAX_QUEUED` spans wait; further ones are dropped and counted. An unreachable collector is
logged once until it is reachable again.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import urlsplit

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import SpanKind, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.cluster.features.tracing.sdk_spans import QueuedSpan, readable
from quire.cluster.features.tracing.tracing import Role, Span, new_span_id
from quire.cluster.telemetry.timeline import MAX_TRACE_STATE, Timeline

_log = logging.getLogger(__name__)

MAX_QUEUED = 8192
"""Most spans that wait to be sent: some MB."""
_MAX_BATCH = 512
_CLOSE_S = 2.0
_LONG_MEMBER = 128
"""Members of ``tracestate`` with more characters than this are left out first."""
_OF_HEADERS = ("opentelemetry.trace.span", "opentelemetry.trace.propagation.tracecontext")
"""Loggers that quote malformed headers of clients."""
_W3C = TraceContextTextMapPropagator()


class SpanExport:
    """The spans of one process on their way to a collector. Created and used in one event loop."""

    def __init__(self, endpoint: str | None, *, protocol: str, role: Role, instance: str) -> None:
        """``endpoint``: the collector's address; ``None`` takes the environment's."""
        resource = Resource.create()
        ours = {"service.instance.id": instance}
        if str(resource.attributes["service.name"]).startswith("unknown_service"):
            ours["service.name"] = f"quire-{role}"
        # Used only to read the environment's sampler; it creates no spans.
        provider = TracerProvider(shutdown_on_exit=False)
        self._sampler, self._new_ids = provider.sampler, provider.id_generator
        self._sender = _Sender(
            _exporter(endpoint, protocol),
            resource=resource.merge(Resource(ours)),
            where=endpoint or "the collector",
        )
        self._processor = BatchSpanProcessor(
            self._sender, max_queue_size=MAX_QUEUED, max_export_batch_size=_MAX_BATCH
        )
        self._num_added = 0
        self.count: Callable[[str, int], object] = lambda outcome, num: None
        """Receives the number of spans "sent", "failed" or "dropped"; may be called in another
        thread."""
        self._sender.count = lambda outcome, num: self.count(outcome, num)
        for name in _OF_HEADERS:  # Clients must not write to our log.
            logging.getLogger(name).disabled = True

    def begin(
        self, call: Timeline, *, traceparents: Sequence[str], tracestates: Sequence[str]
    ) -> None:
        """Makes ``call`` part of the client's trace, or of a new one, and decides whether it is
        sampled. The arguments are the values of the client's headers. Malformed ones count as
        absent, and a long ``tracestate`` loses members."""
        headers: dict[str, list[str]] = {}
        if len(traceparents) == 1:
            headers = {"traceparent": [*traceparents], "tracestate": [*tracestates]}
        context = _W3C.extract(headers)
        client = get_current_span(context).get_span_context()
        trace_id = client.trace_id if client.is_valid else self._new_ids.generate_trace_id()
        result = self._sampler.should_sample(
            context,
            trace_id,
            call.endpoint,
            SpanKind.SERVER,
            {"url.path": call.endpoint},
            trace_state=client.trace_state,
        )
        call.trace_id, call.span_id = f"{trace_id:032x}", new_span_id()
        call.parent_span_id = f"{client.span_id:016x}" if client.is_valid else ""
        call.trace_state = _shortened(result.trace_state or TraceState())
        call.is_sampled = result.decision is Decision.RECORD_AND_SAMPLE

    def add(self, spans: Iterable[Span]) -> None:
        """Queues ``spans`` for sending, and drops those that find no room. Never waits."""
        for span in spans:
            # Meanwhile the sender's thread can only increase `num_taken`, so there is room.
            if self._num_added - self._sender.num_taken >= MAX_QUEUED:
                self.count("dropped", 1)
            else:
                self._num_added += 1
                self._processor.on_end(QueuedSpan(span))

    async def close(self) -> None:
        """Sends the waiting spans if that takes no longer than `_CLOSE_S`."""
        # Not in the loop's thread pool: a process waits for it when it exits.
        closing = threading.Thread(target=self._processor.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _CLOSE_S)


def _shortened(state: TraceState) -> str:
    """The header of ``state``, cut to `MAX_TRACE_STATE` characters. As W3C's Trace Context asks,
    whole members are left out: long ones first, then others from the end."""
    members = [f"{key}={value}" for key, value in state.items()]
    num_over = len(",".join(members)) - MAX_TRACE_STATE
    for max_chars in (_LONG_MEMBER, 0):
        for number in reversed(range(len(members))):
            if num_over > 0 and len(members[number]) > max_chars:
                num_over -= len(members.pop(number)) + 1
    return ",".join(members)


class _Sender(SpanExporter):
    """Sends `QueuedSpan`s with an exporter of OpenTelemetry's, and counts their outcomes. Called
    from a thread."""

    def __init__(self, exporter: SpanExporter, *, resource: Resource, where: str) -> None:
        self.num_taken = 0
        self.count: Callable[[str, int], object] = lambda outcome, num: None
        self._exporter = exporter
        self._resource = resource
        self._where = where
        self._is_failing = False
        self._reasons = _Reasons()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_taken += len(spans)
        result = self._exporter.export(readable(spans, self._resource))
        is_failing = result is not SpanExportResult.SUCCESS
        self.count("failed" if is_failing else "sent", len(spans))
        if is_failing and not self._is_failing:
            _log.warning("spans cannot be sent to %s: %s", self._where, self._reasons.last)
        elif self._is_failing and not is_failing:
            _log.info("spans are sent to %s again", self._where)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()
        self._reasons.close()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


class _Reasons(logging.Handler):
    """Suppresses the lines that OpenTelemetry's exporters log at each attempt to send, and keeps
    the last one."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.last = "no reason is known"
        self._theirs = logging.getLogger("opentelemetry.exporter.otlp")
        self._theirs.propagate = False
        self._theirs.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()

    def close(self) -> None:
        self._theirs.removeHandler(self)
        super().close()


def _exporter(endpoint: str | None, protocol: str) -> SpanExporter:
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

        # "grpc" is what vLLM's guides write; "https" asks for TLS.
        is_plain = True if endpoint and endpoint.startswith("grpc:") else None
        return OTLPSpanExporter(endpoint=endpoint, insecure=is_plain)
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import (
        OTLPSpanExporter as HttpSpanExporter,
    )

    if endpoint and not urlsplit(endpoint).path.strip("/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return HttpSpanExporter(endpoint=endpoint)
