"""What it costs users if a decision looks at a few groups only, by the simulator.

Looked at are the groups that hold the most of the prompt, those with the least to do, and some at
random; of how busy all are, the policy hears from those at random. Each replica of the trace's part
is for 16 groups, with prompts of its own, so that loads are those of 16 groups. A prototype: it
chooses by going through all groups, which what it stands for would not.
"""

import random
from collections.abc import Iterator, Sequence
from functools import partial
from heapq import nlargest, nsmallest
from math import inf
from pathlib import Path

from quire.router.policies.prefix_aware import PrefixAware
from quire.router.policies.simple import Forgetful
from quire.router.policy import GroupState, Reason, RouteRequest
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace import Row, Trace
from quire.router.simulate.trace_files import block_name, load_trace

TRACES = {
    "conversation": ("mooncake_conversation_trace.jsonl", 11.5, 3000.0),
    "multitenant": ("multitenant_like.jsonl", 20.0, 1000.0),
}
"""The speed at which 16 groups are some 85 % full, and how coarse the clock is in ms."""

NUM_REQUESTS = 30_000
GROUPS_PER_COPY = 16
WARM_UP = 0.2
CANDIDATES = (4, 16)


class Preselected(Forgetful):
    """Our policy over ``num_each`` holders, as many idle groups and as many at random."""

    reason: Reason = "least_loaded"
    reads_steps = True

    def __init__(self, *, num_each: int) -> None:
        self._ours = PrefixAware()
        self._num_each = num_each
        self._chosen: list[int] = []

    def costs(
        self, request: RouteRequest, groups: Sequence[GroupState], hits: Sequence[int]
    ) -> list[float]:
        num_each, everyone = self._num_each, range(len(groups))
        draw = random.Random(request.ordinal)
        sample = draw.sample(everyone, min(num_each, len(groups)))
        holders = nlargest(num_each, (i for i in everyone if hits[i]), key=hits.__getitem__)
        idle = nsmallest(num_each, everyone, key=[_work(state) for state in groups].__getitem__)
        self._chosen = chosen = sorted({*sample, *holders, *idle})
        costs = self._ours.costs(request, [groups[i] for i in chosen], [hits[i] for i in chosen])
        all_costs = [inf] * len(groups)
        for index, cost in zip(chosen, costs, strict=True):
            all_costs[index] = cost
        return all_costs

    def second_home(
        self,
        request: RouteRequest,
        groups: Sequence[GroupState],
        hits: Sequence[int],
        home: int,
        num_coming: int,
    ) -> int:
        chosen = self._chosen
        few, few_hits = [groups[i] for i in chosen], [hits[i] for i in chosen]
        index = self._ours.second_home(request, few, few_hits, chosen.index(home), num_coming)
        return chosen[index]


def measure(folder: Path, *, group_counts: Sequence[int]) -> Iterator[dict[str, float | str]]:
    """The full scan first."""
    for num_groups in group_counts:
        for name, (file, speed, coarse_ms) in TRACES.items():
            part = load_trace(folder / file)
            num_copies = max(num_groups // GROUPS_PER_COPY, 1)
            part = part.first(min(NUM_REQUESTS // num_copies, len(part)))
            trace = _copies(part, num_copies).spread(seed=0, within_ms=coarse_ms).at_speed(speed)
            for num_each in (0, *CANDIDATES):
                result = simulate(
                    trace,
                    SimulationConfig(num_groups=num_groups),
                    make_policy=partial(Preselected, num_each=num_each) if num_each else None,
                ).after(WARM_UP)
                yield {
                    "trace": name,
                    "num_groups": num_groups,
                    "num_each": num_each,
                    "num_requests": len(trace),
                    "mean_s": float(result.ttft_s.mean()),
                    "p99_s": result.ttft_quantile_s(0.99),
                    "hit_rate": result.hit_rate,
                    "balance": result.balance,
                }


def _copies(trace: Trace, num_copies: int) -> Trace:
    names = {
        block: [block, *(block_name((block, copy)) for copy in range(1, num_copies))]
        for block in {block for chain in trace.chains for block in chain}
    }
    rows: list[Row] = [
        row._replace(chain=tuple(names[block][copy] for block in row.chain))
        for row in trace.rows
        for copy in range(num_copies)
    ]
    return Trace.of(rows, name=trace.name, block_size=trace.block_size)


def _work(state: GroupState) -> int:
    return state.num_queued_tokens + 32 * state.num_requests
