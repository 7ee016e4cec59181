"""The comparison with other engines: floors, prompts, and the protocol with an engine's process."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ENGINE = """
import os
print("an engine that prints")
PACKAGES = ()

class Engine:
    def __init__(self):
        self.calls = []
    def forget(self):
        self.calls.append(("forget",))
    def generate(self, prompts, new_tokens):
        self.calls.append((len(prompts), new_tokens))
        if prompts == [[666]]:
            os._exit(3)
        return [prompt[:1] * (new_tokens + (prompt == [667])) for prompt in prompts]

def load(checkpoint, *, dtype, threads):
    assert os.environ["OMP_NUM_THREADS"] == str(threads) == "2"
    return Engine()
"""

Import = Callable[[str], ModuleType]


@pytest.fixture
def peers(bench_module: Import) -> Any:
    class Modules:
        def __getattr__(self, name: str) -> ModuleType:
            return bench_module(f"peers.{name}")

    return Modules()


@pytest.fixture
def start(peers: Any, tmp_path: Path) -> Callable[..., Any]:
    """Starts an engine's process from its adapter's source."""

    def start(source: str) -> Any:
        adapter = tmp_path / "adapter.py"
        adapter.write_text(source)
        command = (sys.executable, "-P", str(peers.peers.HERE / "host.py"), str(adapter))
        return peers.process.EngineProcess(
            peers.peers.Engine(name="fake", command=command, environment={}),
            tmp_path,
            dtype="float32",
            num_threads=2,
            timeout_s=300.0,
            log=tmp_path / "log",
        )

    return start


def test_a_relative_cache_is_found_from_where_engines_run(
    peers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache, shape = Path("cache"), peers.checkpoints.SHAPES["S"]
    made = cache / f"random-S-{shape.num_parameters / 1e6:.0f}M" / "config.json"
    ready = cache / "vllm" / "ready"
    for file in (made, ready):
        file.parent.mkdir(parents=True)
        file.touch()
    checkpoint = peers.checkpoints.make_checkpoint(shape, cache)
    engine = peers.peers.install("vllm", cache)
    monkeypatch.chdir("/")
    assert (checkpoint / "config.json").is_file()
    assert Path(engine.command[0]).is_relative_to(tmp_path / "cache" / "vllm")


@pytest.mark.parametrize(
    ("workload", "expected"),
    [
        # Worked out by hand for GEMM 440, attention 352 GFLOP/s, DRAM 38 GB/s, when the targets
        # were set.
        ("cold", (8700, 1076, 213)),
        ("cached", (8930, 1166, 254)),
        ("unshared", (2030, 183, 36)),
        ("decode", (13770, 1851, 397)),
        ("stream", (1300, 190, 42)),
    ],
)
def test_the_floor_is_the_one_the_targets_were_set_by(
    peers: Any, workload: str, expected: tuple[float, ...]
) -> None:
    limits = peers.floor.Limits(gemm_flops={"bfloat16": 440e9}, dram_bytes_per_s=38e9)
    asked = replace(peers.workloads.WORKLOADS[workload], fewer_requests={})
    for name, tokens_per_s in zip(peers.checkpoints.SIZES, expected, strict=True):
        shape = peers.checkpoints.SHAPES[name]
        seconds = peers.floor.floor_seconds(asked, shape, limits)
        assert asked.figure(seconds, shape) == pytest.approx(tokens_per_s, rel=0.02)


def test_prompts_share_what_the_workload_says_and_differ_between_repetitions(peers: Any) -> None:
    shape = peers.checkpoints.SHAPES["L"]
    prompts, before = peers.workloads.WORKLOADS["cached"].prompts(shape, seed=0)
    assert {len(prompt) for prompt in [*prompts, before]} == {816}
    assert len({tuple(prompt[:768]) for prompt in [*prompts, before]}) == 1
    assert len({tuple(prompt[768:]) for prompt in [*prompts, before]}) == 33
    again, _ = peers.workloads.WORKLOADS["cached"].prompts(shape, seed=1)
    assert again[0][:768] != prompts[0][:768]


def test_a_job_is_answered_although_the_engine_prints(start: Callable[..., Any]) -> None:
    with start(ENGINE) as process:
        seconds, tokens = process.run([[5], [6]], before=[7], new_tokens=3)
        assert tokens == [[5, 5, 5], [6, 6, 6]]
        assert seconds >= 0


@pytest.mark.parametrize(
    ("token_id", "message"),
    [(666, "ended without an answer"), (667, r"asked for 3 tokens each, answered \[4\]")],
)
def test_an_engine_that_ends_or_stops_early_has_no_figure(
    peers: Any, start: Callable[..., Any], token_id: int, message: str
) -> None:
    with (
        start(ENGINE) as process,
        pytest.raises(peers.process.EngineFailed, match=message),
    ):
        process.run([[token_id]], new_tokens=3)


def test_an_engine_that_cannot_load_says_why(peers: Any, start: Callable[..., Any]) -> None:
    with pytest.raises(peers.process.EngineFailed, match="No module named 'no_such_engine'"):
        start("import no_such_engine")


def test_the_table_names_the_best_peer_and_compares_with_it_and_with_the_floor(peers: Any) -> None:
    rates, times = (peers.workloads.WORKLOADS[name] for name in ("stream", "ttft"))
    measured = peers.measure.Measured(repeats=3)
    for workload in (rates, times):
        for engine, seconds in {"quire": [2.0, 9.0, 1.0], "a": [4.0], "b": [1.0]}.items():
            runs = [peers.measure.Run(value, 0.0) for value in seconds]
            measured.runs["S", workload.name, engine] = runs
    limits = peers.floor.Limits(gemm_flops={"bfloat16": 440e9}, dram_bytes_per_s=38e9)
    about = peers.report.describe(num_threads=2, limits=limits)
    stream, ttft = peers.report.table(measured, about).splitlines()[2:]
    assert stream.startswith("| one stream | S | 1 | tokens/s | 32.0 | 16.0 | 64.0 | b | 0.50 |")
    assert ttft.startswith(
        "| TTFT, 816 tokens cold | S | 1 | ms | 2,000 | 4,000 | 1,000 | b | 2.00 |"
    )


def test_the_least_disturbed_runs_count(peers: Any) -> None:
    shape, stream = peers.checkpoints.SHAPES["S"], peers.workloads.WORKLOADS["stream"]
    measured = peers.measure.Measured(repeats=2)
    runs = [(9.0, 0.4), (1.0, 0.01), (8.0, 0.1), (3.0, None)]
    measured.runs["S", "stream", "a"] = [peers.measure.Run(*run) for run in runs]
    assert measured.median(shape, stream, "a") == pytest.approx(64 / 2.0)
    assert measured.median(shape, stream, "b") is None


def test_a_later_run_goes_on_from_the_figures_of_an_earlier_one(peers: Any, tmp_path: Path) -> None:
    run, failure = peers.measure.Run, peers.measure.Failure
    measured = peers.measure.Measured(
        repeats=2,
        agreed={"quire": "abc"},
        runs={("S", "stream", "quire"): [run(1.5, 0.0, "abc"), run(2.5, None, "def")]},
        failures=[failure("S", "bfloat16", "a", "cold", "no answer in 9 s")],
        versions={"quire": {"torch": "2"}},
    )
    limits = peers.floor.Limits(
        gemm_flops={"bfloat16": 4e11, "float32": 2e11}, dram_bytes_per_s=4e10
    )
    about = peers.report.describe(num_threads=2, limits=limits)
    settings = peers.measure.Settings(
        repeats=2, patience_s=9, timeout_s=9, num_threads=2, logs=tmp_path, commit="def"
    )
    path = tmp_path / "table.md"
    peers.report.write_results(path, "a table", measured, about, settings)
    assert "at commit abc, def," in path.read_text()
    assert peers.report.read_results(path, repeats=2) == (measured, limits)

    measured.forget_other_commits("quire", "def")
    assert measured.runs["S", "stream", "quire"] == [run(2.5, None, "def")]


@pytest.mark.parametrize(
    ("runs", "missing"),
    [
        ([], True),
        ([(1.0, 0.0)], True),
        ([(1.0, 0.0), (1.0, 0.0)], False),
        ([(1.0, 0.5), (1.0, 0.0)], True),  # Disturbed runs are repeated, but not for ever.
        ([(1.0, 0.5)] * 6, False),
        ([(30.0, 0.0)], False),  # Too long to repeat.
    ],
)
def test_only_what_is_missing_is_measured_again(
    peers: Any, runs: list[tuple[float, float]], missing: bool
) -> None:
    shape, stream = peers.checkpoints.SHAPES["S"], peers.workloads.WORKLOADS["stream"]
    engine = peers.peers.Engine(name="a", command=(), environment={})
    measured = peers.measure.Measured(repeats=2)
    measured.runs["S", "stream", "a"] = [peers.measure.Run(*run) for run in runs]
    assert measured.is_missing(shape, stream, engine, 20.0) is missing
    failed = peers.measure.Failure("S", "bfloat16", "a", "cold", "died")
    measured.failures.append(failed)
    assert not measured.is_missing(shape, stream, engine, 20.0)


def test_nothing_is_begun_after_the_time_is_up(peers: Any, tmp_path: Path) -> None:
    shape, stream = peers.checkpoints.SHAPES["S"], peers.workloads.WORKLOADS["stream"]
    settings = peers.measure.Settings(
        repeats=1, patience_s=9, timeout_s=9, num_threads=2, logs=tmp_path, commit="", deadline=0.0
    )
    measured = peers.measure.Measured(repeats=1)
    engine = peers.peers.Engine(name="a", command=("false",), environment={})
    contest = peers.measure.Contest(
        [engine], shape, tmp_path, dtype="bfloat16", settings=settings, measured=measured
    )
    with pytest.raises(peers.measure.OutOfTime):
        contest.run([stream])
    assert not measured.runs


def test_weights_that_the_cache_holds_are_read_at_its_rate(peers: Any) -> None:
    limits = peers.floor.Limits(
        gemm_flops={}, dram_bytes_per_s=50.0, cache_bytes=100, cache_bytes_per_s=200.0
    )
    assert limits.read_s(100) == 0.5
    assert limits.read_s(150) == 3.0
