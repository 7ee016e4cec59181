"""The effect of hostile clients on others: ambiguous grammars over HTTP, HTTP/2 floods over gRPC.

    python -m bench.hostile grammars [--clients 4] [--n 1 64] [--seconds 20]
    python -m bench.hostile floods [--connections 8 32] [--seconds 12] [--same-address]

``quire serve`` with the demo model, one group. Four victims have one stream after the other. Shown
are their longest gap between two tokens, their tokens per second and, beside floods, their p99 and
longest of four tokens and the gateway's memory: alone, beside attackers that only burn CPU, and
beside each attack. Attackers run at niceness 10. Those of floods have no key, connect again as soon
as they are cut off, and begin with the victims. They come from addresses that no attack used
before, unless told otherwise.
"""

import argparse
import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
import socket
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import quantiles

import httpx
from bench.http2_frames import (
    CONTINUATION,
    END_HEADERS,
    HEAD,
    HEADERS,
    HELLO,
    PRIORITY,
    RST,
    WINDOW_UPDATE,
    frame,
    header,
)
from bench.machine import descendants, resident_mb
from bench.report import command
from bench.servers import serving
from bench.serving.gateways import Gateways
from bench.serving.http_server import HttpServer
from bench.serving.load import Request, Stream, Target

NUM_VICTIMS = 4
KEY = "sk-a-victim-of-the-bench"


@dataclass
class Felt:
    """The latencies that the victims measured, in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    """The time from each request to its last token."""
    gaps_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    errors: Counter[str] = field(default_factory=Counter)

    def add(self, stream: Stream, *, until_s: float) -> None:
        times_s = [at_s for at_s in stream.times if at_s < until_s]
        self.num_tokens += len(times_s)
        self.gaps_s += [later - earlier for earlier, later in pairwise(times_s)]
        if stream.error is not None:
            self.errors[stream.error.partition(":")[0]] += 1
        elif times_s:
            self.latencies_s.append(times_s[-1] - stream.sent_s)

    def p99_ms(self) -> float:
        return quantiles(self.latencies_s, n=100)[-1] * 1e3 if len(self.latencies_s) > 1 else 0.0


def main() -> None:
    parser = command("bench.hostile", __doc__)
    kinds = parser.add_subparsers(required=True)
    kind = kinds.add_parser("grammars")
    kind.set_defaults(run=beside_grammars)
    kind.add_argument("--clients", type=int, default=4)
    kind.add_argument("--n", type=int, nargs="+", default=[1, 64], help="choices of a request")
    kind.add_argument("--seconds", type=float, default=20)
    kind = kinds.add_parser("floods")
    kind.set_defaults(run=beside_floods)
    kind.add_argument("--connections", type=int, nargs="+", default=[8, 32])
    kind.add_argument("--seconds", type=float, default=12)
    kind.add_argument("--same-address", action="store_true", help="as the victims'")
    kind.add_argument("--only", nargs="+", choices=FLOODS, default=list(FLOODS))
    arguments = parser.parse_args()
    arguments.run(arguments)


async def _victims(
    connect: Callable[[], AbstractAsyncContextManager[Target]],
    ask: Callable[[int, int], Request],
    seconds: float,
    *,
    pause_s: float = 0.0,
) -> Felt:
    """Each sends one request after the other over a connection of its own; ``ask`` makes them of
    the victim's number and the turn."""
    felt, end_s = Felt(), time.monotonic() + seconds

    async def victim(number: int) -> None:
        async with connect() as target:
            for turn in itertools.count():
                if time.monotonic() > end_s:
                    return
                stream = Stream(request=ask(number, turn))
                await target.send(stream)
                felt.add(stream, until_s=end_s)
                await asyncio.sleep(pause_s)

    await asyncio.gather(*map(victim, range(NUM_VICTIMS)))
    return felt


# Grammars


