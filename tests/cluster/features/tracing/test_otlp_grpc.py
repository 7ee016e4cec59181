"""Our encoding of spans equals that of OpenTelemetry's encoder."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans

from quire.cluster.features.tracing.otlp_grpc import GrpcExporter
from quire.cluster.features.tracing.sdk_spans import OnlyItself, QueuedSpan, readable
from quire.cluster.features.tracing.tracing import Span


def an_id(num_bytes: int) -> st.SearchStrategy[str]:
    return st.binary(min_size=num_bytes, max_size=num_bytes).filter(any).map(bytes.hex)


RESOURCE = OnlyItself({"service.name": "quire-gateway", "numbers": [1, 2]}, "https://a.schema")
SPANS = st.builds(
    Span,
    name=st.text(),
    kind=st.sampled_from(["server", "client", "internal"]),
    trace_id=an_id(16),
    span_id=an_id(8),
    parent_span_id=st.just("") | an_id(8),
    trace_state=st.sampled_from(["", "a=1", "a=1,t@b=2"]),
    begin_s=st.floats(0, 1e9),
    end_s=st.floats(0, 1e9),
    error=st.text(),
    attributes=st.dictionaries(
        st.text(min_size=1),
        st.text(st.characters(codec=None, categories=["L", "Cs"]))
        | st.integers(-(2**65), 2**65)
        | st.floats(allow_nan=False)
        | st.booleans()
        | st.lists(st.text()),
    ),
)


@pytest.fixture(scope="module")
def exporter() -> Iterator[GrpcExporter]:
    made = GrpcExporter("http://127.0.0.1:1", is_plain=True, resource=RESOURCE)
    yield made
    made.shutdown()


@given(spans=st.lists(SPANS.map(QueuedSpan), min_size=1, max_size=3))
def test_messages_over_grpc_are_those_of_opentelemetrys_own_encoder(
    exporter: GrpcExporter, spans: list[QueuedSpan]
) -> None:
    assert exporter._translate_data(spans) == encode_spans(readable(spans, RESOURCE))
