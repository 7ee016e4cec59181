"""The cost of tracing: CPU time of a gateway and a group per token, with and without spans.

    python -m bench.tracing [--streams N] [--tokens N] [--rounds N] [--times N]

A gateway, a group with the demo model, and a collector that drops what it gets each have a process
of their own. The gateway sends and hands on traces in every other run only; without, neither it nor
the group has anything to do with them. A run is so many streams at a time over gRPC, each with
some calls in a row, all of them sampled. The CPU time is that of all threads of the gateway's and
of the group's process, the thread that sends spans among them; ranks are not traced. A ratio
compares two runs that follow each other; shown are medians, and the quartiles of the ratio.

Other work on the machine changes CPU times by more than spans do. So each span is made and sent
``--times`` times, and the last column is the difference divided by that.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio
from bench.report import command, markdown
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.cluster.features.tracing.tracing import Span
from quire.cluster.group.server import GroupServer
from quire.cluster.group.session import TracesTo
from quire.v1 import inference_pb2, inference_pb2_grpc
from quire.worker.request.config import EngineConfig

_SPAWN = multiprocessing.get_context("spawn")
_PROMPT_TOKENS = 100
_CALLS_PER_STREAM = 4
"""In a run."""
_SENT_S = 2.0
"""Until the spans of a run have been sent, which counts."""


class Part:
    """A process that runs an async context until it is closed. That gives what to tell at first,
    and a function of further commands."""

    def __init__(self, start: Callable[..., Any], *arguments: object) -> None:
        self._pipe, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_run, args=(theirs, start, arguments), daemon=True)
        self._process.start()
        self.told: Any = self._pipe.recv()

    def do(self, command: str) -> Any:
        self._pipe.send(command)
        return self._pipe.recv()

    def close(self) -> None:
        self._pipe.send("end")
        self._process.join()


def _run(pipe: Connection, start: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    async def serve() -> None:
        async with start(*arguments) as (told, do):
            pipe.send(told)
            while (command := await asyncio.to_thread(pipe.recv)) != "end":
                pipe.send(do(command))

    asyncio.run(serve())


@contextlib.asynccontextmanager
async def _group(config: ClusterConfig, times: int) -> AsyncIterator[Any]:
    server = await GroupServer.start(config, group_id="g")
    door = server._service._door
    assert door.traces is not None
    add = door.traces.add

    def add_again(spans: Iterable[Span]) -> None:
        for _ in range(times):
            add(spans)

    door.traces = TracesTo("g", add_again)
    yield server.contact, _cpu_s
    await server.stop(drain_timeout_s=0)


@contextlib.asynccontextmanager
async def _gateway(config: ClusterConfig, contact: Any, times: int) -> AsyncIterator[Any]:
    server = await GatewayServer.start(config)
    traces = server.models.traces
    told = server.models.on_finished
    told += told[-1:] * (times - 1)  # The last one makes the spans.

    def do(command: str) -> float:
        if command != "cpu":
            server.models.traces = traces if command == "with" else None
        return _cpu_s(command)

    server.set_groups([contact])
    while not server.models.is_ready:
        await asyncio.sleep(0.01)
    yield server.grpc_address, do
    await server.stop(drain_timeout_s=0)


class _Sink(trace_service_pb2_grpc.TraceServiceServicer):
    num_spans = 0

    async def Export(self, request: Any, context: Any) -> Any:
        self.num_spans += sum(
            len(scope.spans) for each in request.resource_spans for scope in each.scope_spans
        )
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.asynccontextmanager
async def _collector() -> AsyncIterator[Any]:
    server, sink = grpc.aio.server(), _Sink()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"http://127.0.0.1:{port}", lambda _: sink.num_spans
    await server.stop(None)


async def _load(address: str, num_streams: int, num_tokens: int, seed: int) -> int:
    """Returns how many tokens came."""
    draw = random.Random(seed)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        async def stream() -> int:
            num = 0
            for _ in range(_CALLS_PER_STREAM):
                ids = draw.choices(range(3, 200), k=_PROMPT_TOKENS)
                params = inference_pb2.SamplingParams(
                    temperature=0, max_tokens=num_tokens, ignore_eos=True
                )
                request = inference_pb2.GenerateRequest(
                    token_ids=inference_pb2.TokenIds(ids=ids), sampling=params
                )
                async for chunk in stub.Generate(request):
                    num += len(chunk.token_ids)
            return num

        return sum(await asyncio.gather(*(stream() for _ in range(num_streams))))


def _cpu_s(_: str) -> float:
    return time.process_time()


def measure(options: argparse.Namespace) -> str:
    os.environ["OTEL_BSP_SCHEDULE_DELAY"] = "500"  # In ms; else spans count for the next run.
    collector = Part(_collector)
    config = ClusterConfig(
        engine=EngineConfig(
            model=demo_model.PATH, num_blocks=4096, max_num_seqs=options.streams, num_threads=1
        ),
        served_model_name=demo_model.NAME,
        grpc_port=0,
        http_port=0,
        otlp_traces_endpoint=collector.told,
    )
    group = Part(_group, config, options.times)
    gateway = Part(_gateway, config, group.told, options.times)
    parts = {"gateway": gateway, "group": group}
    ways = ("without", "with")
    taken: dict[str, dict[str, list[float]]] = {part: {way: [] for way in ways} for part in parts}
    for number in range(options.rounds + 1):
        for turn, way in enumerate(ways if number % 2 else reversed(ways)):
            gateway.do(way)
            before = [part.do("cpu") for part in parts.values()]
            seed = 2 * number + turn
            num = asyncio.run(_load(gateway.told, options.streams, options.tokens, seed))
            time.sleep(_SENT_S)
            for (name, part), begin_s in zip(parts.items(), before, strict=True):
                if number:  # The first round warms up.
                    taken[name][way].append((part.do("cpu") - begin_s) / num)
    num_spans = collector.do("spans")
    for part in (gateway, group, collector):
        part.close()
    rows = []
    for name, by_way in taken.items():
        ratios = [a / b for a, b in zip(by_way["with"], by_way["without"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        costs = [f"{1e6 * statistics.median(by_way[way]):.1f}" for way in ways]
        one = f"{100 * (middle - 1) / options.times:.2f} %"
        rows.append([name, *costs, f"{middle:.3f} ({low:.3f} to {high:.3f})", one])
    header = ["process", "CPU µs a token, without", "with", "ratio (quartiles)", "for one"]
    return f"{markdown(header, rows)}\n\n{num_spans} spans came."


def main() -> None:
    parser = command("bench.tracing", __doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--times", type=int, default=10)
    print(measure(parser.parse_args()))


if __name__ == "__main__":
    main()
