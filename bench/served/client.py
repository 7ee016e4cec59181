"""The load generator: a process with one event loop, which counts tokens without decoding them.

This minimises its use of the CPU that it shares with the server. HTTP is read from plain sockets,
and events of a stream are counted by their first bytes. gRPC is `grpc.aio`.
"""

import asyncio
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import grpc.aio
import uvloop
from bench.machine import Machine
from bench.peers.process import EngineFailed
from bench.peers.workloads import Prompt
from bench.served.servers import cpu_s

from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

_EVENT = b"data: {"
_END = b"\r\n0\r\n\r\n"  # The chunk of no bytes, which ends a body.
_USAGE = re.compile(rb'"completion_tokens": ?(\d+)')
_LONGEST_USAGE = 2000


@dataclass(frozen=True, kw_only=True)
class Load:
    """Requests for ``new_tokens`` tokens behind each of ``prompts``, sent to one server."""

    protocol: str
    """"http" or "grpc"."""
    address: str
    model: str
    prompts: list[Prompt]
    before: Prompt | None
    new_tokens: int
    num_clients: int
    """Requests under way at a time."""
    server_pid: int | None
    """The server's process ID; known only if this benchmark started it."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of a load; times are in seconds."""

    elapsed_s: float
    cpu_s: dict[str, float]
    """CPU seconds by role: those of the server's processes, "client" and "others"."""
    num_tokens: int
    ttft_s: list[float]
    """Time to first token of each request."""
    gaps_s: list[float]
    """Times between two events of a stream."""
    errors: list[str]


@dataclass
class Answer:
    """One stream as it arrives."""

    times: list[float] = field(default_factory=list)
    """Arrival time of each event."""
    num_tokens: int = 0
    error: str = ""
    is_over: bool = False
    _end: bytes = b""

    def feed(self, data: bytes, now_s: float) -> None:
        """Takes the next bytes of an HTTP response."""
        if not self._end and not data.startswith(b"HTTP/1.1 200 "):
            self.error, self.is_over = data[:400].decode(errors="replace"), True
            return
        # What is kept of the bytes before is too short to be counted again.
        events = (self._end[1 - len(_EVENT) :] + data).count(_EVENT)
        self.times += [now_s] * events
        self._end = (self._end + data)[-_LONGEST_USAGE:]
        if self._end.endswith(_END):
            self.is_over = True
            usage = _USAGE.findall(self._end)
            self.num_tokens = int(usage[-1]) if usage else 0
            self.times.pop()  # The event of the usage.


Ask = Callable[[Prompt, int], Awaitable[Answer]]


def run_load(load: Load) -> Result:
    """
    Raises:
        EngineFailed: The server refused the prompt ``before``, which fills its prefix cache.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(load))


async def _run(load: Load) -> Result:
    if load.protocol == "grpc":
        async with grpc.aio.insecure_channel(load.address) as channel:
            return await _measure(load, _over_grpc(InferenceStub(channel)))
    return await _measure(load, _over_http(load.address, load.model))


async def _measure(load: Load, ask: Ask) -> Result:
    if load.before is not None and (error := (await ask(load.before, 1)).error):
        raise EngineFailed(f"{load.address} refused the first request: {error}")
    machine, roles = Machine.now(), cpu_s(load.server_pid)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    answers: list[tuple[float, Answer]] = []
    left = iter(load.prompts)

    async def client() -> None:
        for prompt in left:
            sent_s = time.perf_counter()
            answers.append((sent_s, await ask(prompt, load.new_tokens)))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(load.num_clients):
            tasks.create_task(client())
    elapsed_s = time.perf_counter() - begin_s
    client_cpu_s = time.process_time() - begin_cpu_s
    spent = {role: now_s - roles[role] for role, now_s in cpu_s(load.server_pid).items()}
    spent["client"] = client_cpu_s
    if load.server_pid and machine is not None and (now := Machine.now()) is not None:
        spent["others"] = max(0.0, now.busy_s - machine.busy_s - sum(spent.values()))
    errors = [a.error or f"{a.num_tokens} tokens" for _, a in answers]
    return Result(
        elapsed_s=elapsed_s,
        cpu_s=spent,
        num_tokens=sum(answer.num_tokens for _, answer in answers),
        ttft_s=[answer.times[0] - sent_s for sent_s, answer in answers if answer.times],
        gaps_s=[
            later - earlier for _, answer in answers for earlier, later in pairwise(answer.times)
        ],
        errors=[error for error in errors if error != f"{load.new_tokens} tokens"],
    )


def _over_grpc(stub: Any) -> Ask:
    async def ask(prompt: Prompt, new_tokens: int) -> Answer:
        sampling = pb.SamplingParams(max_tokens=new_tokens, ignore_eos=True, temperature=0)
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling)
        answer = Answer()
        try:
            async for chunk in stub.Generate(request):
                if chunk.token_ids:
                    answer.times.append(time.perf_counter())
                    answer.num_tokens += len(chunk.token_ids)
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"
        return answer

    return ask


def _over_http(address: str, model: str) -> Ask:
    host, _, port = address.rpartition(":")
    idle: list[_Connection] = []

    async def ask(prompt: Prompt, new_tokens: int) -> Answer:
        fields: dict[str, Any] = {
            "max_tokens": new_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        fields |= {"model": model, "prompt": prompt, "stream_options": {"include_usage": True}}
        body = json.dumps(fields).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        idle[:] = [each for each in idle if each.is_open]
        if idle:
            connection = idle.pop()
        else:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(_Connection, host, int(port))
            except OSError as error:
                return Answer(error=str(error))
        answer = await connection.ask(head.encode() + body)
        if not answer.error:
            idle.append(connection)
        return answer

    return ask


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self.is_open = True
        self._answer = Answer(is_over=True)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._answer.feed(data, time.perf_counter())
        if self._answer.is_over:
            self._over.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if not self._answer.is_over:
            self._answer.error = f"the connection was lost: {exc or 'closed'}"
            self._over.set()

    async def ask(self, request: bytes) -> Answer:
        self._answer, self._over = Answer(), asyncio.Event()
        self._transport.write(request)
        await self._over.wait()
        if self._answer.error:
            self._transport.close()
        return self._answer
