"""Tokenization over HTTP, endpoints for load balancers, and the API reference."""

import base64
import hashlib
import json
import re
from typing import Any

import httpx
import pytest
from openapi_spec_validator import validate
from tests.cluster.test_every_door import routes_of

from quire import __version__
from quire.cluster.edge.access import Access
from quire.cluster.edge.body import BodyReader
from quire.cluster.edge.openai_http import api_routes, build_http_app
from quire.cluster.edge.routes import ApiRoute
from quire.cluster.features.installed import INSTALLED
from quire.cluster.features.reference.document import reference_of
from quire.cluster.gateway.models import Models
from quire.cluster.seams import Feature

pytestmark = pytest.mark.anyio

CHAT = [{"role": "user", "content": "the mat"}]


async def test_texts_and_chats_become_tokens_and_tokens_text(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client,
    ):
        tokenizer = cluster.model.tokenizer
        text = (await client.post("/tokenize", json={"prompt": "the cat"})).json()
        asked = {"messages": CHAT, "return_token_strs": True, "model": "hash"}
        chat = (await client.post("/tokenize", json=asked)).json()
        back = await client.post("/detokenize", json={"tokens": text["tokens"]})
    assert text["tokens"] == tokenizer.encode("the cat")
    assert text["count"] == len(text["tokens"])
    assert text["max_model_len"] == 400
    assert text["token_strs"] is None
    assert chat["tokens"] == tokenizer.encode("<|user|>the mat<|end|><|assistant|>")
    assert "".join(chat["token_strs"]) == "<|user|>the mat<|end|><|assistant|>"
    assert back.json() == {"prompt": "the cat"}


@pytest.mark.quick_cells(2, "the most")
@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("tokenize", {}, 400, "send either prompt, a text, or messages, a chat"),
        ("tokenize", {"prompt": "x", "messages": CHAT}, 400, "send either prompt"),
        ("tokenize", {"promt": "x"}, 400, "did you mean prompt?"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, "'other' does not exist"),
        ("tokenize", {"prompt": " " * 4_000_000}, 400, "the most that is tokenized"),
        ("detokenize", {"tokens": [99999]}, 400, "token_ids=99999 is not in the vocabulary"),
        ("detokenize", {"tokens": [-1]}, 400, "tokens.0=-1"),
        ("detokenize", {}, 400, "tokens"),
    ],
)
async def test_what_cannot_be_read_is_refused(
    start_cluster: Any, path: str, body: dict[str, Any], status: int, said: str
) -> None:
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(f"{cluster.http_url}/{path}", json=body)
    assert answer.status_code == status
    assert said in answer.json()["error"]["message"]


async def test_load_balancers_learn_state_load_and_version(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client,
    ):
        assert (await client.get("/ping")).status_code == 200
        assert (await client.get("/load")).json() == {"server_load": 0}
        assert (await client.get("/version")).json() == {"version": __version__}


async def test_the_reference_describes_every_route(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client,
    ):
        reference = (await client.get("/openapi.json")).json()
        page = await client.get("/docs")
        routes = routes_of(build_http_app(cluster.models, features=INSTALLED))
        for path, calls in reference["paths"].items():
            for method, call in calls.items():
                body = call.get("requestBody", {}).get("content", {}).get("application/json", {})
                example = body.get("example")
                if example is not None and "temperature" in fields_of(reference, body):
                    # A greedy answer to another question, which is not empty for this model.
                    text = json.dumps(example).replace("of France", "of Spain")
                    example = json.loads(text) | {"temperature": 0}
                answer = await client.request(method, path, json=example)
                if "example" in body:
                    assert f"curl {cluster.http_url}{path} " in page.text
                (media, told), *_ = call["responses"]["200"]["content"].items()
                if answer.status_code != 200:  # This text model refuses embeddings and adapters.
                    assert re.search("makes no embeddings|adapter|does not exist", answer.text)
                    assert str(answer.status_code) in {*call["responses"], "404"}
                elif "example" in told and media == "application/json":
                    assert_alike(told["example"], answer.json(), path)
    served = {route.path.replace(":path}", "}") for route in routes}
    pages = {path for path in served if path == "/" or path.startswith("/ui")}
    assert served - pages == set(reference["paths"])
    chat = reference["paths"]["/v1/chat/completions"]["post"]
    fields = fields_of(reference, chat["requestBody"]["content"]["application/json"])
    assert {"messages", "temperature", "max_completion_tokens"} <= fields
    assert page.headers["content-type"].startswith("text/html")
    for path in reference["paths"]:
        assert path in page.text


def fields_of(reference: Any, body: Any) -> set[str]:
    """Fields of a call's body according to the reference, if it takes one."""
    name = body["schema"]["$ref"].rpartition("/")[2]
    return set(reference["components"]["schemas"][name]["properties"])


def assert_alike(example: Any, answer: Any, place: str) -> None:
    """Asserts that ``answer`` has every key of ``example``, with values of the same types."""
    if example is None:
        return
    assert type(example) is type(answer), place
    if isinstance(example, dict):
        for name, value in example.items():
            assert name in answer, f"{place} has no {name}"
            assert_alike(value, answer[name], f"{place}.{name}")
    if isinstance(example, list) and example:
        assert_alike(example[0], answer[0], f"{place}[0]")


def test_each_field_of_a_body_is_described() -> None:
    models = Models()
    routes = api_routes(models, BodyReader(models.bodies), INSTALLED)
    reference = reference_of(routes)
    schemas = reference["components"]["schemas"]
    calls = [route.call for route in routes if route.call is not None]
    for name in (call.body.__name__ for call in calls if call.body is not None):
        for field, schema in schemas[name]["properties"].items():
            assert schema.get("description"), f"{name}.{field}"
    temperature = schemas["ChatBody"]["properties"]["temperature"]
    assert temperature["default"] == 1.0
    assert temperature["description"].endswith("Allowed: 0 to 100.")
    validate(reference)


def test_every_call_but_a_pages_is_described() -> None:
    models = Models()
    routes = api_routes(models, BodyReader(models.bodies), INSTALLED)
    hidden = {route.path for route in routes if route.call is None}
    assert {path for path in hidden if not path.startswith("/ui")} == {"/"}


def test_a_call_that_is_not_described_is_served_and_not_in_the_reference() -> None:
    models = Models()

    def added(models: Models, bodies: BodyReader) -> list[ApiRoute]:
        return [ApiRoute("/new", lambda _: None, methods=["GET"], access=Access.KEY)]

    app = build_http_app(models, features=[*INSTALLED, Feature(name="new", routes=added)])
    assert "/new" in {route.path for route in routes_of(app)}
    routes = api_routes(models, BodyReader(models.bodies), [Feature(name="new", routes=added)])
    assert "/new" not in reference_of(routes)["paths"]


async def test_the_page_runs_no_script_but_its_own(start_cluster: Any) -> None:
    async with (
        start_cluster(num_groups=1) as cluster,
        httpx.AsyncClient(base_url=cluster.http_url, timeout=None) as client,
    ):
        page = await client.get("/docs", headers={"Host": '"><script>alert(1)</script>'})
    policy = page.headers["content-security-policy"]
    sources = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert sources["default-src"] == "'none'"
    scripts = re.findall("<script>(.*?)</script>", page.text, re.DOTALL)
    assert len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert sources["script-src"] == f"'sha256-{digest}'"
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", page.text)
