"""Each sampled call has one trace over OTLP, from the client to the groups' steps."""

import asyncio
import logging
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv._incubating.attributes import rpc_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    server_attributes,
)
from tests.cluster.collector import (
    Collector,
    Received,
    collecting,
    collecting_over_http,
)
from tests.cluster.test_failover import FAST_S, PROMPT, SLOW_S, begin, generate, read_rest

from quire.cluster.features.tracing.span_export import MAX_QUEUED, SpanExport
from quire.cluster.features.tracing.tracing import Span, new_span_id, start_tracing
from quire.cluster.group.session import TracesTo
from quire.cluster.telemetry.access_log import fields_of
from quire.cluster.telemetry.timeline import MAX_TRACED, Timeline
from quire.v1 import inference_pb2 as pb
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio

CLIENT_TRACE, CLIENT_SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{CLIENT_TRACE}-{CLIENT_SPAN}-01"
SECRET = "the cat sat"
CONVENTIONS = {
    value
    for module in (gen_ai, rpc_attributes, error_attributes, http_attributes, server_attributes)
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
        ended: list[Timeline] = []
        cluster.models.on_finished.append(ended.append)
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
    assert fields_of(ended[0])["trace_id"] == CLIENT_TRACE  # The access line has the same trace id.
    told, usage = call.attributes, answer.json()["usage"]
    assert {each for each in told if not each.startswith("quire.")} <= CONVENTIONS | VLLM
    assert told[gen_ai.GEN_AI_OPERATION_NAME] == gen_ai.GenAiOperationNameValues.CHAT.value
    assert told[gen_ai.GEN_AI_REQUEST_MODEL] == answer.json()["model"]
    assert told[gen_ai.GEN_AI_REQUEST_MAX_TOKENS] == 4
    assert told[gen_ai.GEN_AI_REQUEST_TEMPERATURE] == 0.5
    assert told[gen_ai.GEN_AI_USAGE_INPUT_TOKENS] == usage["prompt_tokens"]
    assert told[gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS] == usage["completion_tokens"]
    reasons = [each["finish_reason"] for each in answer.json()["choices"]]
    assert told[gen_ai.GEN_AI_RESPONSE_FINISH_REASONS] == reasons
    assert told[http_attributes.HTTP_RESPONSE_STATUS_CODE] == 200
    assert (
        0
        < told["gen_ai.latency.time_to_first_token"]
        <= told["gen_ai.latency.e2e"]
        <= (call.span.end_time_unix_nano - call.span.start_time_unix_nano) / 1e9 + 1e-3
    )
    assert SECRET not in "".join(str(each.span) for each in collector.spans)


def follow_groups(cluster: Any, traces: SpanExport) -> None:
    for group in cluster.groups.values():
        group.service._door.traces = TracesTo(group.name, traces.add)


def assert_within(inner: Received, outer: Received) -> None:
    """Asserts with a tolerance of a microsecond, the precision of float seconds since 1970."""
    assert outer.span.start_time_unix_nano <= inner.span.start_time_unix_nano + 1000
    assert inner.span.end_time_unix_nano <= outer.span.end_time_unix_nano + 1000


async def test_a_stream_that_fails_over_is_one_trace_with_both_groups(
    start_cluster: Any, collector: Collector
) -> None:
    async with start_cluster() as cluster:
        at_gateway, at_groups = traces_to(collector), traces_to(collector, "group", "both")
        cluster.models.trace_to(at_gateway)
        follow_groups(cluster, at_groups)
        cluster.take_steps_of(SLOW_S)
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=PROMPT),
            sampling=pb.SamplingParams(seed=5, max_tokens=40, ignore_eos=True),
        )
        trace = [("traceparent", TRACEPARENT), ("tracestate", "t@a=1 , "), ("tracestate", "b=2")]
        call = cluster.inference.Generate(request, metadata=trace)
        chunks = await begin(call, num_chunks=5)
        killed = cluster.groups[chunks[0].start.routing.group]
        killed.service._door.traces = None  # A killed process sends nothing more.
        await killed.kill()
        cluster.take_steps_of(FAST_S)
        tokens = await read_rest(call, chunks)
        await collector.wait(9)
        await at_gateway.close()
        await at_groups.close()
    assert tokens == cluster.model.continuation(PROMPT, seed=5, max_tokens=40)
    assert {each.span.trace_id.hex() for each in collector.spans} == {CLIENT_TRACE}
    assert {each.span.trace_state for each in collector.spans} == {"t@a=1,b=2"}

    by_id = {each.span.span_id: each for each in collector.spans}
    assert len(by_id) == len(collector.spans) == 9
    (root,) = [each for each in collector.spans if each.span.parent_span_id not in by_id]
    assert root.span.parent_span_id.hex() == CLIENT_SPAN
    for each in collector.spans:
        if each is not root:
            assert_within(each, by_id[each.span.parent_span_id])

    names = {each.span.name: each.span.parent_span_id for each in collector.spans}
    first, second = collector.named("attempt")
    (group,) = collector.named("group")
    assert group.span.parent_span_id == second.span.span_id
    assert group.resource["service.name"] == "quire-group"
    assert {names[name] for name in ("prefill", "decode")} == {group.span.span_id}
    assert names["prepare"] == root.span.span_id

    lost, done = first.attributes, second.attributes
    assert lost["quire.group"] == killed.name != done["quire.group"]
    assert done["quire.group"] == group.attributes["quire.group"]
    assert lost["error.type"] == "GroupDied"
    assert first.span.status.code == first.span.status.STATUS_CODE_ERROR
    assert "error.type" not in done
    assert done["quire.tokens.resumed"] == lost["quire.tokens.output"] > 0
    assert done["quire.tokens.output"] == len(tokens) - done["quire.tokens.resumed"]
    assert group.attributes["quire.tokens.output"] == done["quire.tokens.output"]
    assert done["quire.outcome"] == group.attributes["quire.outcome"] == "length"
    (prefill,) = collector.named("prefill")
    found = prefill.attributes["quire.tokens.cached"] + prefill.attributes["quire.tokens.computed"]
    assert found == len(PROMPT) + done["quire.tokens.resumed"]
    told = {name for each in collector.spans for name in each.attributes}
    assert {name for name in told if not name.startswith("quire.")} <= CONVENTIONS | VLLM


