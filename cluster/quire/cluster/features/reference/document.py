"""``GET /openapi.json``, the HTTP API as an OpenAPI document, and ``GET /docs``, its page.

Both are generated from the routes and from the models that validate bodies, so that they match what
is served.
"""

import html
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from quire import __version__
from quire.cluster.edge.access import Access
from quire.cluster.edge.call import Call, Heading, Json
from quire.cluster.edge.error_kinds import STATUSES
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.edge.served_fields import Body
from quire.cluster.features.reference.field_texts import described
from quire.cluster.features.reference.page import BASE, HEADERS, page_of

_TEXT: Json = {"type": "string"}
_MAYBE_TEXT: Json = {"type": ["string", "null"]}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT | {"description": "What is wrong, and what would be right."},
                "type": _TEXT,
                "param": _MAYBE_TEXT | {"description": "The field that it is about."},
                "code": _MAYBE_TEXT,
            },
        }
    },
}
_NULL = type(None)
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", _NULL: "null"}


def reference_routes(routes: Iterable[ApiRoute]) -> list[ApiRoute]:
    """Two routes that describe themselves and those of ``routes`` that have a call."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(reference)

    async def docs(request: Request) -> Response:
        here = html.escape(str(request.base_url))
        return HTMLResponse(page.replace(BASE, here), headers=HEADERS)

    own = [
        ApiRoute(
            "/openapi.json",
            openapi,
            methods=["GET"],
            access=Access.OPEN,
            call=Call("The OpenAPI document.", Heading.SERVER),
        ),
        ApiRoute(
            "/docs",
            docs,
            methods=["GET"],
            access=Access.OPEN,
            call=Call("This reference, as a page.", Heading.SERVER, media="text/html"),
        ),
    ]
    reference = reference_of([*routes, *own])
    page = page_of(reference)
    return own


def reference_of(routes: Iterable[ApiRoute]) -> Json:
    """The OpenAPI document of those of ``routes`` that have a call, by heading."""
    described = [(route, route.call) for route in routes if route.call is not None]
    headings = list(Heading)
    described.sort(key=lambda each: headings.index(each[1].heading))
    bodies = (call.body for _, call in described if call.body is not None)
    references, schemas = _body_schemas(tuple(dict.fromkeys(bodies)))
    paths: Json = {}
    for route, call in described:
        (method,) = (route.methods or set()) - {"HEAD"}
        operation: Json = {
            "tags": [call.heading.value],
            "summary": call.summary,
            "responses": {"200": _answer(call), **_errors(call)},
        }
        parameters: list[Json] = [
            {"name": name, "in": "query", "description": text, "schema": _TEXT}
            for name, text in call.query.items()
        ]
        if call.body is not None:
            schema = references[call.body]
            operation["requestBody"] = {
                "required": True,
                "content": {"application/json": {"schema": schema, "example": call.example}},
            }
        if "{" in route.path_format:
            name = route.path_format.partition("{")[2].partition("}")[0]
            parameters.append({"name": name, "in": "path", "required": True, "schema": _TEXT})
        if parameters:
            operation["parameters"] = parameters
        paths[route.path_format] = {method.lower(): operation}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {**schemas, "Error": _ERROR},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


@cache
def _body_schemas(bodies: Sequence[type[Body]]) -> tuple[dict[type[Body], Json], Json]:
    """For each body a reference to its schema; and all schemas by name."""
    names, schemas = models_json_schema(
        [(body, "validation") for body in bodies],
        ref_template="#/components/schemas/{model}",
    )
    references = {body: names[body, "validation"] for body in bodies}
    neutral = {_name_of(reference): body.neutral for body, reference in references.items()}
    for name, schema in schemas["$defs"].items():
        schema["properties"] = {
            field: described(name, field, given)
            for field, given in schema["properties"].items()
            # Inherited fields that this body refuses are left out.
            if field not in neutral.get(name, ())
        }
    return references, schemas["$defs"]


def _name_of(reference: Json) -> str:
    """The schema's name within ``reference``."""
    return str(reference["$ref"].rpartition("/")[2])


def _answer(call: Call) -> Json:
    content: Json = {call.media: {}}
    if call.answer is not None:
        content[call.media] = {"schema": _schema_of(call.answer), "example": call.answer}
    if call.streams:
        content["text/event-stream"] = {}
    return {"description": "The answer.", "content": content}


def _errors(call: Call) -> Json:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    if call.body is None:
        return {"default": {"description": "An error.", "content": content}}
    return {
        str(status): {"description": text, "content": content} for status, text in STATUSES.items()
    }


def _schema_of(example: Any) -> Json:
    """A schema with the types found in an example."""
    if isinstance(example, dict):
        fields = {name: _schema_of(value) for name, value in example.items()}
        return {"type": "object", "properties": fields}
    if isinstance(example, list):
        return {"type": "array", "items": _schema_of(example[0]) if example else {}}
    return {} if example is None else {"type": _TYPES[type(example)]}
