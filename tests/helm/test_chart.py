"""The chart's manifests are valid, and their pods, nodes and services are consistent."""

import json
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from tests.helm.charts import (
    CHART,
    VALUES,
    Manifest,
    is_kubernetes_own,
    num_replicas,
    of_kind,
    pods,
    ray_cluster,
    render,
    settings,
)

from quire.cluster.features.nodes.placement import placement_options
from quire.cluster.settings import config_from

KUBERNETES = "1.33"


def test_helm_finds_nothing_to_complain_of(values: dict[str, Any]) -> None:
    report = helm_python.lint(CHART, values, strict=True)
    # Icons are optional.
    found = [each for each in report["messages"] if "icon is recommended" not in each["error"]]
    assert not found
    assert not report["errors"]


@pytest.mark.quick_cells(3)
def test_core_kinds_are_valid(manifests: list[Manifest]) -> None:
    for manifest in manifests:
        if is_kubernetes_own(manifest):
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    for pod in pods(manifests).values():
        whole = {**pod, "apiVersion": "v1", "kind": "Pod"}
        kubernetes_validate.validate(whole, KUBERNETES, strict=True)


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
        assert spec["replicas"] == scaled["minGroups"]
        assert spec["maxReplicas"] > scaled["maxGroups"]
        assert ray_cluster(manifests)["enableInTreeAutoscaling"] is True
    else:
        assert spec["maxReplicas"] > num_replicas(manifests)["ReplicaGroup"]
    # KubeRay never updates bounds of a running cluster, so they leave room in both directions.
    (gateways, *_) = ray_cluster(manifests)["workerGroupSpecs"]
    assert (gateways["minReplicas"], spec["minReplicas"]) == (0, 0)
    bounds = values.get("gateway", {}).get("autoscaling")
    if bounds:
        assert gateways["replicas"] == bounds["minGateways"]
        assert gateways["maxReplicas"] > bounds["maxGateways"]
    else:
        assert gateways["replicas"] == num_replicas(manifests)["Gateway"] < gateways["maxReplicas"]


def test_every_container_is_confined(manifests: list[Manifest]) -> None:
    for name, pod in pods(manifests).items():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        # A user's init container is unknown.
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
    # Each pod has the resources that Ray may reserve on it.
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
