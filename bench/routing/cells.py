"""One run of the simulator per cell, kept in a file."""

import gc
import json
import time
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

from bench.routing.made_up import WORKLOADS, made_up_trace
from bench.routing.one_cache import OneCache

from quire.simulate.capacity import find_capacity
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.result import Result
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace import Row, Trace
from quire.simulate.trace_files import block_name, load_trace
from quire.worker.blocks.hashing import BlockHash

OURS, OURS_POLICY = "ours", "ours, LRU"
DYNAMO = "dynamo"
BASELINES = (
    *("round_robin", "least_loaded", "power_of_two", "bounded_hash", "sglang", "sglang_events"),
    *("ray_prefix", "llmd", "preble", "mooncake", DYNAMO, "dynamo_20"),
)
BOUND = "one cache"
"""Not a policy but an upper bound: ours, if all groups shared one infinite cache."""
ROWS = (OURS, OURS_POLICY, *BASELINES, BOUND)
LOADS = (0.6, 0.78, 0.85, 0.92, 0.95)
WARM_UP = 0.1


class Source(NamedTuple):
    file: str | None
    """The trace's file; None for a synthetic trace."""
    target_s: float
    """Target of the 99th percentile of TTFT."""
    spread_ms: float
    """How coarse its clock is: seeds differ in where in between a request arrives."""


SOURCES = {
    "conversation": Source("mooncake_conversation_trace.jsonl", 3.0, 3000.0),
    "multitenant": Source("multitenant_like.jsonl", 0.5, 1000.0),
    "azure": Source("AzureLLMInferenceTrace_conv_2023.csv", 0.5, 1000.0),
    "azure_code": Source("AzureLLMInferenceTrace_code_2023.csv", 0.5, 1000.0),
    # Of prompts with 15,000 tokens in the mean, 190,000 at most.
    "mooncake_synthetic": Source("mooncake_synthetic_trace.jsonl", 10.0, 1000.0),
    **{name: Source(None, 2.0, 0.0) for name in WORKLOADS},
    "contrast": Source(None, 20.0, 0.0),  # For traces whose prompts take seconds each.
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
    """The input of one run of the simulator; ``load`` 0 asks for the capacity."""

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
        return _values(_simulate(trace.at_speed(speed), cell), speed)

    def _capacity(self, cell: Cell) -> dict[str, float]:
        trace = self._trace(cell.trace, cell.num_groups, cell.seed)

        def replay(speed: float) -> Result:
            return _simulate(trace.at_speed(speed), cell)

        speed, result = find_capacity(replay, target_s=SOURCES[cell.trace].target_s)
        return {"speed": speed} if result is None else _values(result, speed)

    def _trace(self, name: str, num_groups: int, seed: int) -> Trace:
        key = name, max(num_groups // 16, 1), seed
        if self._last is None or self._last[0] != key:
            self._last = key, self._load_trace(*key)
            gc.collect()
            gc.freeze()  # Else each collection goes through all of the trace's tuples.
        return self._last[1]

    def _load_trace(self, name: str, num_copies: int, seed: int) -> Trace:
        return load_copies(self._data, name, num_copies=num_copies, seed=seed)


def load_copies(data: Path, name: str, *, num_copies: int, seed: int) -> Trace:
    """The trace of a source so many times at once; the copies share nothing."""
    source = SOURCES[name]
    if source.file is None:
        trace = made_up_trace(name, seed=seed)
    else:
        trace = load_trace(data / "traces" / source.file)
    rows = [_copied(row, copy) for row in trace.rows for copy in range(num_copies)]
    trace = Trace.of(rows, name=name, block_size=trace.block_size)
    return trace.spread(seed=seed, within_ms=source.spread_ms)


def _simulate(trace: Trace, cell: Cell) -> Result:
    make_pool = OneCache().pool if cell.policy == BOUND else None
    return simulate(trace, _config(cell), make_pool=make_pool).after(WARM_UP)


def _config(cell: Cell) -> SimulationConfig:
    config = SimulationConfig(
        num_groups=cell.num_groups,
        policy=cell.policy if cell.policy in BASELINES else "prefix_aware",
        seed=cell.seed,
    )
    config = replace(config, **DISTURBANCES[cell.disturbance])  # type: ignore[arg-type]
    if cell.policy in (OURS, BOUND):
        config = replace(config, eviction="utility", engine=SimulatedEngine(order="srpf"))
    return config


def _values(counted: Result, speed: float) -> dict[str, float]:
    return {
        "speed": speed,
        "mean": float(counted.ttft_s.mean()),
        "p90": counted.ttft_quantile_s(0.9),
        "p99": counted.ttft_quantile_s(0.99),
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
