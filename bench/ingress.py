"""The effect of large or slow requests on a gateway before they are admitted.

    python -m bench.ingress [--requests 8] [--megabytes 7.6] [--max-model-len 1024] [--only NAME]

Three processes: a group whose engine is a clock, a gateway with gRPC and HTTP, and the client that
attacks. Meanwhile this process reads a stream that gets a token each 5 ms and asks for ``/health``
all the time: the longest that either had to wait is what others feel. Memory is the gateway's
resident set, and that of what it started. It may map 8 GiB, so that an attack that nothing bounds
ends in an error and not with the machine.
"""

import asyncio
import contextlib
import http.client
import json
import os
import resource
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from math import inf
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import grpc
import uvicorn
from bench.clock_group import Child, gateway_of, run_clock_group
from bench.machine import descendants, resident_mb
from bench.report import command

from quire import demo_model
from quire.cluster.edge.grpc_server import build_grpc_server
from quire.cluster.edge.openai_http import build_http_app
from quire.cluster.links.group_link import GroupContact
from quire.v1 import inference_pb2 as pb
from quire.v1 import inference_pb2_grpc
from quire.worker.bench.report import format_table
from quire.worker.text.tokenizer import Tokenizer

_STEP_S = 0.005
_REST_S = 0.5
_MAX_BYTES = 8 << 30
_WORDS = "The quick brown fox, 42 of them, jumps over the lazy dog's tail. "
# Slow, huge or wrong, as the message says; the number keeps a compiler from doing it before.
_TEMPLATE = """{% set what = messages[0].content %}{% set n = messages | length * 10 %}
{% if what == 'loop' %}{% for i in range(n ** 4) %}{% for j in range(n ** 4) %}{% endfor %}
{% endfor %}{% elif what == 'huge' %}{{ 'x' * n ** 10 }}
{% elif what == 'zero' %}{{ 1 // (n - 10) }}{% endif %}
{% for message in messages %}{{ message.content }}{% endfor %}"""


class Attack(NamedTuple):
    """So many requests at once, each of ``headers`` and ``body``."""

    path: str
    body: bytes
    num: int = 1
    content_length: int | None = None
    """The announced length of its body, if it sends none."""


