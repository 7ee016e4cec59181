"""Faults that strike a group, its node or the head: killed, stopped, cut off, poisoned."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.chaos.cluster import FRONTS, Life, NotReady
from bench.chaos.stage import MARGIN_S, Stage, now_s, poison
from bench.chaos.verdicts import Outcome, check_exact, check_gap, num_under_way

VICTIM = "a"
_CUT_S = 8.0
_NO_RANKS = Outcome(seen=["a group of one rank has no process for it"], was_run=False)


def replica_killed(stage: Stage) -> Outcome:
    return _strike(stage, lambda life: _signal([life.pid], signal.SIGKILL), detected_s=0)


def rank_killed(stage: Stage) -> Outcome:
    if not _has_ranks(stage):
        return _NO_RANKS
    return _strike(stage, lambda life: _signal(life.ranks[-1:], signal.SIGKILL), detected_s=0)


def rank_stopped(stage: Stage) -> Outcome:
    """The stopped rank is left to Serve, which replaces the group."""
    if not _has_ranks(stage):
        return _NO_RANKS
    deadline_s = stage.cluster.settings["step_deadline_s"]
    return _strike(
        stage, lambda life: _signal(life.ranks[-1:], signal.SIGSTOP), detected_s=deadline_s
    )


def group_stopped(stage: Stage) -> Outcome:
    """And goes on when its streams have ended elsewhere: what it still sends reaches nobody."""
    silence_s = stage.cluster.settings["silence_timeout_s"]
    return _strike(
        stage,
        lambda life: _signal([life.pid, *life.ranks], signal.SIGSTOP),
        detected_s=silence_s,
        undo=lambda life: _signal([life.pid, *life.ranks], signal.SIGCONT),
    )


def node_killed(stage: Stage) -> Outcome:
    """Every process of a group's host at once; later the host is there again."""
    host = stage.cluster.network.hosts["b"]
    return _strike(
        stage,
        lambda life: host.power_off(),
        victim=host.name,
        detected_s=0,
        undo=lambda life: stage.cluster.start_node(host.name),
    )


def partitioned(stage: Stage) -> Outcome:
    """Streams restart all the while, so that some run when the link is cut and when it heals."""
    outcome = Outcome()
    cluster = stage.cluster
    load = stage.begin("partition", again=True)
    resumes = cluster.total("quire_resumes_total")
    at_s = now_s()
    with cluster.network.cut_between(FRONTS[0], VICTIM):
        time.sleep(_CUT_S)
        healed_s = now_s()
    time.sleep(_CUT_S / 2)
    load.stop()
    streams = load.wait()
    resumed = cluster.total("quire_resumes_total") - resumes
    under_way = num_under_way(streams, at_s), num_under_way(streams, healed_s)
    outcome.seen.append(f"{under_way[0]} streams under way at the cut, {under_way[1]} at the heal")
    outcome.seen.append(f"{resumed:.0f} resumed")
    outcome.check(resumed > 0, "nothing was resumed: the cut hit nobody")
    check_exact(outcome, streams, stage.reference)
    stage.settle(outcome, since_s=at_s)
    return outcome


def disk_filled(stage: Stage) -> Outcome:
    """The disk with a group's logs, while it serves."""
    outcome = Outcome()
    filler = stage.cluster.folder / VICTIM / "filler"
    load = stage.begin("disk", again=True)
    at_s = now_s()
    try:
        outcome.seen.append(f"{_fill(filler) / 2**20:.0f} MiB filled the disk")
        time.sleep(_CUT_S)
        load.stop()
        streams = load.wait()
    finally:
        filler.unlink()
    check_exact(outcome, streams, stage.reference)
    stage.settle(outcome, since_s=at_s)
    return outcome


def poisoned(stage: Stage) -> Outcome:
    """A request that kills the process that runs it, among others."""
    outcome = Outcome()
    cluster = stage.cluster
    deaths = cluster.settings["max_group_deaths"]
    before = _lives_so_far(cluster.folder)
    load = stage.begin("poison")
    at_s = now_s()
    poisoned = cluster.clients.load([poison(num_tokens=40)], cluster.gateways[:1])
    poisoned.wait_begun()
    (victim,) = poisoned.wait()
    streams = load.wait()
    error = f"{victim.error}"
    outcome.seen.append(f"the poison: {error.partition(';')[0]}")
    refused = error.startswith("ABORTED: quarantined")
    outcome.check(refused, f"the poison was not quarantined: {error}")
    check_exact(outcome, streams, stage.reference)
    stage.settle(outcome, since_s=at_s)
    num_killed = _lives_so_far(cluster.folder) - before
    outcome.seen.append(f"{num_killed} groups killed")
    outcome.check(num_killed <= deaths, f"{num_killed} groups were killed")
    return outcome


