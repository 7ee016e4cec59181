"""Reading of HTTP request bodies, and refusals before that."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from quire.cluster.edge import body
from quire.cluster.edge.access import EVERYONE, Caller
from quire.cluster.edge.error_kinds import BodyTooLarge, BodyTooSlow, NotJson
from quire.cluster.errors import Overloaded
from quire.cluster.serving.bounds import Budget, Turns
from quire.worker.request.errors import InvalidRequest

pytestmark = pytest.mark.anyio

JSON = {"content-type": "application/json"}
BIG = json.dumps({"prompt": "x" * 100_000}).encode()


class Body:
    """A request whose body arrives in ``pieces``; ``num_read`` of them were read."""

    def __init__(self, *pieces: bytes, headers: dict[str, str] = JSON) -> None:
        self.num_read = 0
        self._pieces = pieces
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        self.request = Request(
            {"type": "http", "headers": raw, "state": {"caller": EVERYONE}}, self._receive
        )

    async def _receive(self) -> dict[str, Any]:
        if self.num_read == len(self._pieces):
            await asyncio.Event().wait()
        self.num_read += 1
        piece = self._pieces[self.num_read - 1]
        return {
            "type": "http.request",
            "body": piece,
            "more_body": self.num_read < len(self._pieces) or not piece,
        }

    async def read(self, budget: Budget | None = None) -> object:
        budget = budget or Budget(1 << 30)
        value, hold = await body.read_json(self.request, budget, turns=Turns(), turn=Budget(1))
        hold.release()
        return value


@pytest.mark.parametrize(
    "given",
    [
        "application/json",
        "Application/JSON; charset=utf-8",
        "application/vnd.api+json",
        None,  # httpx and scripts may send no type.
    ],
)
async def test_json_is_read_by_whatever_name_it_has(given: str | None) -> None:
    headers = {} if given is None else {"content-type": given}
    assert await Body(b'{"a": 1}', headers=headers).read() == {"a": 1}


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},  # curl's default without -H.
        {"content-type": "multipart/form-data; boundary=application/json"},
        {"content-type": "application/jsonp"},
        {"content-type": ""},
        {"origin": "http://evil.example"},  # Web pages may send blobs without a type.
    ],
)
async def test_what_a_page_may_send_without_asking_is_not_read(headers: dict[str, str]) -> None:
    sent = Body(b'{"a": 1}', headers=headers)
    with pytest.raises(NotJson, match="header Content-Type: application/json"):
        await sent.read()
    assert sent.num_read == 0


async def test_a_body_that_says_it_is_too_long_is_not_read() -> None:
    sent = Body(b"{}", headers={**JSON, "content-length": str(body.MAX_BODY_BYTES + 1)})
    with pytest.raises(BodyTooLarge, match="exceeds 8388608 bytes"):
        await sent.read()
    assert sent.num_read == 0


async def test_a_body_that_does_not_say_is_cut_at_the_limit() -> None:
    sent = Body(*[b"x" * 2**20] * 100)
    budget = Budget(1 << 30)
    with pytest.raises(BodyTooLarge):
        await sent.read(budget)
    assert (sent.num_read, budget.held) == (9, 0)


@pytest.mark.parametrize("announced", [True, False])
async def test_large_bodies_wait_while_others_hold_all_memory(announced: bool) -> None:
    budget = Budget(body.MAX_BODY_BYTES)
    headers = {**JSON, "content-length": str(len(BIG))} if announced else JSON
    sent = Body(BIG[:70_000], BIG[70_000:], headers=headers)
    with await budget.take(budget.limit):
        task = asyncio.create_task(sent.read(budget))
        for _ in range(10):
            await asyncio.sleep(0)
        assert sent.num_read == 1
        assert await Body(b"{}").read(budget) == {}  # Small ones do not.
    assert await task == json.loads(BIG)
    assert budget.held == 0


async def test_a_body_holds_nothing_before_it_is_large_and_its_own_length_at_the_end() -> None:
    """An upload of a byte a second, which announces 8 MB, takes no room from others."""
    budget = Budget(body.MAX_BODY_BYTES)
    headers = {**JSON, "content-length": str(body.MAX_BODY_BYTES)}
    slow = Body(BIG[:60_000], b"", headers=headers)
    task = asyncio.create_task(slow.read(budget))
    for _ in range(10):
        await asyncio.sleep(0)
    assert (slow.num_read, budget.held) == (2, 0)
    task.cancel()
    whole = Body(BIG[:70_000], BIG[70_000:])
    _, hold = await body.read_json(whole.request, budget, turns=Turns(), turn=Budget(1))
    assert budget.held == len(BIG)
    hold.release()


async def test_large_bodies_of_a_tenant_leave_room_for_those_of_others() -> None:
    budget = Budget(4 * body.MAX_BODY_BYTES)
    headers = {**JSON, "content-length": str(body.MAX_BODY_BYTES)}
    slow = [Body(BIG[:70_000], b"", headers=headers) for _ in range(4)]
    for each in slow:
        each.request.state.caller = Caller(tenant="greedy")
    tasks = [asyncio.create_task(each.read(budget)) for each in slow]
    for _ in range(10):
        await asyncio.sleep(0)
    assert budget.held == 2 * body.MAX_BODY_BYTES
    other = Body(BIG, headers={**JSON, "content-length": str(len(BIG))})
    other.request.state.caller = Caller(tenant="other")
    assert await other.read(budget) == json.loads(BIG)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert budget.held == 0


async def test_neither_waiting_nor_sending_may_take_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(body, "WAIT_TIMEOUT_S", 0.01)
    monkeypatch.setattr(body, "READ_TIMEOUT_S", 0.01)
    budget = Budget(1000)
    headers = {**JSON, "content-length": str(len(BIG))}
    with await budget.take(1000), pytest.raises(Overloaded, match="try again later") as raised:
        await Body(BIG, headers=headers).read(budget)
    assert raised.value.reason == "bodies"
    with pytest.raises(BodyTooSlow, match="not sent within"):
        await Body(BIG[:70_000], b"", headers=headers).read(budget)
    assert budget.held == 0


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ({f"k{number}": 1 for number in range(100_001)}, "100001 keys, at most 100000"),
        ({"prompt": [[]] * 60_000}, "60002 lists and objects, at most 50000"),
        ({"prompt": [1] * 1_200_000}, "1199999 values, at most"),
    ],
)
async def test_a_body_of_too_many_parts_is_refused_unparsed(
    sent: object, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(body, "from_json", None)
    with pytest.raises(InvalidRequest, match=words):
        await Body(json.dumps(sent, separators=(",", ":")).encode()).read()


async def test_what_is_in_strings_is_no_part() -> None:
    sent = {"prompt": '{"a": [1, "\\"]}, ' * 200_000}
    assert await Body(json.dumps(sent).encode()).read() == sent


PLAIN = st.none() | st.integers() | st.text(alphabet='a\\"[{:,é', max_size=9)
VALUES = st.recursive(
    PLAIN, lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='a"\\:'), inner)
)


def num_parts(value: object) -> tuple[int, int, int]:
    """Number of lists, objects, keys, and values after the first."""
    if not isinstance(value, list | dict):
        return 0, 0, 0
    inner = list(value.values()) if isinstance(value, dict) else value
    below = [num_parts(each) for each in inner]
    containers, keys, commas = (sum(column) for column in zip(*below, (0, 0, 0), strict=True))
    num_keys = len(inner) if isinstance(value, dict) else 0
    return containers + 1, keys + num_keys, commas + max(len(inner) - 1, 0)


@pytest.mark.slow
@given(VALUES)
def test_parts_are_counted_as_a_parser_would(value: object) -> None:
    data = bytearray(json.dumps(value).encode())
    with pytest.MonkeyPatch.context() as patch:
        for characters, num in zip((b"[{", b":", b","), num_parts(value), strict=True):
            patch.setattr(body, "MAX_PARTS", {characters: (num, "parts")})
            body._check_parts(data)
            patch.setattr(body, "MAX_PARTS", {characters: (num - 1, "parts")})
            with pytest.raises(InvalidRequest, match=f"{num} parts"):
                body._check_parts(data)


async def test_the_connection_ends_with_the_answer_to_a_body_that_was_not_read(
    start_cluster: Any,
) -> None:
    async def endless() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b" " * 2**20

    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/completions"
        for content, headers, status in (
            (endless(), {**JSON, "content-length": "20971520"}, 413),
            (endless(), JSON, 413),
            (b"prompt=x", {"content-type": "application/x-www-form-urlencoded"}, 415),
        ):
            answer = await client.post(url, content=content, headers=headers)
            assert (answer.status_code, answer.headers["connection"]) == (status, "close")
            assert answer.json()["error"]["type"] == "invalid_request_error"
        answer = await client.post(url, json={"prompt": "x", "max_tokens": 1, "n": 0})
        assert (answer.status_code, "connection" in answer.headers) == (400, False)


@pytest.mark.slow
async def test_an_answer_to_a_gigabyte_comes_before_a_byte_of_it(start_cluster: Any) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    async with start_cluster(num_groups=1) as cluster:
        host, port = cluster.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"{head}Content-Length: 1000000000\r\n\r\n".encode())
        assert (await reader.readline()).startswith(b"HTTP/1.1 413")
        await reader.read()  # Reads to the end, which arrives without more data.
        writer.close()


async def test_a_large_body_is_served_as_a_small_one_and_gives_its_memory_back(
    start_cluster: Any,
) -> None:
    sent = {"prompt": "the cat", "max_tokens": 5, "seed": 1, "temperature": 0}
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/completions"
        answers = [
            (await client.post(url, json={**sent, "user": user})).json()["choices"]
            for user in ("x", "x" * 1_000_000)
        ]
        assert answers[0] == answers[1]
        assert cluster.models.bodies.held == 0


async def test_a_long_answer_is_encoded_in_a_thread_as_a_short_one_is_here(
    start_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = {"prompt": "the cat", "max_tokens": 9, "seed": 1, "logprobs": 2}
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/completions"
        answers = [(await client.post(url, json=sent)).json()["choices"]]
        monkeypatch.setattr("quire.cluster.edge.generation_api._MANY_STEPS", 10)
        answers.append((await client.post(url, json=sent)).json()["choices"])
    assert answers[0] == answers[1]
