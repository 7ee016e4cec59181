"""A tenant's share of the groups' slots while others are active."""

from math import ceil
from typing import Any

from tests.cluster.test_admission import admission, frame, group, loads

from quire.cluster.serving.admission import Admission
from quire.cluster.serving.ticket import Stage, Ticket
from quire.router.policies.loads import Loads
from quire.router.policies.speeds import Rates, Speeds

FREE = loads(*[group(num_running=0, max_num_seqs=40)] * 2)
"""Two groups, which could begin 80 requests."""


def offered(
    queue: Admission,
    tenant: str,
    number: int,
    *,
    now_s: float = 0.0,
    to: Loads = FREE,
    **more: Any,
) -> list[Ticket]:
    tickets = [Ticket(num_prompt_tokens=1, tenant=tenant, **more) for _ in range(number)]
    for each in tickets:
        queue.offer(each, to, now_s=now_s)
    queue.release(to, now_s=now_s)
    return tickets


def free(*, step_s: float, each_s: float) -> Loads:
    """As `FREE`, and the gateway has seen steps of ``step_s`` and ``each_s`` for each sequence."""
    common = Rates.new()
    speeds, now_s = Speeds(common), 0.0
    for step in range(100):
        speeds.observe(frame(num_running=1 + step % 8, num_steps=step), at_s=now_s, is_awaited=True)
        now_s += step_s + each_s * (1 + step % 8)
    return Loads(FREE.states, common=common)


def num_released(tickets: list[Ticket]) -> int:
    return sum(each.stage is Stage.RELEASED for each in tickets)


def finish(queue: Admission, tickets: list[Ticket]) -> None:
    for each in tickets:
        queue.begun(each)
        queue.leave(each)


def test_a_tenant_alone_takes_all_slots() -> None:
    for tenant in ("", "alone"):
        assert num_released(offered(admission(), tenant, 70)) == 70


def test_beside_others_it_takes_twice_its_share() -> None:
    queue = admission()
    light = [offered(queue, f"light{number}", 1)[0] for number in range(3)]
    greedy = offered(queue, "greedy", 70)
    assert num_released(greedy) == 2 * 80 / 4
    assert num_released(light) == 3
    assert num_released(offered(queue, "light0", 5)) == 5, "others do not wait behind it"
    finish(queue, greedy[:10])
    assert len(queue.release(FREE, now_s=0.2)) == 10


def test_beside_others_it_takes_its_share_of_the_time_that_sequences_add_to_steps() -> None:
    queue, slow = admission(), free(step_s=0.0055, each_s=0.001)
    for number in range(4):
        offered(queue, f"light{number}", 1, to=slow)
    greedy = offered(queue, "greedy", 70, to=slow)
    assert num_released(greedy) == (2 * 5.5 + 4) // 4
    assert num_released(offered(queue, "light0", 5, to=slow)) == (2 * 5.5 + 3 + 3) // 4 - 1


def test_where_sequences_add_nothing_to_steps_it_takes_twice_its_share_of_slots() -> None:
    queue, fast = admission(), free(step_s=0.005, each_s=0.0)
    for number in range(3):
        offered(queue, f"light{number}", 1, to=fast)
    assert num_released(offered(queue, "greedy", 70, to=fast)) == 2 * 80 / 4


def test_tenants_that_ask_for_as_much_together_take_all_slots() -> None:
    queue, slow = admission(), free(step_s=0.005, each_s=0.001)
    tenants = [offered(queue, f"tenant{number}", 50, to=slow) for number in range(4)]
    queue.release(slow, now_s=0.1)
    assert sum(map(num_released, tenants)) >= 80


def test_shares_are_by_weight() -> None:
    queue = admission()
    offered(queue, "light", 1, weight=1.0)
    assert num_released(offered(queue, "heavy", 75, weight=0.5)) == ceil(2 * 80 / 3)


def test_a_tenant_counts_for_a_second_after_its_last_request() -> None:
    queue = admission()
    for number in range(3):
        finish(queue, offered(queue, f"light{number}", 1))
    greedy = offered(queue, "greedy", 70, now_s=0.5)
    assert num_released(greedy) == 2 * 80 / 4
    queue.release(FREE, now_s=1.1)
    assert num_released(greedy) == 70


def test_a_request_larger_than_the_share_goes_alone() -> None:
    queue = admission()
    light = [offered(queue, f"light{number}", 1)[0] for number in range(39)]
    large = offered(queue, "greedy", 2, num_requests=20)
    assert num_released(light) == 39
    assert num_released(large) == 1


def test_a_lower_priority_does_not_wait_behind_a_tenant_with_its_share() -> None:
    queue = admission()
    for number in range(3):
        offered(queue, f"light{number}", 1)
    assert num_released(offered(queue, "greedy", 70, priority=-1)) == 2 * 80 / 4
    assert num_released(offered(queue, "light0", 1, priority=5)) == 1


def test_a_large_request_is_not_kept_out_by_its_tenants_lower_priorities() -> None:
    queue = admission()
    for number in range(3):
        offered(queue, f"light{number}", 1)
    running = offered(queue, "tenant", 5)
    (large,) = offered(queue, "tenant", 1, num_requests=38)
    assert num_released([large, *offered(queue, "tenant", 5, priority=5)]) == 0
    finish(queue, running)
    queue.release(FREE, now_s=0.1)
    assert num_released([large]) == 1
