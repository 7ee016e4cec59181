"""Faults of a group or its node: killed, stopped, disconnected, crashed by a request."""

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from bench.chaos.cluster import FRONTS, Life, NotReady
from bench.chaos.stage import Stage, fault, now_s, poison
from bench.chaos.verdicts import check_gap, num_under_way, tokens_to_recompute

VICTIM = "a"
MARGIN_S = 1.0
"""How much longer than detection and recompute a gap may be."""
_CUT_S = 8.0


@fault("replica-killed", "group: SIGKILL of the replica", "all exact; no gap 1 s above recompute")
def replica_killed(stage: Stage) -> None:
    _strike(stage, lambda life: send_signal([life.pid], signal.SIGKILL))


@fault("rank-killed", "group: SIGKILL of a rank", "all exact; no gap 1 s above recompute")
def rank_killed(stage: Stage) -> None:
    if _has_ranks(stage):
        _strike(stage, lambda life: send_signal(life.ranks[-1:], signal.SIGKILL))


@fault(
    "rank-stopped",
    "group: SIGSTOP of a rank",
    "all exact; no gap 1 s above step deadline and recompute",
)
def rank_stopped(stage: Stage) -> None:
    """The stopped rank is left to Serve, which replaces the group."""
    if _has_ranks(stage):
        _strike(
            stage,
            lambda life: send_signal(life.ranks[-1:], signal.SIGSTOP),
            detected_s=stage.cluster.settings["step_deadline_s"],
        )


@fault(
    "group-stopped",
    "group: SIGSTOP of replica and ranks, later SIGCONT",
    "all exact; no gap 1 s above silence timeout and recompute",
)
def group_stopped(stage: Stage) -> None:
    """And goes on when its streams have ended elsewhere: what it still sends reaches nobody."""
    _strike(
        stage,
        lambda life: send_signal([life.pid, *life.ranks], signal.SIGSTOP),
        detected_s=stage.cluster.settings["silence_timeout_s"],
        undo=lambda life: send_signal([life.pid, *life.ranks], signal.SIGCONT),
    )


@fault(
    "node-killed",
    "every process of a group's node: SIGKILL; later the node is back",
    "all exact; no gap 1 s above recompute",
)
def node_killed(stage: Stage) -> None:
    """Every process of a group's host at once; later the host is there again."""
    host = stage.cluster.network.hosts["b"]
    _strike(
        stage,
        lambda life: host.power_off(),
        victim=host.name,
        undo=lambda life: stage.cluster.start_node(host.name),
    )


@fault(
    "partition",
    "a gateway and a group cut off from each other for 8 s, then healed",
    "all exact; nothing twice behind the heal; blocks free",
)
def partitioned(stage: Stage) -> None:
    """Streams restart all the while, so that some run when the link is cut and when it heals."""
    load = stage.begin("partition", again=True)
    resumes = stage.cluster.total("quire_resumes_total")
    at_s = stage.strike()
    with stage.cluster.network.cut_between(FRONTS[0], VICTIM):
        time.sleep(_CUT_S)
        healed_s = now_s()
    time.sleep(_CUT_S / 2)
    load.stop()
    streams = load.wait()
    under_way = num_under_way(streams, at_s), num_under_way(streams, healed_s)
    stage.see(f"{under_way[0]} streams under way at the cut, {under_way[1]} at the heal")
    stage.check_resumed(resumes)
    stage.check_exact(streams)


@fault("disk-full", "disk full under a group's logs and temporary files", "all exact")
def disk_filled(stage: Stage) -> None:
    """Fills the disk that holds a group's logs while the group serves."""
    filler = stage.cluster.folder / VICTIM / "filler"
    load = stage.begin("disk", again=True)
    stage.strike()
    try:
        stage.see(f"{_fill(filler) / 2**20:.0f} MiB filled the disk")
        time.sleep(_CUT_S)
        load.stop()
        streams = load.wait()
    finally:
        filler.unlink()
    stage.check_exact(streams)


@fault(
    "poison",
    "a request that kills each group that takes it",
    "3 groups die at most, the request is refused, the others are exact",
)
def poisoned(stage: Stage) -> None:
    """Sends, among others, a request that kills the process that runs it."""
    cluster = stage.cluster
    before = _lives_so_far(cluster.folder)
    load = stage.begin("poison")
    stage.strike()
    (victim,) = stage.send([poison(num_tokens=40)], cluster.gateways[:1]).wait()
    streams = load.wait()
    error = f"{victim.error}"
    stage.see(f"the poison: {error.partition(';')[0]}")
    refused = error.startswith("ABORTED: quarantined")
    stage.check(refused, f"the poison was not quarantined: {error}")
    stage.check_exact(streams)
    stage.settle()
    num_killed = _lives_so_far(cluster.folder) - before
    stage.see(f"{num_killed} groups killed")
    is_bounded = num_killed <= cluster.settings["max_group_deaths"]
    stage.check(is_bounded, f"{num_killed} groups were killed")


def send_signal(pids: Iterable[int], what: signal.Signals) -> None:
    for pid in pids:
        try:
            os.kill(pid, what)
        except ProcessLookupError as error:
            raise NotReady(f"process {pid} was gone before it was struck") from error


def _strike(
    stage: Stage,
    strike: Callable[[Life], None],
    *,
    detected_s: float = 0.0,
    victim: str = VICTIM,
    undo: Callable[[Life], None] = lambda life: None,
) -> None:
    """Something is done to a group in the midst of all streams."""
    life = stage.cluster.lives()[victim]
    load = stage.begin(f"strike {now_s()}")
    resumes = stage.cluster.total("quire_resumes_total")
    at_s = stage.strike()
    strike(life)
    streams = load.wait()
    # The contexts of the group's streams are computed again, one after the other.
    num_tokens = tokens_to_recompute(streams, group=life.group, at_s=at_s)
    recompute_s = num_tokens / stage.prefill_rate
    stage.check_resumed(resumes)
    undo(life)
    stage.check_exact(streams)
    check_gap(
        stage.outcome,
        streams,
        bound_s=detected_s + recompute_s + MARGIN_S,
        why=f"{detected_s:g} until noticed, {recompute_s:.2f} recompute, {MARGIN_S:g} beyond",
    )
    bystanders = [stream for stream in streams if stream.group != life.group]
    gap_s = max((stream.largest_gap_s for stream in bystanders), default=0.0)
    stage.see(f"{gap_s:.2f} s on the other group")


def _has_ranks(stage: Stage) -> bool:
    stage.outcome.was_run = stage.cluster.settings["engine"]["tensor_parallel_size"] > 1
    if not stage.outcome.was_run:
        stage.see("a group of one rank has no process for it")
    return stage.outcome.was_run


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
