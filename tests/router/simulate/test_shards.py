"""A directory in shards decides nothing otherwise than one directory."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from quire.router.sharding import ShardMap
from quire.router.simulate.cost import PRESETS
from quire.router.simulate.run import SimulationConfig, simulate
from quire.router.simulate.shards import ShardedLog, Sharding
from quire.router.simulate.trace import Row, Trace
from quire.router.simulate.trace_files import block_name
from quire.worker.errors import ConfigError

SMALL = replace(PRESETS["cpu-125m"], num_cache_tokens=4096)
CONFIG = SimulationConfig(num_groups=4, cost=SMALL)
MakeTrace = Callable[..., Trace]


@pytest.mark.parametrize("num_shards", [2, 7])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"event_lag_ms": 500.0},
        {"event_loss": 0.3},
        {"event_lag_ms": 300.0, "event_loss": 0.1, "num_gateways": 3},
        {"eviction": "utility"},
        {"use_table": True},
        {"use_table": True, "event_lag_ms": 500.0, "num_gateways": 2},
    ],
    ids=lambda settings: "-".join(settings) or "plain",
)
def test_any_number_of_shards_gives_the_run_of_one(
    chats: MakeTrace, settings: dict[str, float], num_shards: int
) -> None:
    one = replace(CONFIG, **settings)  # type: ignore[arg-type]
    trace = chats()
    expected = simulate(trace, one)
    result = simulate(trace, replace(one, num_directory_shards=num_shards))
    assert result.digest == expected.digest
    assert (result.hit, result.predicted_hit) == (expected.hit, expected.predicted_hit)


def test_each_shard_repairs_what_was_lost_on_its_way(chats: MakeTrace) -> None:
    config = replace(CONFIG, event_loss=0.3, num_directory_shards=3)
    trace = chats(num_requests=2000, gap_ms=60.0)
    for_good = simulate(trace, config)
    repaired = simulate(trace, replace(config, use_table=True))
    assert repaired.prediction_error < 0.5 * for_good.prediction_error


def test_a_shard_hears_of_its_chains_and_of_what_all_begin_with(chats: MakeTrace) -> None:
    trace = chats()
    sharding = Sharding.of(trace, num_shards=3)
    assert sharding.map.spread
    log = ShardedLog(epoch=1, sharding=sharding)
    for chain in trace.chains:
        log.stored(chain)
    held = [set(part.snapshot().snapshot or ()) for part in log.parts]
    assert set.intersection(*held) == sharding.map.spread
    for chain in trace.chains:
        shard = sharding.map.shard_of(chain)
        assert all(held[shard] >= set(chain) for shard in (range(3) if shard is None else [shard]))
    # Every block that is not spread is in one shard.
    rest = [part - sharding.map.spread for part in held]
    assert sum(map(len, rest)) == len(set.union(*rest))
    log.removed(block for chain in trace.chains for block in chain)
    assert all(part.snapshot().snapshot == () for part in log.parts)


def test_names_that_do_not_cover_what_precedes_them_are_refused() -> None:
    a, b, c = (block_name(name) for name in "abc")
    others = [Row(2, 100, 1, (block_name(number),)) for number in range(300)]
    rows = [Row(0, 200, 1, (a, c)), Row(1, 200, 1, (b, c)), *others]
    trace = Trace.of(rows, name="unchained", block_size=100)
    with pytest.raises(ConfigError, match="request 1 of unchained: its block 1 is another one's"):
        simulate(trace, replace(CONFIG, num_directory_shards=16))
    with pytest.raises(ConfigError, match="num_directory_shards=0: must be above 0"):
        SimulationConfig(num_directory_shards=0)
    with pytest.raises(ConfigError, match="num_shards=0: must be at least 1"):
        ShardMap(num_shards=0)
