"""The autoscaling policy on a trace with bursts, on a virtual clock; beside it, fixed numbers.

    python -m bench.autoscale [--trace FILE] [--rate R ...] [--minutes M] [--start-s S]
                              [--target-ttft-s T] [--max-groups N] [--plot FILE]

Groups are the simulator's, with its costs of an 8B model on an H100 (`bench.autoscale_replay`).
Requests of the trace arrive ``--rate`` times as fast, a rate for each equal part of the replay. A
new group takes ``--start-s`` to start.

Groups that the policy never has at once do not help: the fixed numbers to compare with are what
it used on average and its maximum.
"""

import argparse
from math import ceil
from pathlib import Path

from bench.autoscale_replay import Replay, at_rates

from quire.cluster.scaling.settings import AutoscalingSettings
from quire.simulate.trace_files import load_trace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    default = Path("../shared/data/traces/mooncake_conversation_trace.jsonl")
    add("--trace", type=Path, default=default)
    add("--rate", type=float, nargs="+", default=[0.5, 3.0, 0.5, 0.0, 2.0, 0.3])
    add("--minutes", type=float, default=60)
    add("--start-s", type=float, default=45, help="for a group to start")
    add("--max-groups", type=int, default=12)

    add("--target-ttft-s", type=float, default=2)
    add("--min-groups", type=int, default=1)
    add("--plot", type=Path, help="a PNG of groups and load over time")
    arguments = parser.parse_args()
    trace = at_rates(load_trace(arguments.trace), arguments.rate, minutes=arguments.minutes)
    settings = AutoscalingSettings(
        min_groups=arguments.min_groups,
        max_groups=arguments.max_groups,
        target_ttft_s=arguments.target_ttft_s,
    )
    start_ms = 1000 * arguments.start_s
    replay = Replay(trace, settings, start_ms=start_ms)
    replay.run()
    part_s = 60 * arguments.minutes / len(arguments.rate)
    print(f"{trace.name}: {len(trace)} requests in {arguments.minutes:g} min")
    print("from     rate  groups: at each change")
    for number, rate in enumerate(arguments.rate):
        begin, end = number * part_s, (number + 1) * part_s
        changes = [(t, n, why) for t, n, why in replay.changes if begin <= t < end]
        shown = "  ".join(f"+{t - begin:.1f}s {n} ({why})" for t, n, why in changes)
        print(f"{begin:6.0f}s {rate:5.2f}  {shown}")
        ups = [t - begin for (t, n, _), (_, before, _) in replay.steps() if begin <= t < end
               and n > before]  # fmt: skip
        if number and rate > arguments.rate[number - 1] and ups:
            print(f"         burst to decision: {ups[0]:.1f} s")
    print(f"\n{'':10} {'group hours':>12} {'TTFT <= target':>15} {'p50':>7} {'p90':>7} {'p99':>7}")
    print(row("policy", replay, arguments.target_ttft_s))
    mean = ceil(replay.group_ms / (60_000 * arguments.minutes))
    for number in sorted({mean, max(n for _, n, _ in replay.changes), arguments.max_groups}):
        fixed = Replay(trace, settings, start_ms=start_ms, fixed=number)
        fixed.run()
        print(row(f"{number} always", fixed, arguments.target_ttft_s))
    if arguments.plot is not None:
        plot(replay, arguments.plot)


def row(name: str, replay: Replay, target_s: float) -> str:
    ttft_s = sorted(ms / 1000 for ms in replay.ttft_ms)
    within = sum(each <= target_s for each in ttft_s) / len(ttft_s)
    p50, p90, p99 = (ttft_s[int(share * len(ttft_s))] for share in (0.5, 0.9, 0.99))
    hours = replay.group_ms / 3_600_000
    return f"{name:10} {hours:12.2f} {within:15.1%} {p50:7.2f} {p90:7.2f} {p99:7.2f}"


def plot(replay: Replay, path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 4))
    axes.step(*zip(*((t, n) for t, n, _ in replay.changes), strict=True), where="post")
    axes.set_xlabel("s")
    axes.set_ylabel("groups")
    tokens = axes.twinx()
    tokens.plot(*zip(*replay.pending, strict=True), color="tab:gray", linewidth=0.6)
    tokens.set_ylabel("prompt tokens waiting")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
