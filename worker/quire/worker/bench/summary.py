"""Summarises runs: medians over the repeats, and the theoretical bounds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

import numpy as np

from quire.worker.bench.bound import StepCost, fit_step_cost, speedup_bound
from quire.worker.bench.measure import Run, StepSample
from quire.worker.bench.sweep import Cell, Runs
from quire.worker.bench.workload import Workload, infinite_cache_hits


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """Medians over the repeats of one combination of block size, cache size and caching."""

    seconds: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompt and output tokens per second."""
    hit_rate: float
    """Cached prompt tokens as a share of all prompt tokens."""
    num_evictions: float
    num_preemptions: float
    fragmentation: float
    """Empty slots of held blocks as a share of all slots of held blocks, over all steps."""
    num_peak_blocks: float
    """The most blocks held at the same time."""
    ttft_mean_ms: float
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """The speedup of caching, and its upper bounds."""

    measured: float
    """Uncached ÷ cached time: the median over the repeats, each a pair of consecutive runs."""
    bound: float
    """The speedup at the measured hit rate if hits were free; see `quire.worker.bench.bound`."""
    infinite_bound: float
    """The bound at the hit rate of a cache that never evicts."""
    reached: float
    """``measured / bound``."""
    cost: StepCost
    """The fitted cost of steps without caching."""
    num_different_outputs: int
    """Requests whose tokens differ between any two runs, cached or not; it should be 0."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """The summary of one block size and one cache size."""

    cell: Cell
    uncached: Figures | None
    cached: Figures
    infinite_hit_rate: float
    """Hit rate of a cache that never evicts, at this block size."""
    lost_rate: float
    """Prompt tokens that such a cache misses because they do not fill a block, of all of them."""
    speedup: Speedup | None
    """``None`` if there are no runs without caching to compare with."""


def summarize(runs: Runs, workload: Workload) -> list[Row]:
    """Summarises the runs of each cell as a row, in their order."""
    return [_row(cell, of_cell, workload) for cell, of_cell in runs.items()]


def figures(runs: Sequence[Run]) -> Figures:
    """The medians over the repeats of one combination."""

    def middle(figure: Callable[[Run], float]) -> float:
        return float(median(figure(run) for run in runs))

    def ttft_ms(percent: float) -> float:
        return 1e3 * middle(lambda run: float(np.percentile(run.ttft_s, percent)))

    return Figures(
        seconds=middle(lambda run: run.seconds),
        output_tokens_per_s=middle(lambda run: run.num_output_tokens / run.seconds),
        total_tokens_per_s=middle(
            lambda run: (run.num_prompt_tokens + run.num_output_tokens) / run.seconds
        ),
        hit_rate=middle(lambda run: run.num_hit_tokens / run.num_prompt_tokens),
        num_evictions=middle(lambda run: run.num_evictions),
        num_preemptions=middle(lambda run: run.num_preemptions),
        fragmentation=middle(lambda run: run.num_wasted_slots / max(1, run.num_held_slots)),
        num_peak_blocks=middle(lambda run: run.num_peak_blocks),
        ttft_mean_ms=1e3 * middle(lambda run: mean(run.ttft_s)),
        ttft_p50_ms=ttft_ms(50),
        ttft_p99_ms=ttft_ms(99),
    )


def _row(cell: Cell, runs: dict[bool, list[Run]], workload: Workload) -> Row:
    cached, uncached = runs[True], runs.get(False)
    prompts = [item.token_ids for item in workload.items]
    lengths = [len(prompt) for prompt in prompts]
    requests = list(zip(prompts, cached[0].outputs, strict=True))
    infinite_hits = infinite_cache_hits(requests, block_size=cell.block_size)
    hits_by_token = infinite_cache_hits(requests, block_size=1)
    return Row(
        cell=cell,
        uncached=figures(uncached) if uncached else None,
        cached=figures(cached),
        infinite_hit_rate=sum(infinite_hits) / sum(lengths),
        lost_rate=(sum(hits_by_token) - sum(infinite_hits)) / sum(lengths),
        speedup=_speedup(uncached, cached, lengths, infinite_hits) if uncached else None,
    )


def _speedup(
    uncached: list[Run], cached: list[Run], lengths: list[int], infinite_hits: list[int]
) -> Speedup:
    probes = [run.probe for run in uncached]
    cost = fit_step_cost(_typical_steps([run.steps for run in uncached]) + _typical_steps(probes))
    decode_s = _decode_seconds(cached, cost)

    def bound(hits: Sequence[int]) -> float:
        return speedup_bound(
            cost,
            uncached_s=median(run.seconds for run in uncached),
            prompts=zip(lengths, hits, strict=True),
            decode_s=decode_s,
        )

    measured = median(off.seconds / on.seconds for off, on in zip(uncached, cached, strict=True))
    measured_bound = bound(cached[0].hits)
    return Speedup(
        measured=measured,
        bound=measured_bound,
        infinite_bound=bound(infinite_hits),
        reached=measured / measured_bound,
        cost=cost,
        num_different_outputs=_num_different(uncached + cached),
    )


def _decode_seconds(cached: list[Run], uncached_cost: StepCost) -> float:
    """Seconds of a cached run's steps without the cost of their prompts."""
    steps = _typical_steps([run.steps for run in cached])
    without_prompts = [step for step in steps if step.num_prefill_tokens == 0]
    cost = fit_step_cost(without_prompts) if without_prompts else uncached_cost
    return cost.seconds(
        num_steps=len(steps),
        num_prefill_tokens=0,
        num_attended=0,
        num_decodes=sum(step.num_decodes for step in steps),
    )


def _typical_steps(runs: Sequence[tuple[StepSample, ...]]) -> list[StepSample]:
    """The steps of one run, each with its median time over all runs.

    The same requests cause the same steps in every repeat. So a step that was disturbed by other
    work on the machine in one repeat does not distort the fit.
    """
    return [
        alike[0]._replace(seconds=median(step.seconds for step in alike))
        for alike in zip(*runs, strict=True)
    ]


def _num_different(runs: list[Run]) -> int:
    first, *others = [[output.tobytes() for output in run.outputs] for run in runs]
    return sum(
        any(other[index] != output for other in others) for index, output in enumerate(first)
    )