def attacks(num: int, num_bytes: int) -> dict[str, Attack]:
    """The attacks by name; bodies are made of about ``num_bytes``."""
    text = _WORDS * (num_bytes // len(_WORDS))
    each = _WORDS * (num_bytes // len(_WORDS) // 1024)
    num_keys = num_bytes * 600_000 // 7_200_000

    def completion(**fields: Any) -> bytes:
        body = {"prompt": "x", "max_tokens": 1, **fields}
        return json.dumps(body, separators=(",", ":")).encode()

    def chat(*texts: str) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": t} for t in texts]}).encode()

    keys = {f"k{number:06}": 1 for number in range(num_keys)}
    lists = b'{"prompt": [' + b",".join([b"[]"] * (num_bytes // 3)) + b"]}"
    completions, chats = "/v1/completions", "/v1/chat/completions"
    return {
        "none": Attack(completions, completion()),
        "one prompt": Attack(completions, completion(prompt=text)),
        "prompts": Attack(completions, completion(prompt=text), num),
        "chats": Attack(chats, chat(text), num),
        "many messages": Attack(chats, chat(*[each] * 1024), num),
        "many prompts": Attack(completions, completion(prompt=[each] * 1024), num),
        "token ids": Attack(completions, completion(prompt=[9] * (num_bytes // 8)), num),
        "unknown keys": Attack(completions, completion(**keys)),
        "empty lists": Attack(completions, lists),
        "template loops": Attack(chats, chat("loop")),
        "template is huge": Attack(chats, chat("huge")),
        "template divides": Attack(chats, chat("zero")),
        "1 GB announced": Attack(completions, b"", 1, 10**9),
    }


def main() -> None:
    parser = command("bench.ingress", __doc__)
    parser.add_argument("--requests", type=int, default=8, help="at once, where there are several")
    parser.add_argument("--megabytes", type=float, default=7.6, help="of each body")
    parser.add_argument("--max-model-len", type=int, default=1024)
    parser.add_argument("--only", action="append", help="of the attacks, by name; may be repeated")
    args = parser.parse_args()

    chosen = attacks(args.requests, round(args.megabytes * 1e6))
    with (
        Child(run_clock_group, _STEP_S, args.max_model_len) as group,
        Child(_run_gateway, group.contact) as gateway,
        Child(_run_attacker, None) as attacker,
    ):
        pid, grpc_address, http_address = gateway.address.split()
        watch = _Watch(int(pid), grpc_address, http_address)
        rows = []
        for name, attack in chosen.items():
            if args.only and name not in args.only:
                continue
            with watch.watching() as seen:
                answers = attacker.ask((http_address, attack))
                time.sleep(_REST_S)
            rows.append([name, *_described(answers), *seen.row()])
    print(
        f"{args.requests} requests of {args.megabytes:g} MB at once, max_model_len "
        f"{args.max_model_len}; MB of memory before, at most, after; longest wait beside it"
    )
    header = ("attack", "answers", "s", "before", "peak", "after", "stream ms", "/health ms")
    print(format_table(header, rows))


def _described(answers: list[tuple[str, float]]) -> tuple[str, str]:
    statuses = Counter(status for status, _ in answers)
    shown = ", ".join(f"{num} × {status}" for status, num in sorted(statuses.items()))
    return shown, f"{max(seconds for _, seconds in answers):.2f}"


class _Seen:
    """Measurements during one attack."""

    def __init__(self, watch: "_Watch") -> None:
        self.before = self.peak = self.after = watch.memory_mb()
        self.stream_s = self.health_s = 0.0

    def row(self) -> list[str]:
        memory = [f"{value:.0f}" for value in (self.before, self.peak, self.after)]
        return [*memory, f"{self.stream_s * 1e3:.0f}", f"{self.health_s * 1e3:.0f}"]


class _Watch:
    """A gateway as seen by other clients."""

    def __init__(self, pid: int, grpc_address: str, http_address: str) -> None:
        self._pid = pid
        self._grpc_address = grpc_address
        self._http_address = http_address

    def memory_mb(self) -> float:
        """Resident memory of the process and its children."""
        return sum(map(resident_mb, [self._pid, *descendants(self._pid)]))

    @contextlib.contextmanager
    def watching(self) -> Iterator[_Seen]:
        seen, done = _Seen(self), threading.Event()
        streams, begun = threading.Event(), time.perf_counter()
        with ThreadPoolExecutor(3) as pool:
            stream = pool.submit(self._stream, done, streams)
            health = pool.submit(self._health, done)
            memory = pool.submit(self._memory, done)
            assert streams.wait(60), f"no stream began in {time.perf_counter() - begun:.0f} s"
            try:
                yield seen
            finally:
                done.set()
            seen.stream_s, seen.health_s = stream.result(), health.result()
            seen.peak = memory.result()
        seen.after = self.memory_mb()

    def _stream(self, done: threading.Event, begun: threading.Event) -> float:
        """The longest between two tokens of a stream."""
        times = []
        with grpc.insecure_channel(self._grpc_address) as channel:
            params = pb.SamplingParams(seed=1, ignore_eos=True)
            request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[20]), sampling=params)
            stub = inference_pb2_grpc.InferenceStub(channel)
            while not done.is_set():
                try:
                    for _ in stub.Generate(request):
                        times.append(time.perf_counter())
                        if len(times) > 10:
                            begun.set()
                        if done.is_set():
                            break
                except grpc.RpcError:
                    return inf
        return max(later - earlier for earlier, later in pairwise(times))

    def _health(self, done: threading.Event) -> float:
        longest_s = 0.0
        while not done.wait(0.01):
            begin_s = time.perf_counter()
            status, _ = _ask(self._http_address, Attack("/health", b""), method="GET")
            longest_s = max(longest_s, time.perf_counter() - begin_s if status == "200" else inf)
        return longest_s

    def _memory(self, done: threading.Event) -> float:
        most = 0.0
        while not done.wait(0.005):
            most = max(most, self.memory_mb())
        return most


def _ask(address: str, attack: Attack, *, method: str = "POST") -> tuple[str, float]:
    """The answer's status, or why there is none, and how long it took."""
    begin_s = time.perf_counter()
    connection = http.client.HTTPConnection(address, timeout=20 if attack.content_length else 120)
    num_bytes = len(attack.body) if attack.content_length is None else attack.content_length
    headers = {"Content-Type": "application/json", "Content-Length": str(num_bytes)}
    try:
        connection.request(method, attack.path, headers=headers, body=attack.body)
        status = str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as error:
        status = type(error).__name__
    finally:
        connection.close()
    return status, time.perf_counter() - begin_s


def _run_attacker(pipe: Connection, _: object) -> None:
    pipe.send("ready")
    while (work := pipe.recv()) != "end":
        address, attack = work
        with ThreadPoolExecutor(attack.num) as pool:
            pipe.send(list(pool.map(_ask, [address] * attack.num, [attack] * attack.num)))


def _run_gateway(pipe: Connection, group: GroupContact) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))

    async def run() -> None:
        backend = Tokenizer.load(demo_model.PATH)._backend
        tokenizer = Tokenizer(backend, chat_template=_TEMPLATE)
        gateway, groups = await gateway_of(group, tokenizer)
        app = build_http_app(gateway)
        config = uvicorn.Config(app, port=0, lifespan="off", log_level="error")
        web = uvicorn.Server(config)
        task = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        http_port = web.servers[0].sockets[0].getsockname()[1]
        server = build_grpc_server(gateway)
        grpc_port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        pipe.send(f"{os.getpid()} 127.0.0.1:{grpc_port} 127.0.0.1:{http_port}")
        await asyncio.to_thread(pipe.recv)
        await server.stop(None)
        web.should_exit = True
        await task
        await groups.close()

    asyncio.run(run())


if __name__ == "__main__":
    main()
