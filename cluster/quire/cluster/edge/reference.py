"""``GET /openapi.json``, the HTTP API in OpenAPI's form, and ``GET /docs``, the same as a page.

Both are made of the routes and of the bodies that requests are checked with, so that they describe
what is served.
"""

import html
import json
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from quire import __version__
from quire.cluster.edge.embeddings_api import EmbeddingsBody, RerankBody, ScoreBody
from quire.cluster.edge.messages_schema import CountTokensBody, MessagesBody
from quire.cluster.edge.models_api import (
    LOAD_PATH,
    UNLOAD_PATH,
    LoadAdapterBody,
    UnloadAdapterBody,
)
from quire.cluster.edge.openai_schema import (
    Body,
    ChatBody,
    CompletionBody,
)
from quire.cluster.edge.responses_schema import ResponsesBody
from quire.cluster.edge.text_api import DetokenizeBody, TokenizeBody

Json = dict[str, Any]


class _Call(NamedTuple):
    summary: str
    body: type[Body] | None = None
    streams: bool = False
    example: Json | None = None
    """A body that any model can answer."""
    query: tuple[str, ...] = ()
    media: str = "application/json"


_QUESTION = "What is the capital of France?"
_MESSAGES = [{"role": "user", "content": _QUESTION}]
_CALLS = {
    "/v1/models": _Call("The models and adapters that are served."),
    "/v1/models/{model:path}": _Call("One of them; 404 unless it is served."),
    LOAD_PATH: _Call(
        "Gives a LoRA adapter a name, for operators.",
        LoadAdapterBody,
        example={"lora_name": "sql", "lora_path": "ORG/NAME"},
    ),
    UNLOAD_PATH: _Call(
        "Takes the name away, for operators.", UnloadAdapterBody, example={"lora_name": "sql"}
    ),
    "/v1/completions": _Call(
        "Text behind a prompt.",
        CompletionBody,
        streams=True,
        example={"prompt": "The capital of France is", "max_tokens": 16},
    ),
    "/v1/chat/completions": _Call(
        "The next turn of a chat.", ChatBody, streams=True, example={"messages": _MESSAGES}
    ),
    "/v1/responses": _Call(
        "The next items of a conversation.",
        ResponsesBody,
        streams=True,
        example={"input": _QUESTION},
    ),
    "/v1/messages": _Call(
        "The next message, in Anthropic's words.",
        MessagesBody,
        streams=True,
        example={"max_tokens": 64, "messages": _MESSAGES},
    ),
    "/v1/messages/count_tokens": _Call(
        "How many tokens that prompt has.", CountTokensBody, example={"messages": _MESSAGES}
    ),
    "/v1/embeddings": _Call(
        "Vectors of texts, of models that make them.", EmbeddingsBody, example={"input": _QUESTION}
    ),
    **dict.fromkeys(
        ("/v1/rerank", "/v2/rerank", "/rerank"),
        _Call(
            "Documents, ordered by how alike they are to a query.",
            RerankBody,
            example={"query": _QUESTION, "documents": ["Paris.", "It rains."]},
        ),
    ),
    **dict.fromkeys(
        ("/v1/score", "/score"),
        _Call(
            "How alike texts are.", ScoreBody, example={"text_1": _QUESTION, "text_2": ["Paris."]}
        ),
    ),
    "/v1/routing/decisions": _Call(
        "Why requests went where they did (?request_id=, ?limit=).", query=("request_id", "limit")
    ),
    "/tokenize": _Call(
        "A text or a chat as token ids.", TokenizeBody, example={"prompt": _QUESTION}
    ),
    "/detokenize": _Call("Token ids as text.", DetokenizeBody, example={"tokens": [1, 2, 3]}),
    "/version": _Call("The version of this software."),
    "/load": _Call("Completions under way in this gateway."),
    "/health": _Call("200 while a group can serve, else 503. Needs no key."),
    "/ping": _Call("As /health."),
    "/metrics": _Call(
        "Prometheus metrics. Where there are keys, for operators'.", media="text/plain"
    ),
    "/openapi.json": _Call("This reference, for programs."),
    "/docs": _Call("This reference, as a page.", media="text/html"),
}
_BASE = "http://HOST/"
"""What a page is made with in place of the address that it is asked for at."""
_TEXT: Json = {"type": "string"}
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def reference_routes(routes: Iterable[Route]) -> list[Route]:
    """The two routes, which describe ``routes`` and themselves."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(reference)

    async def docs(request: Request) -> Response:
        return HTMLResponse(page.replace(_BASE, html.escape(str(request.base_url))))

    own = [
        Route("/openapi.json", openapi, methods=["GET"]),
        Route("/docs", docs, methods=["GET"]),
    ]
    reference = _reference([*routes, *own])
    page = _page(reference)
    return own


@cache
def _body_schemas() -> tuple[dict[type[Body], Json], Json]:
    """A reference to the schema of each body, and the schemas by name."""
    bodies = [call.body for call in _CALLS.values() if call.body is not None]
    names, schemas = models_json_schema(
        [(body, "validation") for body in bodies], ref_template="#/components/schemas/{model}"
    )
    references = {body: names[body, "validation"] for body in bodies}
    for body, reference in references.items():
        name = reference["$ref"].rpartition("/")[2]
        fields = schemas["$defs"][name]["properties"]
        for field in fields.keys() & body.neutral.keys():
            del fields[field]  # Which it has of another body and refuses.
    return references, schemas["$defs"]


def _reference(routes: Iterable[Route]) -> Json:
    references, schemas = _body_schemas()
    paths: Json = {}
    for route in routes:
        call = _CALLS[route.path]
        (method,) = (route.methods or set()) - {"HEAD"}
        media = [call.media, *(["text/event-stream"] if call.streams else [])]
        parameters: list[Json] = [
            {"name": name, "in": "query", "schema": _TEXT} for name in call.query
        ]
        operation: Json = {
            "summary": call.summary,
            "responses": {
                "200": {"description": "The answer.", "content": {name: {} for name in media}},
                "default": {
                    "description": "An error.",
                    "content": {
                        "application/json": {"schema": {"$ref": "#/components/schemas/Error"}}
                    },
                },
            },
        }
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
    }


def _page(reference: Json) -> str:
    schemas = reference["components"]["schemas"]
    sections = []
    for path, operations in reference["paths"].items():
        for method, operation in operations.items():
            sections.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            sections.append(f"<p>{html.escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                content = operation["requestBody"]["content"]["application/json"]
                sections.append(f"<pre>{html.escape(_command(path, content['example']))}</pre>")
                name = content["schema"]["$ref"].rpartition("/")[2]
                sections.append(_table(schemas[name], schemas))
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Quire: HTTP API</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body {{ font: 16px/1.5 system-ui, sans-serif; max-width: 56rem;
  margin: 2rem auto; padding: 0 1rem }}
h2 {{ margin: 2rem 0 .2rem; font-size: 1.1rem; border-top: 1px solid #ddd; padding-top: 1rem }}
table {{ border-collapse: collapse; width: 100% }}
pre {{ background: #f5f5f5; padding: .6rem; overflow-x: auto }}
td {{ border-top: 1px solid #eee; padding: .2rem .8rem .2rem 0; vertical-align: top }}
</style></head><body><h1>Quire: HTTP API</h1>
<p>OpenAI's API and vLLM's extensions of it, and Anthropic's messages.
A field that is not known is refused by name.
<code>model</code> may be left out, and <code>"stream": true</code> added. Errors are
<code>{{"error": {{"message", "type", "param", "code"}}}}</code>.
For programs: <a href="openapi.json">openapi.json</a>.</p>
{"".join(sections)}</body></html>"""


def _command(path: str, body: Json) -> str:
    return (
        f"curl {_BASE}{path.removeprefix('/')} -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'"
    )


def _table(schema: Json, schemas: Json) -> str:
    required = set(schema.get("required", ()))
    rows = [
        f"<tr><td><code>{name}</code>{'*' if name in required else ''}</td>"
        f"<td>{html.escape(_kind(field, schemas))}</td></tr>"
        for name, field in schema["properties"].items()
    ]
    note = "<p>* must be there.</p>" if required else ""
    return f"<table>{''.join(rows)}</table>{note}"


def _kind(schema: Json, schemas: Json) -> str:
    """A field's type in words."""
    if "anyOf" in schema:
        kinds = [_kind(each, schemas) for each in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in schema:
        fields = schemas[schema["$ref"].rpartition("/")[2]].get("properties", {})
        return f"object of {', '.join(fields)}"
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "any"))
