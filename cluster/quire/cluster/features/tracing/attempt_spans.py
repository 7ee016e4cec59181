"""A group's part of a trace: the spans of one sampled attempt, made when it has ended.

group         from the gateway's message to the end; below the gateway's span of the attempt
  queue       until its first step
  prefill     until its first token
  decode      until its last one
"""

import time

from quire.cluster.features.tracing.tracing import Span, Value, ids_in, new_span_id
from quire.worker.request.outputs import Fetched, TokenDelta
from quire.worker.request.progress import Progress


class AttemptSpans:
    """Records one attempt from its arrival on. Used in the event loop."""

    def __init__(
        self, traceparent: str, *, trace_state: str, group_id: str, num_resumed_tokens: int
    ) -> None:
        """``traceparent``: the gateway's span, which becomes the parent."""
        self.progress = Progress()
        """The record that the engine writes to."""
        self.has_begun = False
        """Whether the engine has produced the first output."""
        self._trace_id, self._parent_id = ids_in(traceparent)
        self._trace_state = trace_state
        self._group_id = group_id
        self._num_resumed_tokens = num_resumed_tokens
        self._begun_at, self._begin_s = time.time(), time.monotonic()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._first_step = self._last_step = 0
        self._num_cached_tokens = 0
        self._fetched = Fetched()

    def took(self, output: TokenDelta, *, num_steps: int) -> None:
        """Records the first or last ``output`` of the engine, after ``num_steps`` steps since its
        start. Outputs between them are not recorded, so that tokens cost nothing."""
        now_s = time.monotonic()
        if not self.has_begun:
            self.has_begun = True
            self._first_s, self._first_step = now_s, num_steps
            self._num_cached_tokens = output.num_cached_tokens
            self._fetched = output.fetched or self._fetched
        if output.finish_reason is not None:
            self._last_s, self._last_step = now_s, num_steps

    def ended(
        self, outcome: str, *, num_tokens: int, num_steps: int, error_type: str = ""
    ) -> list[Span]:
        """The spans of the attempt. ``outcome`` is a finish reason, or why there is none, without
        text of the client. ``num_tokens``: output tokens, including those of earlier attempts."""
        end_s, progress = time.monotonic(), self.progress
        if self._last_s is None:
            self._last_s, self._last_step = end_s, num_steps
        scheduled_s, first_s, last_s = progress.scheduled_s, self._first_s, self._last_s
        num_tokens = max(0, num_tokens - self._num_resumed_tokens)
        own_id = new_span_id()
        told: dict[str, Value] = {
            "quire.group": self._group_id,
            "quire.outcome": outcome,
            "quire.tokens.output": num_tokens,
        }
        if error_type:
            told["error.type"] = error_type
        # The attempt may have been aborted before its first step.
        queued_s = end_s if scheduled_s is None else scheduled_s
        told["gen_ai.latency.time_in_queue"] = queued_s - self._begin_s
        parts = [self._span("queue", own_id, self._begin_s, queued_s, {})]
        if scheduled_s is not None:
            prefilled_s = end_s if first_s is None else first_s
            told["gen_ai.latency.time_in_model_prefill"] = prefilled_s - scheduled_s
            parts.append(self._span("prefill", own_id, scheduled_s, prefilled_s, self._prefill()))
        if scheduled_s is not None and first_s is not None:
            told["gen_ai.latency.time_in_model_decode"] = last_s - first_s
            told["gen_ai.latency.time_in_model_inference"] = last_s - scheduled_s
            decode: dict[str, Value] = {
                "quire.steps": self._last_step - self._first_step,
                "quire.tokens.output": num_tokens,
                "quire.preemptions": progress.num_preemptions,
            }
            parts.append(self._span("decode", own_id, first_s, last_s, decode))
        group = Span(
            name="group",
            kind="server",
            trace_id=self._trace_id,
            span_id=own_id,
            parent_span_id=self._parent_id,
            trace_state=self._trace_state,
            begin_s=self._begun_at,
            end_s=self._wall_s(end_s),
            attributes=told,
            error=outcome if error_type else "",
        )
        return [group, *parts]

    def _prefill(self) -> dict[str, Value]:
        fetched = self._fetched
        told: dict[str, Value] = {
            "quire.chunks": self.progress.num_chunks,
            "quire.tokens.computed": self.progress.num_prefilled_tokens,
            "quire.tokens.cached": self._num_cached_tokens,
        }
        if fetched.num_tokens or fetched.wait_s:
            told["quire.tokens.from_host"] = fetched.num_host_tokens
            told["quire.tokens.from_disk"] = fetched.num_disk_tokens
            told["quire.tokens.from_peer"] = fetched.num_peer_tokens
            told["quire.fetch.wait_s"] = fetched.wait_s
        return told

    def _span(
        self, name: str, parent_id: str, begin_s: float, end_s: float, told: dict[str, Value]
    ) -> Span:
        return Span(
            name=name,
            trace_id=self._trace_id,
            span_id=new_span_id(),
            parent_span_id=parent_id,
            trace_state=self._trace_state,
            begin_s=self._wall_s(begin_s),
            end_s=self._wall_s(end_s),
            attributes=told,
        )

    def _wall_s(self, monotonic_s: float) -> float:
        return self._begun_at + monotonic_s - self._begin_s
