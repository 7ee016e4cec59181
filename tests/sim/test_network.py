import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest
from tests.sim.calls import Call, Connection, RpcError, ServerContext
from tests.sim.loop import Process, SimLoop, simulate
from tests.sim.network import Network, NetworkConfig

from quire.v1 import group_pb2 as pb

CONFIG = NetworkConfig(max_latency_s=0.5, retransmit_s=1.0, tcp_timeout_s=30.0, window=8)


class Counting:
    """A fake group that sends numbered frames."""

    def __init__(self) -> None:
        self.num_sent = 0
        self.ended = ""

    async def Describe(self, request: Any, context: Any) -> pb.GroupDescription:
        return pb.GroupDescription(group_id="counting")

    async def Attach(self, requests: AsyncIterator[Any], context: ServerContext) -> None:
        try:
            while True:
                self.num_sent += 1
                await context.write(pb.StepFrame(step=self.num_sent))
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            self.ended = "cancelled"
            raise


async def read(call: Call, num_frames: int) -> list[int]:
    frames = aiter(call)
    return [(await anext(frames)).step for _ in range(num_frames)]


Script = Callable[[Network, Process, Counting, Connection], Awaitable[None]]


def play(script: Script) -> None:
    async def main(loop: SimLoop) -> None:
        network = Network(loop, random.Random(1), config=CONFIG, trace=lambda name, message: None)
        process, service = Process(loop, "server"), Counting()
        network.listen("server:1", process, service)
        async with network.connect("server:1", client=None, place="client") as connection:
            await script(network, process, service, connection)
        assert not network.failures

    simulate(main, seed=1)


def test_frames_come_in_order_whatever_each_one_takes() -> None:
    async def script(_n: Network, _p: Process, _s: Counting, connection: Connection) -> None:
        description = await connection.unary("Describe", pb.DescribeRequest(), timeout=5)
        assert description.group_id == "counting"
        assert await read(connection.stream_stream("Attach"), 50) == list(range(1, 51))

    play(script)


def test_what_a_cut_holds_back_comes_once_and_in_order() -> None:
    async def script(network: Network, _p: Process, _s: Counting, connection: Connection) -> None:
        call = connection.stream_stream("Attach")
        reading = asyncio.create_task(read(call, 40))
        await asyncio.sleep(2)
        network.cut("server", "client")
        await asyncio.sleep(20)
        assert call.up.num_unread == CONFIG.window
        network.heal("server", "client")
        assert await reading == list(range(1, 41))

    play(script)


def test_a_cut_that_lasts_breaks_the_connection() -> None:
    async def script(network: Network, _p: Process, s: Counting, connection: Connection) -> None:
        call = connection.stream_stream("Attach")
        await asyncio.sleep(2)
        network.cut("server", "client")
        with pytest.raises(RpcError, match="no acknowledgement"):
            await read(call, 100)
        await asyncio.sleep(1)
        assert s.ended == "cancelled"

    play(script)


def test_who_does_not_read_is_not_sent_more_than_the_window() -> None:
    async def script(_n: Network, _p: Process, s: Counting, connection: Connection) -> None:
        call = connection.stream_stream("Attach")
        await asyncio.sleep(20)
        assert s.num_sent == CONFIG.window + 1
        assert await read(call, 12) == list(range(1, 13))

    play(script)


@pytest.mark.parametrize(("resets", "within_s"), [(True, 1.0), (False, 31.0)])
def test_a_dead_peer_is_noticed(resets: bool, within_s: float) -> None:
    async def script(network: Network, p: Process, _s: Counting, connection: Connection) -> None:
        call = connection.stream_stream("Attach")
        await asyncio.sleep(5)
        network.kill(p, resets=resets)
        begin_s = network.loop.time()
        with pytest.raises(RpcError) as raised:
            await read(call, 100)
        assert raised.value.code() == grpc.StatusCode.UNAVAILABLE
        assert network.loop.time() - begin_s <= within_s
        async with network.connect("server:1", client=None, place="client") as again:
            with pytest.raises(RpcError, match="refused"):
                await again.unary("Describe", pb.DescribeRequest(), timeout=5)

    play(script)


def test_a_frozen_server_answers_too_late() -> None:
    async def script(_n: Network, process: Process, _s: Counting, connection: Connection) -> None:
        process.freeze()
        with pytest.raises(RpcError) as raised:
            await connection.unary("Describe", pb.DescribeRequest(), timeout=5)
        assert raised.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        process.thaw()

    play(script)


def test_a_reader_that_leaves_ends_the_handler() -> None:
    async def script(_n: Network, _p: Process, s: Counting, connection: Connection) -> None:
        call = connection.stream_stream("Attach")
        async for _ in call:
            break
        await asyncio.sleep(2)
        assert s.ended == "cancelled"

    play(script)
