"""The routing benchmark on a synthetic trace: results of cells are kept, and tabled."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace_files import load_trace

BenchModule = Callable[[str], ModuleType]

TRACES = Path(__file__).parents[3] / "shared/data/traces"
needs_traces = pytest.mark.skipif(not TRACES.exists(), reason=f"{TRACES} is not here")


@pytest.fixture
def run(
    bench_module: BenchModule, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., None]:
    """Runs the benchmark with our policy and Dynamo's on a folder of traces."""

    def main(data: Path, *flags: str) -> None:
        argv = ["routing", "--data", str(data), "--state", str(tmp_path / "state.jsonl")]
        argv += ["--trace", "multitenant", "--groups", "2", "--load", "0.78", "--seeds", "1"]
        monkeypatch.setattr(sys, "argv", [*argv, "--policy", "ours", "dynamo", *flags])
        bench_module("routing.__main__").main()

    return main


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data/traces"
    folder.mkdir(parents=True)
    with (folder / "multitenant_like.jsonl").open("w") as file:
        for i in range(300):
            tenant = i * i % 7
            line = {"timestamp": 200 * i, "input_length": 2500, "output_length": 20}
            file.write(json.dumps({**line, "hash_ids": [tenant, 10 + tenant, 100 + i]}) + "\n")
    return tmp_path / "data"


@pytest.mark.slow
def test_what_was_run_is_not_run_again_and_the_tables_name_everything(
    data: Path, run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, output = tmp_path / "state.jsonl", tmp_path / "out.md"
    run(data, "--output", str(output))
    lines = state.read_text().splitlines()
    # Two runs for capacity, two at 78 % of it, and those with four disturbances.
    assert len(lines) == 2 + 2 + 2 * 4
    text = output.read_text()
    for words in ("## multitenant, 2 groups", "| ours |", "Capacity", "10 s lag", "best baseline"):
        assert words in text
    capsys.readouterr()
    run(data)
    assert state.read_text().splitlines() == lines
    assert capsys.readouterr().out.strip() == text.strip()


def test_a_trace_that_is_not_there_is_skipped_with_its_path(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(tmp_path)
    assert "multitenant: skipped" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *(("agents", 0.9), ("rag", 0.9), ("few_shot", 0.9), ("tides", 0.9)),
        *(("one", 0.9), ("contrast", 0.8), ("voice", 0.9), ("codebase", 0.9)),
    ],
)
def test_a_made_up_trace_depends_on_its_seed_only_and_shares_prefixes(
    bench_module: BenchModule, name: str, shared: float
) -> None:
    make = bench_module("routing.made_up").made_up_trace
    trace, again, other = (make(name, seed=seed) for seed in (0, 0, 1))
    assert trace == again
    assert trace.num_input != other.num_input
    seen: set[bytes] = set()
    num_shared = 0
    for chain in trace.chains:
        assert len(set(chain)) == len(chain)
        num_shared += bool(chain) and chain[0] in seen
        seen.update(chain)
    assert num_shared > shared * len(trace)


def test_ratios_are_of_the_seeds_that_both_sides_have(bench_module: BenchModule) -> None:
    cell_of = bench_module("routing.cells").Cell
    compare = bench_module("routing.compare")
    cells = {}
    for policy, means in {"ours": [2.0, 4.0], "llmd": [8.0], "preble": [3.0, 3.0]}.items():
        for seed, mean in enumerate(means):
            cell = cell_of(trace="rag", num_groups=16, load=0.6, policy=policy, seed=seed)
            cells[cell] = {"mean": mean}
    ours = cell_of(trace="rag", num_groups=16, load=0.6, policy="ours")
    llmd = cell_of(trace="rag", num_groups=16, load=0.6, policy="llmd")
    assert compare.ratio(compare.by_seed(cells, ours), compare.by_seed(cells, llmd)) == 0.25
    assert compare.to_best_baseline(cells, ours) == (1.0, "preble")
    assert bench_module("routing.report").behind(cells, "ours") == "1 of 1"


def test_with_one_cache_each_group_finds_what_any_computed(
    data: Path, bench_module: BenchModule
) -> None:
    one_cache = bench_module("routing.one_cache").OneCache()
    trace = load_trace(data / "traces/multitenant_like.jsonl").at_speed(0.1)  # One by one.
    config = SimulationConfig(num_groups=3, policy="round_robin")
    result = simulate(trace, config, make_pool=one_cache.pool)
    seen: set[bytes] = set()
    for chain, hit in zip(trace.chains, result.hit, strict=True):
        known = [block in seen for block in chain]
        assert hit == 512 * known.index(False)
        seen.update(chain)
    assert len(set(result.group)) == 3


@needs_traces
@pytest.mark.slow
def test_a_real_trace_gains_by_prefixes(bench_module: BenchModule, tmp_path: Path) -> None:
    cells_module = bench_module("routing.cells")
    cell_of = cells_module.Cell
    cells = cells_module.Bench(data=TRACES.parent, state=tmp_path / "state.jsonl")
    cell = cell_of(trace="azure", num_groups=4, load=0.6, policy="prefix_aware")
    reference = cell_of(trace="azure", num_groups=4, load=0.0, policy="dynamo")
    cells.cells[reference.key] = {"speed": 10.0}
    ours = cells.run(cell)
    blind = cells.run(cell_of(trace="azure", num_groups=4, load=0.6, policy="round_robin"))
    assert ours["hit_rate"] > 1.2 * blind["hit_rate"]
    assert ours["mean"] < blind["mean"]
