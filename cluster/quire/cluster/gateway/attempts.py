"""The attempts of one completion: chooses a group for each, and decides whether there is another.

An attempt is routed and submitted to a group. It ends with the completion, or because its group was
lost, drains or refuses it. The next attempt then continues after the tokens received so far, unless
a limit of `resume` has been reached. Each attempt has a number, by which group and gateway match
messages to it.
"""

import asyncio
from collections.abc import Callable, Sequence

from quire.cluster.errors import (
    Death,
    GroupDied,
    GroupLost,
    HandedOver,
    Quarantined,
    Unavailable,
)
from quire.cluster.gateway.losses import Blame, CompletionConfig, Losses, Resumes
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.telemetry.metrics import Telemetry
from quire.cluster.telemetry.timeline import Attempt, CompletionRecord
from quire.cluster.wire import tokens_to_bytes
from quire.router.errors import NoGroupAvailable
from quire.router.lenders import Source
from quire.router.policies.policy import Decision
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as pb
from quire.worker.api.errors import (
    BrokenLogits,
    ConstraintRefused,
    InvalidRequest,
    QueueFull,
    QuireError,
)
from quire.worker.api.request import Prepared

_MAX_REFUSALS = 3
"""A new completion fails after this number of groups with a full queue refused it."""
_RETRY_PAUSE_S = 0.1
"""Pause before groups that could not take a completion are tried again."""