def all_groups_killed(stage: Stage) -> Outcome:
    """Three groups, in the same moment, and requests that come while there is none. The third group
    stays behind it."""
    outcome = Outcome()
    cluster = stage.cluster
    cluster.add_group()
    load = stage.begin(f"all {now_s()}")
    resumes = cluster.total("quire_resumes_total")
    lives = cluster.lives()
    at_s = now_s()
    _signal([life.pid for life in lives.values()], signal.SIGKILL)
    late = stage.begin(f"late {now_s()}")
    streams = load.wait() + late.wait()
    resumed = cluster.total("quire_resumes_total") - resumes
    outcome.seen.append(f"{len(lives)} groups killed, {resumed:.0f} resumed")
    outcome.check(resumed > 0, "nothing was resumed: the fault hit nobody")
    check_exact(outcome, streams, stage.reference)
    gaps_s = sorted(stream.largest_gap_s for stream in streams)
    outcome.seen.append(
        f"gaps of {gaps_s[0]:.1f}, {gaps_s[len(gaps_s) // 2]:.1f} and {gaps_s[-1]:.1f} s (least, "
        "median, largest), new groups' start included"
    )
    stage.settle(outcome, since_s=at_s)
    return outcome


def head_killed(stage: Stage) -> Outcome:
    """Every process of the head's host at once; then a head in its place."""
    outcome = Outcome()
    cluster = stage.cluster
    load = stage.begin("head")
    cluster.network.hosts["head"].power_off()
    check_exact(outcome, load.wait(), stage.reference)
    again = stage.begin("headless")
    outcome.seen.append("then, without a head")
    check_exact(outcome, again.wait(), stage.reference)
    kept = cluster.lives()
    at_s = now_s()
    cluster.ray.start_head("head")
    stage.settle(outcome, since_s=at_s)
    outcome.check(kept == cluster.lives(), "groups were replaced that had survived")
    return outcome


def _strike(
    stage: Stage,
    strike: Callable[[Life], None],
    *,
    detected_s: float,
    victim: str = VICTIM,
    undo: Callable[[Life], None] = lambda life: None,
) -> Outcome:
    """Something is done to a group in the midst of all streams."""
    outcome = Outcome()
    cluster = stage.cluster
    life = cluster.lives()[victim]
    load = stage.begin(f"strike {now_s()}")
    resumes = cluster.total("quire_resumes_total")
    at_s = now_s()
    strike(life)
    streams = load.wait()
    recompute_s = stage.recompute_s(streams, group=life.group, at_s=at_s)
    resumed = cluster.total("quire_resumes_total") - resumes
    undo(life)
    outcome.seen.append(f"{resumed:.0f} resumed")
    outcome.check(resumed > 0, "nothing was resumed: the fault hit nobody")
    check_exact(outcome, streams, stage.reference)
    check_gap(
        outcome,
        streams,
        bound_s=detected_s + recompute_s + MARGIN_S,
        why=f"{detected_s:g} until noticed, {recompute_s:.2f} recompute, {MARGIN_S:g} beyond",
    )
    bystanders = [stream for stream in streams if stream.group != life.group]
    gap_s = max((stream.largest_gap_s for stream in bystanders), default=0.0)
    outcome.seen.append(f"{gap_s:.2f} s on the other group")
    stage.settle(outcome, since_s=at_s)
    return outcome


def _has_ranks(stage: Stage) -> bool:
    return bool(stage.cluster.settings["engine"]["tensor_parallel_size"] > 1)


def _signal(pids: Iterable[int], what: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, what)
        except ProcessLookupError as error:
            raise NotReady(f"process {pid} was gone before it was struck") from error


def _fill(path: Path) -> int:
    """Writes until nothing more fits; returns how much it was."""
    with path.open("wb", buffering=0) as file:
        for size in (2**20, 2**12):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
        return file.tell()


def _lives_so_far(folder: Path) -> int:
    return sum(1 for _ in (folder / "lives").glob("*.json"))
