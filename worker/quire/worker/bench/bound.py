"""How much faster prefix caching can make a workload: the theoretical bound beside a measurement.

A step costs, near enough, a fixed part, a part per prompt token computed and a part per sequence
decoded:

    seconds = step + per_prefill_token * num_prefill_tokens + per_decode * num_decodes

The three are fitted to the steps of the run *without* caching. With a hit rate ``h``, the same
workload then has to cost at least

    step * num_steps + per_prefill_token * (1 - h) * num_prompt_tokens + per_decode * num_decodes

where ``num_steps`` is that of the run with caching: hits take no time, the rest takes what it
took without a cache. The bound is the uncached time divided by that.

What keeps a real cache below the bound: looking prefixes up, and tokens behind a long prefix,
which attend to more than the average prompt token does. What can take it above: attention that
reads a shared prefix once for several sequences, and noise.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.worker.bench.measure import StepSample


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds that a step costs, by what it computes. None is negative."""

    step_s: float
    per_prefill_token_s: float
    per_decode_s: float

    def seconds(self, *, num_steps: int, num_prefill_tokens: float, num_decodes: int) -> float:
        return (
            self.step_s * num_steps
            + self.per_prefill_token_s * num_prefill_tokens
            + self.per_decode_s * num_decodes
        )


def fit_step_cost(steps: Sequence[StepSample]) -> StepCost:
    """The non-negative costs that explain ``steps`` best, by least squares.

    A cost that comes out negative, as where all steps are alike, is set to 0 and the others are
    fitted again.
    """
    shapes = np.array([[1.0, step.num_prefill_tokens, step.num_decodes] for step in steps])
    seconds = np.array([step.seconds for step in steps])
    costs = np.zeros(3)
    kept = [0, 1, 2]
    while kept:
        fitted = np.linalg.lstsq(shapes[:, kept], seconds, rcond=None)[0]
        if fitted.min() >= 0:
            costs[kept] = fitted
            break
        del kept[int(fitted.argmin())]
    step_s, per_prefill_token_s, per_decode_s = costs.tolist()
    return StepCost(
        step_s=step_s, per_prefill_token_s=per_prefill_token_s, per_decode_s=per_decode_s
    )


def speedup_bound(
    cost: StepCost,
    *,
    uncached_s: float,
    hit_rate: float,
    num_steps: int,
    num_prompt_tokens: int,
    num_decodes: int,
) -> float:
    """The most that uncached ÷ cached time can be at ``hit_rate``; see the top of this module."""
    cached_s = cost.seconds(
        num_steps=num_steps,
        num_prefill_tokens=(1 - hit_rate) * num_prompt_tokens,
        num_decodes=num_decodes,
    )
    return uncached_s / cached_s if cached_s > 0 else float("inf")
