"""An in-process collector for OTLP over gRPC or HTTP."""

import asyncio
import contextlib
import gzip
import http.server
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Received:
    """A span as received, with its resource's attributes."""

    span: Span
    resource: dict[str, Any]

    @property
    def attributes(self) -> dict[str, Any]:
        return _plain(self.span.attributes)


@dataclass
class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    endpoint: str = ""
    spans: list[Received] = field(default_factory=list)

    async def Export(self, request: pb.ExportTraceServiceRequest, context: Any) -> Any:
        return self.take(request)

    def take(self, request: pb.ExportTraceServiceRequest) -> pb.ExportTraceServiceResponse:
        for each in request.resource_spans:
            resource = _plain(each.resource.attributes)
            self.spans += [Received(span, resource) for of in each.scope_spans for span in of.spans]
        return pb.ExportTraceServiceResponse()

    async def wait(self, num_spans: int) -> None:
        """Waits until ``num_spans`` have arrived; pytest's timeout is the limit."""
        while len(self.spans) < num_spans:
            await asyncio.sleep(0.01)

    def named(self, name: str) -> list[Received]:
        """The spans of this name, in the order in which they began."""
        found = [each for each in self.spans if each.span.name == name]
        return sorted(found, key=lambda each: each.span.start_time_unix_nano)


@contextlib.asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield collector
    finally:
        await server.stop(None)


@contextlib.contextmanager
def collecting_over_http() -> Iterator[Collector]:
    collector = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers["Content-Encoding"] == "gzip":
                body = gzip.decompress(body)
            answer = collector.take(pb.ExportTraceServiceRequest.FromString(body))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()
            self.wfile.write(answer.SerializeToString())

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield collector
        server.shutdown()
        thread.join()


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: _value(each.value) for each in attributes if isinstance(each, KeyValue)}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind) if kind else None
