"""The simulator beside the real cluster: what it says of the very requests that were served.

Each run's requests, with the times at which they were really sent, are replayed with the same
policy, number of groups and gateways, cache and step budget; what a step costs was fitted to
`quire bench step` on the same machine. A few prompts that each run sent before its load, one after
the other, say two things that steps do not: how many times as slow the machine was in that run,
and what the way through client, gateway and back adds.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby
from pathlib import Path
from statistics import median

import numpy as np
from bench.serving.case import SERVE, Case, case_of
from bench.serving.figures import WARM_UP
from bench.serving.runs import Record, Runs

from quire.router.simulate.cost import CostModel
from quire.router.simulate.fit import fit_cost
from quire.router.simulate.group import EngineConfig
from quire.router.simulate.result import Result
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace_files import load_trace
from quire.worker.config import EngineConfig as WorkerConfig
from quire.worker.errors import ConfigError

_NAMES = ("hit_rate", "ttft_mean_s", "ttft_p50_s", "ttft_p90_s")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One run: measured and predicted figures by name."""

    case: Case
    slower: float
    """Times that prompts took as long a token as `quire bench step` says."""
    path_s: float
    """From client to group and back, beside the step."""
    measured: dict[str, float]
    predicted: dict[str, float]


def validation(runs: Runs, *, fit: Sequence[Path]) -> Iterator[str]:
    """Markdown. Raises ConfigError: there is no fit, or nothing to replay."""
    if not fit:
        raise ConfigError("fit: give the JSON of `quire bench step` on this machine: --fit FILE")
    pairs = [
        _pair(record, runs.trace_folder / record["trace"], fit)
        for record in runs.records
        if _can_be_simulated(case_of(record["case"])) and "hit_rate" in record["values"]
    ]
    if not pairs:
        raise ConfigError("nothing was run yet that could be replayed")
    pairs.sort(key=lambda pair: pair.case.title)
    for title, group in groupby(pairs, key=lambda pair: pair.case.title):
        yield from _table(title, list(group))


def _can_be_simulated(case: Case) -> bool:
    """The simulator's gateways always have a directory, and ask for each event that they miss."""
    return case.policy != SERVE and case.use_directory and not case.lose_events


def _pair(record: Record, trace_file: Path, fit: Sequence[Path]) -> Pair:
    case = case_of(record["case"])
    cost = fit_cost(list(fit), num_cache_tokens=case.num_blocks * WorkerConfig.block_size)
    slower, path_s = _calibrated(cost, record["probes"])
    block_size = WorkerConfig.block_size
    trace = load_trace(trace_file, format="log", block_size=block_size)
    result = simulate(
        trace,
        SimulationConfig(
            num_groups=case.num_groups,
            num_gateways=case.num_gateways,
            policy=case.policy,
            cost=cost.slowed(slower),
            engine=EngineConfig(
                chunk_tokens=case.max_num_batched_tokens, max_num_seqs=case.max_num_seqs
            ),
            eviction="utility",
            event_loss=case.lose_batches,
            use_table=True,
        ),
    )
    return Pair(
        case=case,
        slower=slower,
        path_s=path_s,
        measured=record["values"],
        predicted=_figures(result, path_s=path_s),
    )


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


def _table(title: str, pairs: Sequence[Pair]) -> Iterator[str]:
    by_label: dict[str, list[Pair]] = {}
    for pair in pairs:
        by_label.setdefault(pair.case.label, []).append(pair)
    measured, predicted = (
        {
            label: {name: median(getattr(p, side)[name] for p in mine) for name in _NAMES}
            for label, mine in by_label.items()
        }
        for side in ("measured", "predicted")
    )
    yield f"## {title}\n"
    yield "predicted / measured; times to first token in ms\n"
    yield "| policy | runs | slower | path | hits | mean | p50 | p90 | mean, predicted ÷ measured |"
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for label, mine in by_label.items():
        ours, theirs = predicted[label], measured[label]
        times = [f"{1000 * ours[name]:.1f} / {1000 * theirs[name]:.1f}" for name in _NAMES[1:]]
        yield (
            f"| {label} | {len(mine)} | {median(p.slower for p in mine):.2f} | "
            f"{1000 * median(p.path_s for p in mine):.1f} | "
            f"{ours['hit_rate']:.1%} / {theirs['hit_rate']:.1%} | {' | '.join(times)}"
            + f" | {ours['ttft_mean_s'] / theirs['ttft_mean_s']:.2f} |"
        )
    yield ""
    yield from _agreement(measured, predicted)


def _agreement(
    measured: dict[str, dict[str, float]], predicted: dict[str, dict[str, float]]
) -> Iterator[str]:
    labels = list(measured)
    if len(labels) < 2:
        return
    gap = np.mean([abs(predicted[x]["hit_rate"] - measured[x]["hit_rate"]) for x in labels])
    yield f"Hit rates differ by {100 * gap:.1f} points on average."
    for name, what in (("hit_rate", "hit rate"), ("ttft_mean_s", "mean TTFT")):
        alike = [
            (measured[a][name] < measured[b][name]) == (predicted[a][name] < predicted[b][name])
            for a, b in combinations(labels, 2)
        ]
        yield f"By {what}, {sum(alike)} of {len(alike)} pairs of lines are in the same order."
    ratios = [
        (predicted[a]["ttft_mean_s"] / predicted[b]["ttft_mean_s"])
        / (measured[a]["ttft_mean_s"] / measured[b]["ttft_mean_s"])
        for a, b in combinations(labels, 2)
    ]
    off = float(np.exp(np.mean(np.abs(np.log(ratios)))))
    yield f"The ratio of two lines' mean TTFT is predicted to a factor of {off:.2f} on average.\n"
