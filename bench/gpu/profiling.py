"""Profiles a step with `torch.profiler`: device time per kernel, and the device's idle share."""

import time
from collections import defaultdict

from bench.gpu.model import decode_step, engine_rank, ways
from bench.gpu.timings import Timer
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


def profile_steps(timer: Timer) -> None:
    """Time by kernel of a decode step, eager and as a graph, and the device's idle share."""
    scale, lines = timer.scale, timer.lines
    with engine_rank(scale) as (executor, _):
        runner = executor._runner
        assert runner is not None
        rows, context = scale.decodes[1]
        step = decode_step(rows, context, int(scale.llama["vocab_size"]))
        for way in ways(runner):
            if not lines.begin(f"profile, {way}"):
                continue
            for _ in range(3):
                runner.execute(step)
            activities = [ProfilerActivity.CPU]
            if scale.device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            start = time.perf_counter()
            with profile(activities=activities) as profiler:
                runner.execute(step)
            wall_us = (time.perf_counter() - start) * 1e6
            by_name: dict[str, float] = defaultdict(float)
            for event in profiler.events() or ():
                if event.device_type == DeviceType.CUDA:
                    by_name[event.name[:60]] += event.time_range.elapsed_us()
            what = f"decode step {rows} x {context}, {way}"
            lines.fact(f"{what}: wall with the profiler, µs", wall_us)
            lines.fact(f"{what}: device busy, µs", sum(by_name.values()))
            for name, micros in sorted(by_name.items(), key=lambda each: -each[1])[:12]:
                lines.fact(f"{way}: {name}, µs", micros)
