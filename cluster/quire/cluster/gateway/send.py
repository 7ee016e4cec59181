"""The end of the pipeline: sends a completion to the chosen group, and passes its tokens on.

An attempt ends with the completion, or because its group was lost, drains or refuses it. The next
attempt continues after the tokens received so far.
"""

from collections.abc import Sequence

from quire.cluster.errors import Death, GroupDied, GroupLost, HandedOver
from quire.cluster.gateway.chunk import Chunk, Start, Usage
from quire.cluster.gateway.work import Completion, Parts, Take
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.telemetry.timeline import Attempt
from quire.cluster.wire import (
    FINISH_REASON_OF,
    fetched_from_proto,
    logprobs_from_proto,
    tokens_to_bytes,
    vector_from_bytes,
)
from quire.router.lenders import Source
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import (
    BrokenLogits,
    ConstraintRefused,
    InvalidRequest,
    QueueFull,
    QuireError,
)
from quire.worker.request.outputs import FinishReason

_ENDS: tuple[FinishReason, ...] = ("stop", "length")
"""The finish reasons with which a group may end a completion."""


class Send:
    """Runs one attempt at the group of `Completion.decision`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    async def __call__(self, one: Completion, take: Take) -> None:
        """Returns when the completion is finished, has set `Completion.lost`, or could not be sent.

        Cancelling the task that runs this aborts the group's work. The group sends at most
        `GroupClientConfig.window_tokens` tokens ahead of ``take``.

        Raises:
            InvalidRequest: The group refused the request itself.
            BrokenLogits: The model's logits for it are not finite.
            And whatever ``take`` raises.
        """
        one.num_attempts += 1
        attempt = one.record.attempt(one.decision, num_resumed_tokens=len(one.output.token_ids))
        submission = self._submission(one, attempt)
        try:
            stream = self._parts.groups.submit(
                one.decision.group, submission, on_cleared=one.end_turn
            )
        except GroupLost as gone:
            one.error = gone
            one.avoided.add(one.decision.group)
            return
        one.record.attempts.append(attempt)
        one.stream, one.is_sent = stream, True
        reader = Reader(self._parts, one, hands_over=submission.hand_over_after > 0)
        error: QuireError | None = None
        try:
            while error is None and one.output.finish_reason is None:
                chunk, error = reader.read(await stream.next())
                if chunk.token_ids or chunk.finish_reason:
                    start = chunk.start
                    _count(one, len(chunk.token_ids), start.num_cached_tokens if start else 0)
                    await take(chunk)
        except GroupLost as lost:
            error = lost
        except BaseException:
            _count_unseen(one, stream)
            raise
        finally:
            has_failed = error is not None and not isinstance(error, HandedOver)
            attempt.end(
                str(error or one.output.finish_reason or "cancelled"),
                error_type=type(error).__name__ if has_failed else "",
            )
            one.is_sent = False
            stream.abort()
        if isinstance(error, GroupLost | QueueFull):
            one.former = self._source(one, stream)
            one.lost = one.error = error
        elif error is not None:
            raise error

    def _submission(self, one: Completion, attempt: Attempt) -> pb.Submit:
        decision, source = one.decision, None
        known = [one.former] if one.former is not None else []
        if decision.source is not None:
            known.append(Source(decision.source, decision.num_source_blocks))
        for group, num_blocks in known:
            if source is None and group != decision.group:
                source = self._parts.groups.source(
                    group, taker=decision.group, num_blocks=num_blocks
                )
        runs_alone = one.end_turn is not None
        return pb.Submit(
            request_id=one.request.request_id,
            attempt=one.num_attempts,
            work=one.encoded,
            completion=one.request.completion,
            resumed_token_ids=tokens_to_bytes(one.output.token_ids),
            isolated_tokens=self._parts.config.isolated_tokens if runs_alone else 0,
            source=source,
            hand_over_after=int(self._ends_prefilled(one)),
            traceparent=attempt.traceparent,
            tracestate=one.record.trace_state,
        )

    def _ends_prefilled(self, one: Completion) -> bool:
        """Whether the group is to end the attempt after one token, so that another group continues:
        the attempt is the first one, on a prefill group."""
        is_new = not one.output.token_ids and one.end_turn is None
        return (
            is_new
            and one.request.task == "generate"
            and (one.request.sampling.max_tokens or 0) > 1
            and self._parts.table.only_prefills(one.decision.group)
        )

    def _source(self, one: Completion, stream: GroupStream) -> Source | None:
        """The attempt's group as a source of KV blocks, if it generated tokens: it has the KV of
        all tokens but the last."""
        if not stream.num_tokens:
            return None
        num_tokens = len(one.request.prompt_token_ids) + len(one.output.token_ids)
        return Source(one.decision.group, (num_tokens - 1) // self._parts.table.block_size)


def _count(one: Completion, num_tokens: int, num_cached_tokens: int = 0) -> None:
    one.record.arrived(num_tokens)
    cached = 0 if one.request.completion else num_cached_tokens
    for count in one.work.counts:
        count(one.index, num_tokens=num_tokens, num_cached_tokens=cached)


def _count_unseen(one: Completion, stream: GroupStream) -> None:
    """Counts the work of the group for a client that left before it received it."""
    num_tokens = sum(len(delta.token_ids) for delta in stream.unread)
    if num_tokens and one.record.num_cached_tokens is None:
        _count(one, num_tokens, stream.unread[0].num_cached_tokens)
    elif num_tokens or stream.is_running:
        _count(one, num_tokens)


class Reader:
    """Reads the deltas of one attempt."""

    def __init__(self, parts: Parts, one: Completion, *, hands_over: bool) -> None:
        """``hands_over``: whether the group was told to end the attempt after its first token, so
        that another group continues. The group's role may have changed since."""
        self._parts = parts
        self._one = one
        self._hands_over = hands_over
        self._is_started = False

    def read(self, deltas: Sequence[pb.TokenDelta]) -> tuple[Chunk, QuireError | None]:
        """Merges deltas into one chunk, up to the first error or finish reason."""
        output = self._one.output
        chunk = Chunk(self._one.index, len(output.token_ids))
        for delta in deltas:
            reason = FINISH_REASON_OF.get(delta.finish_reason)
            if delta.HasField("error"):
                return chunk, self._error(delta.error)
            if delta.finish_reason and reason not in _ENDS:
                # This gateway did not abort it: nothing reads the stream of an aborted attempt.
                told = f"the group ended the request with finish_reason={delta.finish_reason}"
                return chunk, GroupLost(f"{told}, which it was not asked to")
            assert delta.token_offset == len(output.token_ids), "the stream's promise"
            is_handed_over = reason == "length" and self._hands_over
            self._add(delta, None if is_handed_over else reason, chunk)
            if output.finish_reason is not None:
                break
            if is_handed_over:
                return chunk, HandedOver("its prompt is computed")
        return chunk, None

    def _add(self, delta: pb.TokenDelta, reason: FinishReason | None, chunk: Chunk) -> None:
        one, record = self._one, self._one.record
        if not self._is_started:
            self._start(delta, chunk)
        num_kept = one.output.add(list(delta.token_ids), reason, chunk)
        if delta.logprobs:
            chunk.logprobs += logprobs_from_proto(delta.logprobs[:num_kept])
        if delta.embedding:
            chunk.embedding = vector_from_bytes(delta.embedding)
        if record.first_token_s is None and delta.token_ids:
            record.first_token(after_s=self._since_arrival_s)
        if one.output.finish_reason is not None:
            chunk.usage = self._usage()

    def _start(self, delta: pb.TokenDelta, chunk: Chunk) -> None:
        one, request = self._one, self._one.request
        self._is_started = True
        fetched = fetched_from_proto(delta.fetched) if delta.HasField("fetched") else None
        one.record.attempts[-1].begin(
            num_cached_tokens=delta.num_cached_tokens,
            num_fetched_tokens=fetched.num_tokens if fetched else 0,
        )
        self._parts.table.started(
            request.request_id, num_cached_tokens=delta.num_cached_tokens, fetched=fetched
        )
        if one.record.num_cached_tokens is not None:
            return  # A resumed completion: the client got its `Start` from the first attempt.
        num_prompt_tokens = len(request.prompt_token_ids)
        one.record.begun(
            num_prompt_tokens=num_prompt_tokens, num_cached_tokens=delta.num_cached_tokens
        )
        assert request.model is not None
        assert request.sampling.seed is not None
        chunk.start = Start(
            request_id=request.request_id,
            model=one.work.model or request.model.model,
            num_prompt_tokens=num_prompt_tokens,
            num_cached_tokens=delta.num_cached_tokens,
            decision=one.decision,
            explains_routing=request.explain_routing,
            seed=request.sampling.seed,
            prompt_logprobs=logprobs_from_proto(delta.prompt_logprobs),
        )

    def _usage(self) -> Usage:
        record, total_s = self._one.record, self._since_arrival_s
        first_s = record.time_to_first_token_s
        usage = Usage(
            num_prompt_tokens=record.num_prompt_tokens,
            num_cached_tokens=record.num_cached_tokens or 0,
            num_output_tokens=len(self._one.output.token_ids),
            time_to_first_token_s=total_s if first_s is None else first_s,
            total_time_s=total_s,
        )
        record.finished(num_output_tokens=usage.num_output_tokens, total_s=total_s)
        return usage

    @property
    def _since_arrival_s(self) -> float:
        return self._parts.clock() - self._one.request.arrival_s

    def _error(self, error: pb.GroupError) -> QuireError:
        """The exception for a group's refusal."""
        one, group = self._one, self._one.decision.group
        match error.code:
            case pb.GroupError.CONSTRAINT_REFUSED:
                return ConstraintRefused(error.message)
            case pb.GroupError.INVALID_REQUEST:
                return InvalidRequest(error.message, param=error.param or None)
            case pb.GroupError.BROKEN_LOGITS:
                return BrokenLogits(error.message)
            case pb.GroupError.QUEUE_FULL:
                return QueueFull(error.message)
            case pb.GroupError.DRAINING:
                return HandedOver(error.message)
            case pb.GroupError.ADAPTER_MISSING:
                self._parts.groups.forget_adapter(group, one.request.adapter)
                return HandedOver(error.message)
            case pb.GroupError.OTHER_ISOLATED:
                one.avoided.add(group)
                return HandedOver(error.message)
            case pb.GroupError.GROUP_FAILED:
                assert one.stream is not None
                return GroupDied(error.message, Death(group, one.stream.epoch))
        return GroupLost(error.message)
