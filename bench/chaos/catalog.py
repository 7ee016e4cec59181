"""The faults, in the order in which they happen, and what is promised of each."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.chaos import ends, losses, rollouts
from bench.chaos.stage import Stage
from bench.chaos.verdicts import Outcome


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    promise: str
    run: Callable[[Stage], Outcome]
    """Returns when the cluster is whole and idle again."""


_FREE = f"both gateways' KV gauges are 0 {ends.FREE_WITHIN_S:g} s after the last of them at most"

FAULTS = {
    "replica-killed": Fault(
        what="group: SIGKILL of the replica",
        promise="all exact; no gap 1 s above recompute",
        run=losses.replica_killed,
    ),
    "rank-killed": Fault(
        what="group: SIGKILL of a rank",
        promise="all exact; no gap 1 s above recompute",
        run=losses.rank_killed,
    ),
    "rank-stopped": Fault(
        what="group: SIGSTOP of a rank",
        promise="all exact; no gap 1 s above step deadline and recompute",
        run=losses.rank_stopped,
    ),
    "group-stopped": Fault(
        what="group: SIGSTOP of replica and ranks, later SIGCONT",
        promise="all exact; no gap 1 s above silence timeout and recompute",
        run=losses.group_stopped,
    ),
    "node-killed": Fault(
        what="every process of a group's node: SIGKILL; later the node is back",
        promise="all exact; no gap 1 s above recompute",
        run=losses.node_killed,
    ),
    "partition": Fault(
        what="a gateway and a group cut off from each other for 8 s, then healed",
        promise="all exact; nothing twice behind the heal; blocks free",
        run=losses.partitioned,
    ),
    "disk-full": Fault(
        what="disk full under a group's logs and temporary files",
        promise="all exact",
        run=losses.disk_filled,
    ),
    "poison": Fault(
        what="a request that kills each group that takes it",
        promise="3 groups die at most, the request is refused, the others are exact",
        run=losses.poisoned,
    ),
    "gateway-killed": Fault(
        what="one of two gateways: SIGKILL",
        promise="the other serves; clients of the dead one get an error, never a false end",
        run=ends.gateway_killed,
    ),
    "gateway-stopped": Fault(
        what="a gateway: SIGSTOP for 8 s, then SIGCONT",
        promise="all exact; the groups' blocks are free",
        run=ends.gateway_stopped,
    ),
    "cancel": Fault(
        what="clients cancel",
        promise=_FREE,
        run=ends.clients_cancel,
    ),
    "disconnect": Fault(
        what="clients are killed, connections and all",
        promise=_FREE,
        run=ends.clients_disconnect,
    ),
    "deadline": Fault(
        what="clients' deadlines pass",
        promise=_FREE,
        run=ends.deadlines_pass,
    ),
    "upgrade": Fault(
        what="rolling upgrade of every group and gateway under load",
        promise="no stream fails",
        run=rollouts.upgraded,
    ),
    "scale-down": Fault(
        what="from two groups to one, under load",
        promise="no stream fails",
        run=rollouts.scaled_down,
    ),
    "overload": Fault(
        what="three times the load that can be served, open loop",
        promise="p99 TTFT of what is accepted within 2 × that at capacity; the rest refused at "
        "once; nothing lost",
        run=rollouts.overloaded,
    ),
    "kv-exhausted": Fault(
        what="a cache far smaller than what the requests need",
        promise="all complete, all exact",
        run=rollouts.cache_exhausted,
    ),
    "feed-lost": Fault(
        what="gateways miss a fifth of the groups' cache messages and of the events in the rest, "
        "get a tenth twice and a tenth out of order; a group is killed",
        promise="all exact; the hit rate recovers, and gateways know of what is found; idle, the "
        "directories are exact 5 s later",
        run=rollouts.feed_lost,
    ),
    "head-killed": Fault(
        what="Ray's head killed, later another in its place",
        promise="all exact, new ones too; the groups are kept",
        run=losses.head_killed,
    ),
    "all-groups-killed": Fault(  # The last one: it leaves three groups.
        what="all groups, now three, in the same moment: SIGKILL of the replicas",
        promise="all exact once groups are back; nobody is blamed",
        run=losses.all_groups_killed,
    ),
}
