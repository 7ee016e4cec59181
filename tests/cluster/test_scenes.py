from dataclasses import dataclass

from quire.cluster.errors import Death
from quire.cluster.failover.scenes import Scenes, Verdict

DEATH = Death("g", epoch=1)


@dataclass(eq=False)
class Completion:
    blame: object
    num_attempts: int = 3
    num_killed: int = 1
    is_past: bool = False
    is_over: bool = False


def scene(*others: Completion) -> tuple[Scenes, Completion]:
    """Those were there when a group died under the suspect."""
    scenes, suspect = Scenes(), Completion("suspect", num_killed=3)
    for party in (suspect, *others):
        scenes.add(DEATH, party)
    return scenes, suspect


def test_who_was_there_alone_is_guilty_and_so_are_completions_of_its_own_prompt() -> None:
    sibling = Completion("suspect")
    scenes, suspect = scene(sibling)
    assert scenes.verdict(DEATH, suspect) is Verdict.GUILTY


def test_the_verdict_waits_for_everybody_who_was_there() -> None:
    one, two = Completion("one"), Completion("two")
    scenes, suspect = scene(one, two)
    one.num_attempts, one.is_past = 4, True
    assert scenes.verdict(DEATH, suspect) is Verdict.OPEN
    two.is_over = True
    assert scenes.verdict(DEATH, suspect) is Verdict.GUILTY


def test_an_attempt_that_was_past_its_beginning_before_tells_nothing() -> None:
    other = Completion("other")
    scenes, suspect = scene(other)
    other.is_past = True  # Of the attempt that was lost with the group.
    assert scenes.verdict(DEATH, suspect) is Verdict.OPEN


def test_who_kills_another_group_is_likelier_even_if_it_has_ended_since() -> None:
    other, third = Completion("other"), Completion("third")
    scenes, suspect = scene(other, third)
    other.num_killed, other.is_over = 2, True
    assert scenes.verdict(DEATH, suspect) is Verdict.DOUBTFUL


def test_a_client_that_is_gone_is_not_waited_for() -> None:
    other = Completion("other")
    scenes, suspect = scene(other)
    del other
    assert scenes.verdict(DEATH, suspect) is Verdict.GUILTY


def test_no_more_than_some_deaths_are_remembered() -> None:
    other = Completion("other")
    scenes, suspect = scene(other)
    for epoch in range(2, 200):
        scenes.add(Death("g", epoch=epoch), other)
    assert len(scenes._present) == 64
    assert scenes.verdict(DEATH, suspect) is Verdict.GUILTY
