"""Streams under a rolling upgrade and under autoscaling, on a real cluster: does a client notice?

    python -m bench.rolling [--part upgrade scale] [--streams N] [--start-first] [--drain-s S]

*upgrade*: two groups behind two gateways on one port. N streams run and restart when they end while
the application is deployed again, so that Serve replaces every group and every gateway.
*scale*: one group. A burst of N long prompts requires a second group; then follows too little work
for two. The report has the time from the burst until Serve starts a group.

Clients speak gRPC and HTTP, each with one connection for all of its streams or another for each.
Half of the streams are greedy, half are sampled with a seed. Their expected tokens were generated
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
from bench.rolling_load import Load, own_channel

from quire import demo_model
from quire.cluster.client import generate
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import Endpoints, build_app, running_cluster
from quire.cluster.scaling.settings import AutoscalingSettings
from quire.v1 import inference_pb2 as pb
from quire.worker.api.config import EngineConfig

APP_NAME = "rolling"
MAX_TOKENS = 200
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
            # Admission is not the question here.
            max_queue_wait_s=600,
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


@contextlib.contextmanager
def _load(endpoints: Endpoints, num_streams: int) -> Iterator[Load]:
    load = Load(grpc=endpoints.grpc, http=endpoints.http, max_tokens=MAX_TOKENS)
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
        with own_channel(self._address) as channel:
            for turn in itertools.count():
                if self._ended.is_set():
                    return
                ids = [3 + (number * 997 + turn * 31 + i * (number + 7)) % 4000 for i in range(800)]
                request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling)
                with contextlib.suppress(grpc.RpcError):
                    list(generate(channel, request))


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
