"""Faults: operators' rollouts and scale-downs under load, small caches, lossy cache events."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.chaos.cluster import GROUPS, Cluster
from bench.chaos.stage import Stage, fault, make_requests, now_s, offline
from bench.chaos.verdicts import check_exact
from bench.peers.checkpoints import SHAPES, make_checkpoint
from bench.serving.load import Stream

NUM_USERS = 24
"""Streams at a time while the application is deployed again, which takes the same two cores."""
BLOCK_SIZE = 16
SMALL_CACHE = 64
"""Blocks of a group: one prompt of the longest kind and no more."""
LONG_PROMPT_TOKENS = (176, 224)
"""A hundred of them, with half-long answers, fit into one group's cache."""
LOSS = {"batches": 0.2, "events": 0.2, "repeated": 0.1, "overtaken": 0.1}
_MAX_QUEUE_WAIT_S = 1.0
"""In overload. In all other rows nothing is refused."""
_SETTLE_S = 3.0
_MAX_P99_RATIO = 2.0
_AT_ONCE_S = 0.5
"""Refusals take no longer, on a machine that is full."""
_EXACT_WITHIN_S = 5.0
"""Seconds from the last stream's end. The design needs 1.1 s: a digest comes with each heartbeat of
events, a second apart, and the buckets that differ are requested after a pause of 0.1 s. The rest
allows for a busy machine and for polled gauges."""
_ROUNDS_S = 4 * _SETTLE_S
"""Seconds in which each prompt is sent two or three times."""
_RECOVERED = 0.8
"""Share of the hit rate before the loss of a group that must be reached again, and of what is
cached then that the gateways must have known to be."""


@fault("upgrade", "rolling upgrade of every group and gateway under load", "no stream fails")
def upgraded(stage: Stage) -> None:
    """Every group and gateway is replaced, since the engine's settings change."""
    cluster = stage.cluster
    engine = {**cluster.settings["engine"], "max_num_batched_tokens": 256}
    _roll(stage, lambda: cluster.deploy(engine=engine))


@fault("scale-down", "from two groups to one, under load", "no stream fails")
def scaled_down(stage: Stage) -> None:
    _roll(stage, lambda: stage.cluster.scale(1))
    stage.settle()
    stage.cluster.scale(len(GROUPS))
    stage.cluster.wait_ready()


@fault(
    "overload",
    "three times the load that can be served, open loop",
    "p99 TTFT of what is accepted within 2 × that at capacity; the rest refused at once; "
    "nothing lost",
)
def overloaded(stage: Stage) -> None:
    """Three times what the cluster can serve, by `bench.overload`, with a bound on the wait.

    The model makes the groups the limit, and not the gateway and the client beside them.
    """
    cluster = stage.cluster
    model = make_checkpoint(SHAPES["M"], Path.home() / ".cache/quire/bench")
    slow = {"model": str(model), "dtype": "bfloat16", "num_blocks": 512, "max_num_seqs": 8}
    engine = {**cluster.settings["engine"], **slow}
    output = cluster.folder / "overload.json"
    with stage.deployed(engine=engine, max_queue_wait_s=_MAX_QUEUE_WAIT_S):
        stage.strike()
        cluster.network.hosts["client"].run(
            [
                *(sys.executable, "-m", "bench.overload"),
                *("--address", cluster.gateways[0], "--output", str(output)),
                *("--prompt-words", "20", "--concurrency", "18", "--duration-s", "60"),
            ],
            env=cluster.ray.environment,
            stdout=subprocess.DEVNULL,
        )
    result = json.loads(output.read_text())
    calm, overload = result["phases"]
    stage.see(
        f"{overload['offered_per_s'] / calm['offered_per_s']:.1f} × capacity: "
        f"{overload['completed']} of {overload['sent']} accepted, p99 TTFT "
        f"{overload['ttft_p99_s']:.2f} s, {result['p99_ratio']:.2f} × that at capacity; "
        f"{overload['refused']} refused, p99 {overload['refusal_p99_s']:.2f} s; "
        f"{overload['lost']} lost; the client lags by {overload['client_lag_p99_s']:.2f} s"
    )
    stage.check(result["p99_ratio"] <= _MAX_P99_RATIO, "those accepted waited longer")
    stage.check(not overload["lost"] and not calm["lost"], f"lost: {overload['errors']}")
    stage.check(overload["refused"] > 0, "nothing was refused")
    stage.check(overload["refusal_p99_s"] <= _AT_ONCE_S, "refused, but not at once")


