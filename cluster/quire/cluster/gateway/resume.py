"""The layer that runs one attempt after the other, until the completion ends or a limit is reached.

The client sees one unbroken stream of tokens. When a group is lost, another group receives the
prompt and the tokens received so far. The result is exact, because a token depends only on model,
prompt, parameters, seed and position.
"""

from quire.cluster.errors import GroupDied, GroupLost, HandedOver, Unavailable
from quire.cluster.gateway.losses import RetryBudget
from quire.cluster.gateway.work import Completion, Parts, Run, Take
from quire.cluster.links.groups import Groups
from quire.worker.request.errors import QueueFull, QuireError

_MAX_REFUSALS = 3
"""A new completion fails after this number of groups with a full queue refused it."""


class Resume:
    """Tries again until the completion is finished. A draining or full group, and one that was lost
    before it began an attempt, use up no resume."""

    def __init__(self, parts: Parts) -> None:
        self.budget = RetryBudget(parts.config, clock=parts.clock)
        parts.telemetry.retry_budget.set_function(lambda: self.budget.level)
        self._groups = parts.groups
        self._config = parts.config
        self._clock = parts.clock

    async def __call__(self, one: Completion, take: Take, run: Run[Completion]) -> None:
        """Raises:
        QueueFull: Every group that was asked has a full queue.
        Unavailable: Too many groups were lost, of this completion or of the gateway's.
        And whatever the layers within raise.
        """
        self.budget.began()
        try:
            while one.output.finish_reason is None:
                if one.give_up_s is None:
                    one.give_up_s = self._clock() + self._config.group_wait_s
                await run(one, take)
                if one.lost is not None:
                    lost, one.lost = one.lost, None
                    self._count(one, lost)
        finally:
            one.leave_turn()

    def _count(self, one: Completion, lost: QuireError) -> None:
        """Returns if there may be another attempt after one that was ``lost``; raises otherwise."""
        assert one.stream is not None
        if is_unbegun(one, lost):
            self._lose_unbegun(one, lost)
            return
        one.give_up_s = None
        if isinstance(lost, QueueFull):
            self._refuse(one, lost)
            return
        if one.stream.num_tokens:
            one.full_since_s = None
        if isinstance(lost, HandedOver):
            one.record.handed_over()
            return
        if one.losses.is_hopeless:
            raise no_group(one, self._groups)
        if not self.budget.take():
            raise Unavailable(
                "groups are lost faster than this gateway may resume their requests, try again "
                f"later: {lost}"
            )
        self._resume(one, lost)

    def _refuse(self, one: Completion, error: QueueFull) -> None:
        """Looks for another group. Raises ``error``: there were enough."""
        one.num_refusals += 1
        one.avoided.add(one.decision.group)
        now_s = self._clock()
        if one.full_since_s is None:
            one.full_since_s = now_s
        if one.is_new:
            is_last = one.num_refusals >= _MAX_REFUSALS
        else:
            is_last = now_s - one.full_since_s >= self._config.group_wait_s
        if is_last:
            raise error

    def _lose_unbegun(self, one: Completion, lost: QuireError) -> None:
        """Handles a group that was lost before it began the attempt: no limit counts the loss, but
        the search for a group goes on no longer than it may."""
        assert one.give_up_s is not None
        if self._clock() >= one.give_up_s:
            raise no_group(one, self._groups)
        self._resume(one, lost)

    def _resume(self, one: Completion, lost: QuireError) -> None:
        one.record.resumed()
        if not isinstance(lost, GroupDied):
            one.avoided.add(one.decision.group)


def is_unbegun(one: Completion, lost: QuireError) -> bool:
    """Whether the last attempt was lost with a group that had not begun it."""
    is_loss = isinstance(lost, GroupLost) and not isinstance(lost, HandedOver)
    return is_loss and one.stream is not None and not one.stream.may_have_begun


def no_group(one: Completion, groups: Groups) -> Unavailable:
    """The error for a completion that is given up."""
    reasons = "; ".join(filter(None, [str(one.error or ""), *groups.troubles()]))
    return Unavailable(
        f"no replica group can take the request after {one.num_attempts} attempts and "
        f"{len(one.output.token_ids)} tokens, try again later: {reasons or 'none is known'}"
    )
