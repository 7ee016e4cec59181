"""Clients that flood the gRPC port with raw HTTP/2 frames, beside a well-behaved one."""

import asyncio
import contextlib
import itertools
import socket
import ssl
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
import trustme
from bench.http2_frames import (
    CONTINUATION,
    END_HEADERS,
    HEAD,
    HEADERS,
    HELLO,
    PRIORITY,
    RST,
    WINDOW_UPDATE,
    frame,
    header,
)

from quire.cluster.edge.auth import ApiKeys
from quire.cluster.edge.grpc_server import build_grpc_server
from quire.cluster.features.guard import grpc_guard
from quire.cluster.features.guard.grpc_guard import GrpcGuard
from quire.cluster.features.guard.limits import ConnectionLimits
from quire.cluster.features.installed import INSTALLED
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc

pytestmark = pytest.mark.anyio

KEY = [("authorization", "Bearer right")]
PROMPT = [5, 6, 7]
MAX_FLOOD_BYTES = 64 * 2**20


STREAMS = range(1, 2**31, 2)


def endless_head() -> Iterator[bytes]:
    yield frame(HEADERS, 1, HEAD)
    yield from itertools.repeat(frame(CONTINUATION, 1, header("x", "aaa") * 1000))


def window_updates() -> Iterator[bytes]:
    return itertools.repeat(frame(WINDOW_UPDATE, 0, struct.pack(">I", 1)) * 1000)


def priorities() -> Iterator[bytes]:
    return itertools.repeat(frame(PRIORITY, 1, b"\0\0\0\0\0") * 1000)


def streams_without_a_message() -> Iterator[bytes]:
    return (frame(HEADERS, stream, HEAD, flags=END_HEADERS) for stream in STREAMS)


def streams_reset_at_once() -> Iterator[bytes]:
    return (
        frame(HEADERS, stream, HEAD, flags=END_HEADERS) + frame(RST, stream, struct.pack(">I", 8))
        for stream in STREAMS
    )


FLOODS = [
    endless_head,
    window_updates,
    priorities,
    streams_without_a_message,
    streams_reset_at_once,
]


@dataclass
class Server:
    port: int
    cuts: Counter[str] = field(default_factory=Counter)

    def connect(self, host: str) -> socket.socket:
        client = socket.socket()
        client.bind((host, 0))
        client.connect(("127.0.0.1", self.port))
        return client

    def flood(self, frames: Iterator[bytes], *, host: str) -> bool:
        """Whether the server ended the connection before many bytes were sent."""
        with self.connect(host) as client:
            try:
                client.sendall(HELLO)
                sent = 0
                while sent < MAX_FLOOD_BYTES:
                    sent += client.send(next(frames))
            except ConnectionError:
                return True
        return False

    def is_ended(self, client: socket.socket) -> bool:
        """Waits for the end of a connection; pytest's timeout is the limit."""
        with contextlib.suppress(ConnectionError):
            while client.recv(2**16):
                pass
        return True


@pytest.fixture
def serving(start_cluster: Any) -> Any:
    @contextlib.asynccontextmanager
    async def serve(
        *, keys: bool = True, credentials: Any = None, **limits: Any
    ) -> AsyncIterator[tuple[Any, Server]]:
        async with start_cluster(num_groups=1) as cluster:
            server = Server(0)
            bounds = ConnectionLimits(**limits)

            def cut(reason: str) -> None:
                server.cuts[reason] += 1

            guard = GrpcGuard(bounds, cut=cut)
            grpc_server = build_grpc_server(
                cluster.models,
                features=INSTALLED,
                keys=ApiKeys.of_token("right") if keys else None,
                limits=bounds,
                guard=guard,
            )
            server.port = (
                grpc_server.add_insecure_port("127.0.0.1:0")
                if credentials is None
                else grpc_server.add_secure_port("127.0.0.1:0", credentials)
            )
            await grpc_server.start()
            guard.start(server.port)
            try:
                yield cluster, server
            finally:
                await grpc_server.stop(None)
                guard.stop()

    return serve


@contextlib.asynccontextmanager
async def victim(server: Server) -> AsyncIterator[Any]:
    options = [("grpc.use_local_subchannel_pool", 1)]
    address = f"127.0.0.1:{server.port}"
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel)


