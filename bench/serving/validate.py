"""The simulator beside the real cluster: what it says of the very requests that were served.

Each run's requests, with the times at which they were really sent, are replayed with the same
policy, admission, number of groups and gateways, cache and step budget. Where several groups would
do, a cold prefix goes by the groups' names, which Serve draws, and the path adds a millisecond more
or less: a run is one draw of many. So is a replay: of several, with other names and with arrivals
put off by up to 2 ms, the median of each figure is what is predicted.

What a step costs comes from one of two places:

    timed runs   the steps that they kept (`bench.serving.steps`), and the way of their requests
                 (`bench.serving.way`): first of the run itself, which are measured in the very
                 conditions of what is predicted; then of all other rounds, which know nothing of
                 the run and little of what else the machine did then
    --fit        `quire bench step` on the same machine, and the few prompts that each run sent
                 before its load, one after the other: how many times as slow the machine was in
                 that run, and what the way through client, gateway and back adds
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from statistics import median

import numpy as np
from bench.serving.admitted import admitted
from bench.serving.agreement import NAMES, Pair, table
from bench.serving.case import SERVE, Case, case_of
from bench.serving.figures import WARM_UP
from bench.serving.runs import Record, Runs
from bench.serving.steps import fit_steps
from bench.serving.timed import Line, read_lines
from bench.serving.way import mean_path_s

from quire.router.simulate.cost import CostModel
from quire.router.simulate.engine_config import EngineConfig, Order
from quire.router.simulate.fit import fit_cost
from quire.router.simulate.result import Result
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace import Trace
from quire.router.simulate.trace_files import block_name, load_trace
from quire.worker.config import EngineConfig as WorkerConfig
from quire.worker.errors import ConfigError

_NUM_DRAWS = 9
_LATE_MS = 2.0


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a simulation is told of the machine."""

    cost: CostModel
    contention: float
    path_s: float
    """From client to group and back, beside all that waits and computes."""
    slower: float = 1.0
    """Times that prompts took as long a token as `quire bench step` says."""
    origin: str = ""
    """In a few sentences."""


def validation(runs: Runs, *, fit: Sequence[Path]) -> Iterator[str]:
    """Markdown. Raises ConfigError: there is nothing to fit to, or nothing to replay."""
    records = [
        record
        for record in runs.records
        if _can_be_simulated(case_of(record["case"])) and "hit_rate" in record["values"]
    ]
    if not records:
        raise ConfigError("nothing was run yet that could be replayed")
    records.sort(key=lambda record: case_of(record["case"]).title)
    for title, group in groupby(records, key=lambda record: case_of(record["case"]).title):
        mine = list(group)
        timed = [_Timed.of(runs, record) for record in mine if record.get("times")]
        yield f"## {title}\n"
        if fit:
            each = [_from_bench_step(record, fit) for record in mine]
            pairs = [_pair(runs, record, costs) for record, costs in zip(mine, each, strict=True)]
            yield (
                f"A prompt's token took {median(costs.slower for costs in each):.2f} times as long "
                "as `quire bench step` says, and the path adds "
                f"{1000 * median(costs.path_s for costs in each):.1f} ms: medians of the runs.\n"
            )
            yield from table(pairs)
        elif timed:
            yield from _of_timed(runs, mine, timed)
        else:
            raise ConfigError(
                f"{title}: there are no step costs: give --fit FILE with the JSON of "
                "`quire bench step` on this machine, or run a round with --timed"
            )


def _of_timed(runs: Runs, records: Sequence[Record], timed: Sequence["_Timed"]) -> Iterator[str]:
    yield "**Costs from each run's own steps.** " + _costs_of(timed).origin + "\n"
    yield from table([_pair(runs, each.record, _costs_of([each])) for each in timed])
    yield from _without(runs, timed)
    pairs = []
    for record in records:
        others = [each for each in timed if each.record["round"] != record["round"]]
        if others:
            pairs.append(_pair(runs, record, _costs_of(others)))
    if pairs:
        yield "**Costs from the steps of the other rounds' runs.**\n"
        yield from table(pairs)


def _without(runs: Runs, timed: Sequence["_Timed"]) -> Iterator[str]:
    """What each part of the model is worth: predictions that lack it."""
    yield "Mean TTFT, predicted ÷ measured, of a simulation without one of its parts:\n"
    yield "| policy | round | whole | no contention | no admission | no path | first come first |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for each in timed:
        costs = _costs_of([each])
        pairs = [
            _pair(runs, each.record, costs),
            _pair(runs, each.record, replace(costs, contention=0.0)),
            _pair(runs, each.record, costs, has_gate=False),
            _pair(runs, each.record, replace(costs, path_s=0.0)),
            _pair(runs, each.record, costs, order="fcfs"),
        ]
        cells = [f"{p.predicted['ttft_mean_s'] / p.measured['ttft_mean_s']:.2f}" for p in pairs]
        yield f"| {pairs[0].label} | {pairs[0].round} | {' | '.join(cells)} |"
    yield ""


