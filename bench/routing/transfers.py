"""Simulates the benefit of transferring KV between groups.

    python -m bench.routing.transfers --data FOLDER [--trace NAME ...] [--groups N ...]
                                      [--cost PRESET ...] [--link NAME ...]

Our policy on our engine without transfers, beside links of each rate, with and without host memory
of four times the KV cache; and Mooncake's rule on its kind of engine (first come first served,
least recently used), which waits for all that it fetches. A source lends from its next step on. The
first tenth of the requests is not counted. More than 16 groups serve copies of the trace that share
nothing.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from bench.report import command, markdown
from bench.routing.cells import SOURCES, WARM_UP, load_copies

from quire.simulate.cost import PRESETS
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.travel import LINKS_GB_S, TravelConfig

SPEEDS = {
    ("conversation", "h100-8b"): 12.0,
    ("conversation", "h200-70b-tp4"): 3.0,
    ("multitenant", "h100-8b"): 20.0,
    ("multitenant", "h200-70b-tp4"): 5.0,
    ("azure", "h100-8b"): 40.0,
    ("azure", "h200-70b-tp4"): 8.0,
}
"""Speed of the replay for 16 groups: many requests wait, no queue grows without end."""
HOST_SHARE = 4


class Case(NamedTuple):
    policy: str
    link: str = ""
    has_host: bool = False

    @property
    def name(self) -> str:
        who = "Mooncake's rule" if self.policy.startswith("mooncake") else "ours"
        host = ", host memory" if self.has_host else ""
        return f"{who}, {self.link or 'no transfers'}{host}"


def main() -> None:
    parser = command("bench.routing.transfers", __doc__)
    add = parser.add_argument
    add("--data", type=Path, default=Path("../shared/data"), help="has traces/ in it")
    traces = sorted({trace for trace, _ in SPEEDS})
    add("--trace", nargs="+", choices=traces, default=traces)
    add("--groups", type=int, nargs="+", default=[16, 64])
    add("--cost", nargs="+", choices=PRESETS, default=["h100-8b", "h200-70b-tp4"])
    add("--link", nargs="+", choices=LINKS_GB_S, default=list(LINKS_GB_S))
    arguments = parser.parse_args()
    for name in arguments.trace:
        file = arguments.data / "traces" / str(SOURCES[name].file)
        if not file.exists():
            print(f"{name}: skipped, {file} does not exist (say --data FOLDER)")
            continue
        for num_groups in arguments.groups:
            trace = load_copies(arguments.data, name, num_copies=max(num_groups // 16, 1), seed=0)
            for cost in arguments.cost:
                speed = SPEEDS[name, cost]
                print(f"\n### {name}, {num_groups} groups, {cost}, speed {speed:g}\n", flush=True)
                rows = []
                for case in _cases(arguments.link):
                    began_s = time.process_time()
                    config = _config(case, num_groups=num_groups, cost=cost)
                    result = simulate(trace.at_speed(speed), config).after(WARM_UP)
                    rows.append(
                        [
                            case.name,
                            f"{result.ttft_s.mean():.4f}",
                            f"{result.ttft_quantile_s(0.5):.4f}",
                            f"{result.ttft_quantile_s(0.99):.3f}",
                            f"{result.hit_rate:.1%}",
                            f"{time.process_time() - began_s:.0f}",
                        ]
                    )
                header = ["", "mean TTFT, s", "p50", "p99", "not computed", "CPU s"]
                print(markdown(header, rows, num_left=1), flush=True)


def _cases(links: list[str]) -> Iterator[Case]:
    yield Case("prefix_aware")
    for link in links:
        yield Case("prefix_aware", link)
    yield Case("mooncake")
    for link in links:
        yield Case("mooncake_fetch", link)
    yield Case("prefix_aware", has_host=True)
    yield Case("prefix_aware", links[-1], has_host=True)
    yield Case("mooncake_fetch", links[-1], has_host=True)


def _config(case: Case, *, num_groups: int, cost: str) -> SimulationConfig:
    is_ours = case.policy == "prefix_aware"
    travel = TravelConfig(
        transfer_gb_s=LINKS_GB_S.get(case.link, 0.0),
        host_tokens=HOST_SHARE * PRESETS[cost].num_cache_tokens * case.has_host,
    )
    config = SimulationConfig(
        num_groups=num_groups, policy=case.policy, cost=PRESETS[cost], travel=travel
    )
    if is_ours:
        return replace(config, eviction="utility", engine=SimulatedEngine(order="srpf"))
    return replace(config, travel=replace(travel, patience=1e6))


if __name__ == "__main__":
    main()
