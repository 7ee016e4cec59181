"""One completion's life at the gateway: routed, relayed, and resumed where its group is lost.

The client sees one stream whose tokens follow on from each other, whatever happens behind it: a
group that is lost is replaced by another, which is given the prompt and the tokens received so
far. That is exact, since a token depends on model, prompt, parameters, seed and position only.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass

from quire.cluster.errors import GroupLost, Unavailable
from quire.cluster.group_client import GroupStream
from quire.cluster.groups import Groups
from quire.cluster.model_card import ModelCard
from quire.cluster.telemetry import Telemetry
from quire.cluster.wire import params_to_proto, tokens_to_bytes
from quire.router.directory import GroupId
from quire.router.errors import NoGroupAvailable
from quire.router.policy import Decision
from quire.router.table import RoutingTable
from quire.v1 import group_pb2 as group_pb
from quire.v1 import inference_pb2 as pb
from quire.worker.errors import InvalidRequest, QueueFull, QuireError
from quire.worker.hashing import BlockHash, TokenIds
from quire.worker.sampling_params import SamplingParams
from quire.worker.text import TextStream, Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionConfig:
    max_attempts: int = 3
    """Groups that a completion may be sent to, one after the other."""
    group_wait_s: float = 5.0
    """How long it waits for a group where there is none, as after a crash."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionRequest:
    """One completion of one prompt, checked, tokenized and hashed."""

    request_id: str
    """Of no other completion of this gateway."""
    index: int
    """Which of the request's completions it is."""
    model: ModelCard
    prompt_token_ids: TokenIds
    hashes: Sequence[BlockHash]
    """Of the prompt's full blocks."""
    params: SamplingParams
    """``seed`` and ``max_tokens`` are set."""
    cache_salt: str
    arrival_s: float
    """On the completion's clock."""
    priority: int = 0
    """Less runs sooner."""


