"""The chart's manifests: valid, and what they say of pods, nodes and services fits together."""

import json
import os
from pathlib import Path
from typing import Any

import helm_python
import jsonschema
import kubernetes_validate
import pytest
import yaml
from tests.helm.charts import (
    CHART,
    VALUES,
    Manifest,
    num_replicas,
    of_kind,
    pods,
    ray_cluster,
    render,
    settings,
)

from quire.cluster.group.placement import placement_options
from quire.cluster.settings import config_from

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


def test_helm_finds_nothing_to_complain_of(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    # An icon is a matter of taste.
    found = [each for each in report["messages"] if "icon is recommended" not in each["error"]]
    assert not found
    assert not report["errors"]


@pytest.mark.quick_cells(3)
def test_core_kinds_are_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if manifest["kind"] not in OTHERS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for pod in pods(manifests).values():
        whole = {**pod, "apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)


@pytest.mark.slow
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
        for container in spec["containers"]:
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
        for container in pod["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_model_is_where_the_engine_looks(manifests: list[Manifest]) -> None:
    model = settings(manifests)["engine"].get("model")
    for name, pod in pods(manifests).items():
        mounts = [mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]]
        assert ("/models" in mounts) is (model is not None and name != "test")


@pytest.mark.parametrize("claim", ["", "models"])
def test_a_model_of_the_hub_is_fetched_by_every_pod_of_ray(claim: str) -> None:
    hub = {"repository": "example/llama", "revision": "v1", "tokenSecret": "hub"}
    manifests = render({"model": {"source": "hub", "hub": hub | {"cacheClaimName": claim}}})
    assert settings(manifests)["engine"]["model"] == "example/llama@v1"
    for name, pod in pods(manifests).items():
        (container,) = pod["spec"]["containers"]
        mounts = {
            each["mountPath"]: each.get("readOnly", False) for each in container["volumeMounts"]
        }
        environment = {each["name"]: each for each in container.get("env", [])}
        if name == "test":
            assert "HF_HOME" not in environment
            continue
        home = environment["HF_HOME"]["value"]
        assert any(home.startswith(path) and not read_only for path, read_only in mounts.items())
        assert ("/models" in mounts) is bool(claim)
        token = {"secretKeyRef": {"name": "hub", "key": "token"}}
        assert environment["HF_TOKEN"]["valueFrom"] == token


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
