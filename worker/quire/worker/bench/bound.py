"""The theoretical upper bound of the speedup that prefix caching gives a workload.

The time of a step is modelled as a fixed part, a part per prompt token computed, a part per token
that those attend to, and a part per sequence decoded:

    seconds = step + token * num_prefill_tokens + attended * num_attended + decode * num_decodes

The four are fitted to steps *without* caching: those of the run, and those of its longest prompt
alone in chunks, which show the cost of attention per token. If the first ``h`` tokens of a prompt
of ``n`` are cached, the last ``n - h`` must be computed, each of which attends to all before it,
cached or not. So with these hits the prompts cost at least

    Σ token * (n - h) + Σ attended * (n(n+1) - h(h+1)) / 2

The cost of steps and decodes is added, fitted to the decode-only steps of the run *with* caching:
reading one copy of a prefix for many sequences can be much cheaper than reading many copies, which
the hit rate does not bound. The bound is the uncached time divided by the sum.

A real cache stays below the bound because of prefix look-ups, and because prefill is slower after a
cached prefix or in steps that it does not fill. Noise can raise a measurement above it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.worker.bench.measure import StepSample


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """The coefficients of a step's time in seconds. None is negative."""

    step_s: float
    per_prefill_token_s: float
    per_attended_s: float
    per_decode_s: float

    def seconds(
        self, *, num_steps: int, num_prefill_tokens: int, num_attended: int, num_decodes: int
    ) -> float:
        return (
            self.step_s * num_steps
            + self.per_prefill_token_s * num_prefill_tokens
            + self.per_attended_s * num_attended
            + self.per_decode_s * num_decodes
        )


def fit_step_cost(steps: Sequence[StepSample]) -> StepCost:
    """Fits non-negative costs to ``steps``, by least squares of relative errors.

    A cost that comes out negative, for example because all steps are alike, is set to 0 and the
    others are fitted again.
    """
    shapes = np.array(
        [[1.0, step.num_prefill_tokens, step.num_attended, step.num_decodes] for step in steps]
    )
    # Errors are relative to a step's length. Columns are scaled to one size, because the solver
    # would otherwise treat the smallest as noise.
    relative = shapes / np.array([[step.seconds] for step in steps])
    scale = relative.max(axis=0) + (relative.max(axis=0) == 0)
    ones = np.ones(len(steps))
    costs = np.zeros(4)
    kept = [0, 1, 2, 3]
    while kept:
        fitted = np.linalg.lstsq((relative / scale)[:, kept], ones, rcond=None)[0]
        if fitted.min() >= 0:
            costs[kept] = fitted
            break
        del kept[int(fitted.argmin())]
    step_s, per_prefill_token_s, per_attended_s, per_decode_s = (costs / scale).tolist()
    return StepCost(
        step_s=step_s,
        per_prefill_token_s=per_prefill_token_s,
        per_attended_s=per_attended_s,
        per_decode_s=per_decode_s,
    )


def speedup_bound(
    cost: StepCost,
    *,
    uncached_s: float,
    prompts: Iterable[tuple[int, int]],
    decode_s: float,
) -> float:
    """The upper bound of uncached ÷ cached time; see the module's docstring.

    ``prompts``: each prompt's length and its number of cached tokens. ``decode_s``: seconds of
    steps and decodes with caching.
    """
    num_prefill_tokens = num_attended = 0
    for num_tokens, num_hits in prompts:
        num_prefill_tokens += num_tokens - num_hits
        num_attended += (num_tokens * (num_tokens + 1) - num_hits * (num_hits + 1)) // 2
    cached_s = decode_s + cost.seconds(
        num_steps=0, num_prefill_tokens=num_prefill_tokens, num_attended=num_attended, num_decodes=0
    )
    return uncached_s / cached_s if cached_s > 0 else float("inf")
