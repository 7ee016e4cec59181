"""The simulated engine against results worked out by hand."""

import random
from dataclasses import replace
from itertools import accumulate
from math import nan

import pytest

from quire.simulate.cost import CostModel
from quire.simulate.engine_config import Order, SimulatedEngine
from quire.simulate.group import Group
from quire.simulate.pool import WorkerPool
from quire.simulate.run import SimulationConfig, simulate
from quire.simulate.trace import Row, Trace
from quire.simulate.trace_files import block_name
from quire.worker.blocks.events import EventLog
from quire.worker.request.errors import ConfigError

COST = CostModel(
    base=10.0, per_token=0.1, decode_base=5.0, decode_linear=0.0, num_cache_tokens=3200
)
ONE_GROUP = SimulationConfig(num_groups=1, cost=COST)


def trace_of(*rows: Row) -> Trace:
    return Trace.of(rows, name="by hand", block_size=32)


def row(arrival_ms: float, num_input: int, num_output: int, blocks: str = "") -> Row:
    return Row(
        arrival_ms,
        num_input,
        num_output,
        tuple(block_name(blocks[: i + 1]) for i in range(len(blocks))),
    )


def test_two_prompts_that_share_two_blocks() -> None:
    result = simulate(trace_of(row(0, 100, 3, "abc"), row(5, 100, 1, "abd")), ONE_GROUP)
    # The first: 10 + 100 * 0.1. The second waits for it, finds 64 tokens, computes 36, and the
    # first decodes in the same step. Then the first decodes alone.
    assert result.first_token_ms == pytest.approx([20.0, 20 + 10 + 3.6 + 5])
    assert result.last_token_ms == pytest.approx([43.6, 38.6])
    assert result.hit == [0, 64]


@pytest.mark.parametrize("order", ["fcfs", "srpf"])
def test_what_several_lack_is_pending_once_until_its_step_ends(order: Order) -> None:
    trace = trace_of(row(0, 100, 3, "ABC"), row(0, 110, 3, "ABC"), row(0, 70, 3, "AB"))
    group = Group(
        trace=trace,
        cost=COST,
        config=SimulatedEngine(chunk_tokens=64, order=order),
        pool=WorkerPool(num_blocks=100, block_size=32, log=EventLog(epoch=1)),
        on_first_token=lambda request_id, num_hit_tokens: None,
        on_finish=lambda request_id: None,
    )
    for request_id in range(3):
        group.add(request_id, 0.0)
    # Three blocks of 32 in all, and the tokens after them: 4, 14 and 6.
    pending = [group.num_pending]
    while group.wake_at is not None:
        now = group.wake_at
        group.end(now)
        pending.append(group.num_pending)
        group.begin(now)
    assert pending[:3] == [3 * 32 + 24, 3 * 32 + 24 - 64, 0]


@pytest.mark.parametrize(
    ("shared_read", "step_3_ms", "step_4_ms"),
    [(1.0, 20.63, 8.075), (0.25, 20.15, 7.115), (0.0, 19.99, 6.795)],
)
def test_what_decodes_share_costs_each_further_one_a_share_of_the_first(
    shared_read: float, step_3_ms: float, step_4_ms: float
) -> None:
    """A decode step takes 5 ms, and 0.01 ms for each token. All prompts hit the two blocks AB."""
    cost = replace(COST, decode_linear=32.0, shared_read=shared_read)
    trace = trace_of(row(0, 100, 4, "ABC"), row(5, 100, 3, "ABD"), row(30, 100, 3, "ABE"))
    result = simulate(trace, replace(ONE_GROUP, cost=cost))
    # Step 2 computes 36 tokens and attends to 101. Step 3 does so to 203, of which two decodes
    # share 64; step 4 to 307.5 in its middle, of which the second and the third one share 64
    # each. The last is the third one's alone, who shares nothing any more.
    step_2_ms, step_5_ms = 10 + 3.6 + 5 + 1.01, 5 + 1.025
    ends = list(accumulate((20.0, step_2_ms, step_3_ms, step_4_ms, step_5_ms)))
    assert result.first_token_ms == pytest.approx(ends[:3])
    assert result.last_token_ms == pytest.approx([ends[3], ends[3], ends[4]])
    if shared_read == 1.0:  # The same bits as without shared reads.
        assert result.digest == "0dc8544fb349233d"


def test_a_long_prompt_is_computed_in_chunks_beside_which_others_decode() -> None:
    engine = SimulatedEngine(chunk_tokens=51)
    result = simulate(trace_of(row(0, 50, 3), row(0, 100, 1)), replace(ONE_GROUP, engine=engine))
    # Arrived while the first was alone in its step; then two chunks of 50 beside its decodes.
    assert result.first_token_ms == pytest.approx([15.0, 15 + 2 * (10 + 5 + 5)])
    assert result.last_token_ms == pytest.approx([15 + 2 * 20, 15 + 2 * 20])


