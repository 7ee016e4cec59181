"""One trace of each sampled call, from the client to the groups' steps, over OTLP."""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
)
from tests.cluster.collector import Collector, collecting

from quire.cluster.telemetry.span_export import SpanExport
from quire.cluster.telemetry.tracing import start_tracing

pytestmark = pytest.mark.anyio

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
SECRET = "the cat sat"
CONVENTIONS = {
    value
    for module in (gen_ai, error_attributes, http_attributes, server_attributes)
    for name, value in vars(module).items()
    if name.isupper() and isinstance(value, str)
}
VLLM = {
    f"gen_ai.latency.{name}"
    for name in (
        *("e2e", "time_to_first_token", "time_in_queue"),
        *("time_in_model_prefill", "time_in_model_decode", "time_in_model_inference"),
    )
}


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with collecting() as started:
        yield started


def traces_to(collector: Collector, role: Any = "gateway", instance: str = "it") -> SpanExport:
    started = start_tracing(collector.endpoint, role=role, instance=instance)
    assert started is not None
    return started


async def ask(url: str, **headers: str) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 4, "temperature": 0.5}
    async with httpx.AsyncClient(base_url=url, timeout=None) as client:
        return await client.post("/v1/chat/completions", json=body, headers=headers)


async def test_a_calls_span_has_the_conventions_names_and_the_clients_parent(
    start_cluster: Any, collector: Collector
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        traces = traces_to(collector)
        cluster.models.trace_to(traces)
        answer = await ask(cluster.http_url, traceparent=TRACEPARENT, tracestate="a=1,b=2")
        await collector.wait(4)
        await traces.close()
    assert {each.span.trace_id.hex() for each in collector.spans} == {CLIENT_TRACE}
    (call,) = [each for each in collector.spans if each.span.name.startswith("chat ")]
    assert call.span.parent_span_id.hex() == CLIENT_SPAN
    assert call.span.trace_state == "a=1,b=2"
    assert call.span.kind == call.span.SPAN_KIND_SERVER
    assert answer.headers["traceresponse"] == f"00-{CLIENT_TRACE}-{call.span.span_id.hex()}-01"
    assert call.resource["service.name"] == "quire-gateway"
    told, usage = call.attributes, answer.json()["usage"]
    assert {each for each in told if not each.startswith("quire.")} <= CONVENTIONS | VLLM
    assert told[gen_ai.GEN_AI_OPERATION_NAME] == gen_ai.GenAiOperationNameValues.CHAT.value
    assert told[gen_ai.GEN_AI_REQUEST_MODEL] == answer.json()["model"]
    assert told[gen_ai.GEN_AI_REQUEST_MAX_TOKENS] == 4
    assert told[gen_ai.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert told[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == usage["prompt_tokens"]
    assert told[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == usage["completion_tokens"]
    assert told[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] == ["length"]
    assert told[http_attributes.HTTP_RESPONSE_STATUS_CODE] == 200
    assert (
        0
        < told["gen_ai.latency.time_to_first_token"]
        <= told["gen_ai.latency.e2e"]
        <= (call.span.end_time_unix_nano - call.span.start_time_unix_nano) / 1e9 + 1e-3
    )
    assert SECRET not in "".join(str(each.span) for each in collector.spans)


async def test_malformed_headers_begin_a_trace_of_their_own(
    start_cluster: Any, collector: Collector
) -> None:
    bad = ["", "00-xyz-1-01", TRACEPARENT.upper(), TRACEPARENT + "-1", "ff" + TRACEPARENT[2:]]
    bad += [f"00-{'0' * 32}-{CLIENT_SPAN}-01", f"00-{CLIENT_TRACE}-{'0' * 16}-01"]
    async with start_cluster(num_groups=1) as cluster:
        traces = traces_to(collector)
        cluster.models.trace_to(traces)
        for each in bad:
            assert (await ask(cluster.http_url, traceparent=each)).status_code == 200
        await collector.wait(4 * len(bad))
        await traces.close()
    calls = [each.span for each in collector.spans if each.span.name.startswith("chat ")]
    assert len({each.trace_id for each in calls}) == len(bad)
    assert not any(each.parent_span_id for each in calls)
    assert CLIENT_TRACE not in {each.trace_id.hex() for each in calls}


async def test_a_client_that_does_not_sample_has_no_spans_sent(
    start_cluster: Any, collector: Collector
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        traces = traces_to(collector)
        cluster.models.trace_to(traces)
        answer = await ask(cluster.http_url, traceparent=TRACEPARENT[:-1] + "0")
        assert answer.headers["traceresponse"].endswith("-00")
        await ask(cluster.http_url)
        await collector.wait(4)
        await traces.close()
    assert CLIENT_TRACE not in {each.span.trace_id.hex() for each in collector.spans}
