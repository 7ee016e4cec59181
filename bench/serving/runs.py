"""Runs cases on the Ray cluster that this process is connected to, and stores their results."""

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.machine import Machine
from bench.peers.checkpoints import SHAPES, VOCAB_SIZE, make_checkpoint
from bench.provenance import commit
from bench.servers import free_port
from bench.serving.case import Case
from bench.serving.figures import figures, rows_of
from bench.serving.gateways import Gateways
from bench.serving.load import Request, Stream, run, run_chats
from bench.serving.lossy import Loss, lossy_gateway
from bench.serving.workloads import laid_out, tenant_chats

from quire.cluster.config import ClusterConfig
from quire.cluster.deploy.app import running_app
from quire.cluster.deploy.deployments import Gateway
from quire.router.config import RoutingConfig
from quire.worker.model.config import read_model_spec
from quire.worker.request.config import EngineConfig

_CHANNELS = 8
"""Connections per gateway: enough for the kernel to spread them about evenly."""
_SETTLE_S = 1.5
"""Seconds for gateways to attach to all groups, as the start waits for one gateway only."""

Record = dict[str, Any]


class Runs:
    """A file of records, one JSON line each."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self.records: list[Record] = []
        if state.exists():
            self.records = [json.loads(line) for line in state.read_text().splitlines()]

    def has(self, case: Case, round_: int) -> bool:
        return any(
            record["case"] == asdict(case) and record["round"] == round_ for record in self.records
        )

    def run(self, case: Case, round_: int, *, folder: Path) -> Record:
        """Starts the cluster, loads it, stops it; ``folder`` is for checkpoints."""
        streams, machine = measure(case, folder=folder)
        rows = rows_of(streams)
        record = {
            "case": asdict(case),
            "round": round_,
            "commit": commit(),
            "time": time.strftime("%Y-%m-%d %H:%M:%S"),
            "machine": machine,
            "values": figures(rows, num_groups=case.num_groups),
            "rows": rows,
        }
        with self._state.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self.records.append(record)
        return record


def measure(case: Case, *, folder: Path) -> tuple[list[Stream], dict[str, float]]:
    """The streams; and the cores that were busy while the load was on, and with whose work."""
    config = cluster_config(case, folder=folder)
    loss = Loss(batches=case.lose_batches, events=case.lose_events)
    gateway = lossy_gateway(loss) if loss.is_any else Gateway
    with running_app(config, gateway=gateway) as endpoints:
        return asyncio.run(_apply_load(case, endpoints.grpc, config))


def cluster_config(case: Case, *, folder: Path) -> ClusterConfig:
    model = Path(case.model)
    if case.model in SHAPES:
        model = make_checkpoint(SHAPES[case.model], folder)
    return ClusterConfig(
        engine=EngineConfig(
            model=model,
            num_blocks=case.num_blocks,
            max_num_batched_tokens=512,
            max_num_seqs=32,
            num_threads=1,
        ),
        routing=RoutingConfig(policy=case.policy, use_directory=case.use_directory),
        num_groups=case.num_groups,
        num_gateways=case.num_gateways,
        # All are to be served: what is refused would make its policy look fast.
        max_queue_wait_s=case.limit_s,
        # Several gateways share a port, which "any free one" would not let them.
        grpc_port=free_port(),
        http_port=free_port(),
        drain_timeout_s=2,
    )


async def _apply_load(
    case: Case, address: str, config: ClusterConfig
) -> tuple[list[Stream], dict[str, float]]:
    chats = tenant_chats(
        num_tenants=case.num_tenants,
        num_chats=case.num_chats,
        think_s=case.think_s,
        seed=case.seed,
    )
    async with Gateways([address], num_channels=_CHANNELS * case.num_gateways) as gateways:
        await asyncio.sleep(_SETTLE_S)
        await run(_warm_up(case), gateways, limit_s=20)
        before = Machine.now()
        if case.loop == "closed":
            streams = await run_chats(
                chats, gateways, num_users=case.num_users, limit_s=case.limit_s
            )
        else:
            model = read_model_spec(config.engine.model, model_impl=config.engine.model_impl)
            vocab_size = VOCAB_SIZE if case.model in SHAPES else model.vocab_size
            requests = laid_out(
                chats, chats_per_s=case.chats_per_s, seed=case.seed, vocab_size=vocab_size
            )
            streams = await run(requests, gateways, limit_s=case.limit_s)
        after = Machine.now()
    return streams, {} if before is None or after is None else after.since(before)


def _warm_up(case: Case) -> Sequence[Request]:
    """Sends a few requests per connection, which share nothing with the measured ones."""
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
