"""The chart's custom resources fit the definitions (CRDs) of KubeRay, the Gateway API and the
Prometheus operator.

The definitions are read from the folder that ``QUIRE_CRDS`` names, in files of any name, and from
where ``python -m tools.definitions`` puts them.
"""

import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from tests.helm.charts import Manifest, is_kubernetes_own
from tools.definitions import FOLDER

FOLDERS = [
    Path(folder)
    for folder in (
        os.environ.get("QUIRE_CRDS"),
        FOLDER,
        Path(__file__).parents[3] / "shared/data/crds",
    )
    if folder
]

pytestmark = pytest.mark.slow


def test_other_kinds_are_as_their_definitions_want_them(manifests: list[Manifest]) -> None:
    missing = set()
    for manifest in manifests:
        if is_kubernetes_own(manifest):
            continue
        kind = (manifest["apiVersion"], manifest["kind"])
        if kind in definitions():
            jsonschema.validate(manifest, definitions()[kind])
        else:
            missing.add(" ".join(kind))
    if missing:
        kinds = ", ".join(sorted(missing))
        pytest.skip(f"no definition of {kinds}: run python -m tools.definitions")


@cache
def definitions() -> dict[tuple[str, str], Any]:
    """The schema of each kind that has a definition, by API version and name."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted(folder.glob("*.yaml"))):
        for each in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if each and each["kind"] == "CustomResourceDefinition":
                spec = each["spec"]
                for version in spec["versions"]:
                    kind = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                    found[kind] = closed(version["schema"]["openAPIV3Schema"])
    return found


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
    if "(?i)" in str(schema.get("pattern")):  # Go's syntax, which Python lacks.
        schema["pattern"] = f"(?i){schema['pattern'].replace('(?i)', '')}"
    return schema
