"""Tenants' shares of a cluster where one of them asks for far more than its own, in the virtual
time of `test_overload`."""

import random
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import combinations
from statistics import median
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.test_admission import FULL, admission, loads, ticket
from tests.cluster.test_overload import (
    HARDWARE,
    SIZES,
    Client,
    Load,
    ModelGateway,
    ModelGroup,
    World,
)

from quire.cluster.errors import Overloaded
from quire.cluster.features.tenants.fair_queue import OUTPUT_WORK, FairQueue
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.ticket import Ticket

SMALL = [f"small{number}" for number in range(9)]
GREEDY = "greedy"
CAPACITY_PER_S = {"slots": 31.4, "prefill": 6.6, "blocks": 10.8}
"""Requests that two groups complete per second under permanent overload."""


def served(
    rates_per_s: Mapping[str, float],
    *,
    limit: str,
    weights: Mapping[str, float] | None = None,
    is_fair: bool = True,
    seconds: float = 60.0,
    output: tuple[int, int] | None = None,
    num_gateways: int = 1,
    **config: float,
) -> Counter[str]:
    """Work of each tenant's requests that ended in the last two thirds of the time of arrivals. A
    tenant's arrivals do not depend on the others. Without ``is_fair`` all requests count as one
    tenant's."""
    world, hardware = World(), HARDWARE[limit]
    load = Load(per_s=0, **SIZES[limit])
    groups = [ModelGroup(world, f"g{number}", hardware) for number in range(2)]
    settings = AdmissionConfig(**config)  # type: ignore[arg-type]
    gateways = [ModelGateway(world, groups, settings) for _ in range(num_gateways)]
    clients: list[tuple[str, Client]] = []
    for tenant, per_s in rates_per_s.items():
        rng = random.Random(tenant)
        arrival_s = rng.expovariate(per_s)
        while arrival_s < seconds:
            low, high = output if output and tenant == GREEDY else load.output
            ticket = Ticket(
                num_prompt_tokens=rng.randint(*load.prompt),
                max_tokens=high,
                tenant=tenant if is_fair else "",
                weight=(weights or {}).get(tenant, 1.0),
            )
            client = Client(ticket, rng.randint(low, high), arrival_s)
            clients.append((tenant, client))
            world.after(arrival_s, partial(rng.choice(gateways).arrive, client))
            arrival_s += rng.expovariate(per_s)
    world.run(until_s=seconds)
    done: Counter[str] = Counter()
    for tenant, client in clients:
        if client.end_s is not None and client.end_s > seconds / 3:
            done[tenant] += client.ticket.num_prompt_tokens + round(OUTPUT_WORK * client.num_output)
    return done


def share_kept(
    limit: str, *, seconds: float, num_gateways: int = 1, **how: Any
) -> dict[str, float]:
    """Throughput of each small tenant, at 0.8 of its share, beside one that asks for a hundred
    times as much, relative to that without the large one at the same number of gateways."""
    per_s = 0.8 * CAPACITY_PER_S[limit] / (len(SMALL) + 1)
    small = dict.fromkeys(SMALL, per_s)
    at = partial(served, limit=limit, seconds=seconds, num_gateways=num_gateways)
    without, beside = at(small), at(small | {GREEDY: 100 * per_s}, **how)
    assert beside[GREEDY], "what others leave is used"
    return {tenant: beside[tenant] / without[tenant] for tenant in SMALL}


@pytest.mark.slow
def test_a_tenant_at_a_hundred_times_the_load_costs_the_others_at_most_a_twentieth() -> None:
    kept = share_kept("slots", seconds=45)
    assert min(kept.values()) >= 0.95, kept


@pytest.mark.slow
@pytest.mark.parametrize(("limit", "seconds"), [("slots", 90), ("prefill", 300), ("blocks", 120)])
def test_so_it_is_whatever_is_scarce(limit: str, seconds: float) -> None:
    kept = share_kept(limit, seconds=seconds)
    assert min(kept.values()) >= 0.95, kept


@pytest.mark.slow
def test_so_it_is_at_three_gateways_each_of_which_is_fair_by_itself() -> None:
    kept = share_kept("slots", seconds=60, num_gateways=3)
    assert min(kept.values()) >= 0.95, kept


