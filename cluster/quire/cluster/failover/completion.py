"""One completion's life at the gateway: routed, relayed, and resumed where its group is lost.

The client sees one unbroken stream of tokens. When its group is lost, another group gets the prompt
and the tokens received so far. That is exact, because a token depends on model, prompt, parameters,
seed and position only.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from quire.cluster.errors import GroupLost, Quarantined, Unavailable
from quire.cluster.failover.attempts import Attempts
from quire.cluster.failover.config import CompletionConfig
from quire.cluster.failover.ending import Ending
from quire.cluster.failover.resume import Blame, Resumes
from quire.cluster.links.groups import Groups
from quire.cluster.telemetry.explanations import routing_message
from quire.cluster.telemetry.metrics import Telemetry
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as group_pb
from quire.v1 import inference_pb2 as pb
from quire.worker.api.errors import BrokenLogits, QuireError
from quire.worker.api.request import Prepared
from quire.worker.text.text_stream import TextStream
from quire.worker.text.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_OUTCOMES = {
    pb.FINISH_REASON_STOP: "stop",
    pb.FINISH_REASON_LENGTH: "length",
}
"""How a group may end a completion."""


Take = Callable[[pb.GenerateResponse], Awaitable[object]]
"""What a completion's chunks are handed to. The next one comes when it has returned."""


