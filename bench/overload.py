"""What a cluster does with three times the load that it can serve.

    python -m bench.overload                          a cluster of its own with the demo model
    python -m bench.overload --address HOST:PORT      one that runs

Open loop: requests are sent at random times whatever becomes of the earlier ones. First, so many
are kept under way that there is always more to do: what is completed per second is the *capacity*.
Then requests come at that rate, and at ``--factor`` times it. Each is accepted, and its tokens are
counted; or refused with RESOURCE_EXHAUSTED; whatever else becomes of one, it is *lost*, and there
must be none of these.

All phases are of one run, so the last line, the ratio of the two p99s, is what to compare. The
client's own lag is told with each phase: where it is not small, the client is what was measured.
A gateway's work is per token and per request: for groups to be the limit where they share a machine
with it, the model must not be too small (``--model M``).
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import grpc
import grpc.aio
from bench.peers.checkpoints import SHAPES, make_checkpoint

from quire.cluster.client import Server
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub

_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "harbor",
    "sea",
    "light",
    "stone",
    "river",
    "old",
    "new",
    "sees",
]
_REST_S = 3.0
"""Between phases: what was sent in one ends before the next begins anyhow."""

_LOOK_S = 0.02


@dataclass
class Phase:
    """What became of the requests of one phase."""

    name: str
    offered_per_s: float = 0.0
    num_sent: int = 0
    num_completed: int = 0
    num_refused: int = 0
    num_lost: int = 0
    span_s: float = 0.0
    """Until the last one ended."""
    ttft_s: list[float] = field(default_factory=list)
    """Of those completed."""
    refusal_s: list[float] = field(default_factory=list)
    lag_s: list[float] = field(default_factory=list)
    """By how much the client itself was late."""
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "offered_per_s": self.offered_per_s,
            "sent": self.num_sent,
            "completed": self.num_completed,
            "refused": self.num_refused,
            "lost": self.num_lost,
            "ttft_p50_s": _percentile(self.ttft_s, 50),
            "ttft_p99_s": _percentile(self.ttft_s, 99),
            "refusal_p50_s": _percentile(self.refusal_s, 50),
            "refusal_p99_s": _percentile(self.refusal_s, 99),
            "client_lag_p99_s": _percentile(self.lag_s, 99),
            "errors": self.errors[:5],
        }


@dataclass(frozen=True, kw_only=True)
class Workload:
    num_words: int
    max_tokens: int
    duration_s: float
    concurrency: int
    factor: float
    seed: int


class Bench:
    def __init__(self, stub: Any, server: Server, workload: Workload) -> None:
        self._stub = stub
        self._metadata = server.metadata()
        self._workload = workload
        self._rng = random.Random(workload.seed)

    async def capacity_per_s(self) -> float:
        """Completions per second while there is always more to do."""
        phase = Phase("capacity")
        begin_s = time.monotonic()
        end_s = begin_s + self._workload.duration_s
        ends: list[float] = []

        async def client() -> None:
            while time.monotonic() < end_s:
                if await self._request(phase):
                    ends.append(time.monotonic())
                else:
                    await asyncio.sleep(0.05)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._workload.concurrency):
                tasks.create_task(client())
        if phase.num_lost or not ends:
            raise SystemExit(f"no capacity was measured: {phase.errors[:3]}")
        # Without the start, in which nothing ends yet, and without the end.
        first_s = begin_s + self._workload.duration_s / 4
        return sum(first_s < each <= end_s for each in ends) / (end_s - first_s)

    async def open_loop(self, name: str, per_s: float) -> Phase:
        """Sends requests for the workload's time and waits for all of them."""
        phase = Phase(name, offered_per_s=per_s)
        begin_s = due_s = time.monotonic()
        async with _measuring_lag(phase), asyncio.TaskGroup() as tasks:
            while (due_s := due_s + self._rng.expovariate(per_s)) < (
                begin_s + self._workload.duration_s
            ):
                await asyncio.sleep(due_s - time.monotonic())
                tasks.create_task(self._request(phase, due_s=due_s))
        phase.span_s = time.monotonic() - begin_s
        await asyncio.sleep(_REST_S)
        return phase

    async def _request(self, phase: Phase, *, due_s: float | None = None) -> bool:
        """Whether it was completed. Times count from when it was due, so that a client that lags is
        no excuse."""
        due_s = time.monotonic() if due_s is None else due_s
        phase.num_sent += 1
        words = self._rng.choices(_WORDS, k=self._workload.num_words)
        request = pb.GenerateRequest(
            text=" ".join(words),
            sampling=pb.SamplingParams(
                max_tokens=self._workload.max_tokens, ignore_eos=True, temperature=0, seed=1
            ),
        )
        ttft_s, num_tokens = 0.0, 0
        try:
            async for chunk in self._stub.Generate(request, metadata=self._metadata):
                ttft_s = ttft_s or time.monotonic() - due_s
                num_tokens += len(chunk.token_ids)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED and not num_tokens:
                phase.num_refused += 1
                phase.refusal_s.append(time.monotonic() - due_s)
            else:
                phase.num_lost += 1
                phase.errors.append(f"{error.code().name}: {error.details()}")
            return False
        if num_tokens == self._workload.max_tokens:
            phase.num_completed += 1
            phase.ttft_s.append(ttft_s)
        else:
            phase.num_lost += 1
            phase.errors.append(f"{num_tokens} tokens of {self._workload.max_tokens}")
        return num_tokens == self._workload.max_tokens


