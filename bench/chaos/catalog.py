"""The faults, in the order in which they happen, and what is promised of each."""

from collections.abc import Callable
from dataclasses import dataclass

from bench.chaos import losses
from bench.chaos.stage import Stage
from bench.chaos.verdicts import Outcome


@dataclass(frozen=True, kw_only=True)
class Fault:
    what: str
    promise: str
    run: Callable[[Stage], Outcome]
    """Returns when the cluster is whole and idle again."""


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
    "head-killed": Fault(
        what="Ray's head killed, later another in its place",
        promise="all exact, new ones too; the groups are kept",
        run=losses.head_killed,
    ),
}
