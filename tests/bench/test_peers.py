"""The comparison with peers: floors, prompts, and the protocol with an engine's process."""

import os
import subprocess
import sys
import time
from collections.abc import Callable
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
    """Starts an engine's process from the source of its adapter."""

    def start(source: str) -> Any:
        adapter = tmp_path / "adapter.py"
        adapter.write_text(source)
        command = (sys.executable, "-P", str(peers.peers.HERE / "host.py"), str(adapter))
        return peers.process.EngineProcess(
            peers.peers.Engine(name="fake", command=command, environment={}),
            tmp_path,
            dtype="float32",
            num_threads=2,
            timeout_s=30.0,
            log=tmp_path / "log",
        )

    return start


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
    asked = peers.workloads.WORKLOADS[workload]
    for shape, tokens_per_s in zip(peers.checkpoints.SHAPES.values(), expected, strict=True):
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
    shape = peers.checkpoints.SHAPES["S"]
    rates, times = (peers.workloads.WORKLOADS[name] for name in ("stream", "ttft"))
    measured = peers.measure.Measured(repeats=3)
    for workload in (rates, times):
        for engine, seconds in {"quire": [2.0, 9.0, 1.0], "a": [4.0], "b": [1.0]}.items():
            runs = [peers.measure.Run(value, 0.0) for value in seconds]
            measured.runs["S", workload.name, engine] = runs
    limits = peers.floor.Limits(gemm_flops={"bfloat16": 440e9}, dram_bytes_per_s=38e9)
    about = peers.report.describe(num_threads=2, limits=limits)
    text = peers.report.table(measured, about, [shape], [rates, times], ["quire", "a", "b"])
    stream, ttft = text.splitlines()[2:]
    assert stream.startswith("| one stream | S | tokens/s | 32.0 | 16.0 | 64.0 | b | 0.50 | 1,3")
    assert ttft.startswith("| TTFT, 816 tokens cold | S | ms | 2,000 | 4,000 | 1,000 | b | 2.00 |")


def test_the_least_disturbed_runs_count(peers: Any) -> None:
    shape, stream = peers.checkpoints.SHAPES["S"], peers.workloads.WORKLOADS["stream"]
    measured = peers.measure.Measured(repeats=2)
    runs = [(9.0, 0.4), (1.0, 0.01), (8.0, 0.1), (3.0, None)]
    measured.runs["S", "stream", "a"] = [peers.measure.Run(*run) for run in runs]
    assert measured.median(shape, stream, "a") == pytest.approx(64 / 2.0)
    assert measured.median(shape, stream, "b") is None


def test_a_process_is_no_bystander_of_itself(peers: Any) -> None:
    idle = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        # Between these two readings the machine does next to nothing: what is left is ours.
        beside_idle = peers.bystanders.others_s(idle.pid)
        beside_us = peers.bystanders.others_s(os.getpid())
        if beside_us is None:
            pytest.skip("this machine has no /proc/stat")
        assert beside_idle - beside_us == pytest.approx(time.process_time(), abs=0.5)
    finally:
        idle.communicate(b"\n")
