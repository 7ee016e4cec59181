"""Attempts of completions, without a cluster: counted deaths and waits, in simulated time."""

import asyncio
import contextlib
from typing import Any

import pytest
from tests.cluster.completions import Attempts, parts_of
from tests.prepared import prepared
from tests.sim.loop import SimLoop, simulate

from quire.cluster.errors import Death, GroupDied, Quarantined, Unavailable
from quire.cluster.gateway.losses import Blame, CompletionConfig
from quire.cluster.gateway.pipeline import CompletionPipeline
from quire.cluster.gateway.send import Reader
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb

CONFIG = CompletionConfig(group_wait_s=60)
EPOCH = 7


class Silent(Groups):
    """Groups that accept all requests and never answer."""

    members: tuple[str, ...] = ()

    def set_members(self, *names: str) -> None:
        self.members = names
        self._update_members()

    def _routable(self) -> list[GroupId]:
        return [GroupId(name) for name in self.members]

    def submit(self, group_id: GroupId, submit: pb.Submit, **_: Any) -> GroupStream:
        return GroupStream(
            submit, window=8, on_abort=lambda _: None, on_credit=lambda *_: None, epoch=EPOCH
        )


WINDOW_S = 3.0
"""The time within which deaths count as simultaneous: one and a half silence timeouts."""


class Scene:
    """A gateway's parts, in simulated time, and the attempts of its completions."""

    def __init__(self, loop: SimLoop, *, members: tuple[str, ...]) -> None:
        self._loop = loop
        self.table = RoutingTable(block_size=4, clock=loop.time)
        self.groups = Silent(table=self.table, expected=Expectation(model="m", block_size=4))
        self.groups.set_members(*members)
        self.parts = parts_of(self.groups, self.table, config=CONFIG, clock=loop.time)
        self._pipeline = CompletionPipeline(self.parts)
        self._num = 0

    def attempts(self, blame: Blame) -> Attempts:
        self._num += 1
        request = prepared(f"r{self._num}", range(5), seed=1, max_tokens=9)
        return Attempts(request, self.parts, self._pipeline, blame=blame)


def to_be_isolated() -> Blame:
    blame = Blame()
    blame.completion().extend(Death("g", epoch) for epoch in (1, 2))
    return blame


def test_a_death_that_two_completions_hear_of_in_two_ways_counts_once() -> None:
    """One reads the group's failure, the other a broken connection."""

    async def main(loop: SimLoop) -> int:
        scene, blame = Scene(loop, members=("g",)), Blame()
        told, cut_off = scene.attempts(blame), scene.attempts(blame)
        for each in (told, cut_off):
            await each.begin([])
        failed = pb.TokenDelta(error=pb.GroupError(code=pb.GroupError.GROUP_FAILED))
        _, error = Reader(scene.parts, told.one, hands_over=False).read([failed])
        told.lose(error)
        cut_off.lose(GroupDied("gone", Death("g", EPOCH)))
        for each in (told, cut_off):
            await each.begin([])
        await scene.groups.close()
        return blame.num_deaths

    assert simulate(main, seed=1) == 1


def test_isolated_requests_without_a_group_all_wait_for_one_at_once() -> None:
    async def main(loop: SimLoop) -> list[float]:
        scene = Scene(loop, members=())

        async def run() -> float:
            with pytest.raises(Unavailable):
                await scene.attempts(to_be_isolated()).begin([1])
            return loop.time()

        ended_s = await asyncio.gather(*[run() for _ in range(3)])
        await scene.groups.close()
        return ended_s

    assert simulate(main, seed=1) == [CONFIG.group_wait_s] * 3


def test_the_line_of_isolated_requests_may_be_longer_than_a_wait_for_a_group() -> None:
    """A group starts after 40 seconds and each turn takes 50. No request in line gives up."""

    async def main(loop: SimLoop) -> list[float]:
        scene = Scene(loop, members=())

        async def run() -> float:
            attempts = scene.attempts(to_be_isolated())
            await attempts.begin([1])
            begun_s = loop.time()
            await asyncio.sleep(50)
            attempts.end()
            return begun_s

        loop.call_later(40, scene.groups.set_members, "g")
        begun_s = await asyncio.gather(*[run() for _ in range(4)])
        await scene.groups.close()
        return sorted(begun_s)

    assert simulate(main, seed=1) == [40, 90, 140, 190]


def test_what_an_isolated_request_waited_in_line_is_not_taken_for_a_wait_for_a_group() -> None:
    """The group ends while the second waits for its turn; its wait for a group begins only then."""

    async def main(loop: SimLoop) -> float:
        scene = Scene(loop, members=("g",))
        first, second = scene.attempts(to_be_isolated()), scene.attempts(to_be_isolated())
        await first.begin([1])
        waiting = asyncio.create_task(second.begin([1]))
        await asyncio.sleep(50)
        scene.groups.set_members()
        first.end()
        with pytest.raises(Unavailable):
            await waiting
        await scene.groups.close()
        return loop.time()

    assert simulate(main, seed=1) == 50 + CONFIG.group_wait_s


