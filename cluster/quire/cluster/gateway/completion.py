"""Streams one completion from groups to its client, and resumes it when its group is lost.

The client sees one unbroken stream of tokens. When a group is lost, another group receives the
prompt and the tokens received so far. The result is exact, because a token depends only on model,
prompt, parameters, seed and position.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from quire.cluster.errors import GroupLost, HandedOver, Quarantined, Unavailable
from quire.cluster.gateway.attempts import Attempts
from quire.cluster.gateway.chunk import Chunk, Start, Usage
from quire.cluster.gateway.ending import Ending
from quire.cluster.gateway.losses import Blame, CompletionConfig, Resumes
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.telemetry import timeline
from quire.cluster.telemetry.metrics import Telemetry
from quire.cluster.wire import (
    FINISH_REASON_OF,
    fetched_from_proto,
    logprobs_from_proto,
    vector_from_bytes,
)
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as group_pb
from quire.worker.api.errors import BrokenLogits, QuireError
from quire.worker.api.outputs import FinishReason
from quire.worker.api.request import Prepared
from quire.worker.text.text_stream import TextStream
from quire.worker.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_ENDS: tuple[FinishReason, ...] = ("stop", "length")
"""The finish reasons with which a group may end a completion."""


Take = Callable[[Chunk], Awaitable[object]]
"""Consumes a completion's chunks. It is called with the next chunk when it has returned."""


class Meter(Protocol):
    """Counts a group's work for a completion when it arrives, before the client receives it."""

    def __call__(
        self, index: int, *, num_tokens: int, num_cached_tokens: int | None = None
    ) -> object:
        """Counts ``num_tokens`` more output tokens of the completion ``index``. The first call
        shows that a group has begun its prompt. ``num_cached_tokens``: its cached prompt tokens,
        once known."""


def _uncounted(index: int, *, num_tokens: int, num_cached_tokens: int | None = None) -> None:
    pass


