"""The arithmetic of the tables, on numbers whose answers are known."""

from pathlib import Path

import numpy as np
import pytest

from quire.worker.bench.bound import StepCost, fit_step_cost, speedup_bound
from quire.worker.bench.cache_size import parse_cache_size
from quire.worker.bench.measure import Run, StepSample
from quire.worker.bench.report import block_size_table, closing_lines, prefix_table
from quire.worker.bench.step_profile import step_profile, step_table
from quire.worker.bench.stopwatch import Stopwatch, Target
from quire.worker.bench.summary import Row, summarize
from quire.worker.bench.sweep import Cell, SweepConfig, plan_cells
from quire.worker.bench.workload import WorkItem, Workload
from quire.worker.config import EngineConfig
from quire.worker.errors import ConfigError
from quire.worker.hashing import as_token_ids

CELL = Cell(block_size=4, cache_size="50%", num_blocks=10, cache_bytes=640)


def steps(cost: StepCost, shapes: list[tuple[int, int]]) -> tuple[StepSample, ...]:
    return tuple(
        StepSample(
            prefill,
            decodes,
            cost.seconds(num_steps=1, num_prefill_tokens=prefill, num_decodes=decodes),
        )
        for prefill, decodes in shapes
    )


def make_run(
    step_samples: tuple[StepSample, ...], *, hits: int, outputs: list[list[int]] | None = None
) -> Run:
    return Run(
        seconds=sum(step.seconds for step in step_samples),
        steps=step_samples,
        ttft_s=(1.0, 3.0),
        outputs=tuple(as_token_ids(output) for output in outputs or [[7, 8, 9]] * 2),
        num_prompt_tokens=24,
        num_hit_tokens=hits,
        num_output_tokens=6,
        num_preemptions=2,
        num_evictions=5,
        num_peak_blocks=8,
        num_wasted_slots=3,
        num_held_slots=30,
    )


def make_rows(*, cached_outputs: list[list[int]] | None = None) -> list[Row]:
    """Two prompts of 12 tokens that share 8; a step costs 1 s, a prompt token 2 s, a decode 3 s."""
    cost = StepCost(step_s=1, per_prefill_token_s=2, per_decode_s=3)
    uncached = make_run(steps(cost, [(24, 0), (0, 2), (0, 2), (0, 0)]), hits=0)
    cached = make_run(steps(cost, [(16, 0), (0, 2), (0, 2)]), hits=8, outputs=cached_outputs)
    prompts = [as_token_ids([*range(8), own, 1, 2, 3]) for own in (20, 21)]
    items = tuple(WorkItem(token_ids=prompt, max_tokens=3) for prompt in prompts)
    runs = {CELL: {False: [uncached] * 3, True: [cached] * 3}}
    return summarize(runs, Workload(title="made up", items=items))


def test_the_costs_of_a_step_are_found_again() -> None:
    cost = StepCost(step_s=0.5, per_prefill_token_s=0.01, per_decode_s=0.2)
    fitted = fit_step_cost(steps(cost, [(100, 0), (50, 3), (0, 5), (0, 1), (7, 2)]))
    assert fitted.step_s == pytest.approx(0.5)
    assert fitted.per_prefill_token_s == pytest.approx(0.01)
    assert fitted.per_decode_s == pytest.approx(0.2)


def test_a_cost_is_never_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        samples = [
            StepSample(int(prefill), int(decodes), seconds)
            for prefill, decodes, seconds in zip(
                rng.integers(9, size=6), rng.integers(9, size=6), rng.random(6), strict=True
            )
        ]
        fitted = fit_step_cost(samples)
        assert min(fitted.step_s, fitted.per_prefill_token_s, fitted.per_decode_s) >= 0


def test_when_prefill_is_all_there_is_the_bound_is_one_over_the_misses() -> None:
    cost = StepCost(step_s=0, per_prefill_token_s=0.5, per_decode_s=0)
    bound = speedup_bound(
        cost, uncached_s=50, hit_rate=0.75, num_steps=9, num_prompt_tokens=100, num_decodes=40
    )
    assert bound == pytest.approx(4)


