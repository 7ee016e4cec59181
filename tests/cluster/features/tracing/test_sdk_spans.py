"""Quire's spans in the form of OpenTelemetry's SDK."""

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

from quire.cluster.features.tracing.sdk_spans import QueuedSpan, readable
from quire.cluster.features.tracing.tracing import Span


def test_opentelemetrys_encoder_writes_all_of_a_span_but_values_that_it_cannot() -> None:
    span = Span(
        name="attempt",
        kind="client",
        trace_id="0a" * 16,
        span_id="0b" * 8,
        parent_span_id="0c" * 8,
        trace_state="a=1,t@b=2",
        begin_s=1.0,
        end_s=2.5,
        error="gone",
        attributes={"group": "g", "tokens": 3, "broken": "\ud800", "reasons": ["stop"]},
    )
    resource = Resource({"service.name": "quire-gateway"})
    (of_resource,) = encode_spans(readable([QueuedSpan(span)], resource)).resource_spans
    assert of_resource.resource.attributes[0].value.string_value == "quire-gateway"
    (made,) = of_resource.scope_spans[0].spans
    assert (made.name, made.kind, made.trace_state) == (
        "attempt",
        made.SPAN_KIND_CLIENT,
        span.trace_state,
    )
    assert (made.trace_id.hex(), made.span_id.hex()) == (span.trace_id, span.span_id)
    assert made.parent_span_id.hex() == span.parent_span_id
    assert (made.start_time_unix_nano, made.end_time_unix_nano) == (10**9, 25 * 10**8)
    assert (made.status.code, made.status.message) == (made.status.STATUS_CODE_ERROR, "gone")
    told = {each.key: each.value for each in made.attributes}
    assert told.keys() == {"group", "tokens", "reasons"}
    assert (told["group"].string_value, told["tokens"].int_value) == ("g", 3)
    assert told["reasons"].array_value.values[0].string_value == "stop"