async def test_an_aborted_attempt_ends_its_groups_span(
    start_cluster: Any, collector: Collector
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        traces = traces_to(collector, "group")
        cluster.models.trace_to(traces)
        follow_groups(cluster, traces)
        cluster.take_steps_of(SLOW_S)
        call = generate(cluster)
        await begin(call, num_chunks=2)
        call.cancel()
        await collector.wait(8)
        await traces.close()
    (group,) = collector.named("group")
    assert group.attributes["quire.outcome"] == "its gateway ended it"
    assert group.span.status.code == group.span.status.STATUS_CODE_UNSET
    (attempt,) = collector.named("attempt")
    assert attempt.attributes["quire.outcome"] == "cancelled"


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


class Lines(logging.Handler):
    """Records logged warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def some_span() -> Span:
    return Span(name="a", trace_id=CLIENT_TRACE, span_id=new_span_id(), begin_s=1.0, end_s=2.0)


async def test_a_collector_that_is_away_costs_bounded_memory_and_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "5")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    traces = start_tracing("http://127.0.0.1:1", role="gateway", instance="it")
    assert traces is not None
    counts: Counter[str] = Counter()
    traces.count = lambda outcome, num: counts.update({outcome: num})
    lines = Lines()
    logging.getLogger().addHandler(lines)
    traces.add([some_span() for _ in range(3 * MAX_QUEUED)])
    while counts["failed"] < 1024:
        await asyncio.sleep(0.01)
    logging.getLogger().removeHandler(lines)
    assert counts["dropped"] >= MAX_QUEUED
    assert counts["sent"] == 0
    assert len(lines.told) == 1
    assert lines.told[0].startswith("spans cannot be sent to http://127.0.0.1:1: ")
    await traces.close()


async def test_metrics_count_the_spans_that_are_sent(
    start_cluster: Any, collector: Collector
) -> None:
    async with start_cluster(num_groups=1) as cluster:
        traces = traces_to(collector)
        cluster.models.trace_to(traces)
        await ask(cluster.http_url)
        await collector.wait(4)
        await traces.close()
        page = cluster.models.telemetry.render().decode()
    assert 'quire_spans_total{outcome="sent"} 4.0' in page


async def test_an_endpoint_of_the_environment_and_the_service_name_count(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert start_tracing(None, role="group", instance="g") is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=prod")
    traces = start_tracing(None, role="group", instance="g")
    assert traces is not None
    traces.add([some_span()])
    await collector.wait(1)
    await traces.close()
    resource = collector.spans[0].resource
    assert resource["service.name"] == "mine"
    assert resource["deployment.environment.name"] == "prod"
    assert resource["service.instance.id"] == "g"
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert start_tracing(collector.endpoint, role="group", instance="g") is None


async def test_spans_go_over_http_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
    with collecting_over_http() as collector:
        given = start_tracing(collector.endpoint, role="group", instance="a")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.endpoint)
        known = start_tracing(None, role="group", instance="b")
        assert given is not None
        assert known is not None
        given.add([some_span()])
        known.add([some_span()])
        await collector.wait(2)
        await given.close()
        await known.close()
    assert {each.resource["service.instance.id"] for each in collector.spans} == {"a", "b"}


async def test_a_call_of_many_completions_leaves_room_for_others(
    start_cluster: Any, collector: Collector
) -> None:
    async with start_cluster(num_groups=1, num_blocks=600) as cluster:
        traces = traces_to(collector)
        cluster.models.trace_to(traces)
        body = {"prompt": SECRET, "max_tokens": 1, "n": 2 * MAX_TRACED}
        async with httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client:
            assert (await client.post("/v1/completions", json=body)).status_code == 200
        await ask(cluster.http_url)
        await collector.wait(3 + MAX_TRACED + 4)
        await traces.close()
    (call,) = [each for each in collector.spans if each.span.name.startswith("text_completion ")]
    assert call.attributes[gen_ai.GEN_AI_REQUEST_CHOICE_COUNT] == 2 * MAX_TRACED
    assert len(collector.spans) == 3 + MAX_TRACED + 4


async def test_the_sampler_of_the_environment_decides(
    start_cluster: Any, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with start_cluster(num_groups=1) as cluster:
        traces = traces_to(collector)
        cluster.models.trace_to(traces)
        assert (await ask(cluster.http_url)).headers["traceresponse"].endswith("-00")
        await ask(cluster.http_url, traceparent=TRACEPARENT)
        await collector.wait(4)
        await traces.close()
    assert {each.span.trace_id.hex() for each in collector.spans} == {CLIENT_TRACE}


def test_what_cannot_be_sent_to_is_refused_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint='collector:4317'"):
        start_tracing("collector:4317", role="gateway", instance="it")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL='http/json'"):
        start_tracing("http://a:4317", role="gateway", instance="it")


def run(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_the_package_an_error_names_the_extra() -> None:
    script = (
        "import sys; sys.modules['opentelemetry'] = None\n"
        "from quire.cluster.features.tracing.tracing import start_tracing\n"
        "try: start_tracing('http://a:4317', role='group', instance='g')\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    said = run(script)
    assert said.startswith("ConfigError")
    assert "install quire-serve[otel]" in said


@pytest.mark.slow
def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    script = (
        "import sys\n"
        "import quire.cluster.edge.grpc_server, quire.cluster.edge.openai_http\n"
        "import quire.cluster.gateway.models, quire.cluster.group.service\n"
        "from quire.cluster.features.tracing.tracing import start_tracing\n"
        "import quire.cluster.gateway.models, quire.cluster.group.service\n"
        "from quire.cluster.features.tracing.tracing import start_tracing\n"
        "assert start_tracing(None, role='gateway', instance='it') is None\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry')])"
    )
    assert run(script).strip() == "[]"
