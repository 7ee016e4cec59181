"""When a prefix gets a copy in a second group, and the decayed sums that decide it."""

from collections.abc import Callable, Iterable
from math import exp
from random import Random

import pytest

from quire.router.policies.catalog import POLICIES
from quire.router.policies.decide import decide
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Decision, GroupState, RouteRequest
from quire.router.policies.replication import Regrets
from quire.router.prefix_index.directory import GroupId
from quire.worker.blocks.hashing import BlockHash

Blocks = Callable[[Iterable[object]], tuple[BlockHash, ...]]
BLOCK_SIZE = 16


def queued(name: str, num_tokens: int) -> GroupState:
    return GroupState(group=GroupId(name), num_pending_prefill_tokens=num_tokens)


def where_questions_go(
    blocks: Blocks,
    groups: list[GroupState],
    *,
    held: int = 1000,
    of: Callable[[int], list[GroupState]] | None = None,
) -> list[Decision]:
    """Decisions for 400 questions on a text of 16,000 tokens. The first of ``groups`` holds
    ``held`` blocks and computes the rest; ``of`` gives the groups' states at each question."""
    policy, text, others = POLICIES["prefix_aware"](), blocks(range(1000)), [0] * (len(groups) - 1)
    decisions = []
    for number in range(400):
        hashes = (*text, *blocks([("question", number)]))
        asked = RouteRequest(hashes=hashes, num_prompt_tokens=16_026, block_size=BLOCK_SIZE)
        now = of(number) if of else groups
        decisions.append(decide(policy, asked, Loads(now), [1000, *others], [held, *others]))
    return decisions


def test_a_prefix_that_its_group_cannot_keep_up_with_is_copied_in_the_end(blocks: Blocks) -> None:
    # The queue is shorter than what another group would have to compute first.
    went = where_questions_go(blocks, [queued("home", 12_000), queued("a", 1_000), queued("b", 0)])
    assert {decision.reason for decision in went} == {"cached_prefix", "copied_prefix"}
    first = next(i for i, decision in enumerate(went) if decision.group != "home")
    assert 2 <= first <= 40
    assert (went[first].group, went[first].reason) == ("b", "copied_prefix")
    # The copy resets the regret, so the next copy has to be earned again.
    assert {decision.group for decision in went[first + 1 : 2 * first]} == {"home"}


def test_nobody_regrets_to_wait_for_what_no_group_has_yet(blocks: Blocks) -> None:
    groups = [queued("home", 16_000), queued("a", 0), queued("b", 0)]
    assert any(d.group != "home" for d in where_questions_go(blocks, groups))
    computed_now = where_questions_go(blocks, groups, held=0)
    assert {decision.group for decision in computed_now} == {"home"}


def test_copies_cost_no_more_than_a_fourth_of_what_they_would_have_saved(blocks: Blocks) -> None:
    """The home is as busy as others on average, but nearly always busier than one of them."""
    rng = Random(1)
    draws = [[rng.expovariate(1 / 3_000) for _ in range(4)] for _ in range(400)]

    def at(number: int) -> list[GroupState]:
        drawn = zip(("home", "a", "b", "c"), draws[number], strict=True)
        return [queued(name, int(num_tokens)) for name, num_tokens in drawn]

    went = where_questions_go(blocks, at(0), of=at)
    num_copies = sum(decision.group != "home" for decision in went)
    # The average saving at another group; a copy costs at least a quarter more than its tokens,
    # and more after a queue.
    saved = sum(max(home - other, 0) for home, *others in draws for other in others) / 3
    assert 1 <= num_copies <= saved / (4 * 1.25 * 16_000)


def test_a_home_that_is_never_the_slower_one_stays_the_only_one(blocks: Blocks) -> None:
    groups = [queued("home", 3_000), queued("a", 3_000), queued("b", 6_000)]
    assert {decision.group for decision in where_questions_go(blocks, groups)} == {"home"}


def test_what_is_regretted_of_other_prefixes_makes_no_copy(blocks: Blocks) -> None:
    policy = POLICIES["prefix_aware"]()
    groups = [queued("home", 12_000), queued("other", 1_000)]
    for number in range(400):
        session = blocks([(number, index) for index in range(1000)])
        asked = RouteRequest(hashes=session, num_prompt_tokens=16_010, block_size=BLOCK_SIZE)
        assert decide(policy, asked, Loads(groups), [1000, 0]).group == "home"


def test_a_sum_is_what_was_added_faded_step_by_step() -> None:
    rng, regrets = Random(1), Regrets()
    sums, at = dict.fromkeys("abc", 0.0), 0.0
    for _ in range(300):
        later = rng.random() / 20
        at += later
        sums = {key: total * exp(-later) for key, total in sums.items()}
        key, regret = rng.choice("abc"), rng.random()
        sums[key] += regret
        assert regrets.add(key, regret, at=at) == pytest.approx(sums[key], abs=1e-12)
        if rng.random() < 0.05:
            regrets.forget(key)
            sums[key] = 0.0


def test_what_was_added_to_longest_ago_is_forgotten_first() -> None:
    regrets = Regrets(max_keys=2)
    for key in ("a", "b", "a", "c"):
        regrets.add(key, 1.0, at=0.0)
    assert len(regrets) == 2
    assert regrets.add("a", 1.0, at=0.0) == 3.0
    assert regrets.add("b", 1.0, at=0.0) == 1.0
