"""The cost of serving: tokens per second over HTTP and gRPC, compared to the same engine offline.

    python -m bench.served [--models S,M] [--clients 1,8,32,64] [--repeats 3] [--peers vllm]
    python -m bench.served --idle 30                      and what an idle server takes of a core
    python -m bench.served --address HOST:PORT --model NAME [--protocol grpc]    your own server

Each request has 768 prompt tokens that all share, and are cached, 48 of its own, and 64 output
tokens, greedily and beyond the end token. Closed loop: each client sends its next request when the
one before has ended. Offline, the same prompts are completed in batches of as many. Every
repetition starts each server and each offline engine again, one at a time, in alternating order;
figures are medians. CPU time is that of /proc around the measurement; "others" is the rest of the
machine.
"""

import argparse
import os
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import count
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from bench.peers.checkpoints import SHAPES, Shape, make_checkpoint
from bench.peers.peers import OURS, Engine, install
from bench.peers.process import EngineFailed, EngineProcess
from bench.peers.workloads import NEW_TOKENS, WORKLOADS, Prompt
from bench.provenance import commit, cpu
from bench.report import command, names
from bench.served.client import Load, Result, run_load
from bench.served.report import IDLE, OFFLINE, Run, tables
from bench.served.servers import Server, cpu_s, serving

_TIMEOUT_S = 600.0
_NUM_FIRST_TOKENS = 5
_WARM_UP_TOKENS = 8
_SETTLE_S = 10.0
_SEEDS = count()
"""No two measurements share a prompt: a server's cache would know it."""


@dataclass(frozen=True)
class Step:
    """The load of one line of the tables."""

    num_clients: int
    num_requests: int

    def prompts(self, shape: Shape) -> tuple[list[Prompt], Prompt | None]:
        workload = replace(WORKLOADS["cached"], fewer_requests={shape.name: self.num_requests})
        return workload.prompts(shape, seed=next(_SEEDS))


def main() -> int:
    options = _options()
    steps = [
        Step(num_clients=n, num_requests=options.requests or max(32, 2 * n))
        for n in map(int, options.clients.split(","))
    ]
    runs: list[Run] = []
    with ProcessPoolExecutor(1, get_context("spawn")) as client:
        bench = Bench(client, steps, options.threads, options.cache / "logs", idle_s=options.idle)
        try:
            if options.address:
                server = Server(None, options.model, {options.protocol: options.address})
                for _ in range(options.repeats):
                    runs += bench.requests(server, SHAPES["S"], options.address, options.model)
            else:
                engines = [install(name, options.cache) for name in (OURS, *options.peers)]
                for name in options.models:
                    shape = SHAPES[name]
                    checkpoint = make_checkpoint(shape, options.cache / "checkpoints")
                    for repeat in range(options.repeats):
                        runs += bench.round(engines, shape, checkpoint, repeat)
        except (EngineFailed, KeyboardInterrupt) as error:
            print(f"bench.served: {error or 'interrupted'}", file=sys.stderr)
    if not runs:
        return 1
    about = f"{datetime.now(UTC):%Y-%m-%d}, {commit()}, {cpu()}, {os.cpu_count()} cores"
    text = "\n\n".join((about, *tables(runs)))
    print(text)
    if options.output is not None:
        options.output.write_text(text + "\n")
    return 0


