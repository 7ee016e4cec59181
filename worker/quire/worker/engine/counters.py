"""Counters of an engine's steps and of the time that they took."""

from collections.abc import Mapping
from typing import Any

from quire.worker.cache.block_pool import BlockPool
from quire.worker.engine.scheduler import Scheduler
from quire.worker.request.engine_stats import EngineStats

_FIRST_STEP_S = 0.01


class Counters:
    """Counters since the engine's start; `EngineStats` describes each one."""

    def __init__(self) -> None:
        self.num_output_tokens = 0
        self.num_steps = 0
        self.step_s = _FIRST_STEP_S
        """Moving average of a step's duration, in seconds."""
        self._num_prefilled_tokens = 0
        self._num_full_step_tokens = 0
        self._full_step_s = 0.0

    def stepped(self, num_prefilled: int, seconds: float, *, leaves_prompts: bool) -> None:
        """Records that a step with ``num_prefilled`` prompt tokens was submitted and one was waited
        for, in ``seconds``. ``leaves_prompts``: the submitted step left prompt tokens waiting."""
        self.step_s += 0.1 * (seconds - self.step_s)
        self._num_prefilled_tokens += num_prefilled
        if num_prefilled and leaves_prompts:
            # With asynchronous scheduling this is the time of the step before. Over a queue of
            # prompts, the sums are equal.
            self._num_full_step_tokens += num_prefilled
            self._full_step_s += seconds

    def stats(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        *,
        num_waiting: int,
        of_parts: Mapping[str, Any],
    ) -> EngineStats:
        """``of_parts`` are the fields that parts know (`Part.stats`)."""
        block_size = pool.block_size
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=num_waiting,
            num_pending_prefill_tokens=scheduler.num_pending_prefill_tokens,
            num_total_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free,
            num_cached_blocks=pool.num_cached,
            num_held_blocks=pool.num_held,
            num_wasted_slots=sum(
                seq.num_blocks * block_size - seq.num_computed for seq in scheduler.running
            ),
            num_held_slots=pool.num_held * block_size,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_hit_tokens=scheduler.num_hit_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            num_steps=self.num_steps,
            num_prefilled_tokens=self._num_prefilled_tokens,
            num_full_step_tokens=self._num_full_step_tokens,
            full_step_s=self._full_step_s,
            **of_parts,
        )
