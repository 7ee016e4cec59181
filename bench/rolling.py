"""Streams under a rolling upgrade and under autoscaling, on a real cluster: does a client notice?

    python -m bench.rolling [--part upgrade scale] [--streams N] [--start-first] [--drain-s S]

*upgrade*: two groups behind two gateways on one port. N streams run and restart when they end while
the application is deployed again, so that Serve replaces every group and every gateway.
*scale*: one group. A burst of N long prompts requires a second group; then follows too little work
for two. The report has the time from the burst until Serve starts a group.

Half of the streams are greedy, half are sampled with a seed. Their expected texts were generated
before, alone. A stream is *broken* if it ended without its finish after its first token, *refused*
if it failed before, *inexact* if its tokens are others. A gap is the time between two chunks.
"""

import argparse
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from quire import demo_model
from quire.cluster.client import generate
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import Endpoints, build_app, running_cluster
from quire.cluster.scaling.settings import AutoscalingSettings
from quire.v1 import inference_pb2 as pb
from quire.worker.api.config import EngineConfig

APP_NAME = "rolling"
MAX_TOKENS = 200
PROMPTS = ["A whale is", "What is a harbor?", "Once upon a time", "Paged attention is"]
SETTLE_S = 8.0
"""Load before and after what is done to the cluster."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    parts = {"upgrade": upgrade, "scale": scale}
    add("--part", nargs="+", choices=parts, default=list(parts))
    add("--streams", type=int, default=20)
    add("--start-first", action="store_true", help="start each replacement before the old one goes")
    add("--drain-s", type=float, default=20, help="what is cut off after it is handed over")
    add("--output", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    figures = {}
    for part in arguments.part:
        figures[part] = parts[part](
            arguments.streams, start_first=arguments.start_first, drain_s=arguments.drain_s
        )
        for name, value in figures[part].items():
            print(f"{part:8} {name:24} {value}", flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


def upgrade(num_streams: int, *, start_first: bool, drain_s: float) -> dict[str, Any]:
    from ray import serve

    with _ports() as ports:
        config = _config(
            num_groups=2,
            num_gateways=2,
            start_first=start_first,
            drain_timeout_s=drain_s,
            **ports,
        )
        with (
            running_cluster(config, name=APP_NAME) as endpoints,
            _load(endpoints, num_streams) as load,
        ):
            time.sleep(SETTLE_S)
            begin_s = time.monotonic()
            changed = replace(config, engine=replace(config.engine, max_num_seqs=24))
            serve.run(build_app(changed), name=APP_NAME, route_prefix=None)
            duration_s = time.monotonic() - begin_s
            time.sleep(SETTLE_S)
    return {"upgrade_s": round(duration_s, 1), **load.figures()}


def scale(num_streams: int, *, start_first: bool, drain_s: float) -> dict[str, Any]:
    settings = AutoscalingSettings(
        min_groups=1, max_groups=2, target_ttft_s=0.5, down_delay_s=10, down_step_s=1
    )
    config = _config(
        autoscaling=settings,
        start_first=start_first,
        drain_timeout_s=drain_s,
        grpc_port=0,
        http_port=0,
    )
    with (
        running_cluster(config, name=APP_NAME) as endpoints,
        _load(endpoints, num_streams // 2) as load,
    ):
        time.sleep(SETTLE_S)
        burst = _Burst(endpoints, num_streams)
        begin_s = time.monotonic()
        burst.start()
        _wait_for(2)
        decided_s = time.monotonic() - begin_s
        _wait_for(2, state="RUNNING")
        running_s = time.monotonic() - begin_s
        burst.stop()
        begin_s = time.monotonic()
        _wait_for(1)
        down_s = time.monotonic() - begin_s
        time.sleep(SETTLE_S)
    return {
        "burst_to_decision_s": round(decided_s, 2),
        "burst_to_running_s": round(running_s, 1),
        "down_s": round(down_s, 1),
        **load.figures(),
    }


@dataclass
class Load:
    """Closed loops of streams, and what became of them."""

    address: str
    expected: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    num_complete: int = 0
    inexact: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ended: threading.Event = field(default_factory=threading.Event)

    def learn(self, num_seeds: int) -> None:
        """Asks for every answer once, alone. Seed 0 is greedy."""
        with _channel(self.address) as channel:
            for prompt, seed in itertools.product(PROMPTS, range(num_seeds)):
                chunks = list(generate(channel, _request(prompt, seed)))
                self.expected[prompt, seed] = [id for chunk in chunks for id in chunk.token_ids]

    def run(self, number: int) -> None:
        with _channel(self.address) as channel:
            for turn in itertools.count():
                if self._ended.is_set():
                    return
                prompt = PROMPTS[(number + turn) % len(PROMPTS)]
                self._stream(channel, prompt, seed=number % 2 * (1 + turn % 2))

    def end(self) -> None:
        self._ended.set()

    def _stream(self, channel: grpc.Channel, prompt: str, *, seed: int) -> None:
        token_ids: list[int] = []
        is_finished, error, gap_s, last_s = False, "no finish reason", 0.0, None
        try:
            for chunk in generate(channel, _request(prompt, seed)):
                now_s = time.monotonic()
                gap_s = max(gap_s, now_s - (now_s if last_s is None else last_s))
                last_s = now_s
                if chunk.token_offset != len(token_ids):
                    error = f"token {chunk.token_offset} where {len(token_ids)} was due"
                    break
                token_ids += chunk.token_ids
                is_finished = bool(chunk.finish_reason)
        except grpc.RpcError as failure:
            error = f"{failure.code().name}: {failure.details()}"
        with self._lock:
            self.gaps_s.append(gap_s)
            if is_finished and token_ids == self.expected[prompt, seed]:
                self.num_complete += 1
            elif is_finished:
                self.inexact.append(f"{prompt!r}, seed {seed}")
            else:
                (self.broken if token_ids else self.refused).append(error)
        if not is_finished:
            time.sleep(0.2)

    def figures(self) -> dict[str, Any]:
        return {
            "complete": self.num_complete,
            "broken": len(self.broken),
            "refused": len(self.refused),
            "inexact": len(self.inexact),
            "largest_gap_s": round(max(self.gaps_s, default=0.0), 2),
            "errors": sorted({*self.broken, *self.refused, *self.inexact})[:8],
        }


@contextlib.contextmanager
def _load(endpoints: Endpoints, num_streams: int) -> Iterator[Load]:
    load = Load(address=endpoints.grpc)
    load.learn(num_seeds=3)
    threads = [threading.Thread(target=load.run, args=(number,)) for number in range(num_streams)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.end()
        for thread in threads:
            thread.join()


class _Burst:
    """Long prompts that no cache knows, again and again."""

    def __init__(self, endpoints: Endpoints, num_streams: int) -> None:
        self._address = endpoints.grpc
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(num_streams)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        sampling = pb.SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
        with _channel(self._address) as channel:
            for turn in itertools.count():
                if self._ended.is_set():
                    return
                ids = [3 + (number * 997 + turn * 31 + i * (number + 7)) % 4000 for i in range(800)]
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
                with contextlib.suppress(grpc.RpcError):
                    list(generate(channel, request))


def _request(prompt: str, seed: int) -> pb.GenerateRequest:
    sampling = pb.SamplingParams(
        temperature=0.9 if seed else 0, seed=seed, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    return pb.GenerateRequest(text=prompt, sampling=sampling)


def _channel(address: str) -> grpc.Channel:
    """One with a connection of its own, so that gateways on one port share the streams."""
    return grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def _wait_for(num_groups: int, *, state: str | None = None) -> None:
    """Waits until Serve has ``num_groups`` groups, in that state or in any."""
    from ray import serve

    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        states = serve.status().applications[APP_NAME].deployments["ReplicaGroup"].replica_states
        if sum(n for name, n in states.items() if state in (None, name)) == num_groups:
            return
        time.sleep(0.05)
    raise SystemExit(f"there never were {num_groups} groups: {states}")


def _config(**given: Any) -> ClusterConfig:
    engine = EngineConfig(
        model=demo_model.PATH,
        dtype="float32",
        block_size=16,
        num_blocks=2048,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        num_threads=1,
    )
    return ClusterConfig(engine=engine, served_model_name="demo", **given)


@contextlib.contextmanager
def _ports() -> Iterator[dict[str, int]]:
    """For gateways that share them. Until these listen, nobody else is given what is bound here;
    and what does not listen takes no connection from them."""
    with contextlib.ExitStack() as stack:
        ports = {}
        for name in ("grpc_port", "http_port"):
            held = stack.enter_context(socket.socket())
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                held.setsockopt(socket.SOL_SOCKET, option, 1)
            held.bind(("127.0.0.1", 0))
            ports[name] = held.getsockname()[1]
        yield ports


if __name__ == "__main__":
    main()
