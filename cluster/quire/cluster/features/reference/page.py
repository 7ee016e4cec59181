"""The page of the HTTP API: what each call takes and returns, and a form that sends it.

The page is one file that loads nothing from elsewhere. A key entered in it stays in the browser's
tab.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from itertools import groupby
from typing import Any

Json = dict[str, Any]

BASE = "http://HOST/"
"""The address that a page is generated with; replaced by the address of the request."""
_STYLE, _SCRIPT = (
    files("quire.cluster.features.reference").joinpath("pages", name).read_text(encoding="utf-8")
    for name in ("docs.css", "docs.js")
)
_OPEN = ("model", "stream", "max_tokens", "temperature", "top_p", "seed", "stop", "tools")
"""Optional fields that a call's table shows at once, besides the required ones; others are
folded."""


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": f"default-src 'none'; style-src {_source(_STYLE)}; script-src "
    f"{_source(_SCRIPT)}; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


def page_of(reference: Json) -> str:
    """The page of an OpenAPI document made by `reference_of`, with `BASE` as the server."""
    calls = [
        (path, method, operation)
        for path, operations in reference["paths"].items()
        for method, operation in operations.items()
    ]
    groups = [
        (name, list(found)) for name, found in groupby(calls, lambda call: call[2]["tags"][0])
    ]
    links = "".join(
        f"<h3>{html.escape(name)}</h3>"
        + "".join(f'<a href="#{_id(path)}">{html.escape(path)}</a>' for path, _, _ in found)
        for name, found in groups
    )
    sections = "".join(
        _section(path, method, operation, reference["components"]["schemas"])
        for path, method, operation in calls
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Quire: HTTP API</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{_STYLE}</style></head><body><nav aria-label="Calls">{links}</nav><main>
<h1>Quire: HTTP API</h1>
<p>OpenAI's API and vLLM's extensions of it, and Anthropic's messages. A field that is not known is
refused by name. <code>model</code> may be left out where one model is served, and
<code>"stream": true</code> added. For programs: <a href="openapi.json">openapi.json</a>.</p>
<form><label>API key, where the server wants one: it stays in this tab.<br>
<input id="key" type="password" autocomplete="off" placeholder="none"></label></form>
{sections}<section id="errors"><h2>Errors</h2>
<p>An error is <code>{{"error": {{"message", "type", "param", "code"}}}}</code>; below
<code>/v1/messages</code> it is
<code>{{"type": "error", "error": {{"type", "message"}}}}</code>.</p>
<table>{_errors(calls)}</table></section></main>
<script>{_SCRIPT}</script></body></html>"""


def _section(path: str, method: str, operation: Json, schemas: Json) -> str:
    parts = [
        f'<section id="{_id(path)}"><h2><b>{method.upper()}</b> {html.escape(path)}</h2>'
        f"<p>{html.escape(operation['summary'])}</p>"
    ]
    content = operation.get("requestBody", {}).get("content", {}).get("application/json")
    example = json.dumps(content["example"], indent=2) if content else ""
    schema = schemas[content["schema"]["$ref"].rpartition("/")[2]] if content else {}
    if "text/html" not in operation["responses"]["200"]["content"]:
        names_model = "model" in schema.get("properties", ())
        parts.append(_form(path, method, example, names_model=names_model))
    if content:
        command = _command(path, content["example"])
        parts.append(f"<details><summary>curl</summary><pre>{html.escape(command)}</pre></details>")
        parts.append(_table(schema, schemas))
    queries = [each for each in operation.get("parameters", ()) if each["in"] == "query"]
    if queries:
        rows = (_row(each["name"], "text", each["description"]) for each in queries)
        parts.append(f"<table>{''.join(rows)}</table>")
    for given in operation["responses"]["200"]["content"].values():
        if "example" in given:
            answer = given["example"]
            text = answer if isinstance(answer, str) else json.dumps(answer, indent=2)
            parts.append(
                f"<details><summary>An answer</summary><pre>{html.escape(text)}</pre></details>"
            )
    return "".join([*parts, "</section>"])


def _form(path: str, method: str, example: str, *, names_model: bool) -> str:
    shown, mark = html.escape(path), " data-names-model" if names_model else ""
    text = html.escape(example)
    body = f'<textarea aria-label="Body" spellcheck="false"{mark}>{text}</textarea>'
    place = f'<input name="path" aria-label="Path" value="{shown}">'
    return (
        f'<details><summary>Try it</summary><form data-method="{method.upper()}" '
        f'data-path="{shown}">{body if example else place}<p><button>Send</button>'
        '<button type="button" disabled>Stop</button><span class="status" role="status"></span>'
        '</p><pre class="answer" hidden></pre></form></details>'
    )


def _command(path: str, body: Json) -> str:
    return (
        f"curl {BASE}{path.removeprefix('/')} -H 'Content-Type: application/json' \\\n"
        f"  -d '{json.dumps(body)}'"
    )


def _table(schema: Json, schemas: Json) -> str:
    required = schema.get("required", ())
    fields = schema["properties"]
    shown = [name for name in (*required, *_OPEN) if name in fields]
    rows = {
        name: _row(name, _kind(field, schemas), _meaning(field), is_required=name in required)
        for name, field in fields.items()
    }
    table = f"<table>{''.join(rows.pop(name) for name in dict.fromkeys(shown))}</table>"
    if rows:
        table += (
            f"<details><summary>{len(rows)} more fields</summary>"
            f"<table>{''.join(rows.values())}</table></details>"
        )
    return table + ("<p class=status>* must be there.</p>" if required else "")


def _row(name: str, kind: str, text: str, *, is_required: bool = False) -> str:
    mark = "*" if is_required else ""
    return (
        f"<tr><td><code>{html.escape(name)}</code>{mark}</td><td>{html.escape(kind)}</td>"
        f"<td>{_marked_up(text)}</td></tr>"
    )


def _meaning(field: Json) -> str:
    text = str(field.get("description", ""))
    if "default" in field:
        text += f" Default: `{json.dumps(field['default'])}`."
    return text.strip()


def _errors(calls: Iterable[tuple[str, str, Json]]) -> str:
    texts = {
        status: answer["description"]
        for _, _, operation in calls
        for status, answer in operation["responses"].items()
        if status.isdigit() and status != "200"
    }
    return "".join(
        f"<tr><td><code>{status}</code></td><td></td><td>{_marked_up(text)}</td></tr>"
        for status, text in sorted(texts.items())
    )


def _marked_up(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _id(path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")


def _kind(schema: Json, schemas: Json) -> str:
    """A field's type in words, for the page."""
    if "anyOf" in schema:
        kinds = [_kind(each, schemas) for each in schema["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null"))
    if "$ref" in schema:
        fields = schemas[schema["$ref"].rpartition("/")[2]].get("properties", {})
        return f"object ({', '.join(fields)})"
    if "enum" in schema:
        return " or ".join(json.dumps(each) for each in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}), schemas)}"
    return str(schema.get("type", "any"))