def beside_grammars(arguments: argparse.Namespace) -> None:
    def ask(number: int, turn: int) -> Request:
        token_ids = (10 + number, 10 + turn, *range(20, 38))
        return Request(name="", token_ids=token_ids, max_tokens=200)

    with serving("--num-gateways", "1") as addresses:

        def measure() -> Felt:
            connect = partial(HttpServer, addresses.http)
            return asyncio.run(_victims(connect, ask, arguments.seconds))

        alone = measure()
        print(_described("alone", alone), flush=True)
        for name, attack in (("CPU burnt elsewhere", _burn), *_grammar_attacks(arguments)):
            with _attackers(attack, [(addresses.http,)] * arguments.clients) as answers:
                felt = measure()
            share = felt.num_tokens / alone.num_tokens
            print(f"{_described(name, felt)}, {share:.2f} of alone; attackers: {answers()}")


def _described(name: str, felt: Felt) -> str:
    return (
        f"{name}: longest gaps {[round(gap_s * 1e3) for gap_s in sorted(felt.gaps_s)[:-6:-1]]} ms, "
        f"{felt.num_tokens} tokens, "
        f"errors {dict(felt.errors)}"
    )


def _grammar_attacks(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, Callable[..., None]]]:
    for n in arguments.n:
        attack = _Grammars(n)
        yield f"{arguments.clients} clients, ambiguous grammars, n={n}", attack


@dataclass(frozen=True)
class _Grammars:
    """One request after the other, each with a grammar that no one has seen."""

    n: int

    def __call__(self, results: "multiprocessing.Queue[str]", url: str) -> None:
        with httpx.Client(timeout=300) as client:
            for number in itertools.count():
                body = {
                    "prompt": [5, 6 + number % 1000],
                    "max_tokens": 300,
                    "temperature": 1.0,
                    "n": self.n,
                    "structured_outputs": {"grammar": ambiguous(f"r{os.getpid()}_{number}_")},
                }
                answer = client.post(f"{url}/v1/completions", json=body)
                results.put(f"{answer.status_code} {answer.text[:160] if answer.is_error else ''}")


def ambiguous(prefix: str, *, num_rules: int = 20, num_pairs: int = 2) -> str:
    """Lark. Each rule is a letter or one of some pairs of other rules: a mask takes some 30 ms."""
    rules = [f"start: {prefix}0+"]
    for rule in range(num_rules):
        pairs = [
            f"{prefix}{(rule + 1 + k) % num_rules} {prefix}{(rule + 1 + 3 * k) % num_rules}"
            for k in range(num_pairs)
        ]
        rules.append(f"{prefix}{rule}: /[a-z ]/ | " + " | ".join(pairs))
    return "\n".join(rules)


# Floods


def beside_floods(arguments: argparse.Namespace) -> None:
    def ask(number: int, turn: int) -> Request:
        return Request(name="", token_ids=(5, 6, 7 + number), max_tokens=4, deadline_s=30)

    key = (("authorization", f"Bearer {KEY}"),)
    with tempfile.NamedTemporaryFile("w") as keys:
        keys.write(f"{KEY} victims\n")
        keys.flush()
        with serving("--num-gateways", "1", "--api-keys-file", keys.name) as addresses:
            gateway = _gateway(addresses.pid)
            connect = partial(Gateways, [addresses.grpc], metadata=key)
            attacks = [("alone", None, 0), *_flood_attacks(arguments)]
            for attack, (name, flood, num) in enumerate(attacks):
                # An address that has flooded is shut out: each attack comes from new ones.
                hosts = (
                    "127.0.0.1" if arguments.same_address else f"127.{attack}.1.{1 + number}"
                    for number in range(num)
                )
                work = [(addresses.grpc, host) for host in hosts]
                before = resident_mb(gateway)
                with _attackers(flood or _burn, work) as answers, _peak(gateway) as peak:
                    felt = asyncio.run(_victims(connect, ask, arguments.seconds, pause_s=0.05))
                print(
                    f"{name}: p99 {felt.p99_ms():.0f} ms, longest {max(felt.latencies_s):.2f} s, "
                    f"{len(felt.latencies_s)} answers, memory "
                    f"{before:.0f} MB, at most {peak() - before:+.0f} MB, "
                    f"errors {dict(felt.errors)}; connections of attackers: {answers()}",
                    flush=True,
                )


