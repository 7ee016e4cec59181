"""Profiler results: kernels of one eager and of one graph step, and counters of one launch.

`torch.profiler` shows where a step's time goes on the device, and how much of the step the device
is idle. Nsight Compute, where it is installed, reads the hardware's counters of single launches.
"""

import shutil
import subprocess
import sys
import time
from collections import defaultdict

from bench.gpu.lines import Lines
from bench.gpu.model import decode_step, engine_rank
from bench.gpu.shapes import Scale
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

_METRICS = (
    "gpu__time_duration.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)
_NCU_CASES = {
    "attention": ("decode 32 x 8192, 32:8 heads of 128", "prefill 4 x 2048, 32:8 heads of 128"),
    "streams": ("sample 64, top-p 0.95, 32:8 heads of 128",),
}
_NCU_S = 90


def profile_steps(scale: Scale, lines: Lines) -> None:
    """Time by kernel of a decode step, eager and as a graph, and the device's idle share."""
    with engine_rank(scale) as (executor, _):
        runner = executor._runner
        assert runner is not None
        rows, context = scale.decodes[1]
        step = decode_step(rows, context, int(scale.llama["vocab_size"]))
        graphs = runner._graphs
        for way, used in {"call by call": None, "graph": graphs}.items():
            if (way == "graph" and graphs is None) or not lines.begin(f"profile, {way}"):
                continue
            runner._graphs = used
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
            lines.fact(
                f"decode step {rows} x {context}, {way}: wall with the profiler, µs", wall_us
            )
            lines.fact(
                f"decode step {rows} x {context}, {way}: device busy, µs", sum(by_name.values())
            )
            for name, micros in sorted(by_name.items(), key=lambda each: -each[1])[:12]:
                lines.fact(f"{way}: {name}, µs", micros)
        runner._graphs = graphs


def count_launches(scale: Scale, lines: Lines) -> None:
    """Counters of some launches, by running their case once more under Nsight Compute."""
    ncu = shutil.which("ncu")
    if ncu is None or scale.device.type == "cpu":
        lines.fact("not run", "ncu is not installed" if ncu is None else "there is no GPU")
        return
    for part, cases in _NCU_CASES.items():
        for case in cases:
            if not lines.begin(f"ncu, {case}"):
                continue
            command = [
                *(ncu, "--clock-control", "none", "--metrics", ",".join(_METRICS)),
                *(
                    "--launch-skip",
                    "3",
                    "--launch-count",
                    "3",
                    "--csv",
                    "--target-processes",
                    "all",
                ),
                *(
                    sys.executable,
                    "-m",
                    "bench.gpu.part",
                    part,
                    "--out",
                    "/dev/null",
                    "--only",
                    case,
                ),
            ]
            try:
                done = subprocess.run(
                    command, capture_output=True, text=True, timeout=_NCU_S, check=False
                )
            except subprocess.TimeoutExpired:
                lines.fact(f"not run: ncu, {case}", f"took more than {_NCU_S} s")
                continue
            found = [row for row in done.stdout.splitlines() if row.count('","') > 8]
            for row in found[1:]:
                cells = [cell.strip('"') for cell in row.split('","')]
                lines.fact(f"ncu, {case}, {cells[4][:40]}: {cells[-3]}", f"{cells[-1]} {cells[-2]}")
            if not found:
                lines.fact(f"not run: ncu, {case}", (done.stdout + done.stderr)[-300:])
