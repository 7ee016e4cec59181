"""What operators do under load; caches that are too small; gateways that are told too little."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.chaos.cluster import GROUPS
from bench.chaos.stage import Stage, now_s
from bench.chaos.verdicts import Outcome, check_exact
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.serving.load import Stream

from quire.cluster.admission.config import AdmissionConfig

NUM_USERS = 24
"""Streams at a time while the application is deployed anew, which takes the same two cores."""
SMALL_CACHE = 64
"""Blocks of a group: one prompt of the longest kind and no more."""
LOSS = {"batches": 0.2, "events": 0.2, "repeated": 0.1, "overtaken": 0.1}
PATIENT: dict[str, Any] = {"max_queue_wait_s": 600.0, "standing_wait_s": 600.0}
"""Bounds of admission: nothing is refused here but where that is the question."""
_SETTLE_S = 3.0
_MAX_P99_RATIO = 2.0
_AT_ONCE_S = 0.5
"""Refusals take no longer, on a machine that is full."""
_EXACT_WITHIN_S = 5.0
"""Of the last stream's end: digests come with heartbeats."""
_RECOVERED = 0.8
"""Share of the hit rate before the loss of a group that must be reached again."""


def upgraded(stage: Stage) -> Outcome:
    """Every group and gateway is replaced, since the engine's settings change."""
    cluster = stage.cluster
    engine = {**cluster.settings["engine"], "max_num_batched_tokens": 256}
    return _rolled(stage, lambda: cluster.deploy(engine=engine))


def scaled_down(stage: Stage) -> Outcome:
    cluster = stage.cluster
    outcome = _rolled(stage, lambda: cluster.scale(1))
    cluster.scale(len(GROUPS))
    cluster.wait_ready()
    return outcome


def overloaded(stage: Stage) -> Outcome:
    """Three times what the cluster can serve, by `bench.overload`, with admission's own bounds.

    Of a model that makes the groups the limit, and not the gateway and the client beside them.
    """
    outcome = Outcome()
    cluster = stage.cluster
    engine = cluster.settings["engine"]
    bounds = {name: getattr(AdmissionConfig(), name) for name in PATIENT}
    model = make_checkpoint(SHAPES["M"], Path.home() / ".cache/quire/bench")
    slow = {"model": str(model), "dtype": "bfloat16", "num_blocks": 512, "max_num_seqs": 8}
    cluster.deploy(engine={**engine, **slow}, **bounds)
    cluster.wait_ready()
    at_s = now_s()
    output = cluster.folder / "overload.json"
    cluster.network.hosts["client"].run(
        [
            *(sys.executable, "-m", "bench.overload"),
            *("--address", cluster.gateways[0], "--output", str(output)),
            *("--prompt-words", "20", "--concurrency", "18", "--duration-s", "30"),
        ],
        env=cluster.ray.environment,
        stdout=subprocess.DEVNULL,
    )
    result = json.loads(output.read_text())
    calm, overload = result["phases"]
    outcome.seen.append(
        f"{overload['offered_per_s'] / calm['offered_per_s']:.1f} × capacity: "
        f"{overload['completed']} of {overload['sent']} accepted, p99 TTFT "
        f"{overload['ttft_p99_s']:.2f} s, {result['p99_ratio']:.2f} × that at capacity; "
        f"{overload['refused']} refused, p99 {overload['refusal_p99_s']:.2f} s; "
        f"{overload['lost']} lost; the client lags by {overload['client_lag_p99_s']:.2f} s"
    )
    outcome.check(result["p99_ratio"] <= _MAX_P99_RATIO, "those accepted waited longer")
    outcome.check(not overload["lost"] and not calm["lost"], f"lost: {overload['errors']}")
    outcome.check(overload["refused"] > 0, "nothing was refused")
    outcome.check(overload["refusal_p99_s"] <= _AT_ONCE_S, "refused, but not at once")
    stage.settle(outcome, since_s=at_s)
    cluster.deploy(engine=engine, **PATIENT)
    cluster.wait_ready()
    return outcome


