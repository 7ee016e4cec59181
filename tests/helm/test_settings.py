"""The settings that the chart passes to the application and Ray Serve, and refused values."""

import json
import shlex
from dataclasses import asdict, fields
from importlib import import_module
from typing import Any

import helm_python
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema
from tests.helm.charts import (
    CHART,
    Manifest,
    applications,
    num_replicas,
    of_kind,
    pods,
    render,
    settings,
)
from tools import chart_values

from quire.cluster.cli.commands import command_line
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy import wait_idle
from quire.cluster.deploy.app import application, groups
from quire.cluster.deploy.deployments import Gateway, ReplicaGroup
from quire.cluster.deploy.names import application_of, part_of
from quire.cluster.deploy.serve_options import check_of_groups, group_config
from quire.cluster.settings import config_from
from quire.router.config import RoutingConfig
from quire.router.policies.catalog import POLICIES
from quire.worker.request.config import EngineConfig

BOUNDS = {
    ("admission", "maxQueueWaitSeconds"): "max_queue_wait_s",
    ("admission", "maxQueuedRequests"): "max_queued_requests",
    ("admission", "maxQueuedBytes"): "max_queued_bytes",
    ("admission", "maxInflight"): "max_inflight",
    ("failover", "silenceSeconds"): "silence_timeout_s",
    ("failover", "stepDeadlineSeconds"): "step_deadline_s",
    ("failover", "maxGroupDeaths"): "max_group_deaths",
    ("failover", "groupWaitSeconds"): "group_wait_s",
    ("gateway", "handoverSeconds"): "handover_s",
    ("logs", "level"): "log_level",
    ("logs", "format"): "log_format",
    ("logs", "access"): "access_log",
}
CONNECTIONS = {
    "max": "max_connections",
    "maxPerAddress": "max_connections_per_address",
    "shutOutSeconds": "shut_out_s",
    "headTimeoutSeconds": "head_timeout_s",
    "bodyTimeoutSeconds": "body_timeout_s",
    "idleTimeoutSeconds": "idle_timeout_s",
}
"""The application's names for these values of the chart, which have the same defaults."""