@fault(
    "kv-exhausted",
    "a cache far smaller than what the requests need",
    "all complete, all exact",
)
def cache_exhausted(stage: Stage) -> None:
    """Sends all requests at once to groups that can hold only a few of them."""
    with stage.deployed(engine={**stage.cluster.settings["engine"], "num_blocks": SMALL_CACHE}):
        load = stage.begin("exhausted")
        stage.strike()
        streams = load.wait()
        preempted = stage.cluster.total("quire_group_preemptions_total") / 2
    needed = sum(-(-(len(s.request.token_ids) + len(s.tokens)) // BLOCK_SIZE) for s in streams)
    stage.see(f"{needed} blocks needed, {2 * SMALL_CACHE} there")
    stage.see(f"{preempted:.0f} preemptions")
    stage.check_exact(streams)


@fault(
    "feed-lost",
    "gateways miss a fifth of the groups' cache messages and of the events in the rest, "
    "get a tenth twice and a tenth out of order; a group is killed",
    "all exact; the hit rate recovers, and gateways know of what is found; idle, the directories "
    "are exact 5 s later",
)
def feed_lost(stage: Stage) -> None:
    """Groups' cache events are lost, repeated and reordered, and a group is killed.

    The prompts are long: to find one of those in all other rows cached is worth less than one
    request less on a group, so that each group comes to hold all of them, whatever gateways know.
    They come again and again, all at about the same time. So what was found when each was last
    sent before the loss is compared with when each was last sent of all.
    """
    requests = make_requests(
        len(stage.requests),
        num_tokens=stage.requests[0].max_tokens // 2,
        prompt_tokens=LONG_PROMPT_TOKENS,
    )
    reference = offline(requests)
    cluster = stage.cluster
    with stage.deployed(loss=LOSS):
        load = stage.send(requests, again=True)
        time.sleep(_ROUNDS_S)
        at_s = stage.strike()
        os.kill(cluster.lives()["a"].pid, signal.SIGKILL)
        cluster.wait_known()
        back_s = now_s()
        time.sleep(_ROUNDS_S)
        found, wrong = _cached_tokens(cluster)
        time.sleep(2 * _SETTLE_S)
        load.stop()
        streams = load.wait()
        gaps, drifted = (
            cluster.total(f"quire_directory_{name}_total") for name in ("gaps", "drifted_buckets")
        )
        stage.see(f"{gaps:.0f} gaps and {drifted:.0f} drifted buckets found")
        stage.check(gaps > 0 and drifted > 0, "nothing was lost")
        stage.see("a restart under the same name is with tests/router")
        before = _hit_rate(_last_of_each(streams, until_s=at_s))
        sent_behind = [stream for stream in streams if at_s <= stream.sent_s < back_s]
        after = _hit_rate(_last_of_each(streams, until_s=now_s()))
        stage.see(
            f"hit rate {before:.0%}, {_hit_rate(sent_behind):.0%} of {len(sent_behind)} prompts "
            f"until the group was back, {after:.0%} at the end"
        )
        stage.check(after >= _RECOVERED * before, "the hit rate did not recover")
        all_found, all_wrong = _cached_tokens(cluster)
        known = 1 - (all_wrong - wrong) / max(all_found - found, 1)
        stage.see(f"{known:.0%} of that rightly predicted")
        stage.check(known >= _RECOVERED, "the gateways did not know what was cached")
        check_exact(stage.outcome, streams, reference)
        # Events to the end: behind the last one nothing shows by chance that it led to nothing.
        stage.see("new prompts at last")
        stage.check_exact(stage.send(stage.salted("last")[: len(requests) // 2]).wait())
        stage.settle()
        idle_s = now_s()
        cluster.wait_exact_directories()
        seconds = now_s() - idle_s
        stage.see(f"both directories exact {seconds:.1f} s later")
        stage.check(seconds <= _EXACT_WITHIN_S, f"a directory was wrong for {seconds:.1f} s")


def _roll(stage: Stage, roll: Callable[[], None]) -> None:
    """Does that under load. A client knows both gateways and takes the one that is there."""
    one, other = stage.cluster.gateways
    load = stage.send(
        stage.salted("rolled")[:NUM_USERS],
        [f"ipv4:{one},{other}", f"ipv4:{other},{one}"],
        again=True,
    )
    time.sleep(_SETTLE_S)
    at_s = stage.strike()
    roll()
    stage.see(f"done in {now_s() - at_s:.0f} s")
    time.sleep(_SETTLE_S)
    load.stop()
    stage.check_exact(load.wait())


def _last_of_each(streams: Sequence[Stream], *, until_s: float) -> list[Stream]:
    """For each request, the last stream that was sent before ``until_s`` and had tokens."""
    ordered = sorted(streams, key=lambda stream: stream.sent_s)
    began = [stream for stream in ordered if stream.times and stream.sent_s < until_s]
    return [*{stream.request.name: stream for stream in began}.values()]


def _hit_rate(streams: Sequence[Stream]) -> float:
    began = [stream for stream in streams if stream.times]
    num_tokens = sum(len(stream.request.token_ids) for stream in began)
    return sum(stream.num_cached_tokens for stream in began) / max(num_tokens, 1)


def _cached_tokens(cluster: Cluster) -> tuple[float, float]:
    """Prompt tokens so far that were found cached, and that were predicted wrongly."""
    found, wrong = (
        cluster.total(f"quire_routing_{name}_cached_tokens_total") for name in ("found", "wrong")
    )
    return found, wrong
