"""Records what happens to one client call, and when, from its arrival at a gateway to its end.

The edge creates a `Timeline` for each call and ends it. The code that the call passes through
records its steps there. Access lines, metrics and spans of ended calls all read this record. It
holds no text of prompts or answers. It costs some attributes per call and per attempt, and nothing
per token. Times are in seconds on `time.monotonic`.
"""

import time
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from quire.cluster.features.tracing.tracing import new_span_id, traceparent
from quire.router.policies.policy import Decision
from quire.worker.request.sampling_params import SamplingParams

MAX_TRACE_STATE = 512
MAX_TRACED = 32
"""Completions of a call whose attempts get spans: one call leaves room for the spans of others."""


class Counters:
    """Counts what a `CompletionRecord` is told, at once. This one counts nothing."""

    def begun(self, record: "CompletionRecord") -> None:
        """A group has begun it."""

    def arrived(self, num_tokens: int) -> None:
        """``num_tokens`` more tokens have arrived."""

    def first_token(self, record: "CompletionRecord") -> None:
        """Its first token has arrived."""

    def resumed(self) -> None:
        """It goes on after the loss of a group."""

    def handed_over(self) -> None:
        """It goes on elsewhere since its group drained or put it off."""

    def found_poison(self) -> None:
        """Too many groups died under it, so that it is not tried again."""

    def finished(self, record: "CompletionRecord") -> None:
        """It has its last token."""

    def ended(self, record: "CompletionRecord") -> None:
        """It has an outcome."""


_NO_COUNTERS = Counters()


@dataclass(slots=True, eq=False)
class Attempt:
    """One attempt to run a completion at a group."""

    group: str
    reason: str
    """Why the routing policy chose the group."""
    forecast_s: float | None
    """The policy's forecast of the time to the first token, in seconds."""
    num_resumed_tokens: int
    """Output tokens that earlier attempts had generated."""
    routed_s: float
    traceparent: str = ""
    """Header that makes the group's span a child of this attempt's; empty if it has no span."""
    begun_s: float | None = None
    """When its first tokens arrived."""
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    """Number of cached tokens that were fetched from another tier or group."""
    ended_s: float | None = None
    outcome: str = ""
    """How it ended: a finish reason, or why the completion moved to another group or failed."""
    error_type: str = ""
    """The exception that it failed with. A group that hands the completion back has not failed."""

    def begin(self, *, num_cached_tokens: int, num_fetched_tokens: int = 0) -> None:
        self.begun_s = time.monotonic()
        self.num_cached_tokens = num_cached_tokens
        self.num_fetched_tokens = num_fetched_tokens

    def end(self, outcome: str, *, error_type: str = "") -> None:
        self.ended_s, self.outcome, self.error_type = time.monotonic(), outcome, error_type


@dataclass(slots=True, eq=False)
class CompletionRecord:
    """One completion of a call."""

    index: int
    """The completion's index within the call."""
    request_id: str
    is_first_of_prompt: bool
    """Whether it is its prompt's first completion, which computes the prompt."""
    trace_id: str = ""
    """The trace that contains its attempts; empty if none does."""
    trace_state: str = ""
    """The ``tracestate`` of that trace, if any."""
    attempts: list[Attempt] = field(default_factory=list)
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    """A finish reason, "cancelled", "deadline" or "error"."""
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int | None = None
    """Prompt tokens that the first group found in its cache; ``None`` until one has begun it."""
    time_to_first_token_s: float | None = None
    total_s: float = 0.0
    """Time from the request's arrival to its last token."""
    counters: Counters = _NO_COUNTERS

    def attempt(self, decision: Decision, *, num_resumed_tokens: int) -> Attempt:
        """Creates an attempt that is about to be sent. It counts once it is in ``attempts``."""
        return Attempt(
            decision.group,
            decision.reason,
            decision.forecast_s,
            num_resumed_tokens,
            time.monotonic(),
            traceparent(self.trace_id, new_span_id()) if self.trace_id else "",
        )

    def begun(self, *, num_prompt_tokens: int, num_cached_tokens: int) -> None:
        """Notes that a group has begun it, the first one alone."""
        self.num_prompt_tokens, self.num_cached_tokens = num_prompt_tokens, num_cached_tokens
        self.counters.begun(self)

    def arrived(self, num_tokens: int) -> None:
        self.counters.arrived(num_tokens)

    def first_token(self, *, after_s: float) -> None:
        """Notes its first token, ``after_s`` seconds after the request's arrival."""
        self.first_token_s, self.time_to_first_token_s = time.monotonic(), after_s
        self.counters.first_token(self)

    def resumed(self) -> None:
        self.counters.resumed()

    def handed_over(self) -> None:
        self.counters.handed_over()

    def found_poison(self) -> None:
        self.counters.found_poison()

    def finished(self, *, num_output_tokens: int, total_s: float) -> None:
        """Notes its last token, ``total_s`` seconds after the request's arrival."""
        self.num_output_tokens, self.total_s = num_output_tokens, total_s
        self.counters.finished(self)

    def end(self, outcome: str, *, num_output_tokens: int) -> None:
        self.ended_s, self.outcome = time.monotonic(), outcome
        self.num_output_tokens = num_output_tokens
        self.counters.ended(self)