@contextlib.asynccontextmanager
async def _measuring_lag(phase: Phase) -> AsyncIterator[None]:
    async def look() -> None:
        while True:
            due_s = time.monotonic() + _LOOK_S
            await asyncio.sleep(_LOOK_S)
            phase.lag_s.append(time.monotonic() - due_s)

    task = asyncio.create_task(look())
    try:
        yield
    finally:
        task.cancel()


async def measure(server: Server, workload: Workload) -> list[Phase]:
    """The phases at capacity and at ``factor`` times it."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        bench = Bench(InferenceStub(channel), server, workload)
        per_s = await bench.capacity_per_s()
        print(f"capacity: {per_s:.1f} requests/s with {workload.concurrency} under way", flush=True)
        await asyncio.sleep(_REST_S)
        return [
            await bench.open_loop(f"{factor:g} x capacity", factor * per_s)
            for factor in (1.0, workload.factor)
        ]


def main() -> None:
    arguments = _parser().parse_args()
    workload = Workload(
        num_words=arguments.prompt_words,
        max_tokens=arguments.max_tokens,
        duration_s=arguments.duration_s,
        concurrency=arguments.concurrency,
        factor=arguments.factor,
        seed=arguments.seed,
    )
    with _address(arguments) as address:
        phases = asyncio.run(measure(Server(address=address), workload))
    for phase in phases:
        _print(phase.summary())
    ratio = _percentile(phases[1].ttft_s, 99) / _percentile(phases[0].ttft_s, 99)
    print(f"p99 TTFT of what was accepted: {ratio:.2f} times that at capacity")
    if arguments.output:
        result = {
            "workload": asdict(workload),
            "phases": [phase.summary() for phase in phases],
            "p99_ratio": ratio,
        }
        arguments.output.write_text(json.dumps(result, indent=2) + "\n")


def _print(summary: dict[str, Any]) -> None:
    print(
        f"{summary['name']:>14}: {summary['offered_per_s']:.1f}/s, {summary['sent']} sent, "
        f"{summary['completed']} completed, {summary['refused']} refused, {summary['lost']} lost; "
        f"TTFT p50 {summary['ttft_p50_s']:.3f} s, p99 {summary['ttft_p99_s']:.3f} s; refused "
        f"after p50 {summary['refusal_p50_s']:.3f} s, p99 {summary['refusal_p99_s']:.3f} s; "
        f"the client lags by p99 {summary['client_lag_p99_s']:.3f} s"
    )
    for error in summary["errors"]:
        print(f"{'':>14}  {error}")


@contextlib.contextmanager
def _address(arguments: argparse.Namespace) -> Iterator[str]:
    """Where to send requests: a cluster that runs, or one for as long as the block."""
    if arguments.address:
        yield arguments.address
        return
    from quire import demo_model
    from quire.cluster.app import running_cluster
    from quire.cluster.config import ClusterConfig
    from quire.worker.config import EngineConfig

    model = demo_model.PATH
    if arguments.model != "demo":
        model = make_checkpoint(SHAPES[arguments.model], arguments.cache)
    engine = EngineConfig(model=model, max_num_seqs=arguments.max_num_seqs)
    config = ClusterConfig(
        engine=engine,
        served_model_name=arguments.model,
        num_groups=arguments.num_groups,
        num_gateways=arguments.num_gateways,
        grpc_port=0,
        http_port=0,
    )
    with running_cluster(config) as endpoints:
        yield endpoints.grpc


def _percentile(values: list[float], percent: int) -> float:
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.overload",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--address", help="host:port of a gateway; without it, a cluster is started")
    add("--model", choices=["demo", *SHAPES], default="demo", help="random weights, but for demo")
    add("--cache", type=Path, default=Path.home() / ".cache/quire/bench", help="for checkpoints")
    add("--num-groups", type=int, default=2, help="of the cluster that is started")
    add("--num-gateways", type=int, default=1)
    add("--max-num-seqs", type=int, default=16)
    add("--prompt-words", type=int, default=60)
    add("--max-tokens", type=int, default=64)
    add("--duration-s", type=float, default=20.0, help="of each phase")
    add(
        "--concurrency",
        type=int,
        default=36,
        help="when capacity is measured: just above all groups' slots, or refusals are measured",
    )
    add("--factor", type=float, default=3.0, help="of capacity, for the overload")
    add("--seed", type=int, default=1)
    add("--output", type=Path, help="a JSON file with all that was measured")
    return parser


if __name__ == "__main__":
    main()
