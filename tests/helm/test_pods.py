"""Values for pods reach the intended pods, beside the chart's own settings."""

import json
from typing import Any

import helm_python
import pytest
import yaml
from tests.helm.charts import (
    VALUES,
    Manifest,
    applications,
    of_kind,
    pods,
    ray_cluster,
    render,
    settings,
)

from quire.cluster.features.nodes.placement import placement_options
from quire.cluster.settings import config_from

OF_RAY = ("head", "gateway", "tp1")


def given(name: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(VALUES[name].read_text())
    return values


def container(pod: Manifest) -> Manifest:
    first: Manifest = pod["spec"]["containers"][0]
    return first


def environment(pod: Manifest) -> dict[str, str | None]:
    """Environment variables. Asserts that each occurs once, as the API server requires."""
    variables = container(pod)["env"]
    assert len({each["name"] for each in variables}) == len(variables)
    return {each["name"]: each.get("value") for each in variables}


def test_options_of_all_pods_and_of_one_kind_are_added() -> None:
    made = pods(render(given("pods")))
    for name in OF_RAY:
        variables = environment(made[name])
        assert variables["HTTPS_PROXY"] == "http://proxy.example.com:3128"
        assert variables["XDG_CACHE_HOME"] == "/cache"
        assert variables["HOME"] == "/tmp"
        assert ("NCCL_IB_HCA" in variables) is (name == "tp1")
        assert container(made[name])["envFrom"] == [{"configMapRef": {"name": "site"}}]
        spec = made[name]["spec"]
        assert spec["schedulerName"] == "volcano"
        assert spec["serviceAccountName"] == "release-quire"
        assert spec.get("runtimeClassName") == ("nvidia" if name == "tp1" else None)
        assert "cache" in {volume["name"] for volume in spec["volumes"]}
        keys = [each["key"] for each in spec["tolerations"]]
        assert keys == ["example.com/inference"] + ["nvidia.com/gpu"] * (name == "tp1")
        assert made[name]["metadata"]["labels"]["example.com/team"] == "inference"
        assert [each["name"] for each in spec["containers"][1:]] == ["logs"] * (name == "gateway")
        assert [each["name"] for each in spec.get("initContainers", [])] == ["warm"] * (
            name == "tp1"
        )


def test_a_label_does_not_take_a_pod_from_its_service() -> None:
    label = {"app.kubernetes.io/component": "mine"}
    made = pods(render({"pods": {"podLabels": label}}))
    components = [made[name]["metadata"]["labels"]["app.kubernetes.io/component"] for name in made]
    assert components == ["head", "test", "gateway", "group"]


def test_no_pod_needs_a_tool_that_the_image_lacks_to_tell_that_it_is_alive() -> None:
    for name in OF_RAY:
        of_ray = container(pods(render({}))[name])
        assert of_ray["livenessProbe"]["httpGet"] == {"path": "/api/healthz", "port": 52365}
        assert "httpGet" in of_ray["readinessProbe"]
        assert "startupProbe" not in of_ray


def test_rays_agent_tells_its_health_to_everyone_at_that_path() -> None:
    from ray.dashboard import http_server_agent

    assert "/api/healthz" in http_server_agent.PUBLIC_EXACT_PATHS


def test_probes_are_changed_key_by_key_or_replaced() -> None:
    made = pods(
        render(
            {
                "gateway": {
                    "readinessProbe": {"periodSeconds": 7},
                    "startupProbe": {"failureThreshold": 60},
                },
                "groups": {"livenessProbe": {"exec": {"command": ["true"]}}},
            }
        )
    )
    gateway = container(made["gateway"])
    assert gateway["readinessProbe"]["periodSeconds"] == 7
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/health"
    assert gateway["startupProbe"]["failureThreshold"] == 60
    assert gateway["startupProbe"]["httpGet"]["path"] == "/api/healthz"
    alive = container(made["tp1"])["livenessProbe"]
    assert alive["exec"] == {"command": ["true"]}
    assert "httpGet" not in alive
    assert alive["failureThreshold"] == 120


def test_security_is_changed_key_by_key() -> None:
    values = {
        "runAsUser": None,
        "pods": {"podSecurityContext": {"supplementalGroups": [7]}},
        "groups": {
            "securityContext": {
                "readOnlyRootFilesystem": False,
                "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]},
            }
        },
    }
    made = pods(render(values))
    confined = container(made["tp1"])["securityContext"]
    assert confined["readOnlyRootFilesystem"] is False
    assert confined["allowPrivilegeEscalation"] is False
    assert confined["capabilities"]["add"] == ["IPC_LOCK"]
    assert container(made["gateway"])["securityContext"]["readOnlyRootFilesystem"] is True
    of_pod = made["gateway"]["spec"]["securityContext"]
    assert of_pod["supplementalGroups"] == [7]
    assert of_pod["runAsNonRoot"] is True
    assert "runAsUser" not in of_pod


def test_an_account_is_made_or_named() -> None:
    account = {"create": True, "name": "reader", "annotations": {"a": "b"}}
    manifests = render({"serviceAccount": account})
    (made,) = of_kind(manifests, "ServiceAccount")
    assert made["metadata"]["name"] == "reader"
    assert made["metadata"]["annotations"] == {"a": "b"}
    assert made["automountServiceAccountToken"] is False
    named = render({"serviceAccount": {"name": "there"}})
    assert of_kind(named, "ServiceAccount") == []
    for made_by in (manifests, named):
        names = {pods(made_by)[each]["spec"]["serviceAccountName"] for each in OF_RAY}
        assert names == {"reader"} if made_by is manifests else {"there"}


def test_models_have_pods_of_their_own_where_they_ask_for_them() -> None:
    manifests = render(given("two-shapes"))
    large, small, other = config_from(settings(manifests)).models.values()
    groups = {each["groupName"]: each for each in ray_cluster(manifests)["workerGroupSpecs"]}
    gateway, shared, own = groups
    assert (gateway, shared) == ("gateway", "tp4")
    assert own.startswith("org-small-1-")
    # Two groups of the first model, one of the third, and one that replaces either.
    assert groups[shared]["replicas"] == 3 < groups[shared]["maxReplicas"]
    assert groups[own]["replicas"] == small.min_groups == 1
    assert groups[own]["maxReplicas"] > small.max_groups == 6
    assert large.group_resource == other.group_resource != small.group_resource
    for config, name, gpus in ((large, shared, "4"), (small, own, "1")):
        asked = placement_options(config, on_gpu=True)["ray_actor_options"]
        offered = json.loads(json.loads(groups[name]["rayStartParams"]["resources"]))
        assert asked["resources"] == offered
        assert float(groups[name]["rayStartParams"]["num-cpus"]) == asked["num_cpus"]
        limits = container(pods(manifests)[name])["resources"]["limits"]
        assert limits["nvidia.com/gpu"] == gpus == str(asked["num_gpus"])
    assert pods(manifests)[own]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-L4"}
    # Autoscaling decides the number, not the chart.
    assert "deployments" not in applications(manifests)[2]


def test_a_model_of_another_shape_needs_pods_of_its_own() -> None:
    model = {"served_model_name": "b", "engine": {"model": "a/b", "tensor_parallel_size": 2}}
    with pytest.raises(helm_python.HelmError) as raised:
        render({"moreModels": [model]})
    assert "b has engine.tensor_parallel_size=2 and the pods of groups are for 1" in str(
        raised.value
    )


def test_a_claim_is_made_and_used() -> None:
    manifests = render(given("two-shapes"))
    (claim,) = of_kind(manifests, "PersistentVolumeClaim")
    assert claim["spec"]["resources"]["requests"]["storage"] == "1Ti"
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    for name, pod in pods(manifests).items():
        claims = [
            volume["persistentVolumeClaim"]["claimName"]
            for volume in pod["spec"]["volumes"]
            if "persistentVolumeClaim" in volume
        ]
        assert claims == ([claim["metadata"]["name"]] if name != "test" else [])


def test_an_image_may_be_named_by_its_digest() -> None:
    for pod in pods(render(given("ingress"))).values():
        assert container(pod)["image"] == "registry.example.com/quire@sha256:" + "0" * 64


def test_an_ingress_leads_to_the_api_and_holds_no_stream_back() -> None:
    (ingress,) = of_kind(render(given("ingress")), "Ingress")
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "llm.example.com"
    assert [each["path"] for each in rule["http"]["paths"]] == ["/v1", "/health"]
    (service,) = of_kind(render(given("ingress")), "Service")
    for path in rule["http"]["paths"]:
        backend = path["backend"]["service"]
        assert backend["name"] == service["metadata"]["name"]
        assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    said = ingress["metadata"]["annotations"]
    assert said["nginx.ingress.kubernetes.io/proxy-buffering"] == "off"
    assert said["nginx.ingress.kubernetes.io/backend-protocol"] == "HTTPS"
    assert said["cert-manager.io/cluster-issuer"] == "letsencrypt"


def test_more_objects_are_made_with_the_releases_names() -> None:
    made = {
        each["metadata"]["name"]: each for each in of_kind(render(given("ingress")), "ConfigMap")
    }
    assert made["site"]["data"] == {"NO_PROXY": "serving.svc"}
    assert "release-quire-more" in made


def test_routes_have_the_paths_filters_and_services_that_are_asked_for() -> None:
    manifests = render(given("routes"))
    (http,), (grpc,) = of_kind(manifests, "HTTPRoute"), of_kind(manifests, "GRPCRoute")
    rule, more = http["spec"]["rules"]
    assert [match["path"]["value"] for match in rule["matches"]] == ["/v1", "/health", "/docs"]
    assert rule["timeouts"] == {"request": "1800s", "backendRequest": "1800s"}
    assert rule["filters"][0]["type"] == "ResponseHeaderModifier"
    assert more["filters"][0]["type"] == "RequestRedirect"
    services = [match["method"]["service"] for match in grpc["spec"]["rules"][0]["matches"]]
    assert services[0] == "quire.v1.Inference"
    assert len(services) == 3


def test_no_more_groups_than_wanted_are_stopped_at_a_time() -> None:
    def budgets(values: dict[str, Any]) -> dict[str, Any]:
        made = of_kind(render(values), "PodDisruptionBudget")
        return {each["metadata"]["name"]: each["spec"]["maxUnavailable"] for each in made}

    assert budgets(given("pods")) == {"release-quire-gateway": 1, "release-quire-group": "50%"}
    off = {"podDisruptionBudget": {"enabled": False}}
    assert budgets({"groups": off}) == {"release-quire-gateway": 1}
    assert budgets({"gateway": off}) == {"release-quire-group": 1}