class Attempts:
    """The attempts of one completion, one at a time."""

    def __init__(
        self,
        request: Prepared,
        *,
        work: bytes,
        blame: Blame,
        groups: Groups,
        table: RoutingTable,
        telemetry: Telemetry,
        config: CompletionConfig,
        resumes: Resumes,
        clock: Callable[[], float],
        record: CompletionRecord | None = None,
    ) -> None:
        """``work`` is the encoded request for groups. It and ``blame`` are shared by all
        completions of the prompt. ``record`` receives each attempt that was sent."""
        self._request = request
        self._work = work
        self._model = request.model
        self._groups = groups
        self._table = table
        self._telemetry = telemetry
        self._config = config
        self._resumes = resumes
        self._clock = clock
        self._record = record or CompletionRecord(0, request.request_id, True)
        self.blame = blame
        self.num_attempts = 0
        self._losses = Losses(config, blame)
        self._num_tokens = 0
        self._num_refusals = 0
        self._full_since_s: float | None = None  # When it was first refused for a full queue.
        self._deadline_s: float | None = None  # The end of the search for a group.
        self._avoided: set[GroupId] = set()  # Groups that could not take it just now.
        self._decision: Decision | None = None
        self._stream: GroupStream | None = None
        self._error: QuireError | None = None
        self._is_isolated = False
        self._is_unjudged = False  # Whether limits apply only once the last death is judged.
        self.hands_over = False
        """Whether the group was told to end the current attempt after its first token, so that
        another group continues. The group's role may have changed since."""
        self._end_turn: Callable[[], None] = _do_nothing  # Ends the turn of an isolated request.
        resumes.budget.began()

    @property
    def decision(self) -> Decision:
        """The routing decision of the last attempt."""
        assert self._decision is not None
        return self._decision

    async def begin(self, token_ids: Sequence[int]) -> GroupStream:
        """Begins the next attempt: routes the completion, of which ``token_ids`` were received
        already, and submits it to a group.

        Raises:
            QueueFull: Every group that was asked has a full queue.
            Quarantined: Too many groups died under it, or under another completion of its prompt.
            Unavailable: There is no group, or too many groups were lost.
        """
        self._num_tokens = len(token_ids)
        self._is_isolated = False
        try:
            return await self._begin(token_ids)
        except BaseException:
            self._end_turn()
            raise

    def end(self) -> None:
        """Aborts the last attempt, if it still runs, and frees what it held."""
        if self._stream is not None:
            self._stream.abort()
        self._end_turn()

    def lose(self, error: QuireError) -> None:
        """Counts that the last attempt ended with ``error``. Returns if there may be another.

        Raises:
            InvalidRequest: The group refused the request itself.
            BrokenLogits: The model's logits for it are not finite.
            QueueFull: Every group that was asked has a full queue.
            Unavailable: Too many groups were lost.
        """
        self._error = error
        assert self._stream is not None
        is_loss = isinstance(error, GroupLost) and not isinstance(error, HandedOver)
        if is_loss and not self._stream.may_have_begun:
            self._lose_unbegun()
            return
        self._deadline_s = None
        if isinstance(error, QueueFull):
            self._num_refusals += 1
            self._avoided.add(self.decision.group)
            if self._full_since_s is None:
                self._full_since_s = self._clock()
            if self._is_new:
                is_last = self._num_refusals >= _MAX_REFUSALS
            else:
                is_last = self._clock() - self._full_since_s >= self._config.group_wait_s
            if is_last:
                raise error
            return
        if not isinstance(error, GroupLost):
            raise error
        if self._stream.num_tokens:
            self._full_since_s = None
        self._losses.add(error, num_tokens=self._stream.num_tokens, is_isolated=self._is_isolated)
        if isinstance(error, HandedOver):
            self._telemetry.handovers.inc()
            return
        # A convicted request is told so, and not that it was lost too often.
        self._is_unjudged = self.blame.isolated_death is not None
        if not self._is_unjudged:
            self._resume()
        if not isinstance(error, GroupDied):
            self._avoided.add(self.decision.group)

    def refusal(self, error: pb.GroupError) -> QuireError:
        """The exception for a group's refusal."""
        if error.code == pb.GroupError.CONSTRAINT_REFUSED:
            return ConstraintRefused(error.message)
        if error.code == pb.GroupError.INVALID_REQUEST:
            return InvalidRequest(error.message, param=error.param or None)
        if error.code == pb.GroupError.BROKEN_LOGITS:
            return BrokenLogits(error.message)
        if error.code == pb.GroupError.QUEUE_FULL:
            return QueueFull(error.message)
        if error.code == pb.GroupError.DRAINING:
            return HandedOver(error.message)
        if error.code == pb.GroupError.ADAPTER_MISSING:
            self._groups.forget_adapter(self.decision.group, self._request.adapter)
            return HandedOver(error.message)
        if error.code == pb.GroupError.OTHER_ISOLATED:
            self._avoided.add(self.decision.group)
            return HandedOver(error.message)
        if error.code == pb.GroupError.GROUP_FAILED:
            assert self._stream is not None
            return GroupDied(error.message, Death(self.decision.group, self._stream.epoch))
        return GroupLost(error.message)

    @property
    def _is_new(self) -> bool:
        """Whether the completion has no tokens and no lost attempt, so that it may be refused."""
        return not (self._num_tokens or self._losses.num_lost)

    def _resume(self) -> None:
        """Counts a resume. Raises Unavailable: the completion or the gateway may have no more."""
        if self._losses.is_hopeless:
            raise self._unavailable()
        if not self._resumes.budget.take():
            raise Unavailable(
                "groups are lost faster than this gateway may resume their requests, try again "
                f"later: {self._error}"
            )
        self._telemetry.resumes.inc()

    def _lose_unbegun(self) -> None:
        """Handles a group that was lost before it began the attempt: the request is not blamed, and
        no limit counts the loss."""
        assert self._deadline_s is not None
        if self._clock() >= self._deadline_s:
            raise self._unavailable()
        self._telemetry.resumes.inc()
        if not isinstance(self._error, GroupDied):
            self._avoided.add(self.decision.group)

    async def _begin(self, token_ids: Sequence[int]) -> GroupStream:
        if self._deadline_s is None:
            self._deadline_s = self._clock() + self._config.group_wait_s
        num_prompt_tokens = len(self._request.prompt_token_ids) + len(token_ids)
        former = self._former(num_prompt_tokens)
        while True:
            if self._losses.must_be_isolated and not self._is_isolated:
                # The wait for a turn does not count: groups exist, and the queue moves.
                entered_s = self._clock()
                self._end_turn = await self._resumes.isolation.enter()
                self._is_isolated = True
                self._deadline_s += self._clock() - entered_s
            if self._is_isolated:
                if unrest_s := self._groups.deaths.unrest_s:
                    await self._wait_until_calm(unrest_s)
                    continue
                if self.blame.judge(self._groups.deaths):
                    self._telemetry.quarantined.inc()
            if self.blame.is_convicted:
                raise self._quarantined()
            if self._is_unjudged:
                self._is_unjudged = False
                self._resume()
            card = self._groups.card
            if card is not None and not token_ids and card.differs_in_numerics_at_most(self._model):
                # There are no tokens yet, so a group with other numerics may take it.
                if card != self._model:
                    self._request = self._request.hashed_for(card)
                self._model = card
            if card not in (None, self._model):
                raise Unavailable("the model was replaced while the request was under way")
            lacking = self._groups.lacking(self._request.adapter)
            try:
                self._decision = self._table.route(
                    self._request.request_id,
                    hashes=self._request.hashes,
                    num_prompt_tokens=num_prompt_tokens,
                    exclude=lacking | self._avoided,
                    adapter=self._request.adapter,
                    cache_key=self._request.cache_key,
                    client_id=self._request.client_id,
                    tenant=self._request.tenant,
                    moved_because=str(self._error or ""),
                    former=former,
                    has_tokens=len(token_ids) > 0,
                )
                self.num_attempts += 1
                attempt = self._record.attempt(self._decision, num_resumed_tokens=len(token_ids))
                submission = self._submission(token_ids, former, attempt)
                self._stream = self._groups.submit(
                    self._decision.group, submission, on_cleared=self._end_turn
                )
                self.hands_over = submission.hand_over_after > 0
            except NoGroupAvailable as error:
                if lacking:
                    await self._hold(self._deadline_s)
                else:
                    await self._wait(error, self._deadline_s)
            except GroupLost as error:
                self._error = error
                self._avoided.add(self.decision.group)
            else:
                self._record.attempts.append(attempt)
                return self._stream

    async def _hold(self, deadline_s: float) -> None:
        """Returns when it is time to look again for a group that holds the request's adapter.
        Raises Unavailable: ``deadline_s`` has passed."""
        try:
            timeout_s = max(0.0, deadline_s - self._clock())
            await self._groups.hold(self._request.adapter, timeout_s=timeout_s)
        except GroupLost as error:
            self._error = error
            if self._clock() >= deadline_s:
                raise self._unavailable() from error
            await asyncio.sleep(_RETRY_PAUSE_S)
            self._avoided.clear()

    async def _wait_until_calm(self, unrest_s: float) -> None:
        """Waits until all groups that are already dead are known. Groups that die together convict
        no request, so this comes before an isolated request is judged or sent to another group."""
        assert self._deadline_s is not None
        if self._clock() + unrest_s > self._deadline_s:
            raise self._unavailable()
        await asyncio.sleep(max(unrest_s, _RETRY_PAUSE_S))

    async def _wait(self, error: NoGroupAvailable, deadline_s: float) -> None:
        """Returns when it is time to look for a group again. Raises QueueFull or Unavailable: there
        is no point in waiting, or ``deadline_s`` has passed."""
        full = self._error if isinstance(self._error, QueueFull) else None
        timeout_s = deadline_s - self._clock()
        is_over = timeout_s <= 0 or not self._groups.may_come
        if is_over or (full is not None and self._is_new):
            raise full or self._unavailable() from error
        if self._avoided:
            timeout_s = min(timeout_s, _RETRY_PAUSE_S)
        else:
            # There is no group. Isolated requests wait for one all at once, and not in turn.
            self._end_turn()
            self._is_isolated = False
        with self._groups.demand.waiting(len(self._request.prompt_token_ids)):
            await self._groups.wait_for_change(timeout_s=timeout_s)
        self._avoided.clear()

    def _former(self, num_tokens: int) -> Source | None:
        """The group of the last attempt as a source of KV blocks, if it generated tokens: it then
        has the KV of all ``num_tokens`` but the last."""
        if self._stream is None or not self._stream.num_tokens:
            return None
        return Source(self.decision.group, (num_tokens - 1) // self._table.block_size)

    def _submission(
        self, token_ids: Sequence[int], former: Source | None, attempt: Attempt
    ) -> pb.Submit:
        decision, source = self.decision, None
        known = [former] if former is not None else []
        if decision.source is not None:
            known.append(Source(decision.source, decision.num_source_blocks))
        for group, num_blocks in known:
            if source is None and group != decision.group:
                source = self._groups.source(group, taker=decision.group, num_blocks=num_blocks)
        isolated_tokens = self._config.isolated_tokens if self._is_isolated else 0
        return pb.Submit(
            request_id=self._request.request_id,
            attempt=self.num_attempts,
            work=self._work,
            completion=self._request.completion,
            resumed_token_ids=tokens_to_bytes(token_ids),
            isolated_tokens=isolated_tokens,
            source=source,
            hand_over_after=int(self._ends_prefilled()),
            traceparent=attempt.traceparent,
            tracestate=self._record.trace_state,
        )

    def _ends_prefilled(self) -> bool:
        """Whether the group is to end the attempt after one token, so that another group continues:
        the attempt is the first one, on a prefill group."""
        request = self._request
        is_new = not (self._num_tokens or self._is_isolated) and request.task == "generate"
        return (
            is_new
            and (request.sampling.max_tokens or 0) > 1
            and self._table.only_prefills(self.decision.group)
        )

    def _quarantined(self) -> Quarantined:
        return Quarantined(
            f"quarantined: {self._losses.num_deaths} replica groups died one after the other "
            "while they ran this request, the last of them with no other such request; it is not "
            f"tried again. The last one: {self._error}"
        )

    def _unavailable(self) -> Unavailable:
        reasons = "; ".join(filter(None, [str(self._error or ""), *self._groups.troubles()]))
        return Unavailable(
            f"no replica group can take the request after {self.num_attempts} attempts and "
            f"{self._num_tokens} tokens, try again later: {reasons or 'none is known'}"
        )


def _do_nothing() -> None:
    pass
