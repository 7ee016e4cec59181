"""A client's ``tracestate`` header (W3C), as passed on in spans."""

import logging
from collections.abc import AsyncIterator

import pytest
from tests.cluster.features.tracing.test_tracing import CLIENT_TRACE, TRACEPARENT, Lines

from quire.cluster.features.tracing.span_export import SpanExport
from quire.cluster.features.tracing.tracing import start_tracing
from quire.cluster.telemetry.timeline import MAX_TRACE_STATE, Timeline

pytestmark = pytest.mark.anyio


@pytest.fixture
async def traces(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[SpanExport]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.05")
    started = start_tracing("http://127.0.0.1:1", role="gateway", instance="it")
    assert started is not None
    yield started
    await started.close()


def begun(traces: SpanExport, *tracestates: str) -> Timeline:
    call = Timeline()
    traces.begin(call, traceparents=[TRACEPARENT], tracestates=tracestates)
    return call


async def test_a_malformed_tracestate_is_dropped_and_logs_nothing(traces: SpanExport) -> None:
    bad = [
        "a",
        "A=1",
        "a=1=2",
        "a=\u00e9",
        "a=1,,b@=2",
        "a=1,a=2",
        f"{'a' * 257}=1",
        f"a={'1' * 257}",
    ]
    bad += [",".join(f"a{number}=1" for number in range(33)), f"a={'1' * 256}," * 100]
    lines = Lines()
    logging.getLogger().addHandler(lines)
    calls = [begun(traces, each) for each in bad]
    traces.begin(Timeline(), traceparents=[TRACEPARENT + "-1" * 300], tracestates=[])
    logging.getLogger().removeHandler(lines)
    assert {each.trace_id for each in calls} == {CLIENT_TRACE}
    assert {each.trace_state for each in calls} == {""}
    assert lines.told == []
    without = Timeline()
    traces.begin(without, traceparents=[], tracestates=["a=1"])
    assert without.trace_state == ""


async def test_a_long_tracestate_loses_members_as_w3c_has_it(traces: SpanExport) -> None:
    """Long members are dropped first, then the last ones; the others keep their order."""
    short = [f"s{number:02}={'1' * 36}" for number in range(12)]  # 12 * 40 + 11 = 491
    fits = [*short, "last=" + "1" * 15]
    assert len(",".join(fits)) == MAX_TRACE_STATE
    assert begun(traces, ",".join(fits)).trace_state == ",".join(fits)
    long = "long=" + "1" * 124
    assert begun(traces, long, ",".join(fits)).trace_state == ",".join(fits)
    assert begun(traces, f"{long},x{long}", *short[:8]).trace_state == ",".join([long, *short[:8]])
    assert begun(traces, *fits, "more=1").trace_state == ",".join(fits)
    assert begun(traces, "more=1", *fits).trace_state == ",".join(["more=1", *short])