class Completion:
    """Streams one completion. Used once."""

    def __init__(
        self,
        request: CompletionRequest,
        *,
        groups: Groups,
        table: RoutingTable,
        tokenizer: Tokenizer,
        telemetry: Telemetry,
        config: CompletionConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._request = request
        self._groups = groups
        self._table = table
        self._telemetry = telemetry
        self._config = config
        self._clock = clock
        self._text = TextStream(tokenizer, request.params)
        self._token_ids: list[int] = []
        self._attempt = 0
        self._decision: Decision | None = None
        self._is_started = False  # This attempt's first delta has come.
        self._full: set[GroupId] = set()  # Groups whose queue was full when they were asked.
        self._error: QuireError | None = None
        self._num_cached_tokens: int | None = None
        self._first_token_s: float | None = None
        self._finish_reason = pb.FINISH_REASON_UNSPECIFIED

    async def stream(self) -> AsyncGenerator[pb.GenerateResponse, None]:
        """Yields chunks until one has a finish reason.

        Closing the generator, or cancelling whoever waits on it, aborts the group's work.

        Raises:
            InvalidRequest: The group refused the request as it is.
            QueueFull: Every group that was asked has a full queue.
            Unavailable: There is no group, or too many were lost on the way.
        """
        outcome = "error"
        try:
            while not self._finish_reason:
                stream = await self._submit()
                try:
                    while not self._finish_reason and self._error is None:
                        chunk = self._take(await stream.next())
                        if chunk.token_ids or chunk.finish_reason:
                            self._telemetry.output_tokens.inc(len(chunk.token_ids))
                            yield chunk
                except GroupLost as error:
                    self._error = error
                finally:
                    stream.abort()
                if isinstance(self._error, InvalidRequest):
                    raise self._error
            outcome = "stop" if self._finish_reason == pb.FINISH_REASON_STOP else "length"
        except (asyncio.CancelledError, GeneratorExit):
            outcome = "cancelled"
            raise
        finally:
            self._table.completed(self._request.request_id)
            self._telemetry.completions.labels(outcome).inc()

    async def _submit(self) -> GroupStream:
        """Routes the request, or what is left of it, and sends it on its way."""
        deadline_s = self._clock() + self._config.group_wait_s
        while self._attempt < self._config.max_attempts:
            if self._groups.card not in (None, self._request.model):
                raise Unavailable("the model was replaced while the request was under way")
            try:
                decision = self._table.route(
                    self._request.request_id,
                    hashes=self._request.hashes,
                    num_prompt_tokens=len(self._request.prompt_token_ids) + len(self._token_ids),
                    exclude=frozenset(self._full),
                )
                self._attempt += 1
                stream = self._groups.submit(decision.group, self._submission())
            except NoGroupAvailable as error:
                if isinstance(self._error, QueueFull):
                    raise self._error from error
                remaining_s = deadline_s - self._clock()
                if not await self._groups.wait_for_change(timeout_s=remaining_s):
                    raise self._unavailable() from error
            except GroupLost as error:
                self._error = error
            else:
                self._decision, self._is_started, self._error = decision, False, None
                if self._attempt > 1:
                    self._telemetry.resumes.inc()
                return stream
        raise self._error if isinstance(self._error, QueueFull) else self._unavailable()

    def _submission(self) -> group_pb.Submit:
        return group_pb.Submit(
            request_id=self._request.request_id,
            attempt=self._attempt,
            prompt_token_ids=tokens_to_bytes(self._request.prompt_token_ids),
            resumed_token_ids=tokens_to_bytes(self._token_ids),
            sampling=params_to_proto(self._request.params),
            cache_salt=self._request.cache_salt,
            priority=self._request.priority,
        )

    def _unavailable(self) -> Unavailable:
        reasons = "; ".join(filter(None, [str(self._error or ""), *self._groups.troubles()]))
        return Unavailable(
            f"no replica group can take the request after {self._attempt} attempts and "
            f"{len(self._token_ids)} tokens, try again later: {reasons or 'none is known'}"
        )

    def _take(self, deltas: Sequence[group_pb.TokenDelta]) -> pb.GenerateResponse:
        """Makes one chunk of deltas; where one is an error, of those before it."""
        chunk = pb.GenerateResponse(index=self._request.index, token_offset=len(self._token_ids))
        for delta in deltas:
            if delta.HasField("error"):
                self._error = self._refusal(delta.error)
            elif delta.token_offset != len(self._token_ids):
                self._error = GroupLost(
                    f"the group sent token {delta.token_offset}, expected {len(self._token_ids)}"
                )
            else:
                self._add(delta, chunk)
            if self._error is not None or self._finish_reason:
                break
        return chunk

    def _refusal(self, error: group_pb.GroupError) -> QuireError:
        """What the group's refusal means for the request."""
        assert self._decision is not None
        if error.code == group_pb.GroupError.INVALID_REQUEST:
            return InvalidRequest(error.message)
        if error.code == group_pb.GroupError.QUEUE_FULL:
            self._full.add(self._decision.group)
            return QueueFull(error.message)
        return GroupLost(error.message)

    def _add(self, delta: group_pb.TokenDelta, chunk: pb.GenerateResponse) -> None:
        if not self._is_started:
            self._start(delta, chunk)
        self._finish_reason = delta.finish_reason
        num_tokens = len(delta.token_ids)
        # As in vLLM, the token that ends the text is not part of it.
        num_shown = num_tokens
        if delta.finish_reason == pb.FINISH_REASON_STOP:
            num_shown -= not self._request.params.include_stop_str_in_output
        for position in range(num_tokens):
            self._token_ids.append(delta.token_ids[position])
            chunk.token_ids.append(delta.token_ids[position])
            if delta.logprobs:
                chunk.logprobs.append(delta.logprobs[position])
            if position < num_shown:
                # One at a time: tokens behind the stop string must not be part of the answer.
                text, stopped = self._text.push([delta.token_ids[position]])
                chunk.text += text
                if stopped:
                    self._finish_reason = pb.FINISH_REASON_STOP
                    break
        if self._first_token_s is None and num_tokens:
            self._first_token_s = self._clock() - self._request.arrival_s
            self._telemetry.time_to_first_token.observe(self._first_token_s)
        if self._finish_reason:
            self._finish(chunk)

    def _start(self, delta: group_pb.TokenDelta, chunk: pb.GenerateResponse) -> None:
        assert self._decision is not None
        self._is_started = True
        self._table.started(self._request.request_id, num_cached_tokens=delta.num_cached_tokens)
        if self._num_cached_tokens is not None:
            return  # Resumed: the client knows all this from the first attempt.
        self._num_cached_tokens = delta.num_cached_tokens
        self._telemetry.prompt_tokens.inc(len(self._request.prompt_token_ids))
        self._telemetry.cached_tokens.inc(delta.num_cached_tokens)
        assert self._request.params.seed is not None
        chunk.start.CopyFrom(
            pb.Start(
                request_id=self._request.request_id,
                model=self._request.model.model,
                num_prompt_tokens=len(self._request.prompt_token_ids),
                num_cached_tokens=delta.num_cached_tokens,
                routing=pb.Routing(
                    group=self._decision.group,
                    reason=self._decision.reason,
                    predicted_cached_tokens=self._decision.predicted_cached_tokens,
                ),
                seed=self._request.params.seed,
            )
        )

    def _finish(self, chunk: pb.GenerateResponse) -> None:
        total_s = self._clock() - self._request.arrival_s
        first_token_s = total_s if self._first_token_s is None else self._first_token_s
        chunk.text += self._text.finish()
        chunk.finish_reason = self._finish_reason
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
