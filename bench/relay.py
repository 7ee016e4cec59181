"""CPU time of each process per token, on the way from a group's engine to a client.

    python -m bench.relay [--http] [--streams 32] [--tokens 400] [--step-ms 5] [--repeats 3] [--tls]

Three processes: a group whose engine is a clock that gives every request a token each step, a
gateway, and a client. Beside them, in the same run, the *floor*: a bare gRPC server that writes the
same messages to as many streams, as fast as they go, with nothing behind it. With ``--http``, the
client reads OpenAI's completions instead, and the floor is a bare ASGI application. With ``--tls``,
the link between gateway and group has TLS, as where a gateway has it; the client's has not.
"""

import argparse
import asyncio
import json
import socket
import time
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import grpc
import grpc.aio
import uvloop
from bench.clock_group import Child, gateway_of, run_clock_group, serve
from starlette.types import ASGIApp, Receive, Scope, Send

from quire import demo_model
from quire.cluster.edge.grpc_server import SERVICE, build_grpc_server
from quire.cluster.edge.limits import ConnectionLimits
from quire.cluster.edge.listener import HttpListener
from quire.cluster.edge.openai_http import build_http_app
from quire.cluster.links.group_link import GroupContact
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.bench.report import format_table
from quire.worker.text.tokenizer import Tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=400, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--http", action="store_true", help="rather than gRPC")
    parser.add_argument("--tls", action="store_true", help="between gateway and group")
    args = parser.parse_args()

    rows = []
    with (
        Child(_run_http_floor if args.http else _run_floor) as floor,
        Child(run_clock_group, args.step_ms / 1e3, args.tls) as group,
        Child(_run_http_gateway if args.http else _run_gateway, group.contact) as gateway,
    ):
        read = _read_http if args.http else _read_grpc
        for _ in range(args.repeats):
            through = _load(read, gateway.address, args.streams, args.tokens, [group, gateway])
            bare = _load(read, floor.address, args.streams, args.tokens, [floor])
            rows.append([*through, *bare])
    group_us, gateway_us, floor_us = (median(column) for column in zip(*rows, strict=True))
    link = "TLS" if args.tls else "no TLS"
    load = f"{args.streams} streams of {args.tokens} tokens, a step each {args.step_ms:g} ms"
    print(f"{load}, {link} between gateway and group; CPU")
    table = [
        ["group: frames to the gateway", f"{group_us:.1f}", ""],
        ["gateway: frames in, chunks out", f"{gateway_us:.1f}", f"{gateway_us / floor_us:.2f}"],
        ["floor: chunks out alone", f"{floor_us:.1f}", "1"],
    ]
    print(format_table(("process", "µs/token", "of the floor"), table))


Reader = Callable[[str, int, int], Coroutine[Any, Any, None]]


def _load(
    read: Reader, address: str, num_streams: int, num_tokens: int, children: list[Child]
) -> list[float]:
    """CPU µs per token of each of ``children`` while the streams at ``address`` are read."""
    before = [child.cpu_s() for child in children]
    asyncio.run(read(address, num_streams, num_tokens))
    after = [child.cpu_s() for child in children]
    total = num_streams * num_tokens
    return [(b - a) / total * 1e6 for a, b in zip(before, after, strict=True)]


async def _read_http(address: str, num_streams: int, num_tokens: int) -> None:
    body = json.dumps(
        {
            "model": demo_model.NAME,
            "prompt": list(range(20, 60)),
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "seed": 1,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )

    async def one() -> None:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + body)
        got, num_events = b"", 0
        while b"[DONE]" not in got:
            got = got[-8:] + await reader.read(2**16)
            num_events += got.count(b"data: {", max(0, len(got) - 2**16 - 8))
        writer.close()
        assert num_events > 1, "nothing came"

    await asyncio.gather(*[one() for _ in range(num_streams)])


async def _read_grpc(address: str, num_streams: int, num_tokens: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        await asyncio.gather(*[_read(stub, num_tokens) for _ in range(num_streams)])


async def _read(stub: "inference_pb2_grpc.InferenceAsyncStub", num_tokens: int) -> None:
    params = pb.SamplingParams(seed=1, max_tokens=num_tokens, ignore_eos=True)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(20, 60)), sampling=params)
    num = 0
    async for chunk in stub.Generate(request):
        num += len(chunk.token_ids)
    assert num == num_tokens, f"{num} of {num_tokens} tokens came"


def _run_gateway(pipe: Connection, group: GroupContact) -> None:
    async def run() -> None:
        tokenizer = await asyncio.to_thread(Tokenizer.load, demo_model.PATH)
        gateway, groups = await gateway_of(group, tokenizer)
        await serve(pipe, build_grpc_server(gateway))
        await groups.close()

    asyncio.run(run())


def _run_http_gateway(pipe: Connection, group: GroupContact) -> None:
    async def run() -> None:
        tokenizer = await asyncio.to_thread(Tokenizer.load, demo_model.PATH)
        gateway, groups = await gateway_of(group, tokenizer)
        await _serve_http(pipe, build_http_app(gateway))
        await groups.close()

    _run_as_ray_does(run())


def _run_as_ray_does(work: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(work)


async def _serve_http(pipe: Connection, app: ASGIApp) -> None:
    listener = HttpListener(app, limits=ConnectionLimits())
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        server.setblocking(False)
        listener.start(server)
        pipe.send(f"127.0.0.1:{server.getsockname()[1]}")
        while await asyncio.to_thread(pipe.recv) == "cpu":
            pipe.send(time.process_time())
        await listener.stop()


async def _bare_app(scope: Scope, receive: Receive, send: Send) -> None:
    message = await receive()
    num_tokens = json.loads(message["body"])["max_tokens"]
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for position in range(num_tokens):
        event = {"choices": [{"index": 0, "text": chr(97 + position % 26)}]}
        body = f"data: {json.dumps(event)}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})


def _run_http_floor(pipe: Connection) -> None:
    _run_as_ray_does(_serve_http(pipe, _bare_app))


async def _write_chunks(request: pb.GenerateRequest, context: Any) -> None:
    for position in range(request.sampling.max_tokens):
        token_id = 97 + position % 26
        chunk = pb.GenerateResponse(token_offset=position, token_ids=[token_id], text=chr(token_id))
        await context.write(chunk)


def _run_floor(pipe: Connection) -> None:
    async def run() -> None:
        server = grpc.aio.server()
        generate = grpc.unary_stream_rpc_method_handler(
            _write_chunks,
            request_deserializer=pb.GenerateRequest.FromString,
            response_serializer=pb.GenerateResponse.SerializeToString,
        )
        service = grpc.method_handlers_generic_handler(SERVICE, {"Generate": generate})
        server.add_generic_rpc_handlers((service,))
        await serve(pipe, server)

    asyncio.run(run())


if __name__ == "__main__":
    main()
