"""The times of steps of one kind, part by part, and their table."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.worker.bench.report import format_table
from quire.worker.bench.step_parts import ENGINE_PARTS, FORWARD, RANK_PARTS, SAMPLE


@dataclass(frozen=True, kw_only=True, slots=True)
class PartTime:
    """Microseconds of one part of a step."""

    median_us: float
    p99_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepProfile:
    """One kind of step."""

    kind: str
    """ "32 decodes" or "prefill 512"."""
    is_async: bool
    """Whether each step was prepared while the one before it ran."""
    num_steps: int
    step: PartTime
    """The whole of it."""
    parts: dict[str, PartTime]
    """In the order in which a step goes through them; parts that never ran are left out."""
    around_model: PartTime
    """All but the forward pass and sampling."""


def step_table(profiles: Sequence[StepProfile]) -> str:
    """A line for each part, two columns for each kind of step."""
    header = ["part"]
    for profile in profiles:
        header += [profile.kind, "p99"]
    lines = [["the whole step", *_cells([p.step for p in profiles])]]
    lines += [
        [part, *_cells([profile.parts.get(part) for profile in profiles])]
        for part in (*ENGINE_PARTS, *RANK_PARTS)
        if any(part in profile.parts for profile in profiles)
    ]
    lines.append(["without model, sampling", *_cells([p.around_model for p in profiles])])
    return format_table(header, lines)


def step_profile(
    kind: str, times_ns: Sequence[dict[str, int]], *, is_async: bool = False
) -> StepProfile:
    """Medians and 99th percentiles over the steps of one kind."""
    parts = [part for part in (*ENGINE_PARTS, *RANK_PARTS) if any(part in t for t in times_ns)]
    steps_ns = [sum(times.get(part, 0) for part in ENGINE_PARTS) for times in times_ns]
    model_ns = [times.get(FORWARD, 0) + times.get(SAMPLE, 0) for times in times_ns]
    return StepProfile(
        kind=kind,
        is_async=is_async,
        num_steps=len(times_ns),
        step=_part_time(steps_ns),
        parts={part: _part_time([times.get(part, 0) for times in times_ns]) for part in parts},
        around_model=_part_time(
            [step - model for step, model in zip(steps_ns, model_ns, strict=True)]
        ),
    )


def _part_time(times_ns: Sequence[int]) -> PartTime:
    median_us, p99_us = (np.percentile(times_ns, [50, 99]) / 1e3).tolist()
    return PartTime(median_us=median_us, p99_us=p99_us)


def _cells(times: Sequence[PartTime | None]) -> list[str]:
    cells = []
    for time in times:
        cells += ["", ""] if time is None else [f"{time.median_us:.0f}", f"{time.p99_us:.0f}"]
    return cells
