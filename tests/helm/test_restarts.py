"""The table in ``helm/README.md`` tells what a changed value restarts. It is derived here from the
rendered chart, KubeRay's test for a new Ray cluster, and Serve's comparison of configurations."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.deploy_utils import get_app_code_version
from ray.serve.schema import ServeApplicationSchema
from tests.helm.charts import CHART, Manifest, applications, of_kind, ray_cluster, render

NOTHING = "nothing in Ray"
NUMBERS = "nothing: more or fewer of them run"
LATER = "nothing until there is another Ray cluster"
CLUSTER = "all: a new Ray cluster beside the old one"

BASE: dict[str, Any] = {
    "model": {"source": "hub", "hub": {"repository": "example/llama", "revision": "v1"}},
    "gateway": {"tls": {"enabled": True, "secretName": "a"}},
    "ray": {"gcsFaultTolerance": {"enabled": True}},
}
CHANGES: dict[str, Any] = {
    "image.tag": "2",
    "rayVersion": "2.61.0",
    "model.servedName": "other",
    "model.hub.revision": "v2",
    "model.hub.tokenSecret": "b",
    "moreModels": [{"served_model_name": "b", "engine": {"model": "a/b"}}],
    "moreModels[].pod": [
        {"served_model_name": "b", "engine": {"model": "a/b"}, "pod": {"env": []}}
    ],
    "loraModules": [{"name": "law", "path": "a/law"}],
    "pods.env": [{"name": "A", "value": "b"}],
    "pods.tolerations": [{"operator": "Exists"}],
    "serviceAccount.name": "b",
    "settings.max_group_deaths": 9,
    "engine.max_num_seqs": 8,
    "routing.policy": "round_robin",
    "admission.maxInflight": 9,
    "failover.silenceSeconds": 9,
    "logs.level": "debug",
    "logs.access": False,
    "telemetry.otlpTracesEndpoint": "http://collector:4317",
    "groups.replicas": 3,
    "groups.autoscaling.maxGroups": 9,
    "groups.maxPods": 20,
    "groups.tensorParallelSize": 2,
    "groups.resources": {"requests": {"cpu": "9"}},
    "gateway.replicas": 3,
    "gateway.autoscaling.maxGateways": 9,
    "gateway.maxPods": 20,
    "gateway.drainSeconds": 90,
    "gateway.handoverSeconds": 9,
    "gateway.ports": {"http": 8081},
    "gateway.connections.max": 9,
    "gateway.allowOrigins": ["*"],
    "gateway.chatTemplate": "{{ messages }}",
    "gateway.service.type": "LoadBalancer",
    "gateway.tls.secretName": "b",
    "gateway.podDisruptionBudget": {"enabled": False},
    "head.resources": {"requests": {"cpu": "9"}},
    "ray.lostNodeSeconds": 60,
    "ray.autoscaler.idleTimeoutSeconds": 9,
    "ray.gcsFaultTolerance.rocksdb.size": "2Gi",
    "upgrade.startFirst": False,
    "scratchSize": "30Gi",
    "networkPolicy.enabled": False,
    "ingress": {"enabled": True},
    "httpRoute": {"enabled": True, "parentRefs": [{"name": "a"}]},
    "metrics": {"podMonitor": {"enabled": True}},
    "extraObjects": [{"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a"}}],
}
"""A changed value for each row of the table."""

WITH: dict[str, Any] = {
    "gateway.autoscaling.maxGateways": {"gateway": {"autoscaling": {"enabled": True}}},
    "groups.autoscaling.maxGroups": {"groups": {"autoscaling": {"enabled": True}}},
    "loraModules": {"engine": {"enable_lora": True}},
}
"""Values that other values need to have any effect."""


@pytest.mark.parametrize("path", CHANGES)
def test_the_table_says_what_a_value_restarts(path: str) -> None:
    before = merged(BASE, WITH.get(path, {}))
    after = merged(before, at(path.removesuffix("[].pod"), CHANGES[path]))
    said = re.search(rf"^\| `{re.escape(path)}` \| (.+) \|$", table(), re.MULTILINE)
    assert said, path
    assert said[1] == restarted(render(before), render(after))


def test_the_table_has_rows_for_all_parts_of_the_values() -> None:
    parts = yaml.safe_load((CHART / "values.yaml").read_text()).keys()
    told = {re.split(r"[.\[]", path)[0] for path in CHANGES}
    named = {"nameOverride", "fullnameOverride", "runAsUser", "test", "grpcRoute"}
    assert told | named == parts
    assert len(re.findall(r"^\| `", table(), re.MULTILINE)) == len(CHANGES)


def table() -> str:
    page = (Path(__file__).parents[2] / "helm/README.md").read_text()
    return page.partition("## Which value restarts what\n")[2].partition("\n## ")[0]


def at(path: str, value: Any) -> Any:
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def merged(base: Any, over: Any) -> Any:
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return {key: merged(base.get(key), over.get(key, base.get(key))) for key in base | over}


def restarted(before: list[Manifest], after: list[Manifest]) -> str:
    (old,), (new,) = of_kind(before, "RayService"), of_kind(after, "RayService")
    if compared(ray_cluster(before)) != compared(ray_cluster(after)):
        return CLUSTER
    versions = [
        {each["name"]: get_app_code_version(ServeApplicationSchema(**each)) for each in of}
        for of in (applications(before), applications(after))
    ]
    both = versions[0].keys() & versions[1].keys()
    changed = {name for name in both if versions[0][name] != versions[1][name]}
    parts = ["gateways"] if "quire" in changed else []
    if changed - {"quire"}:
        parts.append("groups")
    restarts = " and ".join(parts) + ", one after the other" if parts else ""
    if versions[0].keys() != versions[1].keys():
        return f"{restarts}; the model's groups are started or stopped"
    if restarts:
        return restarts
    if applications(before) != applications(after):
        return NUMBERS
    return NOTHING if old == new else LATER


def compared(cluster: Manifest) -> Any:
    """The part of a Ray cluster whose change makes KubeRay start a new one. Numbers of pods,
    tolerations, and worker groups added at the end do not.

    Source: `GenerateHashWithoutReplicasAndWorkersToDelete` in KubeRay's operator, 1.5 to 1.7.
    """
    cluster = copy.deepcopy(cluster)
    cluster["headGroupSpec"]["template"]["spec"].pop("tolerations", None)
    for group in cluster["workerGroupSpecs"]:
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name)
        group["template"]["spec"].pop("tolerations", None)
    cluster["workerGroupSpecs"] = cluster["workerGroupSpecs"][:2]
    return cluster