def cache_exhausted(stage: Stage) -> Outcome:
    """All requests at once at groups that can hold a few of them."""
    outcome = Outcome()
    cluster = stage.cluster
    engine = cluster.settings["engine"]
    cluster.deploy(engine={**engine, "num_blocks": SMALL_CACHE})
    cluster.wait_ready()
    load = cluster.clients.load(stage.salted("exhausted"), cluster.gateways)
    load.wait_begun()
    at_s = now_s()
    streams = load.wait()
    block_size = 16
    needed = sum(
        -(-(len(stream.request.token_ids) + len(stream.tokens)) // block_size) for stream in streams
    )
    preempted = cluster.total("quire_group_preemptions_total") / 2
    outcome.seen.append(f"{needed} blocks needed, {2 * SMALL_CACHE} there")
    outcome.seen.append(f"{preempted:.0f} preemptions")
    check_exact(outcome, streams, stage.reference)
    stage.settle(outcome, since_s=at_s)
    cluster.deploy(engine=engine)
    cluster.wait_ready()
    return outcome


def feed_lost(stage: Stage) -> Outcome:
    """What groups say of their caches is lost, repeated and overtaken; and a group is killed."""
    outcome = Outcome()
    cluster = stage.cluster
    cluster.deploy(loss=LOSS)
    cluster.wait_ready()
    load = cluster.clients.load(stage.requests, cluster.gateways, again=True)
    load.wait_begun()
    time.sleep(2 * _SETTLE_S)
    at_s = now_s()
    os.kill(cluster.lives()["a"].pid, signal.SIGKILL)
    cluster.wait_known()
    back_s = now_s()
    time.sleep(3 * _SETTLE_S)
    load.stop()
    streams = load.wait()
    gaps, drifted = (
        cluster.total(f"quire_directory_{name}_total") for name in ("gaps", "drifted_buckets")
    )
    outcome.seen.append(f"{gaps:.0f} gaps and {drifted:.0f} drifted buckets found")
    outcome.check(gaps > 0 and drifted > 0, "nothing was lost")
    outcome.seen.append("a restart under the same name is with tests/router")
    before = _hit_rate(streams, at_s - _SETTLE_S, at_s)
    behind = _hit_rate(streams, at_s, back_s)
    after = _hit_rate(streams, _last_sent(streams) - 2 * _SETTLE_S, now_s())
    outcome.seen.append(
        f"hit rate {before:.0%}, {behind:.0%} until the group was back, {after:.0%} at the end"
    )
    outcome.check(after >= _RECOVERED * before, "the hit rate did not recover")
    check_exact(outcome, streams, stage.reference)
    stage.settle(outcome, since_s=at_s)
    idle_s = now_s()
    cluster.wait_exact_directories()
    seconds = now_s() - idle_s
    outcome.seen.append(f"both directories exact {seconds:.1f} s later")
    outcome.check(seconds <= _EXACT_WITHIN_S, f"a directory was wrong for {seconds:.1f} s")
    cluster.deploy()
    cluster.wait_ready()
    return outcome


def _rolled(stage: Stage, roll: Callable[[], None]) -> Outcome:
    """Does that under load. A client knows both gateways and takes the one that is there."""
    outcome = Outcome()
    cluster = stage.cluster
    one, other = cluster.gateways
    load = cluster.clients.load(
        stage.salted("rolled")[:NUM_USERS],
        [f"ipv4:{one},{other}", f"ipv4:{other},{one}"],
        again=True,
    )
    load.wait_begun()
    time.sleep(_SETTLE_S)
    at_s = now_s()
    roll()
    outcome.seen.append(f"done in {now_s() - at_s:.0f} s")
    time.sleep(_SETTLE_S)
    load.stop()
    check_exact(outcome, load.wait(), stage.reference)
    stage.settle(outcome, since_s=at_s)
    return outcome


def _hit_rate(streams: Sequence[Stream], from_s: float, until_s: float) -> float:
    """Of the prompts sent in that time."""
    some = [stream for stream in streams if from_s <= stream.sent_s < until_s and stream.times]
    num_tokens = sum(len(stream.request.token_ids) for stream in some)
    return sum(stream.num_cached_tokens for stream in some) / max(num_tokens, 1)


def _last_sent(streams: Sequence[Stream]) -> float:
    return max(stream.sent_s for stream in streams)
