"""Runs cases on a Ray cluster that this process is connected to, and keeps what came of them."""

import asyncio
import json
import random
import re
import socket
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
from bench.machine import Machine
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoint
from bench.provenance import commit
from bench.serving.case import SERVE, Case
from bench.serving.figures import figures, rows_of, write_trace
from bench.serving.forecasts import Forecast
from bench.serving.gateways import Gateways
from bench.serving.handles import groups_behind_serve
from bench.serving.load import Request, Stream, Target, run, run_chats
from bench.serving.lossy import Loss, lossy_gateway

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import running_app
from quire.cluster.deploy.deployments import Gateway
from quire.cluster.telemetry.explanations import MAX_LIMIT
from quire.router.config import RoutingConfig
from quire.v1 import inference_pb2 as pb
from quire.v1.inference_pb2_grpc import InferenceStub
from quire.worker.api.config import EngineConfig
from quire.worker.model.config import read_model_spec, resolve_max_model_len

_CHANNELS = 8
"""Connections to each gateway that there is, so that the kernel spreads them about evenly."""
_SETTLE_S = 1.5
"""For gateways to attach to all groups: only one of them is waited for."""

Record = dict[str, Any]


class Runs:
    """Records, a line of JSON each, and beside the file a folder with a trace of each run."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.records: list[Record] = []
        if state.exists():
            self.records = [json.loads(line) for line in state.read_text().splitlines()]

    def has(self, case: Case, round_: int) -> bool:
        return any(
            record["case"] == json.loads(case.key) and record["round"] == round_
            for record in self.records
        )

    def run(self, case: Case, round_: int, *, folder: Path) -> Record:
        """Starts the cluster, loads it, stops it; ``folder`` is for checkpoints."""
        trace = self.trace_folder / f"{len(self.records):04}.jsonl"
        measured = measure(case, folder=folder)
        streams = measured.streams
        rows = rows_of(streams)
        write_trace(streams, trace, block_size=EngineConfig.block_size)
        record = {
            "case": asdict(case),
            "round": round_,
            "commit": commit(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "trace": trace.name,
            "gateways": measured.gateways,
            "machine": measured.machine,
            "forecasts": measured.forecasts,
            "values": figures(rows, num_groups=case.num_groups),
            "rows": rows,
        }
        with self._state.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(json.loads(json.dumps(record)))  # Tuples are lists when read back.
        return record

    @property
    def trace_folder(self) -> Path:
        return self._state.with_name(f"{self._state.stem}-traces")


@dataclass(frozen=True, kw_only=True)
class Measured:
    streams: list[Stream]
    machine: dict[str, float]
    """Cores that were busy while the load was on, and with whose work."""
    gateways: list[int] = field(default_factory=list)
    """How many requests each gateway completed, warming up included."""
    forecasts: list[Forecast] = field(default_factory=list)


def measure(case: Case, *, folder: Path) -> Measured:
    config = cluster_config(case, folder=folder)
    loss = Loss(batches=case.lose_batches, events=case.lose_events)
    if case.policy == SERVE:
        with groups_behind_serve(config) as target:
            return asyncio.run(_apply_load(case, target, config))
    gateway = lossy_gateway(loss) if loss.is_any else Gateway
    with running_app(config, gateway=gateway) as endpoints:

        async def load() -> Measured:
            async with Gateways([endpoints.grpc], num_channels=_CHANNELS * case.num_gateways) as to:
                return await _apply_load(case, to, config)

        measured = asyncio.run(load())
        return replace(
            measured,
            gateways=_completions(endpoints.http, case.num_gateways),
            forecasts=_forecasts(endpoints.grpc, measured.streams),
        )


def cluster_config(case: Case, *, folder: Path) -> ClusterConfig:
    model = Path(case.model)
    if case.model in SHAPES:
        model = make_checkpoint(SHAPES[case.model], folder)
    policy = case.policy if case.policy != SERVE else "power_of_two"
    return ClusterConfig(
        engine=EngineConfig(
            model=model,
            num_blocks=case.num_blocks,
            max_num_batched_tokens=case.max_num_batched_tokens,
            max_num_seqs=case.max_num_seqs,
            num_threads=1,
        ),
        routing=RoutingConfig(policy=policy, use_directory=case.use_directory),
        num_groups=case.num_groups,
        num_gateways=case.num_gateways,
        # All are to be served: what is refused would make its policy look fast.
        max_queue_wait_s=case.load.limit_s,
        # Several gateways share a port, which "any free one" would not let them.
        grpc_port=_free_port(),
        http_port=_free_port(),
        drain_timeout_s=2,
    )


async def _apply_load(case: Case, target: Target, config: ClusterConfig) -> Measured:
    await asyncio.sleep(_SETTLE_S)
    load = case.load
    await run(_warm_up(case), target, limit_s=20)
    before = Machine.now()
    if load.loop == "closed":
        streams = await run_chats(
            load.chats(), target, num_users=load.num_users, limit_s=load.limit_s
        )
    else:
        model = read_model_spec(config.engine.model, model_impl=config.engine.model_impl)
        requests = load.requests(
            vocab_size=VOCAB_SIZE if case.model in SHAPES else model.vocab_size,
            max_tokens=resolve_max_model_len(config.engine, model),
        )
        streams = await run(requests, target, limit_s=load.limit_s)
    after = Machine.now()
    machine = {} if before is None or after is None else after.since(before)
    return Measured(streams=streams, machine=machine)


def _warm_up(case: Case) -> Sequence[Request]:
    """A few on every connection, which share nothing with what is measured."""
    rng = random.Random(-1)
    return [
        Request(
            name=f"warm-up-{number}",
            token_ids=[rng.randrange(3, 256) for _ in range(24)],
            max_tokens=2,
            at_s=0.02 * number,
            cache_salt="warm-up",
        )
        for number in range(2 * _CHANNELS * case.num_gateways)
    ]


def _forecasts(address: str, streams: Sequence[Stream]) -> list[Forecast]:
    """As `quire explain` shows them, of the ``streams`` that the gateway remembers, in their order.

    Where there are several gateways, one is asked.
    """
    with grpc.insecure_channel(address) as channel:
        request = pb.ExplainRoutingRequest(limit=MAX_LIMIT)
        answer = InferenceStub(channel).ExplainRouting(request, timeout=10)
    decisions = {decision.request_id: decision for decision in answer.decisions}
    found = [decisions[stream.server_id] for stream in streams if stream.server_id in decisions]
    return [
        (
            decision.routing.forecast_s if decision.routing.HasField("forecast_s") else None,
            decision.waited_s,
        )
        for decision in found
        if decision.HasField("waited_s")
    ]


def _completions(http_address: str, num_gateways: int) -> list[int]:
    """As gateways behind one port count them: each new connection reaches one of them."""

    def pages() -> Iterator[str]:
        for _ in range(20 * num_gateways):
            with urllib.request.urlopen(f"http://{http_address}/metrics", timeout=10) as page:
                yield page.read().decode()

    return counts_by_gateway(pages(), num_gateways=num_gateways)


def counts_by_gateway(pages: Iterable[str], *, num_gateways: int) -> list[int]:
    """Ended completions of each gateway, least first, from ``pages`` of metrics; stops reading when
    ``num_gateways`` are found. The start time of a gateway's counter tells it from the others,
    because counts may be equal."""
    counts: dict[str, int] = {}
    for text in pages:
        (began,) = re.findall(r"^quire_prompt_tokens_created{[^}]*} (\S+)$", text, re.MULTILINE)
        found = re.findall(r"^quire_completions_total{[^}]*} (\S+)$", text, re.MULTILINE)
        counts[began] = int(sum(map(float, found)))
        if len(counts) == num_gateways:
            break
    return sorted(counts.values())


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