def _can_be_simulated(case: Case) -> bool:
    """The simulator's gateways always have a directory and a step clock, and ask for each event
    that they miss."""
    return (
        case.policy != SERVE and case.use_directory and case.use_step_clock and not case.lose_events
    )


@dataclass(frozen=True, kw_only=True)
class _Timed:
    record: Record
    lines: Sequence[Line]

    @classmethod
    def of(cls, runs: Runs, record: Record) -> "_Timed":
        return cls(record=record, lines=read_lines(runs.trace_folder / record["times"]))


def _costs_of(timed: Sequence[_Timed]) -> Costs:
    case = case_of(timed[0].record["case"])
    lines = [each.lines for each in timed]
    fit = fit_steps(lines, num_cache_tokens=case.num_blocks * WorkerConfig.block_size)
    path_s = mean_path_s([each.record["rows"] for each in timed], lines)
    cost = fit.cost
    return Costs(
        cost=cost,
        contention=fit.contention,
        path_s=path_s,
        origin=(
            f"{fit.num_steps} steps of {len(timed)} runs together: a prefill takes "
            f"{cost.base:.1f} ms, {1000 * cost.per_token:.0f} µs a token and "
            f"{1e6 * cost.per_context:.0f} ns for each token that it attends to, decodes "
            f"{cost.decode_base:.1f} ms and {1e6 * cost.decode_linear / cost.num_cache_tokens:.0f} "
            f"ns a token that they attend to, and all of it {fit.contention:.0%} more for each "
            f"other group that computes. That explains {fit.explained:.0%} of the variance; a "
            f"step's thread had a core for {fit.on_cpu:.0%} of the time. The path adds "
            f"{1000 * path_s:.1f} ms."
        ),
    )


def _from_bench_step(record: Record, fit: Sequence[Path]) -> Costs:
    case = case_of(record["case"])
    cost = fit_cost(list(fit), num_cache_tokens=case.num_blocks * WorkerConfig.block_size)
    slower, path_s = _calibrated(cost, record["probes"])
    return Costs(cost=cost.slowed(slower), contention=0.0, path_s=path_s, slower=slower)


def _pair(
    runs: Runs, record: Record, costs: Costs, *, order: Order = "srpf", has_gate: bool = True
) -> Pair:
    case = case_of(record["case"])
    trace = load_trace(
        runs.trace_folder / record["trace"], format="log", block_size=WorkerConfig.block_size
    )
    config = SimulationConfig(
        num_groups=case.num_groups,
        num_gateways=case.num_gateways,
        policy=case.policy,
        cost=costs.cost,
        contention=costs.contention,
        engine=EngineConfig(
            chunk_tokens=case.max_num_batched_tokens,
            max_num_seqs=case.max_num_seqs,
            order=order,
        ),
        eviction="utility",
        event_loss=case.lose_batches,
        use_table=True,
    )
    make_gate = admitted(case) if has_gate else None
    return Pair(
        label=case.label,
        round=record["round"],
        measured={name: record["values"][name] for name in NAMES},
        draws=[
            _figures(
                simulate(drawn(trace, seed), replace(config, seed=seed), make_gate=make_gate),
                path_s=costs.path_s,
            )
            for seed in range(_NUM_DRAWS)
        ],
    )


def drawn(trace: Trace, seed: int) -> Trace:
    """The same requests with other names for their blocks, some of them a moment later."""
    rows = [
        row._replace(chain=tuple(block_name((seed, name)) for name in row.chain))
        for row in trace.spread(seed=seed, within_ms=_LATE_MS).rows
    ]
    return Trace.of(rows, name=trace.name, block_size=trace.block_size)


def _calibrated(cost: CostModel, probes: Sequence[Sequence[float]]) -> tuple[float, float]:
    """How many times slower the run was, and what the path took, by the line through the probes'
    best times: what disturbed one of them is no property of the cluster."""
    best: dict[float, float] = {}
    for num_tokens, ttft_s in probes:
        best[num_tokens] = min(ttft_s, best.get(num_tokens, ttft_s))
    if len(best) < 2:
        raise ConfigError(f"{len(best)} probes were answered: 2 of different lengths are needed")
    per_token_s, base_s = np.polyfit(list(best), list(best.values()), 1).tolist()
    slower = max(1000 * per_token_s / cost.per_token, 0.1)
    return slower, max(base_s - slower * cost.base / 1000, 0.0)


def _figures(result: Result, *, path_s: float) -> dict[str, float]:
    counted = result.after(WARM_UP)
    return {
        "hit_rate": counted.hit_rate,
        "ttft_mean_s": float(counted.ttft_s.mean()) + path_s,
        "ttft_p50_s": counted.ttft_quantile_s(0.5) + path_s,
        "ttft_p90_s": counted.ttft_quantile_s(0.9) + path_s,
    }
