"""Tests whether clients notice rolling upgrades and autoscaling, on a real cluster.

    python -m bench.rolling [--part upgrade numerics scale] [--streams N] [--requests N]
        [--start-first] [--drain-s S]

*upgrade*: two groups behind two gateways on one port. N streams run and restart when they end while
the application is deployed again, so that Serve replaces every group and every gateway; and again
until so many requests were answered.
*numerics*: the same, from float32 to bfloat16: an answer is exact if it is that of either, whole.
*scale*: one group. A burst of N long prompts requires a second group; then follows too little work
for two. The report has the time from the burst until Serve starts a group.

Clients speak gRPC and HTTP, each with one connection for all of its streams or another for each.
Half of the streams are greedy, half are sampled with a seed. Their expected tokens were generated
before, alone. A stream is *broken* if it ended without its finish after its first token, *refused*
if it failed before, *inexact* if its tokens are others. A gap is the time between two chunks.
"""

import argparse
import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.report import command
from bench.rolling_load import Load
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream

from quire import demo_model
from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import Endpoints, running_cluster, upgrade_app
from quire.cluster.deploy.names import deployments_of
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.worker.request.config import EngineConfig

APP_NAME = "rolling"
MAX_TOKENS = 200
SETTLE_S = 8.0
"""Load before and after what is done to the cluster."""


def main() -> None:
    parser = command("bench.rolling", __doc__)
    add = parser.add_argument
    parts: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
        "upgrade": partial(upgrade, changes=[{"max_num_seqs": 24}, {"max_num_seqs": 32}]),
        "numerics": partial(upgrade, changes=[{"dtype": "bfloat16"}, {"dtype": "float32"}]),
        "scale": scale,
    }
    add("--part", nargs="+", choices=parts, default=list(parts))
    add("--streams", type=int, default=20)
    add("--tokens", type=int, default=MAX_TOKENS, help="of each stream")
    add("--requests", type=int, default=1, help="upgrade again until so many are answered")
    add("--start-first", action="store_true", help="start each replacement before the old one goes")
    add("--drain-s", type=float, default=20, help="what is cut off after it is handed over")
    add("--output", type=Path, help="a JSON file for the figures")
    arguments = parser.parse_args()
    figures = {}
    for part in arguments.part:
        figures[part] = parts[part](arguments)
        for name, value in figures[part].items():
            print(f"{part:8} {name:24} {value}", flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(figures, indent=1) + "\n")


def upgrade(arguments: argparse.Namespace, *, changes: list[dict[str, Any]]) -> dict[str, Any]:
    """Deploys each of the changes to the engine's settings in turn, in a circle."""
    with _ports() as ports:
        config = _config(
            arguments,
            num_groups=2,
            num_gateways=2,
            # Admission is not the question here.
            max_queue_wait_s=600,
            **ports,
        )
        durations_s = []
        with (
            running_cluster(config, name=APP_NAME) as endpoints,
            _load(endpoints, arguments) as load,
        ):
            time.sleep(SETTLE_S)
            for change in itertools.cycle(changes):
                begin_s = time.monotonic()
                changed = replace(config, engine=replace(config.engine, **change))
                upgrade_app(changed, name=APP_NAME)
                durations_s.append(round(time.monotonic() - begin_s, 1))
                time.sleep(SETTLE_S)
                if len(durations_s) <= len(changes):
                    load.learn()
                if load.num_answers >= arguments.requests:
                    break
    return {"upgrades_s": durations_s, **load.figures()}


def scale(arguments: argparse.Namespace) -> dict[str, Any]:
    settings = AutoscalingSettings(
        min_groups=1, max_groups=2, target_ttft_s=0.5, down_delay_s=10, down_step_s=1
    )
    config = _config(arguments, autoscaling=settings, grpc_port=0, http_port=0)
    with (
        running_cluster(config, name=APP_NAME) as endpoints,
        _load(endpoints, arguments, arguments.streams // 2) as load,
    ):
        time.sleep(SETTLE_S)
        begin_s = time.monotonic()
        with _burst(endpoints, arguments.streams):
            _wait_for(2)
            decided_s = time.monotonic() - begin_s
            _wait_for(2, state="RUNNING")
            running_s = time.monotonic() - begin_s
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
def _load(
    endpoints: Endpoints, arguments: argparse.Namespace, num_users: int | None = None
) -> Iterator[Load]:
    load = Load(grpc=endpoints.grpc, http=endpoints.http, max_tokens=arguments.tokens)
    load.learn()
    with load.running(num_users or arguments.streams):
        yield load


@contextlib.contextmanager
def _burst(endpoints: Endpoints, num_streams: int) -> Iterator[None]:
    """Long prompts that no cache knows, again and again, as long as the block."""
    ended = threading.Event()

    async def user(number: int) -> None:
        async with Gateways([endpoints.grpc]) as gateways:
            for turn in itertools.count():
                if ended.is_set():
                    return
                ids = [3 + (number * 997 + turn * 31 + i * (number + 7)) % 4000 for i in range(800)]
                request = Request(name="", token_ids=ids, max_tokens=2)
                await gateways.send(Stream(request=request))

    async def run() -> None:
        await asyncio.gather(*map(user, range(num_streams)))

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _wait_for(num_groups: int, *, state: str | None = None) -> None:
    """Waits until Serve has ``num_groups`` groups, in that state or in any."""
    from ray import serve

    deadline_s = time.monotonic() + 120
    while time.monotonic() < deadline_s:
        deployments = deployments_of(APP_NAME, serve.status().applications)
        states = deployments["ReplicaGroup"].replica_states
        if sum(n for name, n in states.items() if state in (None, name)) == num_groups:
            return
        time.sleep(0.05)
    raise SystemExit(f"there never were {num_groups} groups: {states}")


def _config(arguments: argparse.Namespace, **given: Any) -> ClusterConfig:
    engine = EngineConfig(
        model=demo_model.PATH,
        dtype="float32",
        block_size=16,
        num_blocks=2048,
        max_num_seqs=32,
        max_num_batched_tokens=256,
        num_threads=1,
    )
    return ClusterConfig(
        engine=engine,
        served_model_name="demo",
        start_first=arguments.start_first,
        drain_timeout_s=arguments.drain_s,
        **given,
    )


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
