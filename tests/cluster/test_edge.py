"""A gateway's answers to broken messages and odd names, and its own metrics."""

import asyncio
import contextlib
import re
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.worker.request.config import EngineConfig

pytestmark = pytest.mark.anyio

BROKEN = b"\xff\xff\xff"
METHODS = [
    ("unary_unary", "quire.v1.Inference/Tokenize"),
    ("unary_stream", "quire.v1.Inference/Generate"),
    ("unary_unary", "grpc.health.v1.Health/Check"),
    ("stream_stream", "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
]
GROUP_METHODS = [
    ("unary_unary", "quire.v1.ReplicaGroup/Describe"),
    ("unary_stream", "quire.v1.ReplicaGroup/Events"),
    ("stream_stream", "quire.v1.ReplicaGroup/Attach"),
]


@contextlib.asynccontextmanager
async def gateway(**settings: Any) -> AsyncIterator[GatewayServer]:
    ports = {"grpc_port": 0, "http_port": 0}
    config = ClusterConfig(engine=EngineConfig(model=demo_model.PATH), **(ports | settings))
    server = await GatewayServer.start(config)
    try:
        yield server
    finally:
        await server.stop(drain_timeout_s=0)


async def refusal_of(channel: grpc.aio.Channel, kind: str, method: str) -> tuple[Any, str | None]:
    """Status and details for bytes that are no message."""
    call = getattr(channel, kind)(f"/{method}")
    stream = call() if kind == "stream_stream" else call(BROKEN)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if kind == "stream_stream":
            await stream.write(BROKEN)
            while await stream.read() is not grpc.aio.EOF:  # A group speaks first.
                pass
    return await stream.code(), await stream.details()


async def test_a_message_that_is_none_is_an_invalid_argument(start_cluster: Any) -> None:
    async with start_cluster(num_groups=1) as cluster:
        places = [(cluster.grpc_address, METHODS), (cluster.groups["g0"].address, GROUP_METHODS)]
        for address, methods in places:
            async with grpc.aio.insecure_channel(address) as channel:
                for kind, method in methods:
                    refusal = await refusal_of(channel, kind, method)
                    said = "the request is not a message of this method's type"
                    assert refusal == (grpc.StatusCode.INVALID_ARGUMENT, said), method


@pytest.mark.quick_cells(1)
@pytest.mark.parametrize("name", [b"caf\xc3\xa9", b"a\x85b", b"a\x9b31mb", b"x" * 201, b"a\tb"])
async def test_a_request_id_that_is_not_printable_ascii_is_replaced(
    start_cluster: Any, name: bytes
) -> None:
    body = {"model": "hash", "prompt": "x", "max_tokens": 1}
    async with start_cluster(num_groups=1) as cluster, httpx.AsyncClient(timeout=None) as client:
        url = f"{cluster.http_url}/v1/completions"
        answer = await client.post(url, json=body, headers=[(b"X-Request-Id", name)])
        assert answer.status_code == 200
        assert answer.headers["X-Request-Id"] == answer.json()["id"]
        answer = await client.post(url, json=body, headers={"X-Request-Id": "a b~!"})
        assert answer.headers["X-Request-Id"] == "a b~!"


async def test_gateways_that_share_a_port_each_have_metrics_of_their_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        async with (
            gateway(metrics_port=first, max_connections=7) as one,
            gateway(metrics_port=first, http_port=port_of(one.http_address)) as other,
            httpx.AsyncClient(timeout=None) as client,
        ):
            assert one.http_address == other.http_address
            assert first < port_of(one.metrics_address) < port_of(other.metrics_address)
            for _ in range(3):  # The same each time.
                assert await metric(client, one, "quire_http_max_connections") == 7
                assert await metric(client, other, "quire_http_max_connections") == 4096
            for path, status in (("/health", 503), ("/v1/models", 404)):
                answer = await client.get(f"http://{one.metrics_address}{path}")
                assert answer.status_code == status


async def test_a_gateway_counts_its_connections_and_those_that_it_cut() -> None:
    async with gateway(max_connections=2) as server, httpx.AsyncClient(timeout=None) as client:
        address = ("127.0.0.1", port_of(server.http_address))
        open_ = [await asyncio.open_connection(*address) for _ in range(3)]
        assert await open_[0][0].read() == b""
        assert await metric(client, server, "quire_http_connections") == 2
        cut = 'quire_http_cut_connections_total{reason="room"}'
        assert await metric(client, server, cut) == 1
        for _, writer in open_:
            writer.close()


async def test_grpc_connections_beyond_the_bound_are_closed_and_silent_ones_time_out() -> None:
    async with gateway(max_connections=2, head_timeout_s=0.5) as server:
        address = ("127.0.0.1", port_of(server.grpc_address))
        clients = [await asyncio.open_connection(*address) for _ in range(4)]
        for reader, _ in clients:  # All end: two to make room for the newest, later these too.
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        async with httpx.AsyncClient(timeout=None) as client:
            cut = 'quire_grpc_cut_connections_total{reason="room"}'
            assert await metric(client, server, cut) == 2
        for _, writer in clients:
            writer.close()
        async with grpc.aio.insecure_channel(server.grpc_address) as channel:
            await channel.channel_ready()


async def test_metadata_without_end_is_refused() -> None:
    async with (
        gateway() as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        call: Any = channel.unary_unary("/grpc.health.v1.Health/Check")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call(b"", metadata=[("a", "x" * 20_000)])
        assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def metric(client: httpx.AsyncClient, server: GatewayServer, name: str) -> float:
    page = (await client.get(f"http://{server.metrics_address}/metrics")).text
    found = re.search(rf"^{re.escape(name)} (\S+)$", page, re.MULTILINE)
    assert found is not None
    return float(found[1])
