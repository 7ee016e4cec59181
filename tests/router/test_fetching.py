"""Routing decisions that may fetch blocks from outside the chosen group's KV cache."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.examples import examples

from quire.router.config import RoutingConfig
from quire.router.policies.fetching import KINDS, MIN_SAVED_TOKENS, PATIENCE, Elsewhere, FetchCosts
from quire.router.policies.policy import GroupLoad
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.events import BlocksStored, EventBatch, EventLog
from quire.worker.blocks.hashing import BlockHash
from quire.worker.request.outputs import Fetched

Blocks = Callable[[Iterable[object]], tuple[BlockHash, ...]]
A, B, C = GroupId("a"), GroupId("b"), GroupId("c")
SIZE = 16


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def load(**numbers: float) -> GroupLoad:
    fields: dict[str, float] = {"num_running": 0, "num_waiting": 0, "num_pending_prefill_tokens": 0}
    return GroupLoad(**(fields | numbers))  # type: ignore[arg-type]


def table_of(
    *groups: GroupId, lenders: Iterable[GroupId] = (), clock: Clock | None = None
) -> RoutingTable:
    table = RoutingTable(block_size=SIZE, config=RoutingConfig(), clock=clock or Clock())
    table.update_members(groups, lenders=lenders)
    return table


def hold(
    table: RoutingTable, group: GroupId, hashes: tuple[BlockHash, ...], *, tier: int = 0
) -> None:
    log = EventLog(epoch=1, num_tiers=tier + 1)
    log.stored(hashes, tier)
    table.apply_events(group, log.since(0))


rests = st.sampled_from([0.0, 20.0, 300.0])
lengths = st.sampled_from([0, 1, 2, 3, 40, 100]) | st.integers(0, 200)
costs = st.tuples(
    st.sampled_from([0.0, 1.0, 31.0, 64.0, 500.0]), st.sampled_from([0, 0.04, 0.9, 2])
)


@given(data=st.data(), num_tiers=st.integers(1, 3), usable=st.integers(0, 150))
@settings(max_examples=examples(300))
def test_what_a_group_fetches_is_worked_out_for_all_as_for_each(
    data: st.DataObject, num_tiers: int, usable: int
) -> None:
    num_groups = data.draw(st.integers(1, 5))
    of_groups = st.lists(lengths, min_size=num_groups, max_size=num_groups)
    own = [min(length, usable) for length in data.draw(of_groups)]
    tiers = [data.draw(of_groups) for _ in range(num_tiers - 1)]
    source = data.draw(st.sampled_from([None, A]))
    num_lent, source_rest = data.draw(lengths), data.draw(rests)
    takes = data.draw(st.lists(st.booleans(), min_size=num_groups, max_size=num_groups))
    kinds = [[data.draw(costs) for _ in KINDS] for _ in range(num_groups)]
    elsewhere = Elsewhere(
        np.array(tiers, dtype=float).reshape(num_tiers - 1, num_groups),
        source,
        num_lent,
        np.array(takes, dtype=float),
        source_rest,
    )
    costs_2KG = np.array(kinds).transpose(2, 1, 0)
    cached = np.array(own) * float(SIZE)
    rest = np.array(data.draw(st.lists(rests, min_size=num_groups, max_size=num_groups)))
    step = np.array(data.draw(st.lists(rests, min_size=num_groups, max_size=num_groups)))
    found = elsewhere.fetches(costs_2KG, cached, rest, step, usable_blocks=usable, block_size=SIZE)
    for group in range(num_groups):
        end, hits, fetched, of_source = own[group], own[group] * float(SIZE), 0, 0
        ways = [(kind, tier[group], 0.0, 0.0) for kind, tier in enumerate(tiers)]
        if source and takes[group]:
            ways.append((2, num_lent, MIN_SAVED_TOKENS, source_rest))
        for kind, length, min_saved, later in ways:
            num = max(min(length, usable) - end, 0) * SIZE
            end = max(end, min(length, usable))
            fixed, share = kinds[group][kind]
            # Transfers overlap with the group's own step; a source lends after its step.
            fixed += later - rest[group]
            cost = max(fixed + share * num, 0)
            # Blocks that arrive within a step wait for its end.
            cost += step[group] if cost and min_saved else 0
            saved = num - cost
            if num and saved > 0 and saved >= min_saved and fixed <= PATIENCE * num:
                hits, fetched = hits + saved, fetched + num
                of_source = num if kind == 2 else 0
        if found is None:
            assert not fetched
            continue
        assert found.hits[group] == pytest.approx(hits)
        assert found.num_tokens[group] == fetched
        assert found.num_lent(group) == of_source
        costs_of_group = found.costs_RG[:, group].sum()
        assert found.hits[group] + costs_of_group == pytest.approx(cached[group] + fetched)


def test_a_busy_groups_prefix_is_fetched_by_an_idle_one(blocks: Blocks) -> None:
    table = table_of(A, B, lenders=(A, B))
    prompt = blocks(range(200))
    hold(table, A, prompt)
    table.update_load(A, load(num_pending_prefill_tokens=20_000, num_running=9))
    table.update_load(B, load())
    decision = table.route("r", hashes=prompt, num_prompt_tokens=3210)
    assert (decision.group, decision.source, decision.num_source_blocks) == (B, A, 200)
    assert decision.reason == "fetched_prefix"
    assert decision.num_fetched_tokens == decision.predicted_cached_tokens == 3200
    assert 0 < decision.fetch_cost < 3200
    candidate = {each.group: each for each in decision.candidates}
    assert (candidate[A].num_cached_tokens, candidate[A].num_fetched_tokens) == (3200, 0)
    assert (candidate[B].num_cached_tokens, candidate[B].num_fetched_tokens) == (0, 3200)
    assert candidate[B].num_prefill_tokens == 10


def test_nothing_is_fetched_where_that_saves_too_little(blocks: Blocks) -> None:
    table = table_of(A, B, lenders=(A, B))
    prompt = blocks(range(3))
    hold(table, A, prompt)
    table.update_load(A, load(num_pending_prefill_tokens=20_000))
    decision = table.route("r", hashes=prompt, num_prompt_tokens=50)
    assert (decision.group, decision.source, decision.num_fetched_tokens) == (B, None, 0)


@pytest.mark.parametrize("lenders", [(), (A,), (B,)])
def test_only_groups_that_exchange_blocks_lend_and_fetch(
    blocks: Blocks, lenders: tuple[GroupId, ...]
) -> None:
    table = table_of(A, B, lenders=lenders)
    prompt = blocks(range(200))
    hold(table, A, prompt)
    table.update_load(A, load(num_pending_prefill_tokens=20_000))
    decision = table.route("r", hashes=prompt, num_prompt_tokens=3210)
    assert (decision.group, decision.source) == (B, None)
    assert decision.predicted_cached_tokens == 0


def test_a_group_that_is_not_routed_to_any_longer_still_lends(blocks: Blocks) -> None:
    table = table_of(A, B, lenders=(A, B))
    prompt = blocks(range(200))
    hold(table, A, prompt)
    table.update_members([B], lenders=[A, B])
    more = EventBatch(epoch=1, first_seq=1, events=(BlocksStored(blocks("x")),))
    table.apply_events(A, more)
    assert table.events_position(A).next_seq == 2, "its events still count"
    assert table.route("r", hashes=prompt, num_prompt_tokens=3210).source == A
    table.update_members([B], lenders=[B])
    assert table.events_position(A).next_seq == 0
    assert table.route("s", hashes=prompt, num_prompt_tokens=3210).source is None


def test_blocks_of_a_slower_tier_count_less_than_cached_ones_and_more_than_none(
    blocks: Blocks,
) -> None:
    prompt = blocks(range(200))
    costs = {}
    for tier in (0, 1, 2):
        table = table_of(A, B)
        hold(table, A, prompt, tier=tier)
        decision = table.route("r", hashes=prompt, num_prompt_tokens=3210)
        assert (decision.group, decision.predicted_cached_tokens) == (A, 3200)
        assert decision.num_fetched_tokens == (3200 if tier else 0)
        costs[tier] = decision.costs[decision.index]
        worst = max(decision.costs)
    assert costs[0] < costs[1] < costs[2] < worst


def test_what_lies_on_another_groups_disk_is_not_lent(blocks: Blocks) -> None:
    prompt = blocks(range(200))
    for tier, source in ((1, A), (2, None)):
        table = table_of(A, B, lenders=(A, B))
        hold(table, A, prompt, tier=tier)
        table.update_load(A, load(num_pending_prefill_tokens=20_000))
        assert table.route("r", hashes=prompt, num_prompt_tokens=3210).source == source


def test_a_source_that_failed_is_not_named_for_a_while(blocks: Blocks) -> None:
    clock = Clock()
    table = table_of(A, B, lenders=(A, B), clock=clock)
    prompt = blocks(range(200))
    hold(table, A, prompt)
    table.update_load(A, load(num_pending_prefill_tokens=50_000))

    def source(name: str) -> GroupId | None:
        decision = table.route(name, hashes=prompt, num_prompt_tokens=3210)
        table.completed(name)
        return decision.source

    table.route("r", hashes=prompt, num_prompt_tokens=3210)
    table.started("r", num_cached_tokens=0, fetched=Fetched(error="gone"))
    (told,) = table.explain("r")
    assert told.fetched == Fetched(error="gone")
    table.completed("r")
    assert source("s") is None
    clock.now_s = 31
    assert source("t") == A


def test_of_equal_sources_the_one_that_fewest_fetch_from_is_named_then_the_least_loaded(
    blocks: Blocks,
) -> None:
    table = table_of(A, B, C, lenders=(A, B, C))
    prompt = blocks(range(200))
    hold(table, A, prompt)
    hold(table, B, prompt)
    table.update_load(A, load(num_pending_prefill_tokens=90_000))
    table.update_load(B, load(num_pending_prefill_tokens=80_000))

    def source(name: str, number: int) -> GroupId | None:
        # They share only the lent blocks, which are in flight at C from then on.
        hashes = (*prompt, *blocks(range(1000 * number, 1000 * number + 9)))
        return table.route(
            name, hashes=hashes, num_prompt_tokens=3400, exclude=frozenset({A, B})
        ).source

    assert source("r", 1) == B, "the least loaded"
    table.completed("r")
    assert source("s", 2) == B, "none fetches from it any more"
    table.update_members([A, B], lenders=[A, B])
    table.update_members([A, B, C], lenders=[A, B, C])
    assert source("t", 3) == A, "one still fetches from B"


def test_costs_are_learned_from_the_groups_counters_and_guessed_before() -> None:
    costs, per_s = FetchCosts(), 10_000.0
    fixed, share = costs.tokens(per_s)
    assert share.tolist() == [0.04, 0.08, 0.12]
    assert fixed.tolist() == [5.0, 20.0, 40.0]
    costs.observe(load(), at_s=0)
    num_tokens, wait_s = 0, 0.0
    for step in range(30):
        num = 100 * (1 + step % 7)
        num_tokens, wait_s = num_tokens + num, wait_s + 0.01 + 2e-5 * num
        # A pull's tokens are counted on arrival, its time at its end.
        costs.observe(
            load(num_peer_tokens=num_tokens, peer_s=wait_s - 0.01 - 2e-5 * num), at_s=step
        )
        costs.observe(load(num_peer_tokens=num_tokens, peer_s=wait_s), at_s=step + 0.5)
    fixed, share = costs.tokens(per_s)
    assert share.tolist() == pytest.approx([0.04, 0.08, 0.2], rel=1e-3)
    assert fixed.tolist() == pytest.approx([5.0, 20.0, 100.0], rel=1e-3)


def test_what_is_left_of_sources_steps_is_no_part_of_the_learned_cost() -> None:
    """It is added at each decision, with its value at the time."""
    costs = FetchCosts()
    costs.observe(load(), at_s=0)
    for step in range(1, 30):
        costs.asked(source_rest_s=0.03)
        costs.observe(load(num_peer_tokens=100 * step, peer_s=0.05 * step), at_s=step)
    assert costs.tokens(1000.0)[0][2] == pytest.approx(50.0 - 30.0)
    for _ in range(200):
        costs.asked(source_rest_s=0.2)
    assert costs.tokens(1000.0)[0][2] == 0.0


def test_a_source_whose_step_lasts_too_long_is_not_asked(blocks: Blocks) -> None:
    clock = Clock()
    table = table_of(A, B, lenders=(A, B), clock=clock)
    prompt = blocks(range(200))
    hold(table, A, prompt)
    for step in range(12):  # Steps of a second, which compute 20,000 tokens each.
        clock.now_s = float(step)
        table.update_load(
            A, load(num_running=9, num_pending_prefill_tokens=20_000 * (20 - step), num_steps=step)
        )

    def source(name: str) -> GroupId | None:
        asked = table.route(name, hashes=prompt, num_prompt_tokens=3210, exclude=frozenset({A}))
        table.completed(name)
        return asked.source

    assert source("r") is None, "a second is left"
    clock.now_s += 0.999
    assert source("s") == A


def test_failed_pulls_make_sources_dear_for_a_while() -> None:
    costs = FetchCosts()
    costs.observe(load(), at_s=0)
    assert not costs.observe(load(), at_s=1), "nothing was fetched"
    assert costs.observe(load(num_failed_pulls=3), at_s=1)
    assert costs.tokens(1000.0)[1].tolist() == pytest.approx([0.04, 0.08, 0.48])
    assert costs.observe(load(num_failed_pulls=3), at_s=61), "a third is left"
    assert costs.tokens(1000.0)[1][2] == pytest.approx(0.12 * (1 + 3 / np.e))
    costs.observe(load(num_failed_pulls=3), at_s=1000)
    assert costs.tokens(1000.0)[1][2] == pytest.approx(0.12)


def test_a_group_that_began_anew_teaches_nothing_at_first() -> None:
    costs = FetchCosts()
    costs.observe(load(num_disk_tokens=10**6, disk_s=5), at_s=0)
    assert not costs.observe(load(num_disk_tokens=10, disk_s=0.1), at_s=1)
