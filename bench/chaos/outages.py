"""Outages: of Ray's head, and of all groups at once. After the last fault, three groups remain."""

import signal

from bench.chaos.losses import send_signal
from bench.chaos.stage import Stage, fault, now_s


@fault(
    "head-killed",
    "Ray's head killed, later another in its place",
    "all exact, new ones too; the groups are kept",
)
def head_killed(stage: Stage) -> None:
    """Every process of the head's host at once; then a head in its place."""
    cluster = stage.cluster
    load = stage.begin("head")
    cluster.network.hosts["head"].power_off()
    stage.check_exact(load.wait())
    again = stage.begin("headless")
    stage.see("then, without a head")
    stage.check_exact(again.wait())
    kept = cluster.lives()
    stage.strike()
    cluster.ray.start_head("head")
    stage.settle()
    stage.check(kept == cluster.lives(), "groups were replaced that had survived")


@fault(
    "all-groups-killed",
    "all groups, now three, in the same moment: SIGKILL of the replicas",
    "all exact once groups are back; nobody is blamed",
)
def all_groups_killed(stage: Stage) -> None:
    """Three groups, in the same moment, and requests that come while there is none. The third group
    stays behind it."""
    cluster = stage.cluster
    cluster.add_group()
    load = stage.begin(f"all {now_s()}")
    resumes = cluster.total("quire_resumes_total")
    lives = cluster.lives()
    stage.strike()
    send_signal([life.pid for life in lives.values()], signal.SIGKILL)
    late = stage.begin(f"late {now_s()}")
    streams = load.wait() + late.wait()
    stage.see(f"{len(lives)} groups killed")
    stage.check_resumed(resumes)
    stage.check_exact(streams)
    gaps_s = sorted(stream.largest_gap_s for stream in streams)
    stage.see(
        f"gaps of {gaps_s[0]:.1f}, {gaps_s[len(gaps_s) // 2]:.1f} and {gaps_s[-1]:.1f} s (least, "
        "median, largest), new groups' start included"
    )
