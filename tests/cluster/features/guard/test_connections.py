"""Limits and behaviour of HTTP connections, tested by clients that write raw bytes."""

import asyncio
import json
import resource
import socket
import ssl
from typing import Any

import httpx
import pytest
import trustme
from tests.cluster.http_listener import (
    GET,
    HEAD,
    STREAM,
    Client,
    serving,
    status_of,
)

from quire.cluster.features.guard.limits import (
    MAX_HEAD_BYTES,
    ConnectionLimits,
    allowed_connections,
)
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio


@pytest.fixture(params=[False, True], ids=["asyncio", "uvloop"])
def anyio_backend(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    """The event loops of gateways: uvloop is Ray's choice."""
    return "asyncio", {"use_uvloop": request.param}


def error_of(answer: bytes) -> str:
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    message: str = error["message"]
    return message


async def test_connections_of_one_address_are_bounded() -> None:
    async with serving(max_connections_per_address=1) as server:
        first = await server.client(GET, sees=b"done")
        assert status_of(await server.answer(GET)) == 503
        await first.close()
        await server.until_open(0)
        await server.client(GET, sees=b"done")
        assert server.cuts == ["address"]


async def test_a_client_cannot_choose_the_address_that_is_logged() -> None:
    """Although it comes from this machine, as a proxy beside the gateway would."""
    head = HEAD + b"X-Forwarded-For: 192.0.2.1\r\nX-Forwarded-Proto: https\r\n"
    async with serving() as server:
        assert b"done" in await server.answer(
            b"GET / HTTP/1.1\r\n" + head + b"Connection: close\r\n\r\n"
        )
        (scope,) = server.app.scopes
    assert scope["client"][0] == "127.0.0.1"
    assert scope["scheme"] == "http"


async def test_connections_that_say_nothing_make_room_for_new_ones() -> None:
    async with serving(max_connections=3) as server:
        stream = await server.client(STREAM, sees=b"begun")
        silent = [await server.client() for _ in range(10)]
        for client in silent[:8]:
            assert await client.rest() == b""
        assert server.num_open == 3
        for _ in range(5):
            await server.client(GET, sees=b"done")
        server.app.may_end.set()
        await stream.reader.readuntil(b"done")
        assert set(server.cuts) == {"room"}


async def test_an_address_with_many_connections_loses_one_for_another_address() -> None:
    """Even if all of these send bodies slowly, and have sent something last."""
    async with serving(max_connections=4) as server:
        idle = await server.client(GET, sees=b"done\r\n0\r\n\r\n")
        body = b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n" + HEAD + b"\r\n"
        slow = [await server.client(body, host="127.0.0.2") for _ in range(3)]
        await server.until_open(4)
        another = await server.client(GET, host="127.0.0.3", sees=b"done\r\n0\r\n\r\n")
        assert await slow[0].rest() == b""
        for client in (idle, another):
            client.writer.write(GET)
            await client.reader.readuntil(b"done")
        assert server.cuts == ["room"]


async def test_where_every_connection_has_a_request_one_more_is_refused() -> None:
    async with serving(max_connections=2) as server:
        streams = [await server.client(STREAM, sees=b"begun") for _ in range(2)]
        refused = [await server.answer(GET) for _ in range(3)]
        assert [status_of(answer) for answer in refused] == [503] * 3
        assert b"\r\nretry-after: 1\r\n" in refused[0]
        assert "all of the gateway's 2 connections have requests" in error_of(refused[0])
        assert server.cuts == ["full"] * 3
        server.app.may_end.set()
        for stream in streams:
            await stream.reader.readuntil(b"done")
        await server.client(GET, sees=b"done")


async def test_half_sent_heads_are_closed_and_a_stream_goes_on() -> None:
    async with serving(head_timeout_s=0.3, body_timeout_s=0.1, idle_timeout_s=0.1) as server:
        stream = await server.client(STREAM, sees=b"begun")
        slow = [await server.client(b"GET / HTTP/1.1\r\nHost:") for _ in range(20)]
        again = await server.client(STREAM[:-2])
        again.writer.write(b"\r\n")  # In time: the request is now complete.
        for client in slow:
            assert await client.rest() == b""
        assert server.cuts == ["head"] * 20
        server.app.may_end.set()
        for client in (stream, again):
            await client.reader.readuntil(b"done")


async def test_bytes_that_trickle_do_not_put_a_deadline_off() -> None:
    async with serving(head_timeout_s=0.3, body_timeout_s=0.3) as server:
        kept = await server.client(GET, sees=b"done\r\n0\r\n\r\n")
        trickles = [
            (await server.client(b"GET / HTTP/1.1\r\n"), b"A: b\r\n"),
            (await server.client(b"POST / HTTP/1.1\r\nContent-Length: 99999\r\n" + HEAD), b"\r\n"),
            (kept, b"\r\n"),  # Empty lines before a request are allowed.
        ]

        async def trickle(client: Client, piece: bytes) -> None:
            while not client.writer.is_closing():
                client.writer.write(piece)
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(trickle(*each)) for each in trickles]
        for client, _ in trickles:
            assert await client.rest() == b""
        await asyncio.gather(*tasks)
        assert sorted(server.cuts) == ["body", "head", "head"]
        assert server.app.num_lost == 1


