"""The mode ``--crowd`` of `bench.tenants`: 19 light tenants beside one with many clients.

All send completions over HTTP. Each light tenant sends one at a time, and pauses between. The
other tenant's clients send without pause. Light and heavy clients run in a process each; their CPU
is told apart from that of the gateway, which is this process. On a machine with few cores the
clients still compete with it.
"""

import argparse
import asyncio
import contextlib
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from statistics import median, quantiles

import aiohttp

LIGHT = [f"light{number}" for number in range(19)]
HEAVY = "heavy"
_PAUSE_S = (0.2, 0.6)
_OUTPUT_TOKENS = 32
_PROMPT_TOKENS = (3, 200)

Key = Callable[[str], str]
Answers = tuple[list[float], int, float]
"""Seconds of each answer, number of errors, and CPU cores used."""


async def measure(addresses: Sequence[str], options: argparse.Namespace, key: Key) -> None:
    with contextlib.ExitStack() as stack:
        light = _start(stack, addresses, [key(each) for each in LIGHT], _PAUSE_S)
        heavy = _start(stack, addresses, [key(HEAVY)], None)
        alone: Answers | None = None
        for num_clients in (0, *options.crowd):
            begin_s, begin_cpu_s = time.monotonic(), time.process_time()
            heavy.send((num_clients, options.duration_s))
            light.send((1, options.duration_s))
            ours = await asyncio.to_thread(light.recv)
            theirs = await asyncio.to_thread(heavy.recv)
            cores = (time.process_time() - begin_cpu_s) / (time.monotonic() - begin_s)
            alone = alone or ours
            _tell(num_clients, ours, theirs, alone=alone, gateway_cores=cores)


def _tell(
    num_clients: int, ours: Answers, theirs: Answers, *, alone: Answers, gateway_cores: float
) -> None:
    seconds, num_errors, cores = ours
    print(
        f"beside {num_clients} clients: {len(seconds)} answers "
        f"({len(seconds) / len(alone[0]):.2f} of those alone), {num_errors} errors; median "
        f"{median(seconds):.3f} s ({median(seconds) / median(alone[0]):.1f} x), p99 "
        f"{quantiles(seconds, n=100)[-1]:.2f}, longest {max(seconds):.2f}; the heavy tenant "
        f"{len(theirs[0])} answers, {theirs[1]} errors; cores: gateway {gateway_cores:.2f}, light "
        f"clients {cores:.2f}, heavy ones {theirs[2]:.2f}",
        flush=True,
    )


def _start(
    stack: contextlib.ExitStack,
    addresses: Sequence[str],
    keys: Sequence[str],
    pause_s: tuple[float, float] | None,
) -> Connection:
    spawn = multiprocessing.get_context("spawn")
    end, other = spawn.Pipe()
    args = (other, list(addresses), list(keys), pause_s)
    process = spawn.Process(target=_run, args=args, daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(end.close)  # Which ends it.
    other.close()
    return end


def _run(
    end: Connection,
    addresses: Sequence[str],
    keys: Sequence[str],
    pause_s: tuple[float, float] | None,
) -> None:
    with contextlib.suppress(EOFError):
        while True:
            num_each, duration_s = end.recv()
            end.send(asyncio.run(_phase(addresses, keys, pause_s, num_each, duration_s)))


async def _phase(
    addresses: Sequence[str],
    keys: Sequence[str],
    pause_s: tuple[float, float] | None,
    num_each: int,
    duration_s: float,
) -> Answers:
    begin_s, begin_cpu_s = time.monotonic(), time.process_time()
    found, num_errors = list[float](), 0

    async def client(session: aiohttp.ClientSession, key: str, number: int) -> None:
        nonlocal num_errors
        rng = random.Random(f"{key} {number}")
        url = f"http://{addresses[number % len(addresses)]}/v1/completions"
        headers = {"Authorization": f"Bearer {key}"}
        while (sent_s := time.monotonic()) < begin_s + duration_s:
            body = {
                "prompt": [rng.randrange(100, 1000)] * rng.randint(*_PROMPT_TOKENS),
                "max_tokens": _OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
            }
            async with session.post(url, json=body, headers=headers) as answer:
                await answer.read()
            if answer.status == 200:
                found.append(time.monotonic() - sent_s)
            else:
                num_errors += 1
            if pause_s is not None:
                await asyncio.sleep(rng.uniform(*pause_s))

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.create_task(client(session, key, number))
            for key in keys
            for number in range(num_each)
        ]
        await asyncio.sleep(duration_s)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    cores = (time.process_time() - begin_cpu_s) / (time.monotonic() - begin_s)
    return found, num_errors, cores