def request(max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(max_tokens=max_tokens, seed=3, temperature=1.0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), sampling=sampling)


@pytest.mark.slow
@pytest.mark.parametrize("frames", FLOODS)
async def test_a_flood_without_a_key_is_ended_and_streams_go_on(
    serving: Any, frames: Callable[[], Iterator[bytes]]
) -> None:
    async with serving() as (cluster, server), victim(server) as stub:
        cluster.take_steps_of(0.01)
        responses = aiter(stub.Generate(request(300), metadata=KEY))
        token_ids = list((await anext(responses)).token_ids)
        assert await asyncio.to_thread(server.flood, frames(), host="127.0.0.2")
        assert server.cuts == {"flood": 1}
        async for response in responses:
            token_ids += response.token_ids
        assert token_ids == cluster.model.continuation(PROMPT, seed=3, max_tokens=300)


def test_a_guard_without_connections_sleeps_until_the_kernel_accepts_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counts: list[int | None] = [7]
    monkeypatch.setattr(grpc_guard, "num_accepted", lambda: counts[-1])
    guard = GrpcGuard(ConnectionLimits())
    looks_s = [0.01 * tick for tick in range(1000) if not guard._may_sleep(0.01 * tick)]
    assert len([at_s for at_s in looks_s if at_s > 2]) <= 17
    counts.append(8)
    assert [guard._may_sleep(10 + 0.01 * tick) for tick in range(50)] == [False] * 50
    assert guard._may_sleep(12) is False  # It looks from time to time.
    assert guard._may_sleep(12.01)
    counts.append(None)
    assert [guard._may_sleep(20 + tick) for tick in range(9)] == [False] * 9


async def test_a_flood_of_frames_is_ended_where_there_are_no_keys(serving: Any) -> None:
    async with serving(keys=False) as (_, server):
        assert await asyncio.to_thread(server.flood, priorities(), host="127.0.0.2")
        assert server.cuts == {"flood": 1}


async def test_a_flood_from_the_address_of_a_client_is_ended_and_the_client_stays(
    serving: Any,
) -> None:
    async with serving() as (_, server), victim(server) as stub:
        call = stub.Generate(request(10), metadata=KEY)
        token_ids = [each async for response in call for each in response.token_ids]
        for _ in range(6):
            assert await asyncio.to_thread(server.flood, window_updates(), host="127.0.0.1")
        call = stub.Generate(request(10), metadata=KEY)
        assert token_ids == [each async for response in call for each in response.token_ids]
        assert server.cuts == {"flood": 6}
        server.connect("127.0.0.1").close()


async def test_an_address_that_floods_again_and_again_is_shut_out(serving: Any) -> None:
    async with serving(shut_out_s=1000) as (_, server), victim(server) as stub:
        idle = server.connect("127.0.0.2")
        for _ in range(2):
            assert await asyncio.to_thread(server.flood, window_updates(), host="127.0.0.2")
        assert await asyncio.to_thread(server.is_ended, idle)
        idle.close()
        with socket.socket() as client:
            client.settimeout(0.3)
            client.bind(("127.0.0.2", 0))
            with pytest.raises(TimeoutError):
                client.connect(("127.0.0.1", server.port))
        assert [each async for each in stub.Generate(request(3), metadata=KEY)]


async def test_an_address_that_was_shut_out_may_come_back(serving: Any) -> None:
    async with serving(shut_out_s=0.2) as (_, server):
        for _ in range(2):
            assert await asyncio.to_thread(server.flood, window_updates(), host="127.0.0.2")
        client = await asyncio.to_thread(server.connect, "127.0.0.2")
        client.close()


@pytest.mark.slow
async def test_large_messages_and_their_streams_are_no_flood(serving: Any) -> None:
    async with serving() as (_, server), victim(server) as stub:
        assert [each async for each in stub.Generate(request(3), metadata=KEY)]
        text = "the cat " * (3 * 2**17)

        async def tokenize() -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):  # Too much at once is refused.
                await stub.Tokenize(pb.TokenizeRequest(text=text), metadata=KEY)

        for _ in range(3):
            await asyncio.gather(*[tokenize() for _ in range(4)])
        assert not server.cuts


