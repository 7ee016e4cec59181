"""``quire simulate``: replays a trace for each policy, number of groups and speed asked for."""

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from quire.simulate import report
from quire.simulate.capacity import find_capacity
from quire.simulate.report import Row
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace import Trace
from quire.worker.request.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The replays to run.

    Raises:
        ConfigError: There is nothing to replay, or a value cannot work.
    """

    base: SimulationConfig
    policies: Sequence[str]
    group_counts: Sequence[int]
    speeds: Sequence[float]
    ttft_target_s: float | None = None
    """Find the speed at which the 99th percentile is this, instead of replaying at ``speeds``."""

    def __post_init__(self) -> None:
        for speed in self.speeds:
            if not speed > 0:  # Nor is what is not a number.
                raise ConfigError(f"speed={speed}: must be above 0; 2 replays twice as fast")
        if self.ttft_target_s is not None and not self.ttft_target_s > 0:
            raise ConfigError(f"ttft_target_s={self.ttft_target_s}: must be above 0")
        for policy in self.policies:
            replace(self.base, policy=policy)
        for num_groups in self.group_counts:
            replace(self.base, num_groups=num_groups)

    @property
    def configs(self) -> Iterator[SimulationConfig]:
        for num_groups in self.group_counts:
            for policy in self.policies:
                yield replace(self.base, num_groups=num_groups, policy=policy)


def run_command(sweep: Sweep, trace: Trace, *, output: Path | None, plot_format: str) -> int:
    """Prints a line per replay; writes ``output`` + ".json" and a plot if there is a stem.

    Raises:
        ConfigError: ``output`` is in no folder that there is, or a replay is not possible.
    """
    if output is not None and not output.parent.is_dir():
        raise ConfigError(f"output={output}: {output.parent} is no folder; make it first")
    print(f"{trace.name}: {len(trace):,} requests, {sum(trace.num_input):,} prompt tokens\n")
    print(report.HEADER)
    began_s = time.process_time()
    rows = []
    for row in _replay(sweep, trace):
        rows.append(row)
        print(report.line(row), flush=True)
    per_request_us = (time.process_time() - began_s) * 1e6 / max(len(rows) * len(trace), 1)
    print(f"\n{report.LEGEND}")
    if sweep.ttft_target_s is not None:
        print(f"speed: the fastest at which 99 % of requests wait {sweep.ttft_target_s} s at most.")
    else:
        print(f"{per_request_us:.0f} µs of CPU per simulated request.")
    if output is not None:
        _write(sweep, trace, rows, output, plot_format)
    return 0


def _replay(sweep: Sweep, trace: Trace) -> Iterator[Row]:
    for config in sweep.configs:
        if sweep.ttft_target_s is None:
            for speed in sweep.speeds:
                result = simulate(trace.at_speed(speed), config)
                yield Row.of(result, policy=config.policy, speed=speed)
            continue
        speed, best = find_capacity(
            lambda speed, config=config: simulate(trace.at_speed(speed), config),  # type: ignore[misc]
            target_s=sweep.ttft_target_s,
        )
        if best is None:
            raise ConfigError(
                f"ttft_target_s={sweep.ttft_target_s}: {config.policy} on {config.num_groups} "
                "groups does not reach it at any speed; a single prompt may take longer"
            )
        yield Row.of(best, policy=config.policy, speed=speed)


def _write(sweep: Sweep, trace: Trace, rows: list[Row], output: Path, plot_format: str) -> None:
    file = output.with_name(f"{output.name}.json")
    settings = {"trace": trace.name, "num_requests": len(trace), **asdict(sweep.base)}
    data = {"settings": settings, "rows": [row.as_dict() for row in rows]}
    file.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {file}")
    picture = output.with_name(f"{output.name}.{plot_format}")
    try:
        report.plot(rows, picture, title=f"{trace.name}, {sweep.base.eviction} eviction")
    # The slow part is done and written.
    except ConfigError as error:
        print(f"no plot: {error}")
    else:
        print(f"wrote {picture}")
