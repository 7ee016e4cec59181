"""Routing policies beside each other on traces: times to first token, capacity, what goes wrong.

    python -m bench.routing --data FOLDER [--trace NAME ...] [--groups N ...] [--load SHARE ...]
                            [--part latency capacity robust] [--seeds N] [--state FILE]

Simulated with the costs of an 8B model on an H100 and 1M tokens of KV cache per group. Other
systems' policies run on engines that serve first come first served and evict the least recently
used; so does ``ours, policy only``. ``ours`` adds what our engine adds: the least remaining
prefill first, and eviction by utility. The first tenth of the requests warms caches up and is not
counted.

A *load* is a share of the capacity of Dynamo's default: the fastest replay at which 99 % of
requests wait no longer than the trace's target. More than 16 groups serve copies of the trace that
share nothing. Each cell is written to the state file when it is done, and not computed again: to
stop and go on is to run the same command again. ``--report`` only prints what is there.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from quire.router.simulate.capacity import find_capacity
from quire.router.simulate.group import EngineConfig
from quire.router.simulate.result import Result
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.trace import Row, Trace
from quire.router.simulate.trace_files import block_name, load_trace
from quire.worker.hashing import BlockHash

OURS, OURS_POLICY, DYNAMO = "ours", "ours, policy only", "dynamo"
BASELINES = (
    *("round_robin", "least_loaded", "power_of_two", "bounded_hash", "sglang", "sglang_events"),
    *("ray_prefix", "llmd", "preble", "mooncake", DYNAMO, "dynamo_20"),
)
LOADS = (0.6, 0.78, 0.85, 0.92, 0.95)
WARM_UP = 0.1


class Source(NamedTuple):
    file: str
    target_s: float
    """For the 99th percentile of TTFT."""
    spread_ms: float
    """How coarse its clock is: seeds differ in where in between a request arrives."""


SOURCES = {
    "conversation": Source("mooncake_conversation_trace.jsonl", 3.0, 3000.0),
    "multitenant": Source("multitenant_like.jsonl", 0.5, 1000.0),
    "azure": Source("AzureLLMInferenceTrace_conv_2023.csv", 0.5, 1000.0),
}
DISTURBANCES: dict[str, dict[str, float]] = {
    "none": {},
    "10 s lag": {"event_lag_ms": 10_000.0},
    "10 % lost": {"event_loss": 0.1},
    "a fourth 3x slower": {"slow_factor": 3.0},
    "4 gateways": {"num_gateways": 4},
}


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What one run of the simulator is asked for; ``load`` 0 asks for the capacity."""

    trace: str
    num_groups: int
    load: float
    policy: str
    disturbance: str = "none"
    seed: int = 0

    @property
    def key(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)