async def test_a_connection_between_requests_is_closed_when_it_was_idle_for_too_long() -> None:
    async with serving(idle_timeout_s=0.2) as server:
        client = await server.client(GET, sees=b"done\r\n0\r\n\r\n")
        assert await client.rest() == b""
        assert server.cuts == []


async def test_a_body_that_comes_in_time_is_read_whole() -> None:
    async with serving() as server:
        body = b"x" * 300_000
        head = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n" % len(body) + HEAD + b"\r\n"
        await server.client(head + body + head + body, sees=b"done\r\n0\r\n\r\n")
        while len(server.app.bodies) < 2:
            await asyncio.sleep(0.005)
        assert server.app.bodies == [body, body]


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize(
    "head",
    [
        b"A: " + b"x" * 1_000_000 + b"\r\n\r\n",
        b"A: " + b"x" * 1_000_000,
        b"a: b\r\n" * 10_000 + b"\r\n",
        b"a: b\r\n" * 200 + b"\r\n",
        b"A: " + b"x" * MAX_HEAD_BYTES + b"\r\n\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_told_so(head: bytes) -> None:
    async with serving() as server:
        answer = await server.answer(b"GET / HTTP/1.1\r\n" + HEAD + head)
        assert status_of(answer) == 431
        assert "at most 65536 bytes in 128 headers" in error_of(answer)
        assert server.app.bodies == []


async def test_a_small_piece_is_sent_at_once() -> None:
    async with serving() as server:
        await server.client(STREAM, sees=b"begun")
        (connection,) = server.listener.connections.open
        sock = connection.transport.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_a_request_names_one_host() -> None:
    async with serving() as server:
        for head in (b"", HEAD + HEAD):
            answer = await server.answer(b"GET / HTTP/1.1\r\n" + head + b"\r\n")
            assert status_of(answer) == 400
            assert "Host headers: it must have one" in error_of(answer)
        assert status_of(await server.answer(b"GET / HTTP/1.0\r\n\r\n")) == 200
        for nonsense in (b"nonsense\r\n\r\n", b"nonsense" * 20_000):
            assert (await server.answer(nonsense)).count(b"HTTP/1.1 400 ") == 1


@pytest.mark.parametrize("piece", [b"A: ", b"0;"])
async def test_trailers_and_chunk_extensions_are_bounded(piece: bytes) -> None:
    async with serving() as server:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HEAD + b"\r\n"
        endless = (b"0\r\n" if piece == b"A: " else b"") + piece + b"x" * 1_000_000
        assert status_of(await server.answer(head + endless)) in (400, 431)
        assert server.app.num_lost == 1


async def test_a_body_that_cannot_be_read_is_answered() -> None:
    async with serving() as server:
        head = b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n" + HEAD + b"\r\n"
        for body in (b"xyz\r\n", b"2\r\nhe\r\n-1\r\n"):
            assert (await server.answer(head + body)).count(b"HTTP/1.1 400 ") == 1
        assert server.app.num_lost == 2


async def test_an_unknown_expectation_is_refused() -> None:
    async with serving() as server:
        for value, status in ((b"200-x", 417), (b"100-Continue", 100)):
            asked = b"GET / HTTP/1.1\r\nExpect: " + value + b"\r\nConnection: close\r\n" + HEAD
            assert status_of(await server.answer(asked + b"\r\n")) == status


UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAQ\r\n"
BODIES = {
    "no body": b"\r\n",
    "length": b"Content-Length: 5\r\n\r\nhello",
    "chunks": b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
}


@pytest.mark.quick_cells(2)
@pytest.mark.parametrize("body", BODIES)
async def test_a_request_that_asks_for_another_protocol_is_answered_as_if_it_had_not(
    body: str,
) -> None:
    said = b"" if body == "no body" else b"hello"
    asked = b"POST / HTTP/1.1\r\n" + UPGRADE + HEAD + BODIES[body]
    async with serving() as server:
        many = await server.client(
            asked * 3 + GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        )
        assert (await many.rest()).count(b" 200 OK\r\n") == 4
        assert server.app.bodies == [said, said, said, b""]
        del server.app.bodies[:]
        for cut in range(1, len(asked), 7):
            client = await server.client(asked[:cut])
            await asyncio.sleep(0)
            client.writer.write(asked[cut:])
            await client.reader.readuntil(b"done\r\n0\r\n\r\n")
            await client.close()
        assert server.app.bodies == [said] * len(range(1, len(asked), 7))


async def test_a_tunnel_is_answered_and_closed() -> None:
    async with serving() as server:
        answer = await server.answer(b"CONNECT here:80 HTTP/1.1\r\n" + HEAD + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 ")
        assert b"connection: close" in answer


async def test_an_answer_to_http_1_0_is_not_chunked() -> None:
    async with serving() as server:
        client = await server.client(b"GET /stream HTTP/1.0\r\n\r\n", sees=b"begun")
        server.app.may_end.set()
        assert await client.rest() == b"done"
        answer = await server.answer(b"GET / HTTP/1.0\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert b"connection: close" in head
        assert body == b"done"


class Tls:
    def __init__(self) -> None:
        authority = trustme.CA()
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(self.server)
        self.client = ssl.create_default_context()
        authority.configure_trust(self.client)


async def test_connections_in_their_tls_handshake_count_and_have_a_deadline() -> None:
    tls = Tls()
    async with (
        serving(tls=tls.server, max_connections=2, head_timeout_s=0.3) as server,
        httpx.AsyncClient(verify=tls.client, timeout=None) as client,
    ):
        url = f"https://127.0.0.1:{server.port}"
        silent = [await server.client() for _ in range(5)]
        for each in silent[:3]:
            assert await each.rest() == b""
        assert server.num_open == 2
        assert (await client.get(url)).text == "done"
        for each in silent[3:]:
            assert await each.rest() == b""
        assert server.cuts == ["room"] * 4 + ["head"]
        assert (await client.get(url)).text == "done"


async def test_a_handshake_that_fails_leaves_nothing() -> None:
    tls = Tls()
    async with serving(tls=tls.server) as server:
        gone = await server.client()
        await server.until_open(1)
        await gone.close()
        await server.until_open(0)
        await server.answer(b"this is not TLS\r\n\r\n")
        await server.until_open(0)
        untrusted = await asyncio.to_thread(_fails_to_connect, server.port)
        assert untrusted
        await server.until_open(0)
        assert server.cuts == []


def _fails_to_connect(port: int) -> bool:
    try:
        httpx.get(f"https://127.0.0.1:{port}", timeout=60)
    except httpx.ConnectError:
        return True
    return False


async def test_a_stop_lets_requests_end_and_closes_what_has_none() -> None:
    before = asyncio.all_tasks()
    async with serving(drain_timeout_s=1.0) as server:
        stream = await server.client(STREAM, sees=b"begun")
        silent = await server.client(b"GET")
        await server.until_open(2)
        stopping = asyncio.create_task(server.listener.stop())
        assert await silent.rest() == b""
        server.app.may_end.set()
        assert (await stream.rest()).endswith(b"done\r\n0\r\n\r\n")
        await stopping
    assert asyncio.all_tasks() == before


def test_a_process_that_may_open_few_files_keeps_fewer_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    limits = [(1024, 4096)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert allowed_connections(500) == 500
    assert limits[-1] == (2000, 4096)
    assert allowed_connections(5000) == 1024
    assert limits[-1] == (4096, 4096)
    assert "max_connections=5000 is lowered to 1024" in caplog.text


@pytest.mark.parametrize(
    "name", ["max_connections", "head_timeout_s", "body_timeout_s", "idle_timeout_s"]
)
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}=0: must be"):
        ConnectionLimits(**{name: 0})
