"""Runs a workload through an engine once and measures it.

Only the time in `Engine.add_request` and `Engine.step` counts, not that of reading statistics
between steps. Each run has a new engine and so begins with an empty cache; the executor, which has
the model, is shared by all runs.
"""

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from quire.worker.bench.workload import Workload
from quire.worker.blocks.events import BlockEvent, BlocksRemoved
from quire.worker.blocks.hashing import TokenIds, as_token_ids
from quire.worker.group_engine import GroupEngine
from quire.worker.model.facts import ModelFacts
from quire.worker.request.config import EngineConfig
from quire.worker.request.request import Prepared
from quire.worker.request.sampling_params import SamplingParams
from quire.worker.step.messages import Executor, StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments


class StepSample(NamedTuple):
    """The work of one step, and its time including scheduling and bookkeeping."""

    num_prefill_tokens: int
    num_attended: int
    """The sum over the prefilled tokens of the tokens that each attends to, itself included."""
    num_decodes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The results of one run of a workload."""

    seconds: float
    steps: tuple[StepSample, ...]
    probe: tuple[StepSample, ...] = ()
    """Steps of the longest prompt alone, in chunks, without caching; empty if it was not run."""
    ttft_s: tuple[float, ...]
    """Seconds from each request's submission to its first token, queueing included."""
    outputs: tuple[TokenIds, ...]
    hits: tuple[int, ...]
    """Cached prompt tokens of each request."""
    num_prompt_tokens: int
    num_hit_tokens: int
    num_output_tokens: int
    num_preemptions: int
    num_evictions: int
    """Cached blocks that were evicted for new ones."""
    num_peak_blocks: int
    """The most blocks that running requests held after a step."""
    num_wasted_slots: int
    """Slots of held blocks without a token, summed over the steps; so is the field below."""
    num_held_slots: int


class ExecutorView:
    """A view of an executor with a smaller cache, which records the shape of the last step.

    Steps do not overlap, so that the time between two results is that of one step.
    """

    num_ahead = 0

    def __init__(self, executor: Executor, *, num_blocks: int) -> None:
        assert num_blocks <= executor.num_blocks
        self._executor = executor
        self.num_blocks = num_blocks
        self.numerics = executor.numerics
        self.kv_format = executor.kv_format
        self.host_blocks_XC = executor.host_blocks_XC
        self.num_prefill_tokens = 0
        self.num_attended = 0
        self.num_decodes = 0

    def submit(self, step: StepInput) -> None:
        positions = step.positions_T[step.num_decodes :]
        self.num_decodes = step.num_decodes
        self.num_prefill_tokens = len(positions)
        self.num_attended = int(positions.sum()) + len(positions)
        self._executor.submit(step)

    def send_edits(self, adjustments: Adjustments | None) -> None:
        self._executor.send_edits(adjustments)

    def result(self) -> StepOutput:
        return self._executor.result()

    def close(self) -> None:
        """Does not close the executor, which the next run uses."""


def run_workload(
    workload: Workload,
    executor: Executor,
    facts: ModelFacts,
    config: EngineConfig,
    *,
    num_blocks: int,
    concurrency: int | None = None,
) -> Run:
    """Runs ``workload`` on a new engine with ``num_blocks`` of the executor's blocks.

    At most ``concurrency`` requests are in the engine at a time; ``None`` submits all at once.
    """
    view = ExecutorView(executor, num_blocks=num_blocks)
    engine = GroupEngine(config, facts, view)
    evictions = _EvictionCount(engine)
    requests = [
        Prepared(
            request_id=str(index),
            prompt_token_ids=item.token_ids,
            sampling=SamplingParams(temperature=0, max_tokens=item.max_tokens, ignore_eos=True),
        )
        for index, item in enumerate(workload.items)
    ]
    waiting = deque(requests)
    limit = min(concurrency or config.max_num_waiting, config.max_num_waiting)
    submitted_s = [0.0] * len(requests)
    ttft_s = [0.0] * len(requests)
    outputs: list[list[int]] = [[] for _ in requests]
    hits = [0] * len(requests)
    steps: list[StepSample] = []
    num_peak_blocks = num_wasted = num_held = num_inside = 0
    elapsed_s = 0.0
    while waiting or num_inside:
        begin_s = time.perf_counter()
        while waiting and num_inside < limit:
            request = waiting.popleft()
            submitted_s[int(request.request_id)] = elapsed_s
            engine.add_request(request)
            num_inside += 1
        step_begin_s = time.perf_counter()
        deltas = engine.step()
        end_s = time.perf_counter()
        elapsed_s += end_s - begin_s
        shape = view.num_prefill_tokens, view.num_attended, view.num_decodes
        steps.append(StepSample(*shape, end_s - step_begin_s))
        for delta in deltas:
            index = int(delta.request_id)
            if not outputs[index]:
                ttft_s[index] = elapsed_s - submitted_s[index]
                hits[index] = delta.num_cached_tokens
            outputs[index] += delta.token_ids
            num_inside -= delta.finish_reason is not None
        stats = engine.stats()
        num_peak_blocks = max(num_peak_blocks, stats.num_held_blocks)
        num_wasted += stats.num_wasted_slots
        num_held += stats.num_held_slots
    stats = engine.stats()
    return Run(
        seconds=elapsed_s,
        steps=tuple(steps),
        ttft_s=tuple(ttft_s),
        outputs=tuple(as_token_ids(output) for output in outputs),
        hits=tuple(hits),
        num_prompt_tokens=stats.num_prompt_tokens,
        num_hit_tokens=stats.num_hit_tokens,
        num_output_tokens=stats.num_output_tokens,
        num_preemptions=stats.num_preemptions,
        num_evictions=evictions.count,
        num_peak_blocks=num_peak_blocks,
        num_wasted_slots=num_wasted,
        num_held_slots=num_held,
    )


class _EvictionCount:
    def __init__(self, engine: GroupEngine) -> None:
        self.count = 0
        engine.events.subscribe(self._on_event)

    def _on_event(self, seq: int, event: BlockEvent) -> None:
        if isinstance(event, BlocksRemoved):
            self.count += len(event.hashes)