class Completion:
    """Streams one completion. Used once."""

    def __init__(
        self,
        request: Prepared,
        *,
        index: int = 0,
        groups: Groups,
        table: RoutingTable,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        config: CompletionConfig,
        resumes: Resumes | None = None,
        ending: Ending | None = None,
        blame: Blame | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``index``: which of the client's completions it is. ``resumes``: what it shares with the
        gateway's other completions. ``ending``: what with those of its client's request, and
        ``blame`` with those of its prompt."""
        self._request = request
        self._index = index
        self._attempts = Attempts(
            request,
            blame=blame or Blame(),
            groups=groups,
            table=table,
            telemetry=telemetry,
            config=config,
            resumes=resumes or Resumes(config.resume, clock=clock),
            clock=clock,
        )
        self._ending = ending or Ending()
        self._table = table
        self._telemetry = telemetry
        self._clock = clock
        self._text = TextStream(
            tokenizer,
            request.sampling,
            follows=request.prompt_token_ids,
            shown_token_ids=request.shown_token_ids,
        )
        self._token_ids: list[int] = []
        self._is_started = False  # This attempt's first delta has come.
        self._error: QuireError | None = None
        self._num_cached_tokens: int | None = None
        self._first_token_s: float | None = None
        self._finish_reason = pb.FINISH_REASON_UNSPECIFIED

    async def run(self, take: Take) -> None:
        """Hands chunks to ``take`` until one has a finish reason.

        Cancelling the task that runs it aborts the group's work. The group may be ahead of ``take``
        by a window of tokens, no more.

        Raises:
            InvalidRequest: The group refused the request as it is.
            BrokenLogits: The model computes no numbers for it.
            QueueFull: Every group that was asked has a full queue.
            Quarantined: Too many groups died under it.
            Unavailable: There is no group, or too many were lost on the way.
            And what ``take`` does.
        """
        outcome, detail = "error", ""
        try:
            while not self._finish_reason:
                stream = await self._attempts.begin(self._token_ids)
                self._is_started, self._error = False, None
                try:
                    while not self._finish_reason and self._error is None:
                        chunk = self._take(await stream.next())
                        if chunk.token_ids or chunk.finish_reason:
                            self._telemetry.output_tokens.inc(len(chunk.token_ids))
                            await take(chunk)
                except GroupLost as error:
                    self._error = error
                finally:
                    self._attempts.end()
                if self._error is not None:
                    self._attempts.lose(self._error)
            outcome = _OUTCOMES[self._finish_reason]
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
            self._attempts.is_over = True
            if outcome == "error":
                self._ending.is_failed = True
            told = f"{outcome}: {detail}" if detail else outcome
            self._table.completed(self._request.request_id, outcome=told)
            self._telemetry.completions.labels(outcome).inc()

    def _take(self, deltas: Sequence[group_pb.TokenDelta]) -> pb.GenerateResponse:
        """Makes one chunk of deltas; where one is an error, of those before it."""
        chunk = pb.GenerateResponse(index=self._index, token_offset=len(self._token_ids))
        for delta in deltas:
            if delta.HasField("error"):
                self._error = self._attempts.refusal(delta.error)
            elif delta.finish_reason and delta.finish_reason not in _OUTCOMES:
                # Nobody reads any more what this gateway has aborted.
                reason = f"the group ended the request with finish_reason={delta.finish_reason}"
                self._error = GroupLost(f"{reason}, which it was not asked to")
            else:
                assert delta.token_offset == len(self._token_ids), "the stream's promise"
                self._add(delta, chunk)
            if self._error is not None or self._finish_reason:
                break
        return chunk

    def _add(self, delta: group_pb.TokenDelta, chunk: pb.GenerateResponse) -> None:
        if not self._is_started:
            self._start(delta, chunk)
        self._finish_reason = delta.finish_reason
        token_ids = list(delta.token_ids)
        num_tokens = len(token_ids)
        # As in vLLM, the token that ends the text is not part of it.
        num_shown = num_tokens
        if delta.finish_reason == pb.FINISH_REASON_STOP:
            num_shown -= not self._request.sampling.include_stop_str_in_output
        shown = ""
        for position in range(num_shown):
            # One at a time: tokens behind the stop string must not be part of the answer.
            text, stopped = self._text.push(token_ids[position])
            shown += text
            if stopped:
                self._finish_reason = pb.FINISH_REASON_STOP
                del token_ids[position + 1 :]
                break
        if shown:
            chunk.text += shown
        self._token_ids += token_ids
        chunk.token_ids.extend(token_ids)
        if delta.logprobs:
            chunk.logprobs.extend(delta.logprobs[: len(token_ids)])
        if self._first_token_s is None and num_tokens:
            self._first_token_s = self._clock() - self._request.arrival_s
            self._telemetry.time_to_first_token.observe(self._first_token_s)
        if self._finish_reason:
            self._finish(chunk)

    def _start(self, delta: group_pb.TokenDelta, chunk: pb.GenerateResponse) -> None:
        decision = self._attempts.decision
        self._is_started = True
        self._table.started(self._request.request_id, num_cached_tokens=delta.num_cached_tokens)
        if self._num_cached_tokens is not None:
            return  # Resumed: the client knows all this from the first attempt.
        self._num_cached_tokens = delta.num_cached_tokens
        self._telemetry.prompt_tokens.inc(len(self._request.prompt_token_ids))
        self._telemetry.cached_tokens.inc(delta.num_cached_tokens)
        assert self._request.model is not None
        chunk.start.CopyFrom(
            pb.Start(
                request_id=self._request.request_id,
                model=self._request.model.model,
                num_prompt_tokens=len(self._request.prompt_token_ids),
                num_cached_tokens=delta.num_cached_tokens,
                routing=routing_message(decision, with_candidates=self._request.explain_routing),
                seed=self._request.sampling.seed,
                prompt_logprobs=delta.prompt_logprobs,
            )
        )

    def _finish(self, chunk: pb.GenerateResponse) -> None:
        total_s = self._clock() - self._request.arrival_s
        first_token_s = total_s if self._first_token_s is None else self._first_token_s
        chunk.text += self._text.finish()
        chunk.finish_reason = self._finish_reason
        stop_token_ids = self._request.sampling.stop_token_ids or ()
        if self._text.stop_string is not None:
            chunk.stop_string = self._text.stop_string
        elif self._finish_reason == pb.FINISH_REASON_STOP and self._token_ids[-1] in stop_token_ids:
            chunk.stop_token_id = self._token_ids[-1]
        num_output = len(self._token_ids)
        chunk.usage.CopyFrom(
            pb.Usage(
                num_prompt_tokens=len(self._request.prompt_token_ids),
                num_cached_tokens=self._num_cached_tokens or 0,
                num_output_tokens=num_output,
                time_to_first_token_s=first_token_s,
                total_time_s=total_s,
            )
        )
        self._telemetry.total_time.observe(total_s)
        if num_output > 1:
            per_token_s = (total_s - first_token_s) / (num_output - 1)
            self._telemetry.time_per_output_token.observe(per_token_s)
