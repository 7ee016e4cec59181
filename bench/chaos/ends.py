"""Faults of a gateway and of clients: who loses a connection is told, and leaves nothing behind."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.chaos.clients import Clients
from bench.chaos.stage import Stage, now_s
from bench.chaos.verdicts import Outcome, check_clean_ends, check_exact
from bench.serving.load import Request, Stream, differences

CLEAN_CODES = ("UNAVAILABLE", "CANCELLED")
"""Status details of gRPC's own clients for a broken connection."""
FREE_WITHIN_S = 1.0
"""Seconds from the last client's end: time for a busy machine to step, send a frame and answer."""
_CANCEL_AFTER = 10
_DEADLINE_S = 1.5
_POLL_S = 0.02
_STOPPED_S = 8.0
"""Groups wait three times the silence timeout, which is 2; Serve's health check takes 10."""


def gateway_killed(stage: Stage) -> Outcome:
    """One of two. Its clients have no other."""
    outcome = Outcome()
    cluster = stage.cluster
    half = len(stage.requests) // 2
    requests = stage.salted("gateway")
    dead, alive = cluster.gateways
    loads = [
        cluster.clients.load(requests[:half], [dead]),
        cluster.clients.load(requests[half:], [alive]),
    ]
    for load in loads:
        load.wait_begun()
    at_s = now_s()
    os.kill(cluster.gateway_pid("front1"), signal.SIGKILL)
    again = cluster.clients.load(stage.salted("gateway, again")[:half], [alive])
    outcome.seen.append("of the dead gateway")
    check_clean_ends(outcome, loads[0].wait(), stage.reference, codes=CLEAN_CODES)
    outcome.seen.append("of the other")
    check_exact(outcome, loads[1].wait(), stage.reference)
    outcome.seen.append("sent there afterwards")
    again.wait_begun()
    check_exact(outcome, again.wait(), stage.reference)
    stage.settle(outcome, since_s=at_s)
    return outcome


def gateway_stopped(stage: Stage) -> Outcome:
    """For so long that the groups give up on it, but not Serve. It may not end anything falsely."""
    outcome = Outcome()
    cluster = stage.cluster
    load = stage.begin("stopped gateway")
    at_s = now_s()
    pid = cluster.gateway_pid("front1")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_STOPPED_S)
    os.kill(pid, signal.SIGCONT)
    check_exact(outcome, load.wait(), stage.reference)
    stage.settle(outcome, since_s=at_s)
    return outcome


def clients_cancel(stage: Stage) -> Outcome:
    return _leave(
        stage,
        [replace(request, cancel_after=_CANCEL_AFTER) for request in stage.salted("cancel")],
        lambda stream: stream.finish == "cancelled",
    )


def deadlines_pass(stage: Stage) -> Outcome:
    return _leave(
        stage,
        [replace(request, deadline_s=_DEADLINE_S) for request in stage.salted("deadline")],
        lambda stream: f"{stream.error}".startswith("DEADLINE_EXCEEDED"),
    )


def clients_disconnect(stage: Stage) -> Outcome:
    """The process that all connections belong to is killed."""
    outcome = Outcome()
    cluster = stage.cluster
    others: Clients = cluster.new_clients()
    others.load(stage.salted("disconnect"), cluster.gateways).wait_begun()
    held = cluster.total("quire_group_held_blocks")
    others.kill()
    outcome.seen.append(f"{len(stage.requests)} streams that held {held / 2:.0f} blocks")
    _check_free(outcome, stage, since_s=now_s())
    return outcome


def _leave(
    stage: Stage, requests: Sequence[Request], as_meant: Callable[[Stream], bool]
) -> Outcome:
    outcome = Outcome()
    cluster = stage.cluster
    load = cluster.clients.load(requests, cluster.gateways)
    load.wait_begun()
    streams = load.wait()
    num_left = sum(map(as_meant, streams))
    outcome.seen.append(f"{num_left}/{len(streams)} left as meant")
    outcome.check(num_left == len(streams), "the rest ended otherwise")
    wrong = differences(streams, stage.reference)
    outcome.check(not wrong, f"{len(wrong)} had other tokens")
    _check_free(outcome, stage, since_s=max(stream.ended_s for stream in streams))
    return outcome


def _check_free(outcome: Outcome, stage: Stage, *, since_s: float) -> None:
    """Both gateways' gauges of held blocks are back at 0 soon after the last client left."""
    limit_s = now_s() + 30
    while (held := stage.cluster.total("quire_group_held_blocks")) and now_s() < limit_s:
        time.sleep(_POLL_S)
    seconds = now_s() - since_s
    if held:
        outcome.check(False, f"{held / 2:.0f} blocks are held {seconds:.0f} s later")
        return
    outcome.seen.append(f"the gauges at 0 {seconds:.2f} s after the last of them")
    outcome.check(seconds <= FREE_WITHIN_S, f"blocks were held for {seconds:.2f} s")
