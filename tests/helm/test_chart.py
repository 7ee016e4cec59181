"""The chart, as real Helm lints and renders it with each file of values in ``helm/quire/ci``."""

import json
import os
import re
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

from quire.cluster.admission.config import AdmissionConfig
from quire.cluster.admission.queue import AdmissionQueue
from quire.cluster.autoscaling.demand import Demand
from quire.cluster.config import ClusterConfig
from quire.cluster.deployments import Gateway, ReplicaGroup
from quire.cluster.gateway import telemetry
from quire.cluster.group.placement import placement_options
from quire.cluster.links.groups import Groups
from quire.cluster.settings import config_from
from quire.router.config import RoutingConfig
from quire.router.policies.catalog import POLICIES
from quire.router.table import RoutingTable
from quire.worker.config import EngineConfig

CHART = Path(__file__).parents[2] / "helm" / "quire"
VALUES = {path.name.removesuffix("-values.yaml"): path for path in (CHART / "ci").glob("*.yaml")}
KUBERNETES = "1.33"
OTHERS = {
    "RayService",
    "HTTPRoute",
    "GRPCRoute",
    "PodMonitor",
    "ServiceMonitor",
    "PrometheusRule",
}
CRDS = Path(os.environ.get("QUIRE_CRDS", Path(__file__).parents[3] / "shared/data/crds"))

Manifest = dict[str, Any]

BOUNDS = {
    ("admission", "maxQueueWaitSeconds"): "max_queue_wait_s",
    ("admission", "standingWaitSeconds"): "standing_wait_s",
    ("admission", "maxQueuedRequests"): "max_queued_requests",
    ("admission", "maxQueuedTokens"): "max_queued_tokens",
    ("failover", "silenceSeconds"): "silence_timeout_s",
    ("failover", "stepDeadlineSeconds"): "step_deadline_s",
    ("failover", "maxGroupDeaths"): "max_group_deaths",
    ("gateway", "handoverSeconds"): "handover_s",
}
"""Values of the chart that the application knows by another name, and has the same default for."""


def render(values: dict[str, Any]) -> list[Manifest]:
    """All manifests, hooks among them, of a release called ``release`` in ``serving``."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values=values, name="release", namespace="serving")
    texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def ray_cluster(manifests: list[Manifest]) -> Manifest:
    (service,) = of_kind(manifests, "RayService")
    config: Manifest = service["spec"]["rayClusterConfig"]
    return config


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Metadata and spec of every pod that the chart makes, by name."""
    cluster = ray_cluster(manifests)
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    (test,) = of_kind(manifests, "Pod")
    return {"head": cluster["headGroupSpec"]["template"], "test": test, **groups}