class Bench:
    """Cells by key, kept in a file."""

    def __init__(self, *, data: Path, state: Path) -> None:
        self._data = data
        self._state = state
        self._last: tuple[tuple[str, int, int], Trace] | None = None
        self.cells: dict[str, dict[str, float]] = {}
        if state.exists():
            for line in state.read_text().splitlines():
                cell = json.loads(line)
                self.cells[cell["key"]] = cell["values"]

    def run(self, cell: Cell) -> dict[str, float]:
        """The cell's values, computed now if they were not before."""
        if cell.key not in self.cells:
            began_s = time.process_time()
            values = self._capacity(cell) if not cell.load else self._latency(cell)
            values["cpu_s"] = time.process_time() - began_s
            self.cells[cell.key] = values
            with self._state.open("a") as file:
                file.write(json.dumps({"key": cell.key, "values": values}) + "\n")
            print(_progress(cell, values), flush=True)
        return self.cells[cell.key]

    def _latency(self, cell: Cell) -> dict[str, float]:
        reference = replace(cell, load=0.0, policy=DYNAMO, disturbance="none", seed=0)
        speed = cell.load * self.run(reference)["speed"]
        trace = self._trace(cell.trace, cell.num_groups, cell.seed)
        return _values(simulate(trace.at_speed(speed), _config(cell)), speed)

    def _capacity(self, cell: Cell) -> dict[str, float]:
        trace = self._trace(cell.trace, cell.num_groups, cell.seed)

        def replay(speed: float) -> Result:
            return simulate(trace.at_speed(speed), _config(cell)).after(WARM_UP)

        speed, result = find_capacity(replay, target_s=SOURCES[cell.trace].target_s)
        return {"speed": speed} if result is None else _values(result, speed, warm_up=0.0)

    def _trace(self, name: str, num_groups: int, seed: int) -> Trace:
        key = name, max(num_groups // 16, 1), seed
        if self._last is None or self._last[0] != key:
            self._last = key, self._load_trace(*key)
        return self._last[1]

    def _load_trace(self, name: str, num_copies: int, seed: int) -> Trace:
        source = SOURCES[name]
        trace = load_trace(self._data / "traces" / source.file)
        rows = [_copied(row, copy) for row in trace.rows for copy in range(num_copies)]
        trace = Trace.of(rows, name=name, block_size=trace.block_size)
        return trace.spread(seed=seed, within_ms=source.spread_ms)


def _config(cell: Cell) -> SimulationConfig:
    config = SimulationConfig(
        num_groups=cell.num_groups,
        policy="prefix_aware" if cell.policy in (OURS, OURS_POLICY) else cell.policy,
        seed=cell.seed,
    )
    config = replace(config, **DISTURBANCES[cell.disturbance])  # type: ignore[arg-type]
    if cell.policy == OURS:
        config = replace(config, engine=EngineConfig(order="srpf"), eviction="utility")
    return config


def _values(result: Result, speed: float, *, warm_up: float = WARM_UP) -> dict[str, float]:
    counted = result.after(warm_up)
    return {
        "speed": speed,
        "mean": float(counted.ttft_s.mean()),
        "p90": counted.ttft_quantile_s(0.9),
        "p99": counted.ttft_quantile_s(0.99),
        "cold_mean": float(result.ttft_s.mean()),
        "hit_rate": counted.hit_rate,
    }


def _copied(row: Row, copy: int) -> Row:
    if not copy:
        return row
    return row._replace(chain=tuple(_salted(block, copy) for block in row.chain))


@cache
def _salted(block: BlockHash, copy: int) -> BlockHash:
    return block_name((block, copy))


def _progress(cell: Cell, values: dict[str, float]) -> str:
    what = f"load {cell.load:.0%}" if cell.load else "capacity"
    shown = " ".join(f"{name} {value:.4g}" for name, value in values.items())
    return (
        f"{cell.trace}, {cell.num_groups} groups, {what}, {cell.policy}, "
        f"{cell.disturbance}, seed {cell.seed}: {shown}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--data", type=Path, default=Path("../shared/data"), help="has traces/ in it")
    add("--trace", nargs="+", choices=SOURCES, default=list(SOURCES))
    add("--groups", type=int, nargs="+", default=[16, 4, 64])
    add("--load", type=float, nargs="+", default=LOADS)
    add("--policy", nargs="+", default=[OURS, OURS_POLICY, *BASELINES])
    parts = ("latency", "capacity", "robust")
    add("--part", nargs="+", choices=parts, default=parts)
    add("--seeds", type=int, default=5)
    add("--state", type=Path, default=Path("bench-routing.jsonl"))
    add("--output", type=Path, help="a Markdown file for the tables")
    add("--report", action="store_true", help="run nothing, print what the state file has")
    arguments = parser.parse_args()
    bench = Bench(data=arguments.data, state=arguments.state)
    if not arguments.report:
        for cell in _wanted(arguments):
            file = arguments.data / "traces" / SOURCES[cell.trace].file
            if file.exists():
                bench.run(cell)
            else:
                print(f"{cell.trace}: skipped, {file} does not exist (say --data FOLDER)")
    text = "\n".join(_report(bench.cells))
    print(text)
    if arguments.output is not None:
        arguments.output.write_text(text + "\n")


def _wanted(arguments: argparse.Namespace) -> Iterator[Cell]:
    """Seeds outermost: whenever it is stopped, what is there is spread over everything else."""
    for seed, num_groups, trace in product(
        range(arguments.seeds), arguments.groups, arguments.trace
    ):
        cell = Cell(trace=trace, num_groups=num_groups, load=0.0, policy=DYNAMO, seed=seed)
        if "latency" in arguments.part:
            for load, policy in product(arguments.load, arguments.policy):
                yield replace(cell, load=load, policy=policy)
        if "capacity" in arguments.part:
            for policy in arguments.policy:
                yield replace(cell, policy=policy)
        if "robust" in arguments.part:
            for disturbance, policy in product(DISTURBANCES, arguments.policy):
                yield replace(cell, load=0.78, policy=policy, disturbance=disturbance)


def _report(cells: dict[str, dict[str, float]]) -> Iterator[str]:
    """Tables in Markdown: a line per policy, a column per load, means over the seeds."""
    found = {Cell(**json.loads(key)): values for key, values in cells.items()}
    today = time.strftime("%Y-%m-%d")
    yield f"# Routing policies, {today}, {platform.machine()}, Python {platform.python_version()}\n"
    for num_groups, trace in product(
        sorted({cell.num_groups for cell in found}), sorted({cell.trace for cell in found})
    ):
        here = {c: v for c, v in found.items() if (c.num_groups, c.trace) == (num_groups, trace)}
        latency = {c: v for c, v in here.items() if c.load and c.disturbance == "none"}
        if latency:
            yield f"## {trace}, {num_groups} groups\n"
            yield "TTFT in s, mean / p90 / p99 (× mean of Dynamo's default ÷ this one)\n"
            yield from _table(latency, lambda cell: f"{cell.load:.0%}", _times)
            yield from _closing(latency)
        capacity = {c: v for c, v in here.items() if not c.load and len(v) > 2}
        if len({cell.policy for cell in capacity}) > 1:
            target = SOURCES[trace].target_s
            yield f"Capacity: the speed at which 99 % of requests wait {target} s at most\n"
            yield from _table(capacity, lambda cell: "speed", _speed)
        robust = {c: v for c, v in here.items() if c.load == 0.78}
        if len({cell.disturbance for cell in robust}) > 1:
            yield "Disturbed, at a load of 78 %\n"
            yield from _table(robust, lambda cell: cell.disturbance, _times)


Values = list[dict[str, float]]
Cells = dict[Cell, dict[str, float]]


def _table(
    cells: Cells, column: Callable[[Cell], str], show: Callable[[Values, Values], str]
) -> Iterator[str]:
    columns = list(dict.fromkeys(column(cell) for cell in cells))
    policies = [p for p in (OURS, OURS_POLICY, *BASELINES) if any(c.policy == p for c in cells)]
    yield "| policy | " + " | ".join(columns) + " |"
    yield "| --- |" + " --- |" * len(columns)
    for policy in policies:
        texts = []
        for name in columns:
            of_column = {c: v for c, v in cells.items() if column(c) == name}
            mine = [v for c, v in of_column.items() if c.policy == policy]
            reference = [v for c, v in of_column.items() if c.policy == DYNAMO]
            texts.append(show(mine, reference) if mine else "")
        yield f"| {policy} | " + " | ".join(texts) + " |"
    yield ""


def _times(values: Values, reference: Values) -> str:
    times = " / ".join(f"{_mean(values, name):.3f}" for name in ("mean", "p90", "p99"))
    if not reference:
        return times
    return f"{times} (×{_mean(reference, 'mean') / _mean(values, 'mean'):.2f})"


def _speed(values: Values, reference: Values) -> str:
    speed = _mean(values, "speed")
    return (
        f"{speed:.2f} (×{speed / _mean(reference, 'speed'):.2f})" if reference else f"{speed:.2f}"
    )


def _closing(cells: Cells) -> Iterator[str]:
    """Where ours is furthest behind the best baseline of its column."""
    worst = ("", 0.0)
    for load in {cell.load for cell in cells}:
        means = {
            policy: _mean([v for c, v in cells.items() if (c.load, c.policy) == (load, policy)])
            for policy in {cell.policy for cell in cells if cell.load == load}
        }
        others = [mean for policy, mean in means.items() if policy in BASELINES]
        if OURS in means and others:
            ratio = means[OURS] / min(others)
            worst = max(worst, (f"{load:.0%}", ratio), key=lambda pair: pair[1])
    if worst[0]:
        yield f"Mean TTFT of ours ÷ best baseline's, at most: {worst[1]:.2f} (load {worst[0]})\n"


def _mean(values: Sequence[dict[str, float]], name: str = "mean") -> float:
    return fmean(value[name] for value in values)


if __name__ == "__main__":
    main()