@pytest.mark.slow
def test_so_it_is_where_the_greedy_tenants_outputs_are_long() -> None:
    """Its sequences occupy slots for long; shares must include running work."""
    kept = share_kept("slots", seconds=90, output=(400, 1600))
    assert min(kept.values()) >= 0.95, kept


@pytest.mark.slow
def test_without_shares_the_others_are_crowded_out() -> None:
    kept = share_kept("slots", seconds=60, is_fair=False)
    assert max(kept.values()) < 0.3, kept


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["slots", "blocks"])
def test_tenants_that_ask_for_more_get_shares_as_their_weights(limit: str) -> None:
    weights = {"a": 1.0, "b": 2.0, "c": 4.0}
    rates = dict.fromkeys(weights, 2 * CAPACITY_PER_S[limit])
    done = served(rates, limit=limit, weights=weights, seconds=90)
    for tenant, weight in weights.items():
        share = done[tenant] / done.total()
        assert share == pytest.approx(weight / sum(weights.values()), rel=0.05)


def answers_of_light_tenants(*, num_heavy: int, seconds: float = 30.0) -> tuple[int, float]:
    """The number of answers of 19 tenants that send one request at a time, with pauses, and the
    median of the times that these take, beside a tenant with ``num_heavy`` clients."""
    world, hardware = World(), replace(HARDWARE["slots"], num_slots=128)
    groups = [ModelGroup(world, f"g{number}", hardware) for number in range(2)]
    took_s: list[float] = []

    class Gateway(ModelGateway):
        def token(self, client: Client, *, is_last: bool) -> None:
            super().token(client, is_last=is_last)
            if is_last:
                ended(client)

    gateway, rng = Gateway(world, groups, AdmissionConfig()), random.Random(1)

    def ask(tenant: str) -> None:
        ticket = Ticket(num_prompt_tokens=rng.randint(3, 200), max_tokens=32, tenant=tenant)
        gateway.arrive(Client(ticket, 32, world.now_s))

    def ended(client: Client) -> None:
        tenant, is_heavy = client.ticket.tenant, client.ticket.tenant == GREEDY
        if not is_heavy and client.arrival_s > seconds / 3:
            took_s.append(world.now_s - client.arrival_s)
        world.after(0.001 if is_heavy else rng.uniform(0.2, 0.6), partial(ask, tenant))

    for tenant in [*(f"light{number}" for number in range(19)), *[GREEDY] * num_heavy]:
        world.after(rng.random(), partial(ask, tenant))
    world.run(until_s=seconds)
    return len(took_s), median(took_s)


@pytest.mark.slow
@pytest.mark.parametrize("num_heavy", [200, 1500])
def test_light_tenants_hardly_notice_one_with_many_clients(num_heavy: int) -> None:
    """Each sequence makes a step of 5 ms longer by half a millisecond."""
    num_alone, alone_s = answers_of_light_tenants(num_heavy=0)
    num, median_s = answers_of_light_tenants(num_heavy=num_heavy)
    assert num >= 0.85 * num_alone
    assert median_s < 1.6 * alone_s


ticket_sizes = st.tuples(st.sampled_from("abc"), st.integers(1, 1000))


@given(st.lists(ticket_sizes, min_size=3, max_size=80), st.data())
def test_while_all_wait_no_tenant_is_ahead_by_more_than_a_request(
    sizes: list[tuple[str, int]], data: st.DataObject
) -> None:
    """The bound of start-time fair queueing: for two waiting tenants, work divided by weight
    differs by at most a largest request of each divided by its weight."""
    weights = {tenant: data.draw(st.sampled_from([0.5, 1.0, 3.0])) for tenant in "abc"}
    queue, largest = FairQueue(), Counter[str]()
    for number, (tenant, size) in enumerate(sizes):
        ticket = Ticket(num_prompt_tokens=size, tenant=tenant, weight=weights[tenant])
        ticket.work, ticket.number = size, number
        largest[tenant] = max(largest[tenant], size)
        queue.add(ticket)
    done: Counter[str] = Counter()
    expected = [ticket.number for ticket in queue]
    released = []
    while (first := queue.first) is not None:
        waiting = sorted({ticket.tenant for ticket in queue})
        for a, b in combinations(waiting, 2):
            gap = abs(done[a] / weights[a] - done[b] / weights[b])
            assert gap <= largest[a] / weights[a] + largest[b] / weights[b] + 1e-9
        queue.take(first)
        done[first.tenant] += round(first.work)
        released.append(first.number)
    assert released == expected


