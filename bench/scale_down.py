"""Which group should go: each choice at each scale-down of a replay, and what came of it.

    python -m bench.scale_down [--trace FILE] [--rate R ...] [--minutes M] [--after-s S]

The replay is that of `bench.autoscale`. Whenever the policy lets a running group go, the replay is
copied as often as there are groups that could have gone; in each copy another one goes, the number
of groups then stays, and the same requests come for ``--after-s``. Compared are rules of choosing:
*worth* is the policy's own, *oldest* is what Ray Serve does where each group has a node of its own,
*newest* what it does where all are on one; *any* is the mean of all choices, *best* and *worst* are
known only afterwards.

*Computed* are prompt tokens that no cache knew, of all groups, from the scale-down on.
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.autoscale import add_load_flags
from bench.autoscale_replay import Elastic, Replay, at_rates

from quire.cluster.autoscaling.settings import AutoscalingSettings
from quire.router.simulate.trace_files import load_trace


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_load_flags(parser)
    parser.add_argument("--after-s", type=float, default=120)
    arguments = parser.parse_args()
    trace = at_rates(load_trace(arguments.trace), arguments.rate, minutes=arguments.minutes)
    replay = Forking(
        trace,
        AutoscalingSettings(max_groups=arguments.max_groups),
        start_ms=1000 * arguments.start_s,
        after_ms=1000 * arguments.after_s,
    )
    replay.run()
    print(f"{trace.name}: {len(replay.forks)} times a group went, of "
          f"{fmean(len(fork.outcomes) for fork in replay.forks):.1f} on average")  # fmt: skip
    print(f"\n{'':8} {'computed':>10} {'against any':>12} {'hit rate':>9} {'TTFT mean':>10}")
    rows = compared(replay.forks)
    for name, (computed, asked, ttft_ms) in rows.items():
        print(
            f"{name:8} {computed / 1e6:9.2f}M {computed / rows['any'][0] - 1:12.2%} "
            f"{1 - computed / asked:9.2%} {ttft_ms / 1000:9.3f}s"
        )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    num_computed_tokens: int
    num_asked_tokens: int
    ttft_ms: float
    """Mean, of the requests that came after and began to answer."""


@dataclass(frozen=True, kw_only=True)
class Fork:
    """One scale-down. Groups are in order of their starts."""

    chosen: int
    """By the policy."""
    outcomes: list[Outcome]
    """Of each group that could go, had it gone."""


class Forking(Replay):
    """A replay that also tries what the policy does not choose."""

    def __init__(self, *given: Any, after_ms: float, **named: Any) -> None:
        self.forks: list[Fork] = []
        self._after_ms = after_ms
        super().__init__(*given, **named)

    def _let_go(self, each: Elastic, candidates: list[Elastic]) -> None:
        if each in candidates and len(candidates) > 1:
            outcomes = [self._without(other, candidates) for other in candidates]
            if all(outcome.num_asked_tokens for outcome in outcomes):
                self.forks.append(Fork(chosen=candidates.index(each), outcomes=outcomes))
        super()._let_go(each, candidates)

    def _without(self, going: Elastic, candidates: list[Elastic]) -> Outcome:
        forks, self.forks = self.forks, []
        fork = deepcopy(self, {id(self._trace): self._trace})
        self.forks = forks
        fork._fixed = len(candidates) - 1  # It decides no more.
        Replay._let_go(fork, fork._all[self._all.index(going)], [])
        first, before = fork._next_request, sum(each.num_tokens for each in fork._all)
        fork.run(until_ms=self._now_ms + self._after_ms)
        asked = range(first, fork._next_request)
        begun = [fork.ttft_ms[request] for request in asked if fork.ttft_ms[request] < 1e9]
        return Outcome(
            num_computed_tokens=sum(each.num_tokens for each in fork._all) - before,
            num_asked_tokens=sum(self._trace.num_input[request] for request in asked),
            ttft_ms=fmean(begun) if begun else 0.0,
        )


def compared(forks: Sequence[Fork]) -> dict[str, tuple[float, float, float]]:
    """By rule: tokens computed and asked for in all, and the mean of the times."""
    rules: dict[str, Callable[[Fork], Sequence[int]]] = {
        "worth": lambda fork: [fork.chosen],
        "newest": lambda fork: [len(fork.outcomes) - 1],
        "oldest": lambda fork: [0],
        "any": lambda fork: range(len(fork.outcomes)),
        "best": lambda fork: [_by_computed(fork)[0]],
        "worst": lambda fork: [_by_computed(fork)[-1]],
    }
    rows: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    for fork in forks:
        for name, rule in rules.items():
            outcomes = [fork.outcomes[index] for index in rule(fork)]
            rows[name].append(
                (
                    fmean(each.num_computed_tokens for each in outcomes),
                    fmean(each.num_asked_tokens for each in outcomes),
                    fmean(each.ttft_ms for each in outcomes),
                )
            )
    return {
        name: (sum(row[0] for row in of), sum(row[1] for row in of), fmean(row[2] for row in of))
        for name, of in rows.items()
    }


def _by_computed(fork: Fork) -> list[int]:
    return sorted(
        range(len(fork.outcomes)), key=lambda index: fork.outcomes[index].num_computed_tokens
    )


if __name__ == "__main__":
    main()
