"""How much faster prefix caching can make a workload: the theoretical bound beside a measurement.

A step costs, near enough, a fixed part, a part per prompt token computed, a part per token that
those attend to, and a part per sequence decoded:

    seconds = step + token * num_prefill_tokens + attended * num_attended + decode * num_decodes

The four are fitted to steps *without* caching: those of the run, and those of its longest prompt
alone in chunks, which tell what attention adds to a token. A cache that holds the first ``h``
tokens of a prompt of ``n`` leaves its last ``n - h`` to compute, each of which attends to all
before it, cached or not. So with these hits the prompts have to cost at least

    Σ token * (n - h) + Σ attended * (n(n+1) - h(h+1)) / 2

To that comes what steps and decodes cost, fitted to the steps without prompts of the run *with*
caching: reading one copy of a prefix for many sequences can be a good deal cheaper than reading
many, and that is not what the hit rate bounds. The bound is the uncached time divided by the sum.

A real cache stays below it because of prefix look-ups, and because prefill is slower behind a
cached prefix or in steps that it does not fill. Noise can lift a measurement above it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.worker.bench.measure import StepSample


@dataclass(frozen=True, kw_only=True, slots=True)
class StepCost:
    """Seconds that a step costs, by what it computes. None is negative."""

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
    """The non-negative costs that explain ``steps`` best, by least squares of relative errors.

    A cost that comes out negative, as where all steps are alike, is set to 0 and the others are
    fitted again.
    """
    shapes = np.array(
        [[1.0, step.num_prefill_tokens, step.num_attended, step.num_decodes] for step in steps]
    )
    # A step's error grows with its length; and columns are of one size, or the solver takes the
    # smallest for noise.
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
    """The most that uncached ÷ cached time can be; see the top of this module.

    ``prompts`` has the length of each and how many of its tokens are hits; ``decode_s`` is what
    steps and decodes cost with caching.
    """
    num_prefill_tokens = num_attended = 0
    for num_tokens, num_hits in prompts:
        num_prefill_tokens += num_tokens - num_hits
        num_attended += (num_tokens * (num_tokens + 1) - num_hits * (num_hits + 1)) // 2
    cached_s = decode_s + cost.seconds(
        num_steps=0, num_prefill_tokens=num_prefill_tokens, num_attended=num_attended, num_decodes=0
    )
    return uncached_s / cached_s if cached_s > 0 else float("inf")
