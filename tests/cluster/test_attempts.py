"""Attempts without a cluster: what they count, and how long they wait, in simulated time."""

import asyncio
from typing import Any

import numpy as np
import pytest
from tests.sim.loop import SimLoop, simulate

from quire.cluster.errors import Death, GroupDied, Unavailable
from quire.cluster.failover.attempts import Attempts
from quire.cluster.failover.completion_request import CompletionConfig, CompletionRequest
from quire.cluster.failover.resume import Blame, Resumes
from quire.cluster.gateway.telemetry import Telemetry
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.model_card import Expectation
from quire.router.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb
from quire.worker.sampling_params import SamplingParams

CONFIG = CompletionConfig(group_wait_s=5, resume_wait_s=60)
EPOCH = 7


class Silent(Groups):
    """Groups that take everything and bring nothing."""

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


class Scene:
    """A gateway's parts, in simulated time, and the attempts of its completions."""

    def __init__(self, loop: SimLoop, *, members: tuple[str, ...]) -> None:
        self._loop = loop
        self.table = RoutingTable(block_size=4, clock=loop.time)
        self.groups = Silent(table=self.table, expected=Expectation(model="m", block_size=4))
        self.groups.set_members(*members)
        self._telemetry = Telemetry(groups=self.groups, table=self.table)
        self._resumes = Resumes(CONFIG.resume, clock=loop.time)
        self._num = 0

    def attempts(self, blame: Blame) -> Attempts:
        self._num += 1
        request = CompletionRequest(
            request_id=f"r{self._num}",
            index=0,
            model=None,  # type: ignore[arg-type]
            prompt_token_ids=np.arange(5, dtype=np.uint32),
            hashes=[],
            params=SamplingParams(seed=1, max_tokens=9),
            cache_salt="",
            arrival_s=0.0,
            blame=blame,
        )
        return Attempts(
            request,
            groups=self.groups,
            table=self.table,
            telemetry=self._telemetry,
            config=CONFIG,
            resumes=self._resumes,
            clock=self._loop.time,
        )


def suspected() -> Blame:
    blame = Blame()
    blame.completion().extend(Death("g", epoch) for epoch in (1, 2))
    return blame


def test_a_death_that_two_completions_hear_of_in_two_ways_counts_once() -> None:
    """The one reads that the group failed, the other that its connection broke."""

    async def main(loop: SimLoop) -> int:
        scene, blame = Scene(loop, members=("g",)), Blame()
        told, cut_off = scene.attempts(blame), scene.attempts(blame)
        for each in (told, cut_off):
            await each.begin([])
        told.lose(told.refusal(pb.GroupError(code=pb.GroupError.GROUP_FAILED)))
        cut_off.lose(GroupDied("gone", Death("g", EPOCH)))
        await scene.groups.close()
        return blame.num_deaths

    assert simulate(main, seed=1) == 1


def test_suspects_without_a_group_all_wait_for_one_at_once() -> None:
    async def main(loop: SimLoop) -> list[float]:
        scene = Scene(loop, members=())

        async def run() -> float:
            with pytest.raises(Unavailable):
                await scene.attempts(suspected()).begin([1])
            return loop.time()

        ended_s = await asyncio.gather(*[run() for _ in range(3)])
        await scene.groups.close()
        return ended_s

    assert simulate(main, seed=1) == [CONFIG.resume_wait_s] * 3


def test_the_line_of_suspects_may_be_longer_than_a_wait_for_a_group() -> None:
    """A group comes after 40 seconds and each turn takes 50. None of those in line gives up."""

    async def main(loop: SimLoop) -> list[float]:
        scene = Scene(loop, members=())

        async def run() -> float:
            attempts = scene.attempts(suspected())
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


def test_what_a_suspect_waited_in_line_is_not_taken_for_a_wait_for_a_group() -> None:
    """The group goes while the second waits for its turn, which has its whole wait before it."""

    async def main(loop: SimLoop) -> float:
        scene = Scene(loop, members=("g",))
        first, second = scene.attempts(suspected()), scene.attempts(suspected())
        await first.begin([1])
        waiting = asyncio.create_task(second.begin([1]))
        await asyncio.sleep(50)
        scene.groups.set_members()
        first.end()
        with pytest.raises(Unavailable):
            await waiting
        await scene.groups.close()
        return loop.time()

    assert simulate(main, seed=1) == 50 + CONFIG.resume_wait_s
