"""A gateway that is told to stop: a process, a signal, and clients in the midst of their streams.

Two gateways in processes of their own before one group, without Ray. What streams must bring is
what the gateway that stays brings for the same requests.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import AsyncIterator
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
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.group.server import GroupServer
from quire.cluster.links.group_link import GroupContact
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.api.config import EngineConfig

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
    # How long the machine takes is no matter here.
    max_queue_wait_s=1000,
    drain_timeout_s=300,
)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def run_gateway(group: GroupContact, pipe: Connection) -> None:
    """The body of a gateway's process: what a Serve replica does, which Serve stops by a call."""

    async def run() -> None:
        told = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
        server = await GatewayServer.start(CONFIG)
        server.set_groups([group])
        while not server.groups.num_ready:
            await server.groups.wait_for_change(timeout_s=1)
        pipe.send((server.grpc_address, server.http_address))
        await told.wait()
        await server.stop(drain_timeout_s=CONFIG.drain_timeout_s)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def gateway(group: GroupContact) -> AsyncIterator[tuple[SpawnProcess, str, str]]:
    """Its process and where it listens, gRPC and HTTP."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=run_gateway, args=(group, theirs))
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


async def test_a_gateway_told_to_stop_ends_its_streams_and_takes_no_more() -> None:
    group = await GroupServer.start(CONFIG, group_id="group")
    is_told = threading.Event()
    wait_before_steps(group, is_told)  # So that no stream has ended when all have begun.
    async with gateway(group.contact) as leaving, gateway(group.contact) as staying:
        process, grpc_address, http_address = leaving
        both = f"ipv4:{grpc_address},{staying[1]}"  # The first that answers is taken.
        async with (
            grpc.aio.insecure_channel(both) as channel,
            grpc.aio.insecure_channel(staying[1]) as other,
        ):
            stub = inference_pb2_grpc.InferenceStub(channel)
            # One who asks to be told of the gateway's health for as long as there is one.
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
            assert process.pid is not None
            os.kill(process.pid, signal.SIGTERM)
            assert not any(stream.done() for stream in streams)
            is_told.set()
            # A client knows nothing of it. gRPC's core cancels a call that comes in the very moment
            # (github.com/grpc/grpc/issues/41785), before it has brought anything. On a slow machine
            # that moment, until the client is told to go away, has room for several calls; so the
            # client waits for its end, and nothing may fail after it.
            errors = []
            while process.is_alive():
                asked = asyncio.Event()
                try:
                    await over_grpc(stub, 99, max_tokens=2, begun=asked)
                except grpc.aio.AioRpcError as error:
                    errors.append(error.code())
                    assert not asked.is_set()
                    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
            assert errors in ([], [grpc.StatusCode.CANCELLED], [grpc.StatusCode.UNAVAILABLE])
            with pytest.raises(grpc.aio.AioRpcError, match="the gateway is stopping"):
                _ = [status async for status in watch]
            found = await asyncio.gather(*streams)
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"http://{http_address}/health", timeout=120)
            again = inference_pb2_grpc.InferenceStub(other)
            expected = [
                await over_grpc(again, number, begun=asyncio.Event())
                for number in range(2 * NUM_STREAMS)
            ]
        assert process.exitcode == 0
    await group.stop(drain_timeout_s=0)
    assert found == expected