@pytest.mark.quick_cells(4)
def test_the_application_accepts_its_settings(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    given = settings(manifests)
    config = config_from(given)
    of_groups = values.get("groups", {})
    assert config.engine.tensor_parallel_size == of_groups.get("tensorParallelSize", 1)
    for section in ("engine", "routing"):
        for name, value in values.get(section, {}).items():
            assert getattr(getattr(config, section), name) == value
    modules = [{"name": each.name, "path": each.path} for each in config.lora_modules]
    assert modules == values.get("loraModules", [])
    assert list(config.allow_origins) == values.get("gateway", {}).get("allowOrigins", [])
    scaled = of_groups.get("autoscaling", {"enabled": False})
    assert (config.autoscaling is not None) is scaled["enabled"]
    if config.autoscaling is not None:
        assert config.min_groups == scaled["minGroups"]
        assert config.max_groups == scaled["maxGroups"]
        assert config.autoscaling.target_ttft_s == scaled["targetTtftSeconds"]
    bounds = values.get("gateway", {}).get("autoscaling")
    assert (config.gateway_autoscaling is not None) is (bounds is not None)
    if config.gateway_autoscaling is not None:
        assert list(asdict(config.gateway_autoscaling).values()) == list(bounds.values())[1:]


def test_admission_and_failover_are_as_given_or_as_without_the_chart(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    config = config_from(settings(manifests))
    known = {
        (section, name) for section in ("admission", "failover", "logs") for name in chart(section)
    }
    assert known <= BOUNDS.keys()
    for (section, name), field in BOUNDS.items():
        wanted = values.get(section, {}).get(name, getattr(ClusterConfig, field))
        assert getattr(config, field) == wanted


def test_connections_are_bounded_as_given_or_as_without_the_chart(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    config = config_from(settings(manifests))
    assert chart("gateway")["connections"].keys() == CONNECTIONS.keys()
    given = values.get("gateway", {}).get("connections", {})
    for name, field in CONNECTIONS.items():
        assert getattr(config, field) == given.get(name, getattr(ClusterConfig, field))


def test_what_scrapes_reaches_each_gateway_by_a_port_of_its_own(manifests: list[Manifest]) -> None:
    container, *_ = pods(manifests)["gateway"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["own-metrics"] == settings(manifests)["metrics_port"]
    for monitor in of_kind(manifests, "PodMonitor"):
        assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["own-metrics"]
    for service in of_kind(manifests, "Service"):
        assert "own-metrics" not in [each["targetPort"] for each in service["spec"]["ports"]]


def chart(section: str) -> dict[str, Any]:
    """The chart's own values."""
    given: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())[section]
    return given


def test_serve_accepts_its_configuration(manifests: list[Manifest], values: dict[str, Any]) -> None:
    (service,) = of_kind(manifests, "RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    models = config_from(settings(manifests)).models
    names = ["quire", *(application_of("quire", part_of(each)) for each in models)]
    assert [application.name for application in config.applications] == names
    known = {ReplicaGroup.__name__, Gateway.__name__}
    assert num_replicas(manifests).keys() <= known


def test_groups_are_given_what_they_use_of_the_settings_and_no_more(
    manifests: list[Manifest],
) -> None:
    _, *given = [each["args"] for each in applications(manifests)]
    models = config_from(settings(manifests)).models.values()
    assert [group_config(config_from(each)) for each in given] == list(map(group_config, models))
    for each in given:
        check_of_groups(each)


def test_what_is_run_by_its_name_is_there(manifests: list[Manifest]) -> None:
    (service,) = of_kind(manifests, "RayService")
    builders = []
    for each in applications(manifests):
        module, _, name = each["import_path"].partition(":")
        builders.append(getattr(import_module(module), name))
    assert builders == [application] + [groups] * len(config_from(settings(manifests)).models)
    before_stop = pods(manifests)["gateway"]["spec"]["containers"][0]["lifecycle"]["preStop"]
    python, flag, module, url, *flags = before_stop["exec"]["command"]
    assert (python, flag, import_module(module)) == ("python", "-m", wait_idle)
    given = settings(manifests)
    assert url.endswith(f"://127.0.0.1:{given['metrics_port']}")
    assert given.get("open_metrics") == (True if "api_keys_file" in given else None)
    assert flags == ["--timeout-s", str(settings(manifests)["drain_timeout_s"])]
    script = pods(manifests)["test"]["spec"]["containers"][0]["command"][-1]
    command = shlex.split(script.partition("exec quire")[2].replace("\\\n", " "))
    address = command_line().parse_args(command).address
    assert (
        address == f"{service['metadata']['name']}.serving.svc:{settings(manifests)['grpc_port']}"
    )


def test_how_many_there_are_is_not_told_to_those_that_a_change_would_restart(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    of_gateways, counts = values.get("gateway", {}), {}
    if "autoscaling" not in of_gateways:
        counts["Gateway"] = of_gateways.get("replicas", 2)
    of_groups = values.get("groups", {})
    if "autoscaling" not in of_groups:
        counts["ReplicaGroup"] = of_groups.get("replicas", 1)
    assert num_replicas(manifests) == counts
    assert not settings(manifests).keys() & {"num_groups", "num_gateways"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gatway": {}}, "gatway"),
        ({"engine": {"device": "cuda", "blocksize": 16}}, "blocksize"),
        ({"engine": {"block_size": 24}}, "block_size"),
        ({"routing": {"policy": "fastest"}}, "policy"),
        ({"admission": {"maxQueueWaitSeconds": -1}}, "maxQueueWaitSeconds"),
        ({"admission": {"maxQueueWait": 2}}, "maxQueueWait"),
        ({"failover": {"maxGroupDeaths": 1}}, "maxGroupDeaths"),
        ({"gateway": {"connections": {"max": 0}}}, "max"),
        ({"model": {"source": "s3"}}, "source"),
        ({"model": {"source": "pvc"}}, "model.pvc.claimName is needed"),
        ({"gateway": {"tls": {"enabled": True}}}, "gateway.tls.secretName is needed"),
        (
            {
                "groups": {"autoscaling": {"enabled": True}},
                "ray": {"autoscaler": {"enabled": False}},
            },
            "groups.autoscaling.enabled needs ray.autoscaler.enabled",
        ),
        (
            {"groups": {"autoscaling": {"enabled": True, "minGroups": 9}}},
            "groups.autoscaling.maxGroups=4 must not be below minGroups=9",
        ),
        ({"groups": {"autoscaling": {"minPods": 1}}}, "minPods"),
        (
            {"gateway": {"autoscaling": {"enabled": True, "minGateways": 9}}},
            "gateway.autoscaling.maxGateways=6 must not be below minGateways=9",
        ),
        (
            {
                "gateway": {"autoscaling": {"enabled": True}},
                "ray": {"autoscaler": {"enabled": False}},
            },
            "gateway.autoscaling.enabled needs ray.autoscaler.enabled",
        ),
        (
            {"groups": {"tensorParallelSize": 8, "nodesPerGroup": 3}},
            "groups.nodesPerGroup=3 must divide groups.tensorParallelSize=8",
        ),
        ({"httpRoute": {"enabled": True}}, "httpRoute.parentRefs names the Gateway"),
    ],
)
def test_wrong_values_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(helm_python.HelmError) as raised:
        render(values)
    assert message in str(raised.value)


def test_the_schema_knows_every_value_and_every_option_of_engine_and_routing() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())

    def check(given: dict[str, Any], known: dict[str, Any], place: str) -> None:
        assert known["additionalProperties"] is False, place
        assert given.keys() <= known["properties"].keys(), place
        for name, value in given.items():
            if "properties" in known["properties"][name]:
                check(value, known["properties"][name], f"{place}.{name}")

    check(defaults, schema, "")
    options = {field.name for field in fields(EngineConfig)}
    # The chart sets these two itself.
    assert set(schema["properties"]["engine"]["properties"]) == options - {
        "model",
        "tensor_parallel_size",
    }
    routing = schema["properties"]["routing"]["properties"]
    assert set(routing) == {field.name for field in fields(RoutingConfig)}
    assert routing["policy"]["enum"] == list(POLICIES)


def test_several_models_are_served_at_one_address() -> None:
    manifests = render(yaml.safe_load((CHART / "ci/two-models-values.yaml").read_text()))
    config = config_from(settings(manifests))
    large, small = config.models.values()
    assert [each["name"] for each in applications(manifests)] == [
        "quire",
        "quire:large",
        "quire:org--small",
    ]
    assert str(small.engine.model) == "/models/small"
    assert (small.engine.max_model_len, large.engine.max_model_len) == (8192, None)
    assert small.engine.device == large.engine.device == "cuda"
    assert small.group_resource == large.group_resource
    assert small.aliases == ("small",)
    (of_small,) = applications(manifests)[2]["deployments"]
    assert of_small == {"name": "ReplicaGroup", "num_replicas": 1}


def test_every_value_is_described_in_the_schema_and_in_the_table() -> None:
    assert chart_values.schema() == (CHART / "values.schema.json").read_text()
    assert chart_values.readme() == (CHART.parent / "README.md").read_text()
    silent = [each.path for each in chart_values.values() if each.is_leaf and not each.description]
    assert silent == []