def test_a_group_that_died_before_it_began_an_attempt_counts_for_nothing_but_time() -> None:
    async def main(loop: SimLoop) -> tuple[int, int]:
        scene, blame = Scene(loop, members=("g",)), Blame()
        attempts = scene.attempts(blame)
        await attempts.begin([])
        attempts.lose(GroupDied("gone", Death("g", EPOCH)))  # It may have begun the first one.
        num_lost = 0
        with contextlib.suppress(Unavailable):
            while num_lost < 1000:
                await attempts.begin([])
                await asyncio.sleep(1)
                num_lost += 1
                attempts.lose(GroupDied("gone", Death("g", num_lost)))
        await scene.groups.close()
        return blame.num_deaths, num_lost

    assert simulate(main, seed=1) == (1, CONFIG.group_wait_s)


def test_an_isolated_request_is_sent_on_once_all_that_died_with_the_last_group_are_known() -> None:
    async def main(loop: SimLoop) -> float:
        scene = Scene(loop, members=("g",))
        scene.groups.died(Death("x", 1))
        loop.call_later(2, scene.groups.died, Death("y", 2))
        await scene.attempts(to_be_isolated()).begin([1])
        await scene.groups.close()
        return loop.time()

    assert simulate(main, seed=1) == 2 + WINDOW_S


def test_where_groups_die_faster_than_that_an_isolated_request_gives_up_in_time() -> None:
    async def main(loop: SimLoop) -> float:
        scene = Scene(loop, members=("g",))
        scene.groups.died(Death("x", 0))
        for number in range(1, 100):
            loop.call_later(number, scene.groups.died, Death("x", number))
        with pytest.raises(Unavailable):
            await scene.attempts(to_be_isolated()).begin([1])
        await scene.groups.close()
        return loop.time()

    assert simulate(main, seed=1) <= CONFIG.group_wait_s


@pytest.mark.parametrize(
    ("what_else", "is_guilty"),
    [
        ("nothing", True),
        ("another group died a while before", True),
        ("another group dies too", False),
        ("the group comes back", False),
    ],
)
def test_a_death_while_isolated_convicts_where_nothing_else_explains_it(
    what_else: str, is_guilty: bool
) -> None:
    async def main(loop: SimLoop) -> bool:
        scene = Scene(loop, members=("g",))
        request = scene.attempts(to_be_isolated())
        if what_else == "another group died a while before":
            scene.groups.died(Death("x", 1))
        await request.begin([1])
        death = Death("g", EPOCH)
        scene.groups.died(death)
        request.lose(GroupDied("gone", death))
        if what_else == "another group dies too":
            loop.call_later(WINDOW_S - 1, scene.groups.died, Death("x", 1))
        if what_else == "the group comes back":
            death.is_refuted = True
        try:
            await request.begin([1])
        except Quarantined:
            return True
        finally:
            await scene.groups.close()
        return False

    assert simulate(main, seed=1) is is_guilty


def test_a_request_is_convicted_though_its_sibling_comes_first_and_is_not_run_again() -> None:
    """Two completions of a prompt: the second gets its turn before the first is judged."""

    async def main(loop: SimLoop) -> float:
        scene, blame = Scene(loop, members=("g",)), to_be_isolated()
        first, second = scene.attempts(blame), scene.attempts(blame)
        await first.begin([1])
        waiting = asyncio.create_task(second.begin([1]))
        await asyncio.sleep(1)
        death = Death("g", EPOCH)
        scene.groups.died(death)
        first.lose(GroupDied("gone", death))
        ended = await asyncio.gather(waiting, first.begin([1]), return_exceptions=True)
        await scene.groups.close()
        assert [type(error) for error in ended] == [Quarantined, Quarantined]
        return loop.time()

    assert simulate(main, seed=1) == 1 + WINDOW_S


def test_two_poison_requests_convict_each_other_of_nothing() -> None:
    async def main(loop: SimLoop) -> int:
        scene = Scene(loop, members=("g",))
        num_killed = 0

        async def run() -> None:
            nonlocal num_killed
            attempts = scene.attempts(to_be_isolated())
            while True:
                await attempts.begin([1])
                await asyncio.sleep(0.1)
                num_killed += 1
                death = Death("g", EPOCH + num_killed)
                scene.groups.died(death)
                attempts.lose(GroupDied("gone", death))

        ended = await asyncio.gather(run(), run(), return_exceptions=True)
        await scene.groups.close()
        assert [type(error) for error in ended] == [Quarantined, Quarantined]
        return num_killed

    assert simulate(main, seed=1) == 2


def test_a_request_whose_group_never_dies_alone_ends_after_its_attempts() -> None:
    """So it is with poison requests of several gateways, which all wait for the same calm."""

    async def main(loop: SimLoop) -> int:
        scene = Scene(loop, members=("g",))
        attempts = scene.attempts(to_be_isolated())
        num_lost = 0
        with contextlib.suppress(Unavailable):
            while num_lost < 100:
                stream = await attempts.begin([])
                stream.push(pb.TokenDelta())  # The group has begun it.
                num_lost += 1
                death = Death("g", EPOCH + num_lost)
                scene.groups.died(death)
                scene.groups.died(Death("x", num_lost))
                attempts.lose(GroupDied("gone", death))
        await scene.groups.close()
        return num_lost

    assert simulate(main, seed=1) == CONFIG.max_attempts
