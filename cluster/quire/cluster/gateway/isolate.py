"""The layer that lets a completion under which groups died in a row run alone, and convicts it.

`quire.cluster.gateway.losses` has the rules. A group's death under an isolated request is judged
once all groups that died with it are known: by whichever completion of the prompt comes first.
"""

import asyncio

from quire.cluster.errors import GroupLost, Quarantined
from quire.cluster.gateway.losses import Isolation
from quire.cluster.gateway.resume import is_unbegun, no_group
from quire.cluster.gateway.work import Completion, Parts, Run, Take
from quire.worker.request.errors import QuireError

_PAUSE_S = 0.1
"""Shortest pause while groups die."""


class Isolate:
    """Lets one isolated completion at a time run, and none that is convicted."""

    def __init__(self, parts: Parts) -> None:
        self.isolation = Isolation()
        parts.telemetry.isolated.set_function(lambda: self.isolation.num_completions)
        self._groups = parts.groups
        self._config = parts.config
        self._clock = parts.clock

    async def __call__(self, one: Completion, take: Take, run: Run[Completion]) -> None:
        """Raises:
        Quarantined: Too many groups died under the request, also under another completion of it.
        Unavailable: Groups die one after the other, so that the last death cannot be judged.
        """
        if one.losses.must_be_isolated and one.end_turn is None:
            await self._wait_for_turn(one)
        if one.end_turn is not None:
            assert one.give_up_s is not None
            await self._judge(one, until_s=one.give_up_s)
        if one.losses.blame.is_convicted:
            raise _quarantined(one)
        await run(one, take)
        if one.lost is not None:
            await self._lose(one, one.lost)

    async def _lose(self, one: Completion, lost: QuireError) -> None:
        """Counts a lost attempt, and has the death that ended it judged if it may convict."""
        is_isolated = one.end_turn is not None
        one.leave_turn()
        if not isinstance(lost, GroupLost) or is_unbegun(one, lost):
            return
        assert one.stream is not None
        one.losses.add(lost, num_tokens=one.stream.num_tokens, is_isolated=is_isolated)
        if one.losses.blame.isolated_death is not None:
            await self._judge(one, until_s=self._clock() + self._config.group_wait_s)
            if one.losses.blame.is_convicted:
                raise _quarantined(one)

    async def _wait_for_turn(self, one: Completion) -> None:
        # The wait does not count as a search: groups exist, and the queue moves.
        assert one.give_up_s is not None
        entered_s = self._clock()
        one.end_turn = await self.isolation.enter()
        one.give_up_s += self._clock() - entered_s

    async def _judge(self, one: Completion, *, until_s: float) -> None:
        """Waits until all groups that are already dead are known, and judges the last death under
        the isolated request. Raises Unavailable: that would take longer than ``until_s``."""
        while unrest_s := self._groups.deaths.unrest_s:
            if self._clock() + unrest_s > until_s:
                raise no_group(one, self._groups)
            await asyncio.sleep(max(unrest_s, _PAUSE_S))
        if one.losses.blame.judge(self._groups.deaths):
            one.record.found_poison()


def _quarantined(one: Completion) -> Quarantined:
    return Quarantined(
        f"quarantined: {one.losses.num_deaths} replica groups died one after the other "
        "while they ran this request, the last of them with no other such request; it is not "
        f"tried again. The last one: {one.error}"
    )
