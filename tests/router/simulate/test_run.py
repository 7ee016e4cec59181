"""Properties of a simulation run under every policy, pool and disturbance."""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from math import nan
from typing import Any, get_args

import pytest

from quire.simulate.baselines import SIMULATED_POLICIES
from quire.simulate.command import Sweep
from quire.simulate.cost import PRESETS
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.run import Eviction, SimulationConfig, simulate
from quire.simulate.trace import Row, Trace
from quire.simulate.travel import TravelConfig
from quire.worker.request.errors import ConfigError

SMALL = replace(PRESETS["cpu-125m"], num_cache_tokens=4096)
CONFIG = SimulationConfig(num_groups=4, cost=SMALL)
MakeTrace = Callable[..., Trace]


def check(trace: Trace, config: SimulationConfig) -> None:
    """Asserts that every request is served once, after its arrival, and that hits have a source."""
    result = simulate(trace, config)
    seen: dict[bytes, int] = {}
    for index, chain in enumerate(trace.chains):
        arrival, first = result.arrival_ms[index], result.first_token_ms[index]
        assert arrival < first <= result.last_token_ms[index]
        assert (first < result.last_token_ms[index]) == (trace.num_output[index] > 1)
        endless = 0
        while endless < len(chain) and chain[endless] in seen:
            endless += 1
        # Only a group that reorders requests can hit blocks of one that arrived later.
        limit = min(endless * trace.block_size, trace.num_input[index] - 1)
        assert result.hit[index] <= limit or config.engine.order == "srpf"
        seen.update(dict.fromkeys(chain, index))
    assert simulate(trace, config).digest == result.digest


@pytest.mark.quick_cells(3)
@pytest.mark.parametrize("policy", SIMULATED_POLICIES)
def test_each_request_is_served_once_and_the_same_seed_gives_the_same_run(
    chats: MakeTrace, policy: str
) -> None:
    check(chats(), replace(CONFIG, policy=policy))


@pytest.mark.parametrize("eviction", get_args(Eviction))
def test_every_pool_does_so_too(chats: MakeTrace, eviction: Eviction) -> None:
    check(chats(), replace(CONFIG, eviction=eviction))


@pytest.mark.parametrize(
    "disturbance",
    [
        {"event_lag_ms": 500.0},
        {"event_loss": 0.3},
        {"num_gateways": 3},
        {"slow_factor": 3.0},
        {"travel": TravelConfig(transfer_gb_s=1.0, host_tokens=8192)},
        {"travel": TravelConfig(transfer_gb_s=0.05, host_tokens=512), "event_lag_ms": 500.0},
    ],
    ids=lambda disturbance: "+".join(disturbance),
)
def test_nothing_is_lost_when_things_go_wrong(
    chats: MakeTrace, disturbance: dict[str, Any]
) -> None:
    check(chats(), replace(CONFIG, **disturbance))


@pytest.mark.parametrize("policy", ["prefix_aware", "mooncake_fetch"])
def test_with_every_order_blocks_that_travel_lose_no_request(chats: MakeTrace, policy: str) -> None:
    travel = TravelConfig(transfer_gb_s=0.5, host_tokens=2048)
    engine = SimulatedEngine(order="srpf", chunk_tokens=256)
    config = replace(CONFIG, policy=policy, travel=travel, engine=engine, eviction="utility")
    trace = chats(gap_ms=10.0)
    result = simulate(trace, config)
    assert all(result.last_token_ms)
    assert simulate(trace, config).digest == result.digest


@pytest.mark.parametrize("policy", ["round_robin", "random", "power_of_two"])
def test_gateways_do_not_draw_the_same_lots_one_after_the_other(
    chats: MakeTrace, policy: str
) -> None:
    """Equal random numbers would give groups as many requests in a row as there are gateways."""
    config = replace(CONFIG, policy=policy, num_gateways=4, num_groups=16)
    group = simulate(chats(gap_ms=1e6), config).group  # No two requests overlap.
    in_a_row = sum(a == b for a, b in pairwise(group))
    assert in_a_row < 0.2 * len(group)


def test_prediction_is_exact_where_nothing_is_evicted_late_or_lost(chats: MakeTrace) -> None:
    config = replace(CONFIG, cost=replace(SMALL, num_cache_tokens=10**6))
    trace = chats()
    assert simulate(trace, config).prediction_error == 0
    assert simulate(trace, replace(config, event_loss=0.5)).prediction_error > 0


def test_values_that_cannot_work_name_themselves(chats: MakeTrace) -> None:
    with pytest.raises(ConfigError, match="policy='best': must be one of prefix_aware, "):
        SimulationConfig(policy="best")
    with pytest.raises(ConfigError, match=r"event_loss=1\.5: must be at least 0 and below 1"):
        SimulationConfig(event_loss=1.5)
    with pytest.raises(ConfigError, match="num_groups=0: must be above 0"):
        SimulationConfig(num_groups=0)
    with pytest.raises(ConfigError, match="slow_factor=nan: must be above 0"):
        SimulationConfig(slow_factor=nan)
    with pytest.raises(ConfigError, match="event_lag_ms=nan: must not be negative"):
        SimulationConfig(event_lag_ms=nan)
    with pytest.raises(ConfigError, match="a request arrives at nan ms; each must have a time"):
        Trace.of([Row(nan, 1, 1, ())], name="x", block_size=16)
    sweep: dict[str, Any] = {"base": CONFIG, "policies": [], "group_counts": []}
    with pytest.raises(ConfigError, match="speed=nan: must be above 0"):
        Sweep(**sweep, speeds=[nan])
    with pytest.raises(ConfigError, match="ttft_target_s=nan: must be above 0"):
        Sweep(**sweep, speeds=[], ttft_target_s=nan)
    tiny = replace(SMALL, num_cache_tokens=64)
    with pytest.raises(ConfigError, match=r"request \d+ of chats has .* room for 64: give groups"):
        simulate(chats(), replace(CONFIG, cost=tiny))
