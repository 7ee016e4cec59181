"""Measures a cluster at three times the load that it can serve.

    python -m bench.overload                          a cluster of its own with the demo model
    python -m bench.overload --address HOST:PORT      one that runs

Open loop: requests are sent at random times, independent of earlier ones. A first phase saturates
the cluster; the requests completed per second are its *capacity*. Then requests arrive at
that rate, and at ``--factor`` times it. Each request is accepted, and its tokens are counted, or
refused with RESOURCE_EXHAUSTED. Any other outcome counts as *lost*, and no request may be lost.

All phases belong to one run. Compare the last line: the ratio of the p99s. Each phase prints the
requests served per second: if the last phase served clearly more than the capacity, the machine was
busy with something else when the capacity was measured, and the ratio is meaningless. Each phase
also prints the client's own lag: if it is not small, the client was the bottleneck. Where gateway
and groups share a machine, the model must be large enough for the groups to be the limit
(``--model M``), because a gateway's work is per token and per request.
"""

import argparse
import asyncio
import contextlib
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.report import command, percentile
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream, run

_WORDS = ["the", "a", "cat", "dog", "harbor", "sea", "light", "stone", "river", "old", "new"]
_REST_S = 3.0
"""Pause between phases, after all requests of the earlier one have ended."""
_LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str
    offered_per_s: float
    begin_s: float
    """Begin by `time.monotonic`; each request's ``at_s`` counts from it."""
    span_s: float
    """Seconds from the begin until the last stream ended."""
    streams: list[Stream]
    lag_s: list[float]
    """Samples of the lag of the client's event loop, in seconds."""

    @property
    def completed(self) -> list[tuple[float, float]]:
        """For each completed stream, its due time since the begin of the phase and its TTFT. The
        TTFT counts from the due time and so includes the client's own lag."""
        return [
            (stream.request.at_s, stream.times[0] - self._due_s(stream))
            for stream in self.streams
            if is_whole(stream)
        ]

    @property
    def ttft_s(self) -> list[float]:
        return [ttft_s for _, ttft_s in self.completed]

    def summary(self) -> dict[str, Any]:
        refusal_s = [each.ended_s - self._due_s(each) for each in self.streams if is_refusal(each)]
        lost = [
            f"due at {stream.request.at_s:.2f} s, lost "
            f"{stream.ended_s - self._due_s(stream):.2f} s later with "
            f"{len(stream.tokens)} of {stream.request.max_tokens} tokens: {stream.error}"
            for stream in self.streams
            if is_lost(stream)
        ]
        return {
            "name": self.name,
            "offered_per_s": self.offered_per_s,
            "served_per_s": len(self.completed) / self.span_s,
            "sent": len(self.streams),
            "completed": len(self.completed),
            "refused": len(refusal_s),
            "lost": len(lost),
            "ttft_p50_s": percentile(self.ttft_s, 50),
            "ttft_p99_s": percentile(self.ttft_s, 99),
            "refusal_p50_s": percentile(refusal_s, 50),
            "refusal_p99_s": percentile(refusal_s, 99),
            "client_lag_p99_s": percentile(self.lag_s, 99),
            "errors": lost[:5],
        }

    def _due_s(self, stream: Stream) -> float:
        return self.begin_s + stream.request.at_s


def is_whole(stream: Stream) -> bool:
    return stream.is_complete and len(stream.tokens) == stream.request.max_tokens


def is_refusal(stream: Stream) -> bool:
    return f"{stream.error}".startswith("RESOURCE_EXHAUSTED") and not stream.tokens


def is_lost(stream: Stream) -> bool:
    return not (is_whole(stream) or is_refusal(stream))


class Bench:
    """One client of a gateway."""

    def __init__(self, gateways: Gateways, options: argparse.Namespace) -> None:
        self._gateways = gateways
        self._options = options
        self._rng = random.Random(options.seed)

    async def measure(self) -> list[Phase]:
        """The phases at capacity and at ``--factor`` times it."""
        per_s = await self._capacity_per_s()
        told = f"{per_s:.1f} requests/s with {self._options.concurrency} under way"
        print(f"capacity: {told}", flush=True)
        await asyncio.sleep(_REST_S)
        return [await self._open_loop(factor, per_s) for factor in (1.0, self._options.factor)]

    async def _capacity_per_s(self) -> float:
        """Completions per second while there is always more to do."""
        begin_s = time.monotonic()
        end_s = begin_s + self._options.duration_s
        streams: list[Stream] = []

        async def client() -> None:
            while time.monotonic() < end_s:
                streams.append(stream := Stream(request=self._request()))
                await self._gateways.send(stream)
                if not is_whole(stream):
                    await asyncio.sleep(0.05)

        await asyncio.gather(*(client() for _ in range(self._options.concurrency)))
        lost = [each.error for each in streams if is_lost(each)]
        ends_s = [stream.ended_s for stream in streams if is_whole(stream)]
        if lost or not ends_s:
            raise SystemExit(f"no capacity was measured: {lost[:3]}")
        # Without the start, in which nothing ends yet, and without the end.
        first_s = begin_s + self._options.duration_s / 4
        num_ended = sum(first_s < each <= end_s for each in ends_s)
        return float(num_ended / (end_s - first_s))

    async def _open_loop(self, factor: float, capacity_per_s: float) -> Phase:
        """Sends requests for the phase's time and waits for all of them."""
        per_s, at_s = factor * capacity_per_s, 0.0
        requests = []
        while (at_s := at_s + self._rng.expovariate(per_s)) < self._options.duration_s:
            requests.append(self._request(at_s))
        lag_s: list[float] = []
        lag = asyncio.create_task(_watch_lag(lag_s))
        begin_s = time.monotonic()
        streams = await run(requests, self._gateways, limit_s=inf)
        span_s = time.monotonic() - begin_s
        lag.cancel()
        await asyncio.sleep(_REST_S)
        return Phase(
            name=f"{factor:g} x capacity",
            offered_per_s=per_s,
            begin_s=begin_s,
            span_s=span_s,
            streams=streams,
            lag_s=lag_s,
        )

    def _request(self, at_s: float = 0.0) -> Request:
        mean = self._options.mean_tokens
        words = self._rng.choices(_WORDS, k=self._options.prompt_words)
        max_tokens = mean if self._options.same_length else self._rng.randint(1, 2 * mean - 1)
        return Request(name="", text=" ".join(words), max_tokens=max_tokens, seed=1, at_s=at_s)