def settings(manifests: list[Manifest]) -> Manifest:
    """What the application is given."""
    (service,) = of_kind(manifests, "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    args: Manifest = application["args"]
    return args


def num_replicas(manifests: list[Manifest]) -> dict[str, int]:
    """How many replicas of which deployments Serve is told to keep."""
    (service,) = of_kind(manifests, "RayService")
    (application,) = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return {each["name"]: each["num_replicas"] for each in application["deployments"]}


@pytest.fixture(scope="module", params=sorted(VALUES))
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    given: dict[str, Any] = yaml.safe_load(VALUES[request.param].read_text())
    return given


@pytest.fixture(scope="module")
def manifests(values: dict[str, Any]) -> list[Manifest]:
    return render(values)


def test_helm_finds_nothing_to_complain_of(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    # An icon is a matter of taste.
    found = [each for each in report["messages"] if "icon is recommended" not in each["error"]]
    assert not found
    assert not report["errors"]


def test_core_kinds_are_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] not in OTHERS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for pod in pods(manifests).values():
        whole = {**pod, "apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)


def test_the_ray_service_is_valid(manifests: list[Manifest]) -> None:
    path = CRDS / "rayservices.yaml"
    if not path.exists():
        pytest.skip(f"KubeRay's CRDs are not at {CRDS}; QUIRE_CRDS says where they are")
    crd = yaml.safe_load(path.read_text())
    (version,) = [each for each in crd["spec"]["versions"] if each["name"] == "v1"]
    schema = closed(version["schema"]["openAPIV3Schema"])
    (service,) = of_kind(manifests, "RayService")
    jsonschema.validate(service, schema)


def closed(schema: Any) -> Any:
    """The schema with unknown fields refused, as `kubectl apply --validate=strict` does."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: closed(value) for key, value in schema.items()}
    is_object = "properties" in schema and schema.get("type") == "object"
    if is_object and "additionalProperties" not in schema:
        schema["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        schema.pop("type", None)
    return schema


def test_the_application_accepts_its_settings(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    given = settings(manifests)
    config = config_from(given)
    groups = values.get("groups", {})
    assert config.engine.tensor_parallel_size == groups.get("tensorParallelSize", 1)
    for section in ("engine", "routing"):
        for name, value in values.get(section, {}).items():
            assert getattr(getattr(config, section), name) == value
    scaled = groups.get("autoscaling", {"enabled": False})
    assert (config.autoscaling is not None) is scaled["enabled"]
    if config.autoscaling is not None:
        assert config.min_groups == scaled["minGroups"]
        assert config.max_groups == scaled["maxGroups"]
        assert config.autoscaling.target_ttft_s == scaled["targetTtftSeconds"]


def test_admission_and_failover_are_as_given_or_as_without_the_chart(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    config = config_from(settings(manifests))
    known = {(section, name) for section in ("admission", "failover") for name in chart(section)}
    assert known <= BOUNDS.keys()
    for (section, name), field in BOUNDS.items():
        wanted = values.get(section, {}).get(name, getattr(ClusterConfig, field))
        assert getattr(config, field) == wanted


def chart(section: str) -> dict[str, Any]:
    """The chart's own values."""
    given: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())[section]
    return given


def test_serve_accepts_its_configuration(manifests: list[Manifest], values: dict[str, Any]) -> None:
    (service,) = of_kind(manifests, "RayService")
    config = ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))
    assert [application.name for application in config.applications] == ["quire"]
    known = {ReplicaGroup.__name__, Gateway.__name__}
    assert num_replicas(manifests).keys() <= known


