"""The effect of many idle connections on a gateway's other clients.

    python -m bench.connections [--idle 10000] [--halves 500] [--max-connections 4096]

A gateway in a process of its own, without groups. While one client asks for `/health` again and
again, each time by a new connection, and a second by one that it keeps, as many idle connections
are opened as fast as they can, and then half-sent heads. Both processes need as many files.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import resource
import time
from collections import Counter
from multiprocessing.connection import Connection
from statistics import quantiles

import httpx

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.gateway_server import GatewayServer
from quire.worker.api.config import EngineConfig
from quire.worker.bench.report import format_table

_AT_ONCE = 100


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--idle", type=int, default=10_000)
    parser.add_argument("--halves", type=int, default=500, help="heads that are half sent")
    parser.add_argument("--max-connections", type=int, default=4096)
    parser.add_argument("--head-timeout-s", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=30.0, help="for which they are held")
    args = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    config = ClusterConfig(
        engine=EngineConfig(model=demo_model.PATH),
        grpc_port=0,
        http_port=0,
        max_connections=args.max_connections,
        head_timeout_s=args.head_timeout_s,
    )
    server = context.Process(target=_serve, args=(theirs, config), daemon=True)
    server.start()
    address, metrics_address = pipe.recv()
    asyncio.run(_attack(address, metrics_address, args))
    pipe.send("end")
    server.join()


async def _attack(address: str, metrics_address: str, args: argparse.Namespace) -> None:
    asking = [asyncio.create_task(_ask(address, is_kept=is_kept)) for is_kept in (False, True)]
    begin_s = time.monotonic()
    idle = await _connect(address, args.idle)
    opened_s = time.monotonic() - begin_s
    at_most = await _metric(metrics_address, "quire_http_connections")
    halves = await _connect(address, args.halves, b"GET /health HTTP/1.1\r\nHost:")
    await asyncio.sleep(args.seconds)
    left = [sum(not reader.at_eof() for reader, _ in each) for each in (idle, halves)]
    for task in asking:
        task.cancel()
    outcomes = await asyncio.gather(*asking, return_exceptions=True)
    assert all(isinstance(each, asyncio.CancelledError) for each in outcomes), outcomes

    print(f"{args.idle} idle connections in {opened_s:.1f} s, {args.halves} half-sent heads;")
    print(f"open at the gateway behind the first: {at_most}; of both, after the wait: {left}")
    print("  " + ", ".join(await _metrics(metrics_address, "quire_http_cut_connections_total")))
    rows = []
    for name, (answers, times_s) in zip(("new each time", "kept"), _SEEN.values(), strict=True):
        p50, p99 = (quantiles(times_s, n=100)[i] * 1e3 for i in (49, 98))
        said = ", ".join(f"{what}: {num}" for what, num in answers.items())
        rows.append([name, said, f"{p50:.1f}", f"{p99:.1f}", f"{max(times_s) * 1e3:.1f}"])
    print(format_table(("connection", "answers", "p50 ms", "p99 ms", "longest ms"), rows))
    for _, writer in idle + halves:
        writer.close()


_SEEN: dict[bool, tuple[Counter[str], list[float]]] = {
    False: (Counter(), []),
    True: (Counter(), []),
}
"""By whether the connection is kept: answers, and how long each took."""


async def _ask(address: str, *, is_kept: bool) -> None:
    """The gateway has no groups: 503, with a body that says so, is its right answer."""
    answers, times_s = _SEEN[is_kept]
    limits = httpx.Limits(max_keepalive_connections=int(is_kept))
    async with httpx.AsyncClient(timeout=60, limits=limits) as client:
        while True:
            begin_s = time.monotonic()
            try:
                answer = await client.get(f"http://{address}/health")
                answers["health" if "ready_groups" in answer.json() else "refused"] += 1
            except httpx.HTTPError as error:
                answers[type(error).__name__] += 1
            times_s.append(time.monotonic() - begin_s)
            await asyncio.sleep(0.02)


async def _connect(
    address: str, num: int, data: bytes = b""
) -> list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    connections = []

    async def connect() -> None:
        with contextlib.suppress(ConnectionError):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            connections.append((reader, writer))

    for begin in range(0, num, _AT_ONCE):
        await asyncio.gather(*[connect() for _ in range(min(_AT_ONCE, num - begin))])
    return connections


async def _metrics(address: str, name: str) -> list[str]:
    async with httpx.AsyncClient(timeout=60) as client:
        page = (await client.get(f"http://{address}/metrics")).text
    return [line for line in page.splitlines() if line.startswith(name)]


async def _metric(address: str, name: str) -> int:
    (line,) = await _metrics(address, f"{name} ")
    return round(float(line.split()[1]))


def _serve(pipe: Connection, config: ClusterConfig) -> None:
    async def run() -> None:
        server = await GatewayServer.start(config)
        pipe.send((server.http_address, server.metrics_address))
        await asyncio.to_thread(pipe.recv)
        await server.stop(drain_timeout_s=0)

    asyncio.run(run())


if __name__ == "__main__":
    main()
