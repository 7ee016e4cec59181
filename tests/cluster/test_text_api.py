"""Tokenizing over HTTP, and what load balancers ask."""

import re
from typing import Any

import httpx
import pytest

from quire import __version__

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


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        ("tokenize", {}, 400, "send either prompt, a text, or messages, a chat"),
        ("tokenize", {"prompt": "x", "messages": CHAT}, 400, "send either prompt"),
        ("tokenize", {"promt": "x"}, 400, "did you mean prompt?"),
        ("tokenize", {"prompt": "x", "model": "other"}, 404, "'other' does not exist"),
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
        missing = (await client.get("/nothing")).json()["error"]["message"]
        examples = {
            path: calls["post"]["requestBody"]["content"]["application/json"]["example"]
            for path, calls in reference["paths"].items()
            if "post" in calls
        }
        for path, body in examples.items():
            answer = await client.post(path, json=body)
            if answer.status_code != 200:  # This model is one of text, and takes no adapters.
                assert re.search("makes no embeddings|adapter", answer.text)
            assert f"curl {cluster.http_url}{path} " in page.text
    served = missing.partition("there are ")[2].split(", ")
    assert set(served) == set(reference["paths"])
    chat = reference["paths"]["/v1/chat/completions"]["post"]
    schema = chat["requestBody"]["content"]["application/json"]["schema"]
    fields = reference["components"]["schemas"][schema["$ref"].rpartition("/")[2]]["properties"]
    assert {"messages", "temperature", "max_completion_tokens"} <= set(fields)
    assert page.headers["content-type"].startswith("text/html")
    for path in reference["paths"]:
        assert path in page.text
