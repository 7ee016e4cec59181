"""The chart's dashboard and alerts use metrics that gateways really export."""

import json
import re
import time
from typing import Any

import yaml
from tests.helm.charts import CHART, VALUES, of_kind, render

from quire.cluster.features.autoscale.demand import Demand
from quire.cluster.links.groups import Groups
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.queue import AdmissionQueue
from quire.cluster.telemetry import metrics as telemetry
from quire.router.table import RoutingTable


def known_metrics() -> set[str]:
    groups, table = FakeGroups(), RoutingTable(block_size=16)
    registry = telemetry.Telemetry(groups=groups, table=table).registry
    AdmissionQueue(
        AdmissionConfig(),
        groups=groups,
        table=table,
        registry=registry,
        start_wait_s=1,
        clock=time.monotonic,
    )
    gateway = telemetry.GatewayTelemetry()
    gateway.add("model", registry)
    return {metric.name for metric in gateway._page.collect()}


def test_dashboards_draw_metrics_that_gateways_have() -> None:
    known = known_metrics()
    for path in (CHART / "dashboards").glob("*.json"):
        text = json.dumps(json.loads(path.read_text()))
        for name in set(re.findall(r"quire_[a-z_]+", text)):
            base = re.sub(r"_(total|bucket|sum|count)$", "", name)
            assert base in known, name


def rules(*names: str, **extra: Any) -> list[dict[str, Any]]:
    """The alerts of a release with these files of values."""
    values: dict[str, Any] = {}
    for name in names:
        values |= yaml.safe_load(VALUES[name].read_text())
    (rule,) = of_kind(render(values | extra), "PrometheusRule")
    (group,) = rule["spec"]["groups"]
    alerts: list[dict[str, Any]] = group["rules"]
    return alerts


def test_alerts_are_of_this_release_and_of_metrics_and_labels_that_gateways_have() -> None:
    known = known_metrics()
    manifests = render(yaml.safe_load(VALUES["metrics"].read_text()))
    (monitor,) = of_kind(manifests, "PodMonitor")
    job = f"serving/{monitor['metadata']['name']}"
    for alert in rules("metrics"):
        asked = re.findall(r'(quire_[a-z_]+){(?:outcome="error",)?job="([^"]+)"}', alert["expr"])
        assert len(asked) == alert["expr"].count("quire_") > 0
        for name, of in asked:
            assert of == job
            assert re.sub(r"_(total|bucket)$", "", name) in known, name
        assert alert["labels"]["severity"] in ("warning", "critical")
        assert alert["annotations"]["summary"]


def test_no_group_alerts_where_groups_should_be_there() -> None:
    metrics = {"metrics": {"alerts": {"enabled": True}}}
    of = {alert["alert"]: alert for alert in rules("metrics")}
    assert re.search(r"== 0 or absent\(quire_ready_groups", of["QuireServesNothing"]["expr"])
    assert of["QuireFirstTokensLate"]["expr"].endswith("> 2.5")
    autoscaled = {alert["alert"]: alert for alert in rules("autoscaling", **metrics)}
    assert "QuireGroupsMissing" not in autoscaled
    groups = {"autoscaling": {"enabled": True, "minGroups": 0}}
    to_zero = {alert["alert"]: alert for alert in rules(groups=groups, **metrics)}
    assert "quire_requests_without_group" in to_zero["QuireServesNothing"]["expr"]


class FakeGroups(Groups):
    """Stands for `Groups` without groups, since real ones need an event loop."""

    def __init__(self) -> None:
        self.demand = Demand()
        self._loads = {}
        self._attached = {}
        self._retired = set()
        self._watchers = []
        self._load_watchers = []
