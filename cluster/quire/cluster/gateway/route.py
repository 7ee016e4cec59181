"""The layer that chooses a group, or waits until it makes sense to look for one again."""

import asyncio

from quire.cluster.errors import GroupLost, Unavailable
from quire.cluster.gateway.resume import no_group
from quire.cluster.gateway.work import Completion, Parts, Run, Take
from quire.router.errors import NoGroupAvailable
from quire.worker.request.errors import QueueFull

_RETRY_PAUSE_S = 0.1
"""Pause before groups that could not take a completion are tried again."""


class Route:
    """Routes a completion. A try that finds no group waits for one and ends."""

    def __init__(self, parts: Parts) -> None:
        self._groups = parts.groups
        self._table = parts.table
        self._clock = parts.clock

    async def __call__(self, one: Completion, take: Take, run: Run[Completion]) -> None:
        """Raises:
        QueueFull: Every group that was asked has a full queue.
        Unavailable: No group came in time, or the groups run another model now.
        """
        self._follow_model(one)
        request, num_tokens = one.request, len(one.output.token_ids)
        lacking = self._groups.lacking(request.adapter)
        try:
            one.routed_to = self._table.route(
                request.request_id,
                hashes=request.hashes,
                num_prompt_tokens=len(request.prompt_token_ids) + num_tokens,
                exclude=lacking | one.avoided,
                adapter=request.adapter,
                cache_key=request.cache_key,
                client_id=request.client_id,
                tenant=request.tenant,
                moved_because=str(one.error or ""),
                former=one.former,
                has_tokens=num_tokens > 0,
            )
        except NoGroupAvailable as error:
            if lacking:
                await self._hold(one)
            else:
                await self._wait(one, error)
        else:
            await run(one, take)

    def _follow_model(self, one: Completion) -> None:
        """Names the prompt's blocks for the groups' model, if that has changed since. Raises
        Unavailable: the completion cannot run on it."""
        card, model = self._groups.card, one.request.model
        if card in (None, model):
            return
        assert card is not None
        # Without tokens, a group with other numerics may take it.
        if one.output.token_ids or not card.differs_in_numerics_at_most(model):
            raise Unavailable("the model was replaced while the request was under way")
        one.request = one.request.hashed_for(card)

    async def _hold(self, one: Completion) -> None:
        """Returns when it is time to look again for a group that holds the request's adapter.
        Raises Unavailable: the search has taken too long."""
        assert one.give_up_s is not None
        try:
            timeout_s = max(0.0, one.give_up_s - self._clock())
            await self._groups.hold(one.request.adapter, timeout_s=timeout_s)
        except GroupLost as error:
            one.error = error
            if self._clock() >= one.give_up_s:
                raise no_group(one, self._groups) from error
            await asyncio.sleep(_RETRY_PAUSE_S)
            one.avoided.clear()

    async def _wait(self, one: Completion, error: NoGroupAvailable) -> None:
        """Returns when it is time to look for a group again. Raises QueueFull or Unavailable: there
        is no point in waiting, or the search has taken too long."""
        assert one.give_up_s is not None
        full = one.error if isinstance(one.error, QueueFull) else None
        timeout_s = one.give_up_s - self._clock()
        is_over = timeout_s <= 0 or not self._groups.may_come
        if is_over or (full is not None and one.is_new):
            raise full or no_group(one, self._groups) from error
        if one.avoided:
            timeout_s = min(timeout_s, _RETRY_PAUSE_S)
        else:
            # There is no group. Those that run alone wait for one all at once, and not in turn.
            one.leave_turn()
        with self._groups.demand.waiting(len(one.request.prompt_token_ids)):
            await self._groups.wait_for_change(timeout_s=timeout_s)
        one.avoided.clear()
