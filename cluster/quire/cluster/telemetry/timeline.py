"""What happened when to one call of a client, from its arrival at a gateway to its end.

The edge begins a `Timeline` for each call and ends it. What the call passes on its way notes there
what it does. All that tells of finished calls reads the same record: access lines, metrics and
spans. It has no text of prompts or answers, and costs some attributes for a call and
for an attempt, none for a token. Times are in seconds on `time.monotonic`.
"""

import time
from contextvars import ContextVar, Token
from dataclasses import dataclass, field

from quire.cluster.telemetry.tracing import new_span_id, traceparent
from quire.router.policies.policy import Decision
from quire.worker.api.sampling_params import SamplingParams

MAX_TRACE_STATE = 512
MAX_TRACED = 32
"""Completions of a call whose attempts have spans: one call leaves room for those of others."""


@dataclass(slots=True, eq=False)
class Attempt:
    """A completion at one group."""

    group: str
    reason: str
    """Why the routing policy chose the group."""
    forecast_s: float | None
    """The policy's forecast of the seconds to the first token."""
    num_resumed_tokens: int
    """Output tokens that earlier attempts had brought."""
    routed_s: float
    traceparent: str = ""
    """Its span, for the group; empty where it has none."""
    begun_s: float | None = None
    """When its first tokens came."""
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    """Those of them that came from another tier or group."""
    ended_s: float | None = None
    outcome: str = ""
    """How it ended: a finish reason, or why the completion went elsewhere or failed."""
    error_type: str = ""
    """The exception that it failed with. A group that gives it back has not failed."""

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
    """Which of the call's completions it is."""
    request_id: str
    is_first_of_prompt: bool
    """It is its prompt's first completion, which computes the prompt."""
    trace_id: str = ""
    """The trace that has its attempts; empty where none has."""
    trace_state: str = ""
    """That of the trace, where there is one."""
    attempts: list[Attempt] = field(default_factory=list)
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    """A finish reason, "cancelled", "deadline" or "error"."""
    num_output_tokens: int = 0

    def attempt(self, decision: Decision, *, num_resumed_tokens: int) -> Attempt:
        """One that is about to be sent; it counts once it is among ``attempts``."""
        return Attempt(
            decision.group,
            decision.reason,
            decision.forecast_s,
            num_resumed_tokens,
            time.monotonic(),
            traceparent(self.trace_id, new_span_id()) if self.trace_id else "",
        )

    def end(self, outcome: str, *, num_output_tokens: int) -> None:
        self.ended_s, self.outcome = time.monotonic(), outcome
        self.num_output_tokens = num_output_tokens


@dataclass(slots=True, eq=False, kw_only=True)
class Timeline:
    """One call."""

    method: str = ""
    """The HTTP method, or "gRPC"."""
    path: str = ""
    """The HTTP path, or the gRPC method: as the client sent it, of any length."""
    endpoint: str = ""
    """The same, of those that there are; else "other"."""
    client: str = ""
    """The client's address."""
    client_id: str = ""
    """The client's own name for the call, where it is a sane one."""
    trace_id: str = ""
    """The trace that it is part of, in hexadecimal digits, where there is one."""
    span_id: str = ""
    parent_span_id: str = ""
    """The client's span, where it has one."""
    trace_state: str = ""
    """W3C's ``tracestate``: that of the client, shortened to `MAX_TRACE_STATE` characters."""
    is_sampled: bool = False
    """Its spans are sent."""
    server: tuple[str, int] | None = None
    """The address that it came to, where it is known."""
    tenant: str = ""
    key_name: str = ""
    model: str = ""
    """The served model or adapter; empty until it is known."""
    operation: str = ""
    """What is asked of the model: "generate" or "embed"."""
    is_chat: bool = False
    """Its prompt is a chat."""
    request_id: str = ""
    """Our name for it: that of its first prompt's request."""
    is_stream: bool = False
    priority: int = 0
    num_prompt_tokens: int = 0
    sampling: SamplingParams | None = None
    """Those of its first prompt."""
    completions: list[CompletionRecord] = field(default_factory=list)
    status: str = ""
    """The HTTP status, or the name of gRPC's."""
    error: str = ""
    """What kind of error it ended with, as it was told to the client; empty without one."""
    arrived_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    arrival_s: float = field(default_factory=time.monotonic)
    prepared_s: float | None = None
    """When its prompts were checked and tokenized."""
    admitted_s: float | None = None
    """When it might go to a group."""
    ended_s: float | None = None

    def prepared(self) -> None:
        self.prepared_s = time.monotonic()

    def admitted(self) -> None:
        self.admitted_s = time.monotonic()

    def end(self) -> None:
        self.ended_s = time.monotonic()

    def completion(
        self, request_id: str, *, index: int, is_first_of_prompt: bool
    ) -> CompletionRecord:
        """The record of one more completion."""
        trace = (self.trace_id, self.trace_state)
        if not self.is_sampled or index >= MAX_TRACED:
            trace = ("", "")
        made = CompletionRecord(index, request_id, is_first_of_prompt, *trace)
        self.completions.append(made)
        return made

    def wall_s(self, monotonic_s: float) -> float:
        """A time of this record, in seconds since 1970."""
        return self.arrived_at + monotonic_s - self.arrival_s

    @property
    def queue_s(self) -> float | None:
        """How long it waited at the gateway for its turn."""
        if self.prepared_s is None or self.admitted_s is None:
            return None
        return self.admitted_s - self.prepared_s

    @property
    def first_token_s(self) -> float | None:
        """When its first token came, of any completion."""
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
        """Those that it was sent to, in their order."""
        named = (attempt.group for each in self.completions for attempt in each.attempts)
        return list(dict.fromkeys(named))

    @property
    def outcomes(self) -> list[str]:
        """How its completions ended, each way once."""
        return list(dict.fromkeys(each.outcome for each in self.completions if each.outcome))


_current: ContextVar[Timeline | None] = ContextVar("quire_timeline", default=None)


def begin(timeline: Timeline) -> Token[Timeline | None]:
    """What this task and those that it starts note belongs to ``timeline`` from now on."""
    return _current.set(timeline)


def leave(token: Token[Timeline | None]) -> None:
    """Takes `begin` back."""
    _current.reset(token)


def current() -> Timeline:
    """The timeline of the call that is handled here; where there is none, one that nobody reads."""
    return _current.get() or Timeline()


def in_call() -> Timeline | None:
    """The same; ``None`` where no call is handled."""
    return _current.get()
