"""Simulated transfers and host memory against results worked out by hand."""

from dataclasses import replace
from math import inf, nan
from typing import Any

import pytest

from quire.simulate.cost import CostModel
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.group import Group
from quire.simulate.network import Network, Transfer
from quire.simulate.pool import Chain, WorkerPool
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace import Row, Trace
from quire.simulate.trace_files import block_name
from quire.simulate.travel import Fetching, HostLog, Offer, TravelConfig
from quire.worker.blocks.events import BlockEvent, BlocksRemoved, BlocksStored
from quire.worker.request.errors import ConfigError

SIZE = 32
COST = CostModel(
    base=10.0,
    per_token=0.1,
    decode_base=5.0,
    decode_linear=0.0,
    num_cache_tokens=3200,
    kv_bytes_per_token=1000,
)


def chain(names: str) -> Chain:
    return tuple(block_name(names[: i + 1]) for i in range(len(names)))


def transfer(source: int, target: int, num_blocks: int, **more: Any) -> Transfer:
    fields = {"starts_ms": 0.0, "compute_ms": 1.0, "patience": 0.1, **more}
    return Transfer(
        source=source,
        target=target,
        chain=(),
        begin=0,
        num_blocks=num_blocks,
        opened_ms=0.0,
        **fields,
    )


def run(network: Network) -> dict[Transfer, float]:
    """Runs all transfers; returns the time at which each ended."""
    ended: dict[Transfer, float] = {}
    while network.next_ms < inf:
        now_ms = network.next_ms
        for each in network.advance(now_ms):
            ended.setdefault(each, now_ms)
    return ended


def test_transfers_share_what_goes_out_of_a_source_and_comes_in_at_a_target() -> None:
    network = Network(num_groups=4, blocks_per_ms=1.0)
    first, second = transfer(0, 1, 30), transfer(0, 2, 10)
    third = transfer(3, 2, 20, starts_ms=5.0)
    for each in (first, second, third):
        network.open(each)
    # Two share group 0's link to 20 ms, when the second ends: 10 blocks each. The third has half of
    # group 2's until then, 7.5 blocks, and 12.5 blocks are left. The first then has 20 left.
    assert run(network) == pytest.approx({second: 20.0, third: 32.5, first: 40.0})


def test_a_closed_transfer_keeps_what_has_landed_and_leaves_its_share_to_others() -> None:
    network = Network(num_groups=3, blocks_per_ms=1.0)
    cut, other = transfer(0, 1, 30), transfer(0, 2, 10)
    network.open(cut)
    network.open(other)
    network.advance(0.0)
    network.close(cut, 10.0)
    network.close(cut, 11.0)
    assert (cut.landed_at(50.0), cut.is_open) == (5, False)
    assert run(network) == pytest.approx({other: 15.0})


def test_who_waits_gives_up_once_it_would_end_later_than_by_computing() -> None:
    """At half the speed of computing, t / 2 blocks land in t ms. The wait may cost 10 ms of 100."""
    network = Network(num_groups=2, blocks_per_ms=0.5)
    slow = transfer(0, 1, 100)
    network.open(slow)
    network.advance(0.0)
    assert network.want(slow, 0.0)
    assert network.next_ms == pytest.approx(20.0)
    assert list(network.advance(20.0)) == [slow]
    assert not network.want(slow, 20.0), "it has been waited for"
    assert slow.landed_at(20.0) == 10
    assert run(network) == pytest.approx({slow: 200.0}), "what lands later may still be used"


def test_a_transfer_that_begins_too_late_is_not_waited_for() -> None:
    network = Network(num_groups=2, blocks_per_ms=10.0)
    late = transfer(0, 1, 100, starts_ms=50.0)
    network.open(late)
    assert network.want(late, 2.0)
    assert list(network.advance(12.0)) == [late]


def one_group(
    network: Network | None, first_ms: dict[int, float], *rows: Row
) -> tuple[Group, HostLog]:
    trace = Trace.of(rows, name="by hand", block_size=SIZE)
    log = HostLog(epoch=1, num_blocks=4)
    fetching = Fetching(index=1, log=log, network=network, patience=0.1, block_size=SIZE)
    group = Group(
        trace=trace,
        cost=COST,
        config=SimulatedEngine(),
        pool=WorkerPool(num_blocks=100, block_size=SIZE, log=log),
        on_first_token=lambda request_id, num_hits: first_ms.update({request_id: num_hits}),
        on_finish=lambda request_id: None,
        fetching=fetching,
        copy_ms=0.25,
    )
    return group, log


