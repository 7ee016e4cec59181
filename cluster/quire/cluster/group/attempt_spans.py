"""A group's part of a trace: what it did for one sampled attempt, as spans once that has ended.

group         from the gateway's message to the end; below the gateway's span of the attempt
  queue       until its first step
  prefill     until its first token
  decode      until its last one
"""

import time

from quire.cluster.telemetry.tracing import Span, Value, ids_in, new_span_id
from quire.worker.api.outputs import Fetched, TokenDelta
from quire.worker.api.progress import Progress


class AttemptSpans:
    """One attempt, from now on. Used in the event loop."""

    def __init__(self, traceparent: str, *, group_id: str) -> None:
        """``traceparent``: the gateway's span. Raises ValueError: it is none."""
        self.progress = Progress()
        """For the engine to write to."""
        self._trace_id, self._parent_id = ids_in(traceparent)
        self._group_id = group_id
        self._begun_at, self._begin_s = time.time(), time.monotonic()
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._num_outputs = self._num_tokens = self._num_cached_tokens = 0
        self._fetched = Fetched()

    def took(self, output: TokenDelta) -> None:
        """The engine has given ``output``."""
        self._last_s = time.monotonic()
        if self._first_s is None:
            self._first_s = self._last_s
            self._num_cached_tokens = output.num_cached_tokens
        self._fetched = output.fetched or self._fetched
        self._num_outputs += 1
        self._num_tokens += len(output.token_ids)

    def ended(self, outcome: str, *, error_type: str = "") -> list[Span]:
        """``outcome`` is text of our own: a finish reason, or why there is none."""
        end_s, progress = time.monotonic(), self.progress
        scheduled_s, first_s = progress.scheduled_s, self._first_s
        own_id = new_span_id()
        told: dict[str, Value] = {
            "quire.group": self._group_id,
            "quire.outcome": outcome,
            "quire.tokens.output": self._num_tokens,
            "quire.preemptions": progress.num_preemptions,
        }
        if error_type:
            told["error.type"] = error_type
        # An abort may have come before anything else.
        queued_s = end_s if scheduled_s is None else scheduled_s
        told["gen_ai.latency.time_in_queue"] = queued_s - self._begin_s
        parts = [self._span("queue", own_id, self._begin_s, queued_s, {})]
        if scheduled_s is not None:
            prefilled_s = end_s if first_s is None else first_s
            told["gen_ai.latency.time_in_model_prefill"] = prefilled_s - scheduled_s
            parts.append(self._span("prefill", own_id, scheduled_s, prefilled_s, self._prefill()))
        if scheduled_s is not None and first_s is not None and self._last_s is not None:
            told["gen_ai.latency.time_in_model_decode"] = self._last_s - first_s
            told["gen_ai.latency.time_in_model_inference"] = self._last_s - scheduled_s
            steps: dict[str, Value] = {
                "quire.steps": self._num_outputs - 1,
                "quire.tokens.output": self._num_tokens,
            }
            parts.append(self._span("decode", own_id, first_s, self._last_s, steps))
        group = Span(
            name="group",
            kind="server",
            trace_id=self._trace_id,
            span_id=own_id,
            parent_span_id=self._parent_id,
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
            begin_s=self._wall_s(begin_s),
            end_s=self._wall_s(end_s),
            attributes=told,
        )

    def _wall_s(self, monotonic_s: float) -> float:
        return self._begun_at + monotonic_s - self._begin_s
