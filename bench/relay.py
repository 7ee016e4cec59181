"""What a token costs on its way from a group's engine to a client, in CPU time of each process.

    python -m bench.relay [--streams 32] [--tokens 400] [--step-ms 5] [--repeats 3]

Three processes: a group whose engine is a clock that gives every request a token each step, a
gateway, and a client. Beside them, in the same run, the *floor*: a bare gRPC server that writes the
same messages to as many streams, as fast as they go, with nothing behind it.
"""

import argparse
import asyncio
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, cast

import grpc
import grpc.aio

from quire import demo_model
from quire.cluster.gateway.grpc_server import SERVICE, build_grpc_server
from quire.cluster.gateway.service import Gateway
from quire.cluster.group.engine_loop import EngineLoop, Sink, StepResult
from quire.cluster.group.service import GroupService, build_group_server
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.table import RoutingTable
from quire.v1 import group_pb2, inference_pb2_grpc
from quire.v1 import inference_pb2 as pb
from quire.worker.bench.report import format_table
from quire.worker.engine_stats import EngineStats
from quire.worker.errors import RankFailure
from quire.worker.events import EventBatch
from quire.worker.request import Request, TokenDelta
from quire.worker.text import Tokenizer

_BLOCK_SIZE = 16
_LOAD = dict.fromkeys(EngineStats.__dataclass_fields__, 0)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()

    rows = []
    with (
        _Child(_run_floor, 0.0) as floor,
        _Child(_run_group, args.step_ms / 1e3) as group,
        _Child(_run_gateway, group.address) as gateway,
    ):
        for _ in range(args.repeats):
            through = _load(gateway.address, args.streams, args.tokens, [group, gateway])
            bare = _load(floor.address, args.streams, args.tokens, [floor])
            rows.append([*through, *bare])
    group_us, gateway_us, floor_us = (median(column) for column in zip(*rows, strict=True))
    print(f"{args.streams} streams of {args.tokens} tokens, a step each {args.step_ms:g} ms; CPU")
    table = [
        ["group: frames to the gateway", f"{group_us:.1f}", ""],
        ["gateway: frames in, chunks out", f"{gateway_us:.1f}", f"{gateway_us / floor_us:.2f}"],
        ["floor: chunks out alone", f"{floor_us:.1f}", "1"],
    ]
    print(format_table(("process", "µs/token", "of the floor"), table))


class _Child:
    """A process that serves until it is left; `cpu_s` is what it has used so far."""

    def __init__(self, run: Callable[..., None], argument: object) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=run, args=(theirs, argument), daemon=True)

    def __enter__(self) -> "_Child":
        self._process.start()
        self.address = str(self._pipe.recv())
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send("end")
        self._process.join()

    def cpu_s(self) -> float:
        self._pipe.send("cpu")
        return float(self._pipe.recv())


def _load(address: str, num_streams: int, num_tokens: int, children: list[_Child]) -> list[float]:
    """CPU µs per token of each of ``children`` while the streams at ``address`` are read."""

    async def read() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*[_read(stub, num_tokens) for _ in range(num_streams)])

    before = [child.cpu_s() for child in children]
    asyncio.run(read())
    after = [child.cpu_s() for child in children]
    total = num_streams * num_tokens
    return [(b - a) / total * 1e6 for a, b in zip(before, after, strict=True)]


async def _read(stub: "inference_pb2_grpc.InferenceAsyncStub", num_tokens: int) -> None:
    params = pb.SamplingParams(seed=1, max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(20, 60)), sampling=params)
    num = 0
    async for chunk in stub.Generate(request):
        num += len(chunk.token_ids)
    assert num == num_tokens, f"{num} of {num_tokens} tokens came"


async def _serve(pipe: Connection, server: grpc.aio.Server) -> None:
    """Serves until the parent says that it is enough; tells it the CPU time when asked."""
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    while await asyncio.to_thread(pipe.recv) == "cpu":
        pipe.send(time.process_time())
    await server.stop(None)


def _run_group(pipe: Connection, step_s: float) -> None:
    async def run() -> None:
        engine_loop = _ClockEngine(step_s)
        description = group_pb2.GroupDescription(
            group_id="g0",
            epoch=1,
            model=demo_model.NAME,
            model_fingerprint="clock",
            kv_dtype="float32",
            block_size=_BLOCK_SIZE,
            max_model_len=100_000,
            vocab_size=256,
        )
        server = build_group_server(GroupService(cast(EngineLoop, engine_loop), description))
        stepping = asyncio.create_task(engine_loop.run())
        await _serve(pipe, server)
        stepping.cancel()

    asyncio.run(run())


class _ClockEngine:
    """An `EngineLoop` as far as a `GroupService` sees it, without an engine."""

    def __init__(self, step_s: float) -> None:
        self.num_steps = self.num_submitted = self.num_added = 0
        self.stats = EngineStats(**cast(Any, _LOAD))
        self.failed: asyncio.Future[RankFailure] = asyncio.get_running_loop().create_future()
        self._step_s = step_s
        self._running: dict[str, tuple[Sink, int, int]] = {}

    @property
    def num_requests(self) -> int:
        return len(self._running)

    def submit(self, request: Request, sink: Sink) -> None:
        assert request.params.max_tokens is not None
        self.num_submitted = self.num_added = self.num_submitted + 1
        self._running[request.request_id] = (sink, 0, request.params.max_tokens)

    def abort(self, request_id: str) -> None:
        self._running.pop(request_id, None)

    def listen(self, on_step: Callable[[StepResult], None]) -> Callable[[], None]:
        return lambda: None

    async def call(self, function: object) -> list[EventBatch]:
        return [EventBatch(epoch=1, first_seq=0, events=())]

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            self.num_steps += bool(self._running)
            for request_id, (sink, num_tokens, max_tokens) in list(self._running.items()):
                is_last = num_tokens + 1 == max_tokens
                token_ids = (97 + num_tokens % 26,)
                reason = "length" if is_last else None
                sink(TokenDelta(request_id, num_tokens, token_ids, (), cast(Any, reason), 0))
                if is_last:
                    del self._running[request_id]
                else:
                    self._running[request_id] = (sink, num_tokens + 1, max_tokens)


def _run_gateway(pipe: Connection, group_address: str) -> None:
    async def run() -> None:
        table = RoutingTable(block_size=_BLOCK_SIZE)
        expected = Expectation(model=demo_model.NAME, block_size=_BLOCK_SIZE)
        groups = Groups(table=table, expected=expected)
        groups.set_addresses([group_address])
        tokenizer = await asyncio.to_thread(Tokenizer.load, demo_model.PATH)
        gateway = Gateway(model=demo_model.NAME, tokenizer=tokenizer, groups=groups, table=table)
        while not gateway.is_ready:
            await groups.wait_for_change(timeout_s=10)
        await _serve(pipe, build_grpc_server(gateway))
        await groups.close()

    asyncio.run(run())


async def _write_chunks(request: pb.GenerateRequest, context: Any) -> None:
    for position in range(request.sampling.max_tokens):
        token_id = 97 + position % 26
        chunk = pb.GenerateResponse(token_offset=position, token_ids=[token_id], text=chr(token_id))
        await context.write(chunk)


def _run_floor(pipe: Connection, _: object) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        generate = grpc.unary_stream_rpc_method_handler(
            _write_chunks,
            request_deserializer=pb.GenerateRequest.FromString,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})
        server.add_generic_rpc_handlers((service,))
        await _serve(pipe, server)

    asyncio.run(run())


if __name__ == "__main__":
    main()