def test_a_request_waits_for_its_blocks_and_computes_the_rest() -> None:
    network, hits = Network(num_groups=2, blocks_per_ms=2.0), dict[int, float]()
    row = Row(0.0, 4 * SIZE + 10, 2, chain("abcd"))
    group, _ = one_group(network, hits, row, row)
    group.add(0, 0.0, Offer(source=0, num_blocks=4, starts_ms=1.0))
    group.add(1, 0.0)
    assert (group.wake_at, group.num_waiting, group.num_pending) == (None, 2, 20)
    while group.wake_at is None:
        now_ms = network.next_ms
        for each in network.advance(now_ms):
            group.resume(each, now_ms)
    # It lands from 1 ms to 3 ms. The step computes what is behind it for both, and copies 4 blocks.
    assert group.wake_at == pytest.approx(3.0 + 10 + 0.1 * 20 + 4 * 0.25)
    assert group.wake_at is not None
    group.end(group.wake_at)
    assert hits == {0: 128, 1: 128}, "the second one shares the transfer"
    assert group.counters.num_peer_tokens == 128
    assert group.counters.peer_s == pytest.approx(0.003)


def test_a_request_of_which_blocks_come_too_late_computes_all_of_it() -> None:
    network, hits = Network(num_groups=2, blocks_per_ms=2.0), dict[int, float]()
    group, _ = one_group(network, hits, Row(0.0, 4 * SIZE + 10, 1, chain("abcd")))
    group.add(0, 0.0, Offer(source=0, num_blocks=4, starts_ms=1000.0))
    patience_ms = 0.1 * 128 * (10 + 0.1 * 138) / 138  # A tenth of the time to compute 128 tokens.
    assert network.next_ms == pytest.approx(patience_ms)
    for each in network.advance(network.next_ms):
        group.resume(each, patience_ms)
    assert group.wake_at == pytest.approx(patience_ms + 10 + 0.1 * 138)
    assert network.next_ms == inf, "no more of it is wanted"
    assert group.wake_at is not None
    group.end(group.wake_at)
    assert (hits, group.counters.num_peer_tokens) == ({0: 0}, 0)


def test_what_leaves_the_cache_goes_to_host_memory_and_comes_back_as_copies() -> None:
    heard: list[BlockEvent] = []
    hits = dict[int, float]()
    group, log = one_group(None, hits, Row(0.0, 3 * SIZE + 10, 1, chain("abc")))
    log.subscribe(lambda seq, event: heard.append(event))
    names = chain("abcde")
    log.stored(names)
    log.removed(reversed(names))
    assert heard == [
        BlocksStored(names, 0),
        BlocksStored(names[::-1], 1),
        BlocksRemoved((names[4],)),
    ], "it has room for four, and ends of chains go first"
    group.add(0, 0.0)
    assert group.wake_at == pytest.approx(10 + 0.1 * 10 + 3 * 0.25)
    assert group.wake_at is not None
    group.end(group.wake_at)
    assert hits == {0: 96}
    assert group.counters.num_host_tokens == 96


def test_a_source_lends_from_its_next_step_on() -> None:
    group, _ = one_group(None, {}, Row(0.0, 4 * SIZE + 10, 3, chain("abcd")))
    idle = group.offer(0, chain("abcd"), 4, 0.0)
    assert idle == Offer(0, 0, 0.0)
    group.add(0, 0.0)
    assert group.wake_at is not None
    assert group.offer(0, chain("abcx"), 4, 1.0) == Offer(0, 3, group.wake_at)


def test_with_transfers_a_busy_groups_prefix_is_computed_once() -> None:
    prompt = "abcdefghijklmnopqrst"
    rows = [Row(0.0, 20 * SIZE + 5, 300, chain(prompt))]
    rows += [Row(500.0, 60 * SIZE, 1, chain(prompt[:1] + f"{i}" * 59)) for i in range(3)]
    rows += [Row(510.0 + i, 20 * SIZE + 5, 1, chain(prompt)) for i in range(9)]
    trace = Trace.of(rows, name="by hand", block_size=SIZE)
    config = SimulationConfig(num_groups=2, cost=replace(COST, num_cache_tokens=10**5))
    fast = replace(config, travel=TravelConfig(transfer_gb_s=50.0, transfer_ms=0.1))
    without, with_transfers = simulate(trace, config), simulate(trace, fast)
    assert simulate(trace, fast).digest == with_transfers.digest
    assert sum(with_transfers.hit) >= sum(without.hit)
    assert with_transfers.ttft_s.mean() <= without.ttft_s.mean()


def test_values_that_cannot_work_name_themselves() -> None:
    for name in ("transfer_gb_s", "transfer_ms", "host_tokens", "patience"):
        for value in (-1.0, nan, inf):
            with pytest.raises(ConfigError, match=f"{name}={value}: must be a number, 0 or more"):
                TravelConfig(**{name: value})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"host_gb_s=0\.0: must be a number above 0"):
        TravelConfig(host_gb_s=0.0)
    with pytest.raises(ConfigError, match="kv_bytes_per_token=0: must be what a token's KV takes"):
        SimulationConfig(
            cost=replace(COST, kv_bytes_per_token=0), travel=TravelConfig(transfer_gb_s=1.0)
        )