class Completion:
    """Streams one completion. Used once."""

    def __init__(
        self,
        request: Prepared,
        *,
        work: bytes,
        model: str = "",
        index: int = 0,
        groups: Groups,
        table: RoutingTable,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        config: CompletionConfig,
        resumes: Resumes | None = None,
        ending: Ending | None = None,
        blame: Blame | None = None,
        meter: Meter = _uncounted,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``work``: the encoded request for groups. ``model``: the client's name of the model or
        adapter. ``index``: the number of the completion in the client's request. ``resumes`` is
        shared with the gateway's other completions, ``ending`` with those of the same client's
        request, ``blame`` with those of the same prompt."""
        self._request = request
        self._model = model
        self._index = index
        self._record = timeline.current().completion(
            request.request_id, index=index, is_first_of_prompt=request.completion == 0
        )
        self._attempts = Attempts(
            request,
            work=work,
            blame=blame or Blame(),
            groups=groups,
            table=table,
            telemetry=telemetry,
            config=config,
            resumes=resumes or Resumes(config, clock=clock),
            clock=clock,
            record=self._record,
        )
        self._ending = ending or Ending()
        self._meter = meter
        self._table = table
        self._telemetry = telemetry
        self._clock = clock
        self._text = TextStream(
            tokenizer,
            request.sampling,
            follows=request.prompt_token_ids,
            shown_token_ids=request.shown_token_ids,
            reasoning=request.reasoning,
        )
        self._token_ids: list[int] = []
        self._is_started = False  # The attempt's first delta has arrived.
        self._error: QuireError | None = None
        self._num_cached_tokens: int | None = None
        self._first_token_s: float | None = None
        self._finish_reason: FinishReason | None = None

    async def run(self, take: Take) -> None:
        """Hands chunks to ``take`` until one has a finish reason.

        Cancelling the task that runs this aborts the group's work. The group sends at most
        `GroupClientConfig.window_tokens` tokens ahead of ``take``.

        Raises:
            InvalidRequest: The group refused the request itself.
            BrokenLogits: The model's logits for it are not finite.
            QueueFull: Every group that was asked has a full queue.
            Quarantined: Too many groups died under it.
            Unavailable: There is no group, or too many groups were lost.
            And whatever ``take`` raises.
        """
        outcome, detail = "error", ""
        try:
            while self._finish_reason is None:
                stream = await self._attempts.begin(self._token_ids)
                attempt = self._record.attempts[-1]
                self._is_started, self._error = False, None
                try:
                    while self._finish_reason is None and self._error is None:
                        chunk = self._take(await stream.next())
                        if chunk.token_ids or chunk.finish_reason:
                            start = chunk.start
                            cached = None if start is None else start.num_cached_tokens
                            self._count(len(chunk.token_ids), num_cached_tokens=cached)
                            await take(chunk)
                except GroupLost as error:
                    self._error = error
                except BaseException:
                    self._count_unseen(stream)
                    raise
                finally:
                    has_failed = self._error and not isinstance(self._error, HandedOver)
                    attempt.end(
                        str(self._error or self._finish_reason or "cancelled"),
                        error_type=type(self._error).__name__ if has_failed else "",
                    )
                    self._attempts.end()
                if self._error is not None:
                    self._attempts.lose(self._error)
            outcome = self._finish_reason
        except asyncio.CancelledError:
            outcome, detail = self._ending.of_closed(now_s=self._clock(), lost=self._error)
            raise
        except QuireError as error:
            detail = str(error)
            if isinstance(error, (BrokenLogits, Quarantined, Unavailable)):
                name, known_as = self._request.request_id, self._request.client_id or "no name"
                num_tokens = len(self._token_ids)
                _log.warning("%s (%s) fails after %d tokens: %s", name, known_as, num_tokens, error)
            raise
        finally:
            if outcome == "error":
                self._ending.is_failed = True
            told = f"{outcome}: {detail}" if detail else outcome
            self._table.completed(self._request.request_id, outcome=told)
            self._telemetry.completions.labels(outcome).inc()
            self._record.end(outcome, num_output_tokens=len(self._token_ids))

    def _count(self, num_tokens: int, *, num_cached_tokens: int | None = None) -> None:
        self._telemetry.output_tokens.inc(num_tokens)
        self._meter(self._index, num_tokens=num_tokens, num_cached_tokens=num_cached_tokens)

    def _count_unseen(self, stream: GroupStream) -> None:
        """Counts the work of the group for a client that left before it received it."""
        num_tokens = sum(len(delta.token_ids) for delta in stream.unread)
        if num_tokens and self._num_cached_tokens is None:
            self._count(num_tokens, num_cached_tokens=stream.unread[0].num_cached_tokens)
        elif num_tokens or stream.is_running:
            self._count(num_tokens)

    def _take(self, deltas: Sequence[group_pb.TokenDelta]) -> Chunk:
        """Merges deltas into one chunk, up to the first error or finish reason."""
        chunk = Chunk(self._index, len(self._token_ids))
        for delta in deltas:
            reason = FINISH_REASON_OF.get(delta.finish_reason)
            if delta.HasField("error"):
                self._error = self._attempts.refusal(delta.error)
            elif delta.finish_reason and reason not in _ENDS:
                # This gateway did not abort it: nothing reads the stream of an aborted attempt.
                told = f"the group ended the request with finish_reason={delta.finish_reason}"
                self._error = GroupLost(f"{told}, which it was not asked to")
            else:
                assert delta.token_offset == len(self._token_ids), "the stream's promise"
                is_handed_over = reason == "length" and self._attempts.hands_over
                self._add(delta, None if is_handed_over else reason, chunk)
                if is_handed_over and self._finish_reason is None:
                    self._error = HandedOver("its prompt is computed")
            if self._error is not None or self._finish_reason is not None:
                break
        return chunk

    def _add(self, delta: group_pb.TokenDelta, reason: FinishReason | None, chunk: Chunk) -> None:
        if not self._is_started:
            self._start(delta, chunk)
        self._finish_reason = reason
        token_ids = list(delta.token_ids)
        num_tokens = len(token_ids)
        # As in vLLM, the text does not include the stop token.
        num_shown = num_tokens
        if reason == "stop":
            num_shown -= not self._request.sampling.include_stop_str_in_output
        shown = ""
        for position in range(num_shown):
            # One at a time, because tokens after the stop string are not part of the answer.
            text, stopped = self._text.push(token_ids[position])
            shown += text
            if stopped:
                self._finish_reason = "stop"
                del token_ids[position + 1 :]
                break
        chunk.text += shown
        self._token_ids += token_ids
        chunk.token_ids += token_ids
        if delta.logprobs:
            chunk.logprobs += logprobs_from_proto(delta.logprobs[: len(token_ids)])
        if self._first_token_s is None and num_tokens:
            self._record.first_token_s = time.monotonic()
            self._first_token_s = self._clock() - self._request.arrival_s
            self._telemetry.time_to_first_token.observe(self._first_token_s)
            sent_s = self._record.attempts[0].routed_s
            self._telemetry.prefill_time.observe(self._record.first_token_s - sent_s)
        if delta.embedding:
            chunk.embedding = vector_from_bytes(delta.embedding)
        if self._finish_reason is not None:
            self._finish(chunk)

    def _start(self, delta: group_pb.TokenDelta, chunk: Chunk) -> None:
        self._is_started = True
        fetched = fetched_from_proto(delta.fetched) if delta.HasField("fetched") else None
        self._record.attempts[-1].begin(
            num_cached_tokens=delta.num_cached_tokens,
            num_fetched_tokens=fetched.num_tokens if fetched else 0,
        )
        self._table.started(
            self._request.request_id, num_cached_tokens=delta.num_cached_tokens, fetched=fetched
        )
        if self._num_cached_tokens is not None:
            return  # A resumed completion: the client got its `Start` from the first attempt.
        self._num_cached_tokens = delta.num_cached_tokens
        self._telemetry.prompt_tokens.inc(len(self._request.prompt_token_ids))
        self._telemetry.cached_tokens.inc(delta.num_cached_tokens)
        request = self._request
        assert request.model is not None
        assert request.sampling.seed is not None
        chunk.start = Start(
            request_id=request.request_id,
            model=self._model or request.model.model,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=delta.num_cached_tokens,
            decision=self._attempts.decision,
            explains_routing=request.explain_routing,
            seed=request.sampling.seed,
            prompt_logprobs=logprobs_from_proto(delta.prompt_logprobs),
        )

    def _finish(self, chunk: Chunk) -> None:
        total_s = self._clock() - self._request.arrival_s
        first_token_s = total_s if self._first_token_s is None else self._first_token_s
        chunk.text += self._text.finish()
        chunk.finish_reason = self._finish_reason
        stop_token_ids = self._request.sampling.stop_token_ids or ()
        if self._text.stop_string is not None:
            chunk.stop_reason = self._text.stop_string
        elif (
            self._finish_reason == "stop"
            and stop_token_ids
            and self._token_ids[-1] in stop_token_ids
        ):
            chunk.stop_reason = self._token_ids[-1]
        num_output = len(self._token_ids)
        chunk.usage = Usage(
            num_prompt_tokens=len(self._request.prompt_token_ids),
            num_cached_tokens=self._num_cached_tokens or 0,
            num_output_tokens=num_output,
            time_to_first_token_s=first_token_s,
            total_time_s=total_s,
        )
        self._telemetry.total_time.observe(total_s)
        self._telemetry.decode_time.observe(total_s - first_token_s)
        self._telemetry.prompt_lengths.observe(chunk.usage.num_prompt_tokens)
        self._telemetry.output_lengths.observe(num_output)
        if num_output > 1:
            per_token_s = (total_s - first_token_s) / (num_output - 1)
            self._telemetry.time_per_output_token.observe(per_token_s)
