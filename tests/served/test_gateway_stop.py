"""A gateway process that receives a stop signal while clients read streams.

Two gateway processes share the ports in front of one group, without Ray. Streams must equal the
answers of the remaining gateway to the same requests.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy import gateway_server
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.edge import grpc_server
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.request.config import EngineConfig

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

NUM_STREAMS = 8
NUM_TOKENS = 400
CONFIG = ClusterConfig(
    engine=EngineConfig(
        model=demo_model.PATH,
        dtype="float32",
        num_blocks=1000,
        max_num_seqs=4 * NUM_STREAMS,
        num_threads=1,
    ),
    served_model_name="demo",
    grpc_port=0,
    http_port=0,
    # Long timeouts: the machine's speed does not matter.
    max_queue_wait_s=1000,
    drain_timeout_s=300,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextlib.contextmanager
def shared_ports() -> Iterator[ClusterConfig]:
    """Ports bound here, without listening, so that no other process gets them."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in ("grpc_port", "http_port"):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            ports[name] = held.getsockname()[1]
        yield replace(CONFIG, **ports)


def run_gateway(config: ClusterConfig, group: GroupContact, pipe: Connection) -> None:
    """The body of a gateway process: like a Serve replica, but stopped by a signal, not a call."""
    # Shortens the test.
    for module, name, value in (
        (grpc_server, "GRPC_CONNECTION_AGE_S", 2.0),
        (gateway_server, "GRPC_LEAVE_S", 30.0),
    ):
        setattr(module, name, value)

    async def run() -> None:
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        server = await GatewayServer.start(config)
        server.set_groups([group])
        groups = server.models.named(None).groups
        while not groups.num_ready:
            await groups.wait_for_change(timeout_s=1)
        pipe.send((server.grpc_address, server.http_address))
        await told.wait()
        await server.stop(drain_timeout_s=config.drain_timeout_s)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def gateway(
    config: ClusterConfig, group: GroupContact
) -> AsyncIterator[tuple[SpawnProcess, str, str]]:
    """Yields a gateway's process and its gRPC and HTTP addresses."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_gateway, args=(config, group, theirs))
    process.start()
    theirs.close()
    try:
        yield process, *await asyncio.to_thread(ours.recv)
    finally:
        process.kill()
        await asyncio.to_thread(process.join)


def prompt_of(number: int) -> str:
    return f"Question {number}: what is it?"


def request(number: int, *, max_tokens: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(seed=number, max_tokens=max_tokens, ignore_eos=True)
    return pb.GenerateRequest(text=prompt_of(number), sampling=sampling)


async def over_grpc(
    stub: "inference_pb2_grpc.InferenceAsyncStub",
    number: int,
    *,
    max_tokens: int = NUM_TOKENS,
    begun: asyncio.Event,
) -> str:
    text = ""
    async for chunk in stub.Generate(request(number, max_tokens=max_tokens)):
        text += chunk.text
        begun.set()
    return text


async def over_http(url: str, number: int, *, begun: asyncio.Event) -> str:
    body = {
        "model": "demo",
        "prompt": prompt_of(number),
        "seed": number,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "stream": True,
    }
    text, last = "", ""
    async with (
        httpx.AsyncClient(timeout=None) as client,
        client.stream("POST", f"http://{url}/v1/completions", json=body) as response,
    ):
        async for line in response.aiter_lines():
            if not (event := line.removeprefix("data: ")):
                continue
            last = event
            if event != "[DONE]":
                text += json.loads(event)["choices"][0]["text"]
                begun.set()
    assert last == "[DONE]"
    return text


def wait_before_steps(group: GroupServer, may_hurry: threading.Event) -> None:
    step = group._engine.step

    def wait_and_step() -> Any:
        may_hurry.wait(0.1)
        return step()

    group._engine.step = wait_and_step  # type: ignore[method-assign]


async def ask_over_http(client: httpx.AsyncClient, url: str, *, until: asyncio.Event) -> int:
    """Sends requests until told to stop; returns their number."""
    num_asked = 0
    body = {"model": "demo", "prompt": "A", "max_tokens": 1, "ignore_eos": True}
    while not until.is_set():
        (await client.post(f"http://{url}/v1/completions", json=body)).raise_for_status()
        num_asked += 1
    return num_asked


async def ask_over_grpc(
    stub: "inference_pb2_grpc.InferenceAsyncStub", *, until: asyncio.Event
) -> int:
    num_asked = 0
    while not until.is_set():
        await over_grpc(stub, 99, max_tokens=2, begun=asyncio.Event())
        num_asked += 1
    return num_asked


async def test_a_gateway_told_to_stop_ends_its_streams_and_no_client_fails() -> None:
    group = await GroupServer.start(CONFIG, group_id="group")
    is_told, is_gone = threading.Event(), asyncio.Event()
    wait_before_steps(group, is_told)  # No stream ends before all have begun.
    options = [("grpc.use_local_subchannel_pool", 1)]  # Otherwise channels share a connection.
    async with contextlib.AsyncExitStack() as stack:
        config = stack.enter_context(shared_ports())
        process, grpc_address, http_address = await stack.enter_async_context(
            gateway(config, group.contact)
        )
        enter = stack.enter_async_context
        channel = await enter(grpc.aio.insecure_channel(grpc_address, options=options))
        kept = await enter(httpx.AsyncClient(timeout=None))
        none_kept = httpx.Limits(max_keepalive_connections=0)
        fresh = await enter(httpx.AsyncClient(timeout=None, limits=none_kept))
        stub = inference_pb2_grpc.InferenceStub(channel)
        # A client that watches the gateway's health until the gateway ends.
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await anext(aiter(watch))).status == health_pb2.HealthCheckResponse.SERVING
        begun = [asyncio.Event() for _ in range(2 * NUM_STREAMS)]
        streams = [
            asyncio.create_task(
                over_http(http_address, number, begun=begun[number])
                if number % 2
                else over_grpc(stub, number, begun=begun[number])
            )
            for number in range(2 * NUM_STREAMS)
        ]
        for each in begun:
            await each.wait()
        loops = [
            *(ask_over_http(client, http_address, until=is_gone) for client in 8 * [kept, fresh]),
            *(ask_over_grpc(stub, until=is_gone) for _ in range(16)),
        ]
        asks = [asyncio.create_task(each) for each in loops]
        await enter(gateway(config, group.contact))
        assert process.pid is not None
        os.kill(process.pid, signal.SIGTERM)
        assert not any(stream.done() for stream in streams)
        is_told.set()
        while process.is_alive():
            await asyncio.sleep(0.01)
        is_gone.set()
        assert min(await asyncio.gather(*asks)) > 0
        with pytest.raises(grpc.aio.AioRpcError, match="the gateway is stopping"):
            _ = [status async for status in watch]
        found = await asyncio.gather(*streams)
        expected = [
            await over_grpc(stub, number, begun=asyncio.Event())
            for number in range(2 * NUM_STREAMS)
        ]
        assert process.exitcode == 0
    await group.stop(drain_timeout_s=0)
    assert found == expected
