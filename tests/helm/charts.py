"""The chart as real Helm renders it, and the parts of what comes out."""

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "helm" / "quire"
VALUES = {path.name.removesuffix("-values.yaml"): path for path in (CHART / "ci").glob("*.yaml")}
"""Each file of values, which is one feature in use."""

Manifest = dict[str, Any]


def render(values: dict[str, Any]) -> list[Manifest]:
    """All manifests, hooks among them, of a release called ``release`` in ``serving``."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values=values, name="release", namespace="serving")
    texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def is_kubernetes_own(manifest: Manifest) -> bool:
    """Whether it is of a kind that every cluster knows; others have definitions of their own."""
    group, _, _ = manifest["apiVersion"].rpartition("/")
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith("gateway."))


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


def applications(manifests: list[Manifest]) -> list[Manifest]:
    """The applications of Ray Serve: the gateways, and the groups of each model."""
    (service,) = of_kind(manifests, "RayService")
    found: list[Manifest] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return found


def settings(manifests: list[Manifest]) -> Manifest:
    """The arguments of the gateways' application."""
    args: Manifest = applications(manifests)[0]["args"]
    return args


def num_replicas(manifests: list[Manifest]) -> dict[str, int]:
    """How many replicas of which deployments Serve is told to keep: gateways, and groups of the
    first model."""
    return {
        each["name"]: each["num_replicas"]
        for application in applications(manifests)[:2]
        for each in application.get("deployments", [])
    }