@dataclass(slots=True, eq=False, kw_only=True)
class Timeline:
    """The record of one call."""

    method: str = ""
    """The HTTP method, or "gRPC"."""
    path: str = ""
    """The HTTP path or gRPC method as the client sent it, of any length."""
    endpoint: str = ""
    """The HTTP path or gRPC method if it exists; else "other"."""
    client: str = ""
    """The client's address."""
    client_id: str = ""
    """The client's own id for the call, if it is valid."""
    trace_id: str = ""
    """The trace that the call is part of, in hexadecimal digits; empty if none."""
    span_id: str = ""
    parent_span_id: str = ""
    """The client's span, in hexadecimal digits; empty if none."""
    trace_state: str = ""
    """W3C's ``tracestate`` of the client, shortened to `MAX_TRACE_STATE` characters."""
    is_sampled: bool = False
    """Whether its spans are sent."""
    server: tuple[str, int] | None = None
    """The address that it arrived at, if known."""
    tenant: str = ""
    key_name: str = ""
    model: str = ""
    """The served model or adapter; empty until known."""
    operation: str = ""
    """The requested operation: "generate" or "embed"."""
    is_chat: bool = False
    """Whether the prompt is a chat."""
    request_id: str = ""
    """Quire's id of the call: that of its first prompt's request."""
    is_stream: bool = False
    priority: int = 0
    num_prompt_tokens: int = 0
    sampling: SamplingParams | None = None
    """The sampling parameters of its first prompt."""
    completions: list[CompletionRecord] = field(default_factory=list)
    status: str = ""
    """The HTTP status, or the name of the gRPC status."""
    error: str = ""
    """The kind of error that the client received; empty without one."""
    arrived_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    arrival_s: float = field(default_factory=time.monotonic)
    prepared_s: float | None = None
    """When its prompts had been checked and tokenized."""
    admitted_s: float | None = None
    """When it was admitted, so that it could be sent to a group."""
    ended_s: float | None = None

    def prepared(self) -> None:
        self.prepared_s = time.monotonic()

    def admitted(self) -> None:
        self.admitted_s = time.monotonic()

    def end(self) -> None:
        self.ended_s = time.monotonic()

    def completion(
        self,
        request_id: str,
        *,
        index: int,
        is_first_of_prompt: bool,
        counters: Counters = _NO_COUNTERS,
    ) -> CompletionRecord:
        """Adds the record of another completion. ``counters`` count what it is told."""
        trace = (self.trace_id, self.trace_state)
        if not self.is_sampled or index >= MAX_TRACED:
            trace = ("", "")
        made = CompletionRecord(index, request_id, is_first_of_prompt, *trace, counters=counters)
        self.completions.append(made)
        return made

    def wall_s(self, monotonic_s: float) -> float:
        """Converts a time of this record to seconds since 1970."""
        return self.arrived_at + monotonic_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        """How long it waited at the gateway for admission, in seconds."""
        if self.prepared_s is None or self.admitted_s is None:
            return None
        return self.admitted_s - self.prepared_s

    @property
    def first_token_s(self) -> float | None:
        """When the first token of any of its completions arrived."""
        times = (each.first_token_s for each in self.completions)
        return min((each for each in times if each is not None), default=None)

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the first groups found in their caches."""
        return sum(
            each.attempts[0].num_cached_tokens
            for each in self.completions
            if each.is_first_of_prompt and each.attempts
        )

    @property
    def num_output_tokens(self) -> int:
        return sum(each.num_output_tokens for each in self.completions)

    @property
    def groups(self) -> list[str]:
        """The groups that it was sent to, in order."""
        named = (attempt.group for each in self.completions for attempt in each.attempts)
        return list(dict.fromkeys(named))

    @property
    def outcomes(self) -> list[str]:
        """The distinct outcomes of its completions."""
        return list(dict.fromkeys(each.outcome for each in self.completions if each.outcome))


_current: ContextVar[Timeline | None] = ContextVar("quire_timeline", default=None)


def begin(timeline: Timeline) -> Token[Timeline | None]:
    """Makes ``timeline`` the current one of this task and of the tasks that it starts."""
    return _current.set(timeline)


def leave(token: Token[Timeline | None]) -> None:
    """Undoes `begin`."""
    _current.reset(token)


def current() -> Timeline:
    """The timeline of the current call. Outside of calls, a timeline that nobody reads."""
    return _current.get() or Timeline()


def in_call() -> Timeline | None:
    """The timeline of the current call; ``None`` outside of calls."""
    return _current.get()
