"""Faults of a gateway and of clients: lost connections are reported, and leave nothing behind."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.chaos.stage import Stage, fault, now_s
from bench.chaos.verdicts import check_clean_ends
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
_FREE = f"both gateways' KV gauges are 0 {FREE_WITHIN_S:g} s after the last of them at most"


@fault(
    "gateway-killed",
    "one of two gateways: SIGKILL",
    "the other serves; clients of the dead one get an error, never a false end",
)
def gateway_killed(stage: Stage) -> None:
    """Kills one of two gateways. Its clients know no other."""
    clients = stage.cluster.clients
    half = len(stage.requests) // 2
    requests = stage.salted("gateway")
    dead, alive = stage.cluster.gateways
    loads = clients.load(requests[:half], [dead]), clients.load(requests[half:], [alive])
    for load in loads:
        load.wait_begun()
    stage.strike()
    os.kill(stage.cluster.gateway_pid("front1"), signal.SIGKILL)
    again = stage.send(stage.salted("gateway, again")[:half], [alive])
    stage.see("of the dead gateway")
    check_clean_ends(stage.outcome, loads[0].wait(), stage.reference, codes=CLEAN_CODES)
    stage.see("of the other")
    stage.check_exact(loads[1].wait())
    stage.see("sent there afterwards")
    stage.check_exact(again.wait())


@fault(
    "gateway-stopped",
    "a gateway: SIGSTOP for 8 s, then SIGCONT",
    "all exact; the groups' blocks are free",
)
def gateway_stopped(stage: Stage) -> None:
    """For so long that the groups give up on it, but not Serve. It may not end anything falsely."""
    load = stage.begin("stopped gateway")
    stage.strike()
    pid = stage.cluster.gateway_pid("front1")
    os.kill(pid, signal.SIGSTOP)
    time.sleep(_STOPPED_S)
    os.kill(pid, signal.SIGCONT)
    stage.check_exact(load.wait())


@fault("cancel", "clients cancel", _FREE)
def clients_cancel(stage: Stage) -> None:
    _leave(
        stage,
        [replace(request, cancel_after=_CANCEL_AFTER) for request in stage.salted("cancel")],
        lambda stream: stream.finish == "cancelled",
    )


@fault("disconnect", "clients are killed, connections and all", _FREE)
def clients_disconnect(stage: Stage) -> None:
    """Kills the process that owns all client connections."""
    others = stage.cluster.new_clients()
    load = others.load(stage.salted("disconnect"), stage.cluster.gateways)
    load.wait_begun()
    held = stage.cluster.total("quire_group_held_blocks")
    others.kill(load)
    stage.see(f"{len(stage.requests)} streams that held {held / 2:.0f} blocks")
    _check_free(stage, since_s=now_s())


@fault("deadline", "clients' deadlines pass", _FREE)
def deadlines_pass(stage: Stage) -> None:
    _leave(
        stage,
        [replace(request, deadline_s=_DEADLINE_S) for request in stage.salted("deadline")],
        lambda stream: f"{stream.error}".startswith("DEADLINE_EXCEEDED"),
    )


def _leave(stage: Stage, requests: Sequence[Request], as_meant: Callable[[Stream], bool]) -> None:
    streams = stage.send(requests).wait()
    num_left = sum(map(as_meant, streams))
    stage.see(f"{num_left}/{len(streams)} left as meant")
    stage.check(num_left == len(streams), "the rest ended otherwise")
    wrong = differences(streams, stage.reference)
    stage.check(not wrong, f"{len(wrong)} had other tokens")
    _check_free(stage, since_s=max(stream.ended_s for stream in streams))


def _check_free(stage: Stage, *, since_s: float) -> None:
    """Both gateways' gauges of held blocks are back at 0 soon after the last client left."""
    limit_s = now_s() + 30
    while (held := stage.cluster.total("quire_group_held_blocks")) and now_s() < limit_s:
        time.sleep(_POLL_S)
    seconds = now_s() - since_s
    if held:
        stage.check(False, f"{held / 2:.0f} blocks are held {seconds:.0f} s later")
        return
    stage.see(f"the gauges at 0 {seconds:.2f} s after the last of them")
    stage.check(seconds <= FREE_WITHIN_S, f"blocks were held for {seconds:.2f} s")
