import asyncio
import itertools

import pytest

from quire.cluster.errors import Death, GroupDied, GroupLost, HandedOver
from quire.cluster.gateway.losses import Blame, CompletionConfig, Isolation, Losses, RetryBudget
from quire.worker.request.errors import ConfigError

pytestmark = pytest.mark.anyio

CONFIG = CompletionConfig(max_attempts=5, max_group_deaths=3, isolated_tokens=8)


EPOCHS = itertools.count(1)


def died(*, is_refuted: bool = False) -> GroupDied:
    return GroupDied("gone", Death("g", epoch=next(EPOCHS), is_refuted=is_refuted))


def add(losses: Losses, error: GroupLost, *, num_tokens: int = 0) -> None:
    """Adds a loss as `Attempts` does: isolated if the request must be."""
    losses.add(error, num_tokens=num_tokens, is_isolated=losses.must_be_isolated)


def test_after_two_deaths_in_a_row_a_request_is_isolated_and_a_third_is_judged() -> None:
    losses = Losses(CONFIG)
    seen = []
    for _ in range(3):
        add(losses, died(), num_tokens=7)
        seen.append((losses.must_be_isolated, losses.blame.isolated_death is not None))
    assert seen == [(False, False), (True, False), (True, True)]


def test_completions_of_a_prompt_are_blamed_as_one_and_a_group_counts_once() -> None:
    blame = Blame()
    first, second, third = (Losses(CONFIG, blame) for _ in range(3))
    shared = died()
    add(first, shared)
    add(second, shared)
    assert first.num_deaths == 1
    add(third, died())
    assert first.must_be_isolated
    assert not first.blame.isolated_death
    add(second, died())
    assert all(losses.blame.isolated_death for losses in (first, second, third))


def test_groups_that_die_together_only_isolate_a_prompt_that_ran_on_all_of_them() -> None:
    blame = Blame()
    completions = [Losses(CONFIG, blame) for _ in range(5)]
    for losses in completions:
        losses.add(died(), num_tokens=0, is_isolated=False)
    assert completions[0].must_be_isolated
    assert not completions[0].blame.isolated_death


def test_a_death_behind_the_place_of_the_others_convicts_no_other_completion() -> None:
    blame = Blame()
    first, second = Losses(CONFIG, blame), Losses(CONFIG, blame)
    for error in (died(), died()):
        add(first, error)
        add(second, error)
    add(first, died(), num_tokens=8)  # It was isolated, and cleared.
    assert first.num_deaths == 3
    assert not first.blame.isolated_death


def test_who_got_past_the_place_of_earlier_deaths_is_cleared_of_them() -> None:
    losses = Losses(CONFIG)
    add(losses, died())
    add(losses, died())
    add(losses, died(), num_tokens=8)
    assert losses.num_deaths == 1
    assert losses.num_lost == 3


def test_draining_counts_for_nothing_and_a_broken_connection_as_no_death() -> None:
    losses = Losses(CONFIG)
    for _ in range(50):
        add(losses, HandedOver("drains"))
    assert (losses.num_lost, losses.num_deaths) == (0, 0)
    add(losses, GroupLost("odd"))
    assert (losses.num_lost, losses.num_deaths) == (1, 0)


def test_who_was_handed_over_behind_that_place_is_cleared_too() -> None:
    losses = Losses(CONFIG)
    add(losses, died())
    add(losses, died())
    add(losses, HandedOver("drains"), num_tokens=7)
    assert losses.must_be_isolated, "it had not got past it"
    add(losses, HandedOver("drains"), num_tokens=8)
    assert not losses.must_be_isolated
    add(losses, died())
    assert not losses.blame.isolated_death


def test_a_death_is_refuted_by_the_same_incarnation_coming_back() -> None:
    losses = Losses(CONFIG)
    cut_off = died()
    add(losses, died())
    add(losses, cut_off)
    assert losses.must_be_isolated
    cut_off.death.is_refuted = True
    assert not losses.must_be_isolated
    assert losses.num_lost == 2


def test_attempts_have_an_end_whatever_they_die_of() -> None:
    losses = Losses(CONFIG)
    for _ in range(4):
        add(losses, died(), num_tokens=100)
        assert not losses.is_hopeless
    add(losses, died(), num_tokens=100)
    assert losses.is_hopeless
    assert not losses.blame.isolated_death


def test_the_budget_is_a_burst_filled_by_traffic_and_time() -> None:
    now_s = [0.0]
    config = CompletionConfig(retry_burst=100, retry_share=0.25, retry_per_s=2)
    budget = RetryBudget(config, clock=lambda: now_s[0])
    assert sum(budget.take() for _ in range(200)) == 100, "one crash, survived by all"
    for _ in range(8):
        budget.began()
    assert sum(budget.take() for _ in range(200)) == 2
    now_s[0] += 3
    assert sum(budget.take() for _ in range(200)) == 6
    now_s[0] += 1e6
    assert budget.level == 100


@pytest.mark.parametrize(
    ("field", "value"),
    [("max_group_deaths", 1), ("max_attempts", 0), ("isolated_tokens", 0), ("retry_share", -1)],
)
def test_a_value_that_cannot_work_is_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=f"{field}={value}"):
        CompletionConfig(**{field: value})


async def test_one_isolated_request_at_a_time_in_their_order() -> None:
    isolation = Isolation()
    order: list[int] = []

    async def run(number: int) -> None:
        leave = await isolation.enter()
        order.append(number)
        await asyncio.sleep(0)
        assert order[-1] == number, "nobody else came in"
        leave()
        leave()

    await asyncio.gather(*[run(number) for number in range(5)])
    assert order == [0, 1, 2, 3, 4]
    assert isolation.num_completions == 0


async def test_one_that_gives_up_waiting_is_not_waited_for() -> None:
    isolation = Isolation()
    leave = await isolation.enter()
    waiting = asyncio.create_task(isolation.enter())
    await asyncio.sleep(0)
    assert isolation.num_completions == 2
    waiting.cancel()
    await asyncio.wait([waiting])
    leave()
    (await isolation.enter())()
    assert isolation.num_completions == 0
