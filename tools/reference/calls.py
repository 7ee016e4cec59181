"""Generates the page of the HTTP API, from the server's document ``/openapi.json``."""

import json
from itertools import groupby
from typing import Any

from tools.reference.markdown import code, table

from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.openai_http import api_routes
from quire.cluster.features.installed import INSTALLED
from quire.cluster.features.reference.document import reference_of, reference_routes
from quire.cluster.features.reference.page import _kind, _meaning
from quire.cluster.gateway.models import Models

Json = dict[str, Any]


def page() -> str:
    reference = document()
    calls = [
        (path, method, operation)
        for path, operations in reference["paths"].items()
        for method, operation in operations.items()
    ]
    parts = []
    for name, found in groupby(calls, lambda call: call[2]["tags"][0]):
        parts.append(f"## {name}\n")
        parts += [_call(*each, reference["components"]["schemas"]) for each in found]
    return "".join([*parts, _errors(calls)])


def document() -> Json:
    """The OpenAPI document of all calls."""
    models = Models()
    routes = api_routes(models, BodyReader(models.bodies), INSTALLED)
    return reference_of([*routes, *reference_routes(routes)])


def _call(path: str, method: str, operation: Json, schemas: Json) -> str:
    parts = [f"### {method.upper()} {path}\n{operation['summary']}\n\n"]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if content:
        body = json.dumps(content["example"], ensure_ascii=False)
        parts.append(
            f"```console\n$ curl http://127.0.0.1:8000{path} \\\n"
            f"    -H 'Content-Type: application/json' -d '{body}'\n```\n\n"
        )
    for given in operation["responses"]["200"]["content"].values():
        answer = given.get("example")
        if isinstance(answer, dict):
            text = json.dumps(answer, indent=2, ensure_ascii=False)
            parts.append(f"```json\n{text}\n```\n\n")
        elif answer:
            parts.append(f"```text\n{answer.rstrip()}\n```\n\n")
    rows = [
        (code(each["name"]), "text", each.get("description", ""))
        for each in operation.get("parameters", ())
        if each["in"] == "query"
    ]
    if content:
        schema = schemas[content["schema"]["$ref"].rpartition("/")[2]]
        required = schema.get("required", ())
        for name in sorted(schema["properties"], key=lambda name: name not in required):
            field = schema["properties"][name]
            said = _meaning(field) + (" Must be there." if name in required else "")
            rows.append((code(name), _kind(field, schemas), said))
    if rows:
        parts.append(table(("field", "type", "meaning"), rows) + "\n")
    return "".join(parts)


def _errors(calls: list[tuple[str, str, Json]]) -> str:
    texts = {
        status: answer["description"]
        for _, _, operation in calls
        for status, answer in operation["responses"].items()
        if status.isdigit() and status != "200"
    }
    return "## Errors\n" + table(("status", ""), sorted(texts.items()))