async def test_messages_that_come_before_the_event_loop_knows_of_their_calls_are_no_flood(
    serving: Any,
) -> None:
    async with serving() as (_, server):
        text = "the cat " * (3 * 2**17)
        with grpc.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            message = pb.TokenizeRequest(text=text)
            calls = [stub.Tokenize.future(message, metadata=tuple(KEY)) for _ in range(4)]
            time.sleep(0.3)  # Blocks the server's event loop.
            codes = [await asyncio.to_thread(call.code) for call in calls]
        # Whole messages came: their texts are too long, or there is no room for them.
        code = grpc.StatusCode
        assert {*codes} <= {code.INVALID_ARGUMENT, code.RESOURCE_EXHAUSTED}
        assert not server.cuts


@pytest.mark.slow
async def test_uploads_that_are_cancelled_are_no_flood(serving: Any) -> None:
    async with serving() as (_, server), victim(server) as stub:
        assert [each async for each in stub.Generate(request(3), metadata=KEY)]
        for _ in range(5):
            call = stub.Tokenize(pb.TokenizeRequest(text="the cat " * (3 * 2**17)), metadata=KEY)
            await asyncio.sleep(0.005)
            call.cancel()
        assert [each async for each in stub.Generate(request(3), metadata=KEY)]
        assert not server.cuts


@pytest.mark.slow
async def test_a_flood_under_tls_is_ended(serving: Any) -> None:
    authority = trustme.CA()
    pair = authority.issue_cert("localhost")
    chain = b"".join(each.bytes() for each in pair.cert_chain_pems)
    credentials = grpc.ssl_server_credentials([(pair.private_key_pem.bytes(), chain)])
    context = ssl.create_default_context()
    authority.configure_trust(context)
    context.set_alpn_protocols(["h2"])
    async with serving(credentials=credentials) as (_, server):

        def flood() -> bool:
            raw = server.connect("127.0.0.2")
            with context.wrap_socket(raw, server_hostname="localhost") as client:
                try:
                    client.sendall(HELLO)
                    frames, sent = endless_head(), 0
                    while sent < MAX_FLOOD_BYTES:
                        sent += client.send(next(frames))
                except OSError:
                    return True
            return False

        assert await asyncio.to_thread(flood)
        assert server.cuts == {"flood": 1}


async def test_connections_of_one_address_are_bounded(serving: Any) -> None:
    async with serving(max_connections_per_address=2) as (_, server), victim(server) as stub:
        kept = [server.connect("127.0.0.2") for _ in range(2)]
        for client in kept:  # Its settings have arrived, so it is connected.
            assert client.recv(1)
        one_more = server.connect("127.0.0.2")
        assert await asyncio.to_thread(server.is_ended, one_more)
        assert server.cuts == {"address": 1}
        assert [each async for each in stub.Generate(request(3), metadata=KEY)]
        for client in (*kept, one_more):
            client.close()


@pytest.mark.slow
async def test_those_who_never_called_make_room_for_those_who_do(serving: Any) -> None:
    async with serving(max_connections=3) as (_, server), victim(server) as stub:
        call = stub.Generate(request(3), metadata=KEY)
        assert [each async for each in call]
        silent = [server.connect(f"127.0.0.{host}") for host in range(2, 6)]
        for client in silent[:2]:
            assert await asyncio.to_thread(server.is_ended, client)
        assert [each async for each in stub.Generate(request(3), metadata=KEY)]
        assert server.cuts == {"room": 2}
        for client in silent:
            client.close()


async def test_an_address_with_many_silent_connections_loses_one_first(serving: Any) -> None:
    async with serving(max_connections=3) as (_, server):
        first = server.connect("127.0.0.2")
        many = [server.connect("127.0.0.3") for _ in range(3)]
        assert await asyncio.to_thread(server.is_ended, many[0])
        assert first.recv(1)
        assert server.cuts == {"room": 1}
        for client in (first, *many):
            client.close()


async def test_a_message_that_does_not_come_ends_its_call(serving: Any) -> None:
    async with serving(body_timeout_s=0.05) as (_, server):
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address) as channel:
            start: Any = channel.stream_stream(
                "/quire.v1.Inference/Generate",
                request_serializer=pb.GenerateRequest.SerializeToString,
            )
            call = start(metadata=KEY)
            assert await call.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            assert await call.details() == "the request's message did not come within 0.05 s"
            call = start(metadata=KEY)
            await call.done_writing()
            assert await call.code() in (
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            )