def test_how_many_there_are_is_not_told_to_those_that_a_change_would_restart(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    counts = {"Gateway": values.get("gateway", {}).get("replicas", 2)}
    groups = values.get("groups", {})
    if "autoscaling" not in groups:
        counts["ReplicaGroup"] = groups.get("replicas", 1)
    assert num_replicas(manifests) == counts
    assert not settings(manifests).keys() & {"num_groups", "num_gateways"}


def test_there_may_be_a_pod_for_every_group_and_one_that_replaces_it(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    (spec,) = [
        group
        for group in ray_cluster(manifests)["workerGroupSpecs"]
        if group["groupName"].startswith("tp")
    ]
    scaled = values.get("groups", {}).get("autoscaling")
    if scaled:
        assert spec["minReplicas"] == spec["replicas"] == scaled["minGroups"]
        assert spec["maxReplicas"] == scaled["maxGroups"] + 1
        assert ray_cluster(manifests)["enableInTreeAutoscaling"] is True
    else:
        assert spec["maxReplicas"] > num_replicas(manifests)["ReplicaGroup"]


def test_every_container_is_confined(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["requests"], name
        speaks_to_kubernetes = name == "head" and ray_cluster(manifests)["enableInTreeAutoscaling"]
        assert spec.get("automountServiceAccountToken", True) is speaks_to_kubernetes


def test_what_is_mounted_is_there(manifests: list[Manifest]) -> None:
    for pod in pods(manifests).values():
        volumes = {volume["name"] for volume in pod["spec"]["volumes"]}
        for container in [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_model_is_where_the_engine_looks(manifests: list[Manifest]) -> None:
    model = settings(manifests)["engine"].get("model")
    for name, pod in pods(manifests).items():
        mounts = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
        assert ("/models" in mounts) is (model is not None and name != "test")


def test_the_kubelet_waits_for_the_drain(manifests: list[Manifest]) -> None:
    drain_s = settings(manifests)["drain_timeout_s"]
    for name in pods(manifests).keys() - {"head", "test"}:
        grace_s = pods(manifests)[name]["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= drain_s + 30
    (service,) = of_kind(manifests, "RayService")
    assert service["spec"]["rayClusterDeletionDelaySeconds"] > grace_s


def test_gpus_are_one_for_each_rank() -> None:
    on_gpu = pods(render(yaml.safe_load(VALUES["pvc-on-gpus"].read_text())))["tp4"]
    assert on_gpu["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    on_cpu = pods(render(yaml.safe_load(VALUES["demo-on-cpu"].read_text())))["tp2"]
    assert "nvidia.com/gpu" not in on_cpu["spec"]["containers"][0]["resources"]["limits"]


def test_a_group_on_several_nodes_has_a_pod_on_each() -> None:
    manifests = render(yaml.safe_load(VALUES["across-nodes"].read_text()))
    groups = next(
        each for each in ray_cluster(manifests)["workerGroupSpecs"] if each["groupName"] == "tp8"
    )
    assert groups["replicas"] == 4
    container = groups["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "4"
    config = config_from(settings(manifests))
    (bundle, other) = placement_options(config, on_gpu=True)["placement_group_bundles"]
    assert bundle == other == {"CPU": 4, "GPU": 4, "quire_group": 1}
    # What Ray is to reserve on a pod, the pod has.
    assert float(groups["rayStartParams"]["num-cpus"]) == bundle["CPU"]
    assert json.loads(json.loads(groups["rayStartParams"]["resources"])) == {"quire_group": 1}


def test_the_head_keeps_its_state_where_that_is_wanted(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    wanted = values.get("ray", {}).get("gcsFaultTolerance", {})
    options = ray_cluster(manifests).get("gcsFaultToleranceOptions")
    assert (options is not None) is wanted.get("enabled", False)
    if options is not None:
        assert options["backend"] == wanted.get("backend", "rocksdb")


def test_every_pod_of_ray_knows_how_long_to_wait(
    manifests: list[Manifest], values: dict[str, Any]
) -> None:
    ray = values.get("ray", {})
    for name, pod in pods(manifests).items():
        if name == "test":
            continue
        given = pod["spec"]["containers"][0]["env"]
        environment = {each["name"]: each.get("value") for each in given}
        head_loss_s = environment["RAY_gcs_rpc_server_reconnect_timeout_s"]
        assert int(head_loss_s) == ray.get("headLossSeconds", 600)
        each_s = sum(int(environment[f"RAY_health_check_{part}_ms"]) for part in PARTS) / 1000
        lost_s = each_s * int(environment["RAY_health_check_failure_threshold"])
        assert 0.5 <= lost_s / ray.get("lostNodeSeconds", 15) <= 1


PARTS = ("period", "timeout")


def test_services_and_policies_select_pods_that_exist(manifests: list[Manifest]) -> None:
    labels = [pod["metadata"]["labels"] for pod in pods(manifests).values()]
    services = [each["spec"]["selector"] for each in of_kind(manifests, "Service")]
    policies = of_kind(manifests, "NetworkPolicy") + of_kind(manifests, "PodDisruptionBudget")
    for policy in policies:
        selector = policy["spec"].get("podSelector") or policy["spec"]["selector"]
        services.append(selector["matchLabels"])
    for selector in services:
        assert any(selector.items() <= each.items() for each in labels), selector


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
    # Those two the chart sets itself.
    assert set(schema["properties"]["engine"]["properties"]) == options - {
        "model",
        "tensor_parallel_size",
    }
    routing = schema["properties"]["routing"]["properties"]
    assert set(routing) == {field.name for field in fields(RoutingConfig)}
    assert routing["policy"]["enum"] == list(POLICIES)


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
    return {metric.name for metric in registry.collect()}


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
    assert of["QuireServesNothing"]["expr"].endswith("or vector(0)) == 0")
    assert of["QuireFirstTokensLate"]["expr"].endswith("> 2.5")
    autoscaled = {alert["alert"]: alert for alert in rules("autoscaling", **metrics)}
    assert "QuireGroupsMissing" not in autoscaled
    groups = {"autoscaling": {"enabled": True, "minGroups": 0}}
    to_zero = {alert["alert"]: alert for alert in rules(groups=groups, **metrics)}
    assert "quire_requests_without_group" in to_zero["QuireServesNothing"]["expr"]


class FakeGroups(Groups):
    """No group, and no event loop that real ones need."""

    def __init__(self) -> None:
        self.demand = Demand()
        self._loads = {}
        self._attached = {}
        self._retired = set()
        self._watchers = []
        self._load_watchers = []