def _flood_attacks(
    arguments: argparse.Namespace,
) -> Iterator[tuple[str, Callable[..., None], int]]:
    for num in arguments.connections:
        yield f"CPU burnt elsewhere, {num}", _burn, num
        for name in arguments.only:
            yield f"{name}, {num}", _Flood(name), num


@dataclass(frozen=True)
class _Flood:
    name: str

    def __call__(self, results: "multiprocessing.Queue[str]", address: str, host: str) -> None:
        target, port = address.rsplit(":", 1)
        while True:
            try:
                with socket.socket() as client:
                    client.bind((host, 0))
                    client.connect((target, int(port)))
                    client.sendall(HELLO)
                    for frames in FLOODS[self.name]():
                        client.sendall(frames)
            except OSError as error:
                results.put(type(error).__name__)


def _endless_head() -> Iterator[bytes]:
    yield frame(HEADERS, 1, HEAD)
    yield from itertools.repeat(frame(CONTINUATION, 1, header("x", "aaa") * 1500) * 20)


def _streams(*, is_reset: bool) -> Iterator[bytes]:
    for stream in range(1, 2**31, 2):
        reset = frame(RST, stream, struct.pack(">I", 8)) if is_reset else b""
        yield frame(HEADERS, stream, HEAD, flags=END_HEADERS) + reset


FLOODS: dict[str, Callable[[], Iterator[bytes]]] = {
    "continuation": _endless_head,
    "window-update": lambda: itertools.repeat(frame(WINDOW_UPDATE, 0, struct.pack(">I", 1)) * 1000),
    "priority": lambda: itertools.repeat(frame(PRIORITY, 1, b"\0\0\0\0\0") * 1000),
    "half-open": lambda: _streams(is_reset=False),
    "reset": lambda: _streams(is_reset=True),
}


def _gateway(server: int) -> int:
    """Its process ID."""
    (pid,) = (
        pid
        for pid in descendants(server)
        if _command(pid).startswith("ray::Serve") and "Gateway" in _command(pid)
    )
    return pid


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@contextlib.contextmanager
def _peak(pid: int) -> Iterator[Callable[[], float]]:
    """Yields a function that returns a process's peak resident memory so far, in MB."""
    most, ended = [resident_mb(pid)], threading.Event()

    def watch() -> None:
        while not ended.wait(0.02):
            most[0] = max(most[0], resident_mb(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most[0]
    finally:
        ended.set()
        thread.join()


# Attackers


def _burn(results: "multiprocessing.Queue[str]", *_: str) -> None:
    while True:
        pass


@contextlib.contextmanager
def _attackers(
    attack: Callable[..., None], work: Sequence[tuple[str, ...]]
) -> Iterator[Callable[[], dict[str, int]]]:
    """A process for each of the work's arguments; after the block, how its attempts ended."""
    context = multiprocessing.get_context("spawn")
    results: multiprocessing.Queue[str] = context.Queue()
    all_ready = context.Barrier(len(work) + 1)
    processes: list[BaseProcess] = [
        context.Process(target=_attacker, args=(attack, all_ready, results, *each), daemon=True)
        for each in work
    ]
    seen: Counter[str] = Counter()
    for process in processes:
        process.start()
    all_ready.wait(timeout=60)
    try:
        yield lambda: dict(seen)
    finally:
        for process in processes:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        with contextlib.suppress(Exception):
            while True:
                seen[results.get(timeout=0.2)] += 1


def _attacker(
    attack: Callable[..., None],
    all_ready: Barrier,
    results: "multiprocessing.Queue[str]",
    *arguments: str,
) -> None:
    os.nice(10)
    all_ready.wait()
    attack(results, *arguments)


if __name__ == "__main__":
    main()