def test_an_arrival_cuts_a_run_of_decode_steps_at_the_end_of_the_present_one() -> None:
    result = simulate(trace_of(row(0, 100, 100), row(33, 10, 1)), ONE_GROUP)
    assert result.first_token_ms == pytest.approx([20.0, 35 + 10 + 1 + 5])
    # 99 decodes behind the first token, one of them in the longer step.
    assert result.last_token_ms[0] == pytest.approx(20 + 98 * 5 + 16)


def test_the_least_remaining_prefill_goes_first_until_a_long_one_has_waited_long_enough() -> None:
    long, shorts = row(1, 1000, 1), [row(2 + 10 * i, 100, 1) for i in range(200)]
    trace = trace_of(row(0, 100, 1), long, *shorts)
    engine = SimulatedEngine(chunk_tokens=100, order="srpf")
    first, second = 1, 2
    fcfs = simulate(trace, replace(ONE_GROUP, engine=replace(engine, order="fcfs")))
    srpf = simulate(trace, replace(ONE_GROUP, engine=engine))
    never_ages = simulate(trace, replace(ONE_GROUP, engine=replace(engine, aging=0.0)))
    assert fcfs.first_token_ms[first] < fcfs.first_token_ms[second]
    assert srpf.first_token_ms[second] < srpf.first_token_ms[first]
    assert srpf.first_token_ms[first] < never_ages.first_token_ms[first]
    assert never_ages.first_token_ms[first] == max(never_ages.first_token_ms)


def test_a_prompt_waits_until_its_blocks_and_those_of_its_answer_are_there() -> None:
    cost = replace(COST, num_cache_tokens=320)
    trace = trace_of(row(0, 200, 50), row(1, 100, 1))
    result = simulate(trace, replace(ONE_GROUP, cost=cost))
    assert result.first_token_ms[1] == pytest.approx(result.last_token_ms[0] + 20)


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
def test_equal_prompts_that_arrive_at_random_wait_as_long_as_in_an_m_d_1_queue(
    load: float,
) -> None:
    """Pollaczek and Khinchine: the mean wait is ``load * service / (2 * (1 - load))``."""
    rng, now_ms, service_ms, rows = random.Random(1), 0.0, 20.0, []
    for _ in range(20_000):
        now_ms += rng.expovariate(load / service_ms)
        rows.append(row(now_ms, 100, 1))
    engine = SimulatedEngine(chunk_tokens=100)  # One prompt in each step.
    result = simulate(trace_of(*rows), replace(ONE_GROUP, engine=engine))
    waits_ms = 1000 * result.ttft_s.mean() - service_ms
    assert waits_ms == pytest.approx(load * service_ms / (2 * (1 - load)), rel=0.07)


def test_round_robin_over_many_groups_is_many_queues() -> None:
    """With two groups at twice the rate, every second arrival makes one queue."""
    rng, now_ms, rows = random.Random(2), 0.0, []
    for _ in range(2000):
        now_ms += rng.expovariate(1 / 15)
        rows.append(row(now_ms, 100, 1))
    config = replace(ONE_GROUP, policy="round_robin", engine=SimulatedEngine(chunk_tokens=100))
    both = simulate(trace_of(*rows), replace(config, num_groups=2))
    alone = simulate(trace_of(*rows[::2]), config)
    assert both.first_token_ms[::2] == pytest.approx(alone.first_token_ms)


def test_what_nobody_shares_costs_the_same_however_it_is_read() -> None:
    cost = replace(COST, decode_linear=32.0)
    trace = trace_of(*(row(7 * i, 100 + i, 1 + i % 9, chr(65 + i) * 3) for i in range(60)))
    alone, together = (
        simulate(trace, replace(ONE_GROUP, cost=replace(cost, shared_read=share)))
        for share in (1.0, 0.0)
    )
    assert together.digest == alone.digest


@pytest.mark.parametrize("shared_read", [-0.1, 1.1, nan])
def test_a_share_is_between_none_and_all(shared_read: float) -> None:
    with pytest.raises(ConfigError, match=r"shared_read=.*: must be 0 to 1; 1 where each seq"):
        replace(COST, shared_read=shared_read)
    assert replace(COST, shared_read=0.5).slowed(2).shared_read == 0.5


@pytest.mark.parametrize(
    "zeros", [{"base": 0, "per_token": 0}, {"decode_base": 0, "decode_linear": 0}]
)
def test_steps_that_take_no_time_are_refused(zeros: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must take some time"):
        replace(COST, **zeros)  # type: ignore[arg-type]
