"""Renders the chart with real Helm, and finds parts of the manifests."""

from pathlib import Path
from typing import Any

import helm_python
import yaml

CHART = Path(__file__).parents[2] / "helm" / "quire"
VALUES = {path.name.removesuffix("-values.yaml"): path for path in (CHART / "ci").glob("*.yaml")}
"""Values files by name; each puts one feature to use."""

Manifest = dict[str, Any]


def render(values: dict[str, Any]) -> list[Manifest]:
    """All manifests, with hooks, of a release ``release`` in the namespace ``serving``."""
    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        rendered = chart.render(values=values, name="release", namespace="serving")
    texts = [text for name, text in rendered.items() if name.endswith(".yaml")]
    return [each for text in texts for each in yaml.safe_load_all(text) if each]


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind]


def is_kubernetes_own(manifest: Manifest) -> bool:
    """Whether the manifest's kind is built into Kubernetes, rather than defined by a CRD."""
    group, _, _ = manifest["apiVersion"].rpartition("/")
    return "." not in group or (group.endswith(".k8s.io") and not group.startswith("gateway."))


def ray_cluster(manifests: list[Manifest]) -> Manifest:
    (service,) = of_kind(manifests, "RayService")
    config: Manifest = service["spec"]["rayClusterConfig"]
    return config


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """The template, metadata and spec, of every pod of the chart, by name."""
    cluster = ray_cluster(manifests)
    groups = {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}
    (test,) = of_kind(manifests, "Pod")
    return {"head": cluster["headGroupSpec"]["template"], "test": test, **groups}


def applications(manifests: list[Manifest]) -> list[Manifest]:
    """Ray Serve's applications: the gateways' first, then one for the groups of each model."""
    (service,) = of_kind(manifests, "RayService")
    found: list[Manifest] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    return found


def settings(manifests: list[Manifest]) -> Manifest:
    """The arguments of the gateways' application."""
    args: Manifest = applications(manifests)[0]["args"]
    return args


def num_replicas(manifests: list[Manifest]) -> dict[str, int]:
    """The number of replicas configured for each deployment: gateways, and groups of the first
    model."""
    return {
        each["name"]: each["num_replicas"]
        for application in applications(manifests)[:2]
        for each in application.get("deployments", [])
    }
