"""The arithmetic behind benchmark tables, on numbers with known results."""

from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest

from quire.worker.bench.bound import StepCost, fit_step_cost, speedup_bound
from quire.worker.bench.cache_size import parse_cache_size
from quire.worker.bench.measure import Run, StepSample
from quire.worker.bench.report import block_size_table, closing_lines, prefix_table
from quire.worker.bench.summary import Row, summarize
from quire.worker.bench.sweep import Cell, SweepConfig, plan_cells
from quire.worker.bench.workload import WorkItem, Workload
from quire.worker.blocks.hashing import as_token_ids
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import ConfigError

CELL = Cell(block_size=4, cache_size="50%", num_blocks=10, cache_bytes=640)


def steps(cost: StepCost, shapes: list[tuple[int, int, int]]) -> tuple[StepSample, ...]:
    """Steps with the given prompt tokens, tokens that those attend to, and decodes."""
    return tuple(
        StepSample(
            prefill,
            attended,
            decodes,
            cost.seconds(
                num_steps=1,
                num_prefill_tokens=prefill,
                num_attended=attended,
                num_decodes=decodes,
            ),
        )
        for prefill, attended, decodes in shapes
    )


def make_run(
    step_samples: tuple[StepSample, ...],
    *,
    hits: tuple[int, int],
    outputs: list[list[int]] | None = None,
) -> Run:
    return Run(
        seconds=sum(step.seconds for step in step_samples),
        steps=step_samples,
        ttft_s=(1.0, 3.0),
        outputs=tuple(as_token_ids(output) for output in outputs or [[7, 8, 9]] * 2),
        hits=hits,
        num_prompt_tokens=24,
        num_hit_tokens=sum(hits),
        num_output_tokens=6,
        num_preemptions=2,
        num_evictions=5,
        num_peak_blocks=8,
        num_wasted_slots=3,
        num_held_slots=30,
    )


def make_rows(*, cached_outputs: list[list[int]] | None = None) -> list[Row]:
    """Two prompts of 12 tokens that share 10, 8 of them in full blocks. A step costs 1 s, a prompt
    token 2 s, a token that it attends to half a second, and a decode 3 s, or 1 s with caching."""
    cost = StepCost(step_s=1, per_prefill_token_s=2, per_attended_s=0.5, per_decode_s=3)
    cheaper = replace(cost, per_decode_s=1)
    # 1 + 2 + … + 12 = 78 for each prompt; its last four are 42.
    uncached = make_run(steps(cost, [(16, 100, 0), (8, 56, 0), (0, 0, 2), (0, 0, 1)]), hits=(0, 0))
    cached = make_run(
        steps(cheaper, [(16, 120, 0), (0, 0, 2), (0, 0, 1)]), hits=(0, 8), outputs=cached_outputs
    )
    prompts = [as_token_ids([*range(10), own, 1]) for own in (20, 21)]
    items = tuple(WorkItem(token_ids=prompt, max_tokens=3) for prompt in prompts)
    runs = {CELL: {False: [uncached] * 3, True: [cached] * 3}}
    return summarize(runs, Workload(title="made up", items=items))


def test_the_costs_of_a_step_are_found_again() -> None:
    cost = StepCost(step_s=0.5, per_prefill_token_s=0.01, per_attended_s=0.000_02, per_decode_s=0.2)
    shapes = [(100, 5050, 0), (50, 9000, 3), (0, 0, 5), (0, 0, 1), (7, 5000, 2)]
    fitted = fit_step_cost(steps(cost, shapes))
    assert fitted.step_s == pytest.approx(0.5)
    assert fitted.per_prefill_token_s == pytest.approx(0.01)
    assert fitted.per_attended_s == pytest.approx(0.000_02)
    assert fitted.per_decode_s == pytest.approx(0.2)


def test_a_cost_is_never_negative() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        shapes = zip(*rng.integers(9, size=(3, 6)).tolist(), rng.random(6).tolist(), strict=True)
        fitted = fit_step_cost([StepSample(*shape) for shape in shapes])
        assert min(astuple(fitted)) >= 0


def test_when_prefill_is_all_there_is_the_bound_is_one_over_the_misses() -> None:
    cost = StepCost(step_s=0.5, per_prefill_token_s=0.5, per_attended_s=0, per_decode_s=1)
    bound = speedup_bound(cost, uncached_s=50, prompts=[(60, 50), (40, 25)], decode_s=0)
    assert bound == pytest.approx(4)


def test_tokens_behind_hits_attend_to_them_too() -> None:
    cost = StepCost(step_s=0, per_prefill_token_s=0, per_attended_s=1, per_decode_s=0)
    bound = speedup_bound(cost, uncached_s=55, prompts=[(10, 8)], decode_s=0)
    assert bound == pytest.approx(55 / (9 + 10))


def test_figures_are_those_of_the_runs() -> None:
    (row,) = make_rows()
    assert row.uncached is not None
    assert row.speedup is not None
    assert row.uncached.seconds == 24 * 2 + 156 / 2 + 3 * 3 + 4 == 139
    assert row.cached.seconds == 16 * 2 + 120 / 2 + 3 + 3 == 98
    assert row.cached.output_tokens_per_s == 6 / 98
    assert row.cached.total_tokens_per_s == 30 / 98
    assert row.cached.hit_rate == row.infinite_hit_rate == pytest.approx(8 / 24)
    assert row.cached.fragmentation == 0.1
    assert (row.cached.ttft_mean_ms, row.cached.ttft_p50_ms) == (2000, 2000)
    assert row.speedup.measured == pytest.approx(139 / 98)
    # Made of exactly these costs, the run reaches its bound.
    assert row.speedup.bound == row.speedup.infinite_bound == pytest.approx(139 / 98)
    assert row.speedup.reached == pytest.approx(1)
    assert row.speedup.num_different_outputs == 0


def test_the_tables_show_them() -> None:
    rows = make_rows()
    header, _, off, on = (line.split() for line in prefix_table(rows).splitlines())
    assert header[0] == "block"
    assert off[:5] == ["4", "50%", "off", "0", "0"]
    assert on[5:10] == ["1.42x", "1.42x", "100%", "33.3%", "33.3%"]
    assert on[10:] == ["8.3%", "5", "2", "10.0%", "2000", "2000", "2980"]
    only = block_size_table(rows).splitlines()[2].split()
    assert only[4:10] == ["100%", "33.3%", "33.3%", "8.3%", "8", "80%"]


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