class Bench:
    """One client, and what it is to send."""

    def __init__(
        self, client: Executor, steps: list[Step], num_threads: int, logs: Path, *, idle_s: float
    ) -> None:
        self._client = client
        self._idle_s = idle_s
        self._steps = steps
        self._num_threads = num_threads
        self._logs = logs
        logs.mkdir(parents=True, exist_ok=True)

    def round(
        self, engines: list[Engine], shape: Shape, checkpoint: Path, repeat: int
    ) -> Iterator[Run]:
        """Each engine served and offline, in the other order every other time."""
        subjects = [(engine, way) for engine in engines for way in ("served", OFFLINE)]
        for engine, way in subjects if repeat % 2 == 0 else subjects[::-1]:
            log = self._logs / f"{way}-{engine.name}-{checkpoint.name}.log"
            if way == OFFLINE:
                yield from self._offline(engine, shape, checkpoint, log)
                continue
            with serving(engine, checkpoint, num_threads=self._num_threads, log=log) as server:
                # Kernels for the shapes to come are chosen and compiled outside the measurements.
                most = max(step.num_clients for step in self._steps)
                warm_up = Step(most, most)
                for protocol in server.addresses:
                    self._send(server, protocol, shape, warm_up, new_tokens=_WARM_UP_TOKENS)
                if self._idle_s:
                    yield self._idle(server, shape, engine.name)
                yield from self.requests(server, shape, engine.name, shape.name)

    def requests(self, server: Server, shape: Shape, engine: str, model: str) -> Iterator[Run]:
        """All loads on a server over each of its protocols."""
        for step in self._steps:
            for protocol in server.addresses:
                result = self._send(server, protocol, shape, step, new_tokens=NEW_TOKENS)
                num_tokens = max(1, result.num_tokens)
                yield _told(
                    Run(
                        model=model,
                        load=str(step.num_clients),
                        engine=engine,
                        way=protocol,
                        tokens_per_s=result.num_tokens / result.elapsed_s,
                        gap_s=median(result.gaps_s) if result.gaps_s else None,
                        ttft_s=result.ttft_s,
                        cpu_s={role: cpu_s / num_tokens for role, cpu_s in result.cpu_s.items()},
                        num_failed=len(result.errors),
                    ),
                    result.errors,
                )

    def _idle(self, server: Server, shape: Shape, engine: str) -> Run:
        """The server's CPU use without requests, in its first minutes."""
        time.sleep(_SETTLE_S)
        roles, begin_s = cpu_s(server.pid), time.monotonic()
        time.sleep(self._idle_s)
        elapsed_s = time.monotonic() - begin_s
        spent = {
            role: (now_s - roles[role]) / elapsed_s for role, now_s in cpu_s(server.pid).items()
        }
        return _told(Run(model=shape.name, load="0", engine=engine, way=IDLE, idle_cores=spent))

    def _send(
        self, server: Server, protocol: str, shape: Shape, step: Step, *, new_tokens: int
    ) -> Result:
        prompts, before = step.prompts(shape)
        load = Load(
            protocol=protocol,
            address=server.addresses[protocol],
            model=server.model,
            prompts=prompts,
            before=before,
            new_tokens=new_tokens,
            num_clients=step.num_clients,
            server_pid=server.pid,
        )
        return self._client.submit(run_load, load).result()

    def _offline(self, engine: Engine, shape: Shape, checkpoint: Path, log: Path) -> Iterator[Run]:
        process = EngineProcess(
            engine,
            checkpoint,
            dtype="bfloat16",
            num_threads=self._num_threads,
            timeout_s=_TIMEOUT_S,
            log=log,
        )
        with process:
            most = max(step.num_clients for step in self._steps)
            process.run(Step(most, most).prompts(shape)[0], new_tokens=_WARM_UP_TOKENS)
            for step in self._steps:
                prompts, before = step.prompts(shape)
                size = step.num_clients
                elapsed_s = [
                    process.run(prompts[at : at + size], before=before, new_tokens=NEW_TOKENS)[0]
                    for at in range(0, len(prompts), size)
                ]
                gap_s = None
                if size == 1:
                    first_s = [
                        process.run([prompt], before=before, new_tokens=1)[0]
                        for prompt in prompts[:_NUM_FIRST_TOKENS]
                    ]
                    gap_s = (median(elapsed_s) - median(first_s)) / (NEW_TOKENS - 1)
                tokens_per_s = len(prompts) * NEW_TOKENS / sum(elapsed_s)
                yield _told(
                    Run(
                        model=shape.name,
                        load=str(step.num_clients),
                        engine=engine.name,
                        way=OFFLINE,
                        tokens_per_s=tokens_per_s,
                        gap_s=gap_s,
                    )
                )


def _told(run: Run, errors: list[str] | None = None) -> Run:
    print(
        f"{run.model} {run.load:>5} {run.engine} {run.way:8}",
        f"{sum(run.idle_cores.values()):8.1%} of a core"
        if run.way == IDLE
        else f"{run.tokens_per_s:8.1f} tokens/s",
        *(f"failed: {error}" for error in (errors or [])[:3]),
        file=sys.stderr,
        flush=True,
    )
    return run


def _options() -> argparse.Namespace:
    parser = command("bench.served", __doc__)
    add = parser.add_argument
    add("--models", type=names(SHAPES), default=["S", "M"], help=f"of {','.join(SHAPES)}")
    add("--clients", default="1,8,32,64", help="of the closed loop, with commas")
    add("--requests", type=int, help="of a measurement; default: 32, or twice the clients")
    add("--repeats", type=int, default=3)
    add(
        "--peers",
        type=names(("vllm",), or_none=True),
        default=[],
        help="vllm, installed if it is not yet",
    )
    add("--idle", type=float, default=0.0, help="seconds of it to measure, beside the rest")
    add("--threads", type=int, default=os.cpu_count(), help="of each engine")
    add("--address", help="HOST:PORT of a server that runs; alone, without offline and /proc")
    add("--model", help="the name of its model")
    add("--protocol", choices=("http", "grpc"), default="http", help="that it speaks there")
    add("--output", type=Path, help="a Markdown file for the tables")
    cache = Path.home() / ".cache" / "quire" / "peers"
    add("--cache", type=Path, default=cache, help="for environments, checkpoints and logs")
    options = parser.parse_args()
    if options.address and not options.model:
        parser.error("--address needs --model, the name that the server gives its model")
    return options


if __name__ == "__main__":
    sys.exit(main())