def test_figures_are_those_of_the_runs() -> None:
    (row,) = make_rows()
    assert row.uncached is not None
    assert row.speedup is not None
    assert row.uncached.seconds == 24 * 2 + 4 * 3 + 4
    assert row.cached.seconds == 16 * 2 + 4 * 3 + 3
    assert row.cached.output_tokens_per_s == 6 / 47
    assert row.cached.total_tokens_per_s == 30 / 47
    assert row.cached.hit_rate == row.infinite_hit_rate == pytest.approx(8 / 24)
    assert row.cached.fragmentation == 0.1
    assert (row.cached.ttft_mean_ms, row.cached.ttft_p50_ms) == (2000, 2000)
    assert row.speedup.measured == pytest.approx(64 / 47)
    # Made of exactly these costs, the run reaches its bound.
    assert row.speedup.bound == row.speedup.infinite_bound == pytest.approx(64 / 47)
    assert row.speedup.reached == pytest.approx(1)
    assert row.speedup.num_different_outputs == 0


def test_the_tables_show_them() -> None:
    rows = make_rows()
    header, _, off, on = (line.split() for line in prefix_table(rows).splitlines())
    assert header[0] == "block"
    assert off[:5] == ["4", "50%", "off", "0", "0"]
    assert on[5:10] == ["1.36x", "1.36x", "100%", "33.3%", "33.3%"]
    assert on[10:] == ["5", "2", "10.0%", "2000", "2000", "2980"]
    only = block_size_table(rows).splitlines()[2].split()
    assert only[4:9] == ["100%", "33.3%", "33.3%", "8", "80%"]


def test_tokens_that_caching_changed_are_warned_of() -> None:
    assert "are the same with and without" in closing_lines(make_rows())[-1]
    changed = make_rows(cached_outputs=[[7, 8, 9], [7, 8, 1]])
    assert "WARNING: the tokens of up to 1 requests differ" in closing_lines(changed)[-1]


@pytest.mark.parametrize(
    ("text", "num_blocks"),
    [("50%", 4), ("12.5%", 1), ("33tokens", 3), ("7blocks", 7), ("1MiB", 8192), ("1300", 10)],
)
def test_a_cache_size_is_a_share_or_an_amount(text: str, num_blocks: int) -> None:
    size = parse_cache_size(text)
    assert size.num_blocks(block_size=16, token_bytes=8, workload_tokens=128) == num_blocks


@pytest.mark.parametrize("text", ["", "0%", "ten", "5 apples", "-3", "1e3"])
def test_another_cache_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="must be a share of the workload such as 25%"):
        parse_cache_size(text)


def test_a_cache_too_small_for_the_longest_request_is_refused() -> None:
    config = SweepConfig(
        engine=EngineConfig(model=Path("none")),
        block_sizes=(4, 16),
        cache_sizes=(parse_cache_size("10%"),),
    )
    items = tuple(WorkItem(token_ids=as_token_ids(range(30)), max_tokens=2) for _ in range(20))
    workload = Workload(title="", items=items)
    cells = plan_cells(config, workload, token_bytes=2)
    assert [(cell.num_blocks, cell.cache_bytes) for cell in cells] == [(16, 128), (4, 128)]
    few = Workload(title="", items=items[:4])
    with pytest.raises(ConfigError, match=r"10% is 4 blocks of 4 tokens, .* needs 8: at least 25"):
        plan_cells(config, few, token_bytes=2)


def test_a_step_is_the_sum_of_its_parts() -> None:
    times_ns = [
        {
            "schedule": 1000,
            "wait for rank 0": 5000 * n,
            "rest": 500,
            "rank 0: no step": 2000,
            "rank 0: model forward": 5000 * n - 500,
        }
        for n in (1, 2, 3)
    ]
    profile = step_profile("1 decode", times_ns)
    assert list(profile.parts) == list(times_ns[0])
    assert profile.step.median_us == 1 + 10 + 0.5
    assert profile.around_model.p99_us == 2
    assert "rank 0: model forward" in step_table([profile])


def test_a_function_is_charged_for_its_own_time_only() -> None:
    class Work:
        def outer(self) -> int:
            return self.inner() + sum(range(1000))

        def inner(self) -> int:
            return sum(range(100_000))

    plain = Work.outer
    stopwatch = Stopwatch()
    with stopwatch.watching(Target(Work, "outer", "outer"), Target(Work, "inner", "inner")):
        assert Work().outer() == sum(range(100_000)) + sum(range(1000))
    assert Work.outer is plain
    times_ns = stopwatch.take()
    assert times_ns["outer"] < times_ns["inner"]
    assert stopwatch.take() == {}