@given(st.lists(st.integers(1, 1000), max_size=30))
def test_one_tenant_alone_is_served_in_order_of_arrival(sizes: list[int]) -> None:
    queue = FairQueue()
    for number, size in enumerate(sizes):
        ticket = Ticket(num_prompt_tokens=size)
        ticket.work, ticket.number = size, number
        queue.add(ticket)
    assert [ticket.number for ticket in queue] == list(range(len(sizes)))


def in_order(tenants: str, *, work: float) -> list[Ticket]:
    return [
        Ticket(num_prompt_tokens=1, tenant=tenant, work=work, number=number)
        for number, tenant in enumerate(tenants)
    ]


def test_one_who_was_away_has_saved_nothing_up() -> None:
    queue = FairQueue()
    tickets = in_order("aaaaaabbb", work=1.0)
    for each in tickets[:6]:
        queue.add(each)
    for _ in range(3):
        assert queue.first is not None
        queue.take(queue.first)
    for each in tickets[6:]:
        queue.add(each)
    assert [each.tenant for each in queue] == ["b", "a", "b", "a", "b", "a"]


def test_what_a_request_really_cost_is_made_up_for() -> None:
    queue = FairQueue()
    tickets = in_order("abababab", work=10.0)
    for each in tickets:
        queue.add(each)
    for each in tickets[:2]:
        queue.take(each)
    tickets[0].num_done = 25.0  # More than the two and a half requests charged so far.
    queue.grew(tickets[0])
    assert tickets[0].charged == 35.0
    assert [each.tenant for each in queue][:3] == ["b", "b", "b"]
    queue.settle(tickets[0])
    assert [each.tenant for each in queue][:3] == ["b", "b", "a"]


def test_a_full_queue_drops_the_last_of_who_has_most_waiting() -> None:
    queue = admission(max_queued_requests=3)
    waiting = [ticket(10, tenant=tenant) for tenant in ("fat", "thin", "fat")]
    for each in waiting:
        queue.offer(each, loads(FULL), now_s=0)
    newcomer = ticket(10, tenant="new")
    assert queue.offer(newcomer, loads(FULL), now_s=0) == [waiting[2]]
    for tenant in ("fat", "thin", "other"):  # With it, none has less than another.
        with pytest.raises(Overloaded, match="max-queued-requests is 3"):
            queue.offer(ticket(10, tenant=tenant), loads(FULL), now_s=0)
    heavy = ticket(10, tenant="heavy", weight=4.0)
    assert queue.offer(heavy, loads(FULL), now_s=0) == [newcomer]


def test_one_with_less_waiting_gets_the_place_of_another_under_way() -> None:
    queue = admission()
    waiting = [ticket(10, tenant=tenant) for tenant in ("fat", "thin", "fat", "fat")]
    for each in waiting:
        queue.offer(each, loads(FULL), now_s=0)

    def displaced_for(tenant: str, num_requests: int) -> list[Ticket]:
        newcomer = ticket(10, tenant=tenant)
        return queue.make_way(newcomer, loads(FULL), num_requests=num_requests, now_s=0)

    assert displaced_for("fat", 1) == []
    assert displaced_for("thin", 2) == [], "the second would leave fat with less than thin"
    assert displaced_for("new", 2) == [waiting[3], waiting[2]]
    assert queue.queued == waiting[:2]


def test_the_wait_of_one_within_its_share_is_not_that_of_the_whole_queue() -> None:
    queue = admission(max_queue_wait_s=3.0)
    for _ in range(100):
        with suppress(Overloaded):
            queue.offer(ticket(tenant="fat"), loads(FULL), now_s=0)
    with pytest.raises(Overloaded, match="max-queue-wait-s"):
        queue.check(0, loads(FULL), now_s=0, tenant="fat")
    queue.check(0, loads(FULL), now_s=0, tenant="thin")
    assert queue.offer(ticket(tenant="thin"), loads(FULL), now_s=0)[0].tenant == "fat"
