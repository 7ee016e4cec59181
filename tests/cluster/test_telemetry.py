"""The page /metrics: Prometheus' linter rules, and the metrics that dashboards and others read."""

import json
import re
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from quire.cluster.deploy import wait_idle
from quire.cluster.telemetry.vllm_metrics import SUMS
from quire.router.policies.speeds import MIN_OBSERVATIONS
from quire.v1 import inference_pb2 as pb

pytestmark = pytest.mark.anyio

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "helm" / "quire" / "dashboards" / "quire.json"

NO_BASE_UNITS = {
    "s", "sec", "secs", "ms", "us", "ns", "milliseconds", "microseconds", "minutes", "hours",
    "b", "kb", "mb", "kib", "mib", "kilobytes", "megabytes", "percent", "pct",
}  # fmt: skip
TYPES = {"counter", "gauge", "histogram", "summary"}


@pytest.fixture
async def page(start_cluster: Any) -> str:
    """The metrics page of a gateway that served a few requests with each of its groups."""
    async with start_cluster() as cluster, httpx.AsyncClient(timeout=None) as client:
        for number in range(4 * MIN_OBSERVATIONS):
            message = pb.GenerateRequest()
            message.token_ids.ids.extend([number % 200 + 1] * 12)
            message.sampling.max_tokens = 2
            async for _ in cluster.inference.Generate(message):
                pass
        return (await client.get(f"{cluster.http_url}/metrics")).text


def ours(page: str) -> Iterator[Metric]:
    for family in text_string_to_metric_families(page):
        # The client library adds a creation time for each counter.
        if not family.name.endswith("_created") and family.name.startswith("quire_"):
            yield family


async def test_vllms_names_are_there_with_the_same_values(page: str) -> None:
    families = {family.name: family for family in text_string_to_metric_families(page)}
    for name, (first, *_) in SUMS.items():
        assert families[name].type == families[first].type
        for sample in families[name].samples:
            assert sample.labels["model_name"] == "hash"
            assert sample.labels["engine"] == "0"
    (tokens,) = [
        each.value for each in families["vllm:generation_tokens"].samples if "_total" in each.name
    ]
    (own,) = [
        each.value for each in families["quire_output_tokens"].samples if "_total" in each.name
    ]
    assert tokens == own > 0
    (usage,) = families["vllm:kv_cache_usage_perc"].samples
    assert 0 <= usage.value <= 1
    reasons = {each.labels["finished_reason"] for each in families["vllm:request_success"].samples}
    assert reasons <= {"stop", "length", "abort"}
    assert reasons


async def test_names_and_help_keep_to_prometheus_rules(page: str) -> None:
    names = []
    for family in ours(page):
        names.append(family.name)
        words = family.name.split("_")
        assert re.fullmatch(r"quire(_[a-z]+)+", family.name)
        assert family.documentation.endswith("."), family.name
        assert not NO_BASE_UNITS.intersection(words), family.name
        assert not TYPES.intersection(words), family.name
        assert family.type in ("counter", "gauge", "histogram"), family.name
        assert words[-1] not in ("total", "bucket", "sum", "count"), family.name
        for sample in family.samples:
            if family.type == "counter":
                assert sample.name in (f"{family.name}_total", f"{family.name}_created")
            assert all(re.fullmatch(r"[a-z]+", label) for label in sample.labels)
    assert len(names) == len(set(names))
    assert len(names) > 40


async def test_who_waits_for_the_last_request_finds_how_many_there_are(page: str) -> None:
    found = wait_idle._INFLIGHT.search(page)
    assert found is not None  # A missing one would read as 0.
    assert float(found[1]) == 0


async def test_histograms_add_up(page: str) -> None:
    histograms = [family for family in ours(page) if family.type == "histogram"]
    for family in histograms:
        buckets = [s for s in family.samples if s.name.endswith("_bucket")]
        counts = [sample.value for sample in buckets]
        assert counts == sorted(counts)
        assert buckets[-1].labels["le"] == "+Inf"
        (total,) = [s.value for s in family.samples if s.name.endswith("_count")]
        assert counts[-1] == total
    assert "quire_routing_forecast_error_seconds" in {family.name for family in histograms}


async def test_forecasts_and_their_errors_are_told_by_group(page: str) -> None:
    families = {family.name: family for family in ours(page)}
    (forecasts,) = [
        s.value for s in families["quire_routing_forecasts"].samples if s.name.endswith("_total")
    ]
    assert forecasts > 0
    errors = families["quire_group_forecast_error_ratio"].samples
    assert errors
    assert {sample.labels["group"] for sample in errors} <= {"g0", "g1"}
    paces = families["quire_group_pace_seconds"].samples
    assert {s.labels["part"] for s in paces} == {"missing_token", "fixed"}
    assert all(sample.value >= 0 for sample in paces)


async def test_whatever_has_a_bound_says_how_full_it_is(page: str) -> None:
    gauges = {
        family.name: family.samples[0].value
        for family in ours(page)
        if family.type == "gauge" and family.samples
    }
    bounds = {name: value for name, value in gauges.items() if "_max_" in name}
    assert len(bounds) >= 5
    for name, bound in bounds.items():
        assert 0 <= gauges[name.replace("_max_", "_")] <= bound


@pytest.mark.parametrize("document", ["operations.md", "routing.md"])
async def test_every_metric_that_the_documents_name_is_there(page: str, document: str) -> None:
    names = {family.name for family in ours(page)}
    names |= {f"{family.name}_total" for family in ours(page) if family.type == "counter"}
    text = (ROOT / "docs" / document).read_text()
    asked = re.findall(r"`(quire_[a-z_*]+|…_[a-z_]+)", text)
    assert len(asked) > 8
    for name in asked:  # "…_held_blocks" abbreviates a similar name.
        pattern = name.replace("…", "*")
        assert any(fnmatchcase(known, pattern) for known in names), name


async def test_every_metric_of_the_dashboard_is_there(page: str) -> None:
    samples = {sample.name for family in ours(page) for sample in family.samples}
    # A counter with labels has no sample before its first count.
    names = samples | {f"{family.name}_total" for family in ours(page) if family.type == "counter"}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 30
    for expression in expressions:
        asked = re.findall(r"quire_[a-z_]+", expression)
        assert asked, expression
        for name in asked:
            assert name in names, f"{name} in {expression}"
    # Each position occurs once.
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(places) == len(set(places))
    assert len({panel["id"] for panel in panels}) == len(panels)