async def _watch_lag(lag_s: list[float]) -> None:
    while True:
        due_s = time.monotonic() + _LOOK_S
        await asyncio.sleep(_LOOK_S)
        lag_s.append(time.monotonic() - due_s)


def main() -> None:
    options = _parser().parse_args()

    async def measure(address: str) -> list[Phase]:
        async with Gateways([address]) as gateways:
            return await Bench(gateways, options).measure()

    with _address(options) as address:
        phases = asyncio.run(measure(address))
    for phase in phases:
        _print(phase.summary())
    ratio = percentile(phases[1].ttft_s, 99) / percentile(phases[0].ttft_s, 99)
    print(f"p99 TTFT of what was accepted: {ratio:.2f} times that at capacity")
    if options.output:
        result = {
            "options": {name: str(value) for name, value in vars(options).items()},
            "phases": [{**each.summary(), "due_and_ttft_s": each.completed} for each in phases],
            "p99_ratio": ratio,
        }
        options.output.write_text(json.dumps(result, indent=2) + "\n")


def _print(summary: dict[str, Any]) -> None:
    print(
        f"{summary['name']:>14}: {summary['offered_per_s']:.1f}/s, {summary['served_per_s']:.1f}/s "
        f"served; {summary['sent']} sent, "
        f"{summary['completed']} completed, {summary['refused']} refused, {summary['lost']} lost; "
        f"TTFT p50 {summary['ttft_p50_s']:.3f} s, p99 {summary['ttft_p99_s']:.3f} s; refused "
        f"after p50 {summary['refusal_p50_s']:.3f} s, p99 {summary['refusal_p99_s']:.3f} s; "
        f"the client lags by p99 {summary['client_lag_p99_s']:.3f} s"
    )
    for error in summary["errors"]:
        print(f"{'':>14}  {error}")


@contextlib.contextmanager
def _address(options: argparse.Namespace) -> Iterator[str]:
    """Where to send requests: a cluster that runs, or one for as long as the block."""
    if options.address:
        yield options.address
        return
    from quire import demo_model
    from quire.cluster.config import ClusterConfig
    from quire.cluster.deploy.app import running_cluster
    from quire.worker.request.config import EngineConfig

    model = demo_model.PATH
    if options.model != "demo":
        model = make_checkpoint(SHAPES[options.model], options.cache)
    config = ClusterConfig(
        engine=EngineConfig(model=model, max_num_seqs=options.max_num_seqs),
        served_model_name=options.model,
        num_groups=options.num_groups,
        num_gateways=options.num_gateways,
        grpc_port=0,
        http_port=0,
        max_queue_wait_s=options.max_queue_wait_s,
    )
    with running_cluster(config) as endpoints:
        yield endpoints.grpc


def _parser() -> argparse.ArgumentParser:
    parser = command("bench.overload", __doc__)
    add = parser.add_argument
    add("--address", help="host:port of a gateway; without it, a cluster is started")
    add("--model", choices=["demo", *SHAPES], default="demo", help="random weights, but for demo")
    add("--cache", type=Path, default=Path.home() / ".cache/quire/bench", help="for checkpoints")
    add("--num-groups", type=int, default=2, help="of the cluster that is started")
    add("--num-gateways", type=int, default=1)
    add("--max-queue-wait-s", type=float, default=1.0, help="of admission, there")
    add("--max-num-seqs", type=int, default=16)
    add("--prompt-words", type=int, default=60)
    add("--mean-tokens", type=int, default=64, help="of outputs: from 1 to twice as many each")
    add("--same-length", action="store_true", help="all outputs have the mean length")
    add("--duration-s", type=float, default=60.0, help="of a phase: p99s of short ones are chance")
    busy = "when capacity is measured: just above all groups' slots, or refusals are measured"
    add("--concurrency", type=int, default=36, help=busy)
    add("--factor", type=float, default=3.0, help="of capacity, for the overload")
    add("--seed", type=int, default=1)
    add("--output", type=Path, help="a JSON file with all that was measured")
    return parser


if __name__ == "__main__":
    main()
