"""Admission's view of a client's request, from its arrival to its end, and sums over requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import NamedTuple, Self

from quire.cluster.serving.bounds import Hold
from quire.worker.request.request import Prepared


class Queued(NamedTuple):
    """Sums over waiting requests."""

    num_requests: int
    num_tokens: int
    """Prompt tokens of the requests."""


class Stage(Enum):
    NEW = auto()
    QUEUED = auto()
    RELEASED = auto()
    """The request may be sent to a group."""
    ROUTED = auto()
    """The request counts in its group's load."""
    BEGUN = auto()
    LEFT = auto()


@dataclass(eq=False, kw_only=True, slots=True)
class Ticket:
    """A client's request for admission: one or more completions that are admitted together."""

    num_requests: int = 1
    """Number of completions."""
    num_prompt_tokens: int
    max_tokens: int = 0
    """Most output tokens of each completion; 0 is unknown."""
    priority: int = 0
    """Lower values go first."""
    deadline_s: float = inf
    """Deadline on the clock of `Admission.offer`'s ``now_s``."""
    stage: Stage = Stage.NEW
    number: int = 0
    num_bytes: int = 0
    """Memory of the waiting request, beyond a constant that each request takes."""
    place: Hold | None = None
    """The request's places in the gateway's `Inflight`, released when it is displaced."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share relative to other tenants."""
    work: float = 0.0
    """Expected cost in prompt tokens, set by `Admission.offer`."""
    charged: float = 0.0
    """The work that the tenant has been charged for the request."""
    num_done: float = 0.0
    """The work done for the request; its prompt counts as done once it is released."""

    @classmethod
    def of(
        cls,
        prompts: Sequence[Prepared],
        *,
        num_requests: int,
        num_prompt_tokens: int,
        weight: float,
    ) -> Self:
        """The ticket of a client's request with these ``prompts``. ``weight`` is its tenant's."""
        first = prompts[0]
        return cls(
            num_requests=num_requests,
            num_prompt_tokens=num_prompt_tokens,
            num_bytes=sum(each.num_bytes for each in prompts),
            max_tokens=first.sampling.max_tokens or 0,
            priority=first.priority,
            deadline_s=first.deadline_s,
            tenant=first.tenant,
            weight=weight,
        )


class WaitingLoad:
    """Sums over several tickets; ``num_tokens`` counts prompt tokens."""

    __slots__ = ("num_bytes", "num_requests", "num_tokens")

    def __init__(self, num_requests: int = 0, num_tokens: int = 0, num_bytes: int = 0) -> None:
        self.num_requests = num_requests
        self.num_tokens = num_tokens
        self.num_bytes = num_bytes

    def plus(self, other: "WaitingLoad") -> "WaitingLoad":
        return WaitingLoad(
            self.num_requests + other.num_requests,
            self.num_tokens + other.num_tokens,
            self.num_bytes + other.num_bytes,
        )

    def part(self, part: float) -> "WaitingLoad":
        """The fraction ``part`` of each sum, rounded down."""
        sums = (self.num_requests, self.num_tokens, self.num_bytes)
        return WaitingLoad(*(int(each * part) for each in sums))

    def tokens_each_with(self, ticket: Ticket) -> float:
        num_requests = self.num_requests + ticket.num_requests
        return (self.num_tokens + ticket.num_prompt_tokens) / num_requests

    def add(self, num_requests: int, num_tokens: int) -> None:
        self.num_requests += num_requests
        self.num_tokens += num_tokens

    def add_ticket(self, ticket: Ticket) -> None:
        self.add(ticket.num_requests, ticket.num_prompt_tokens)
        self.num_bytes += ticket.num_bytes

    def remove_ticket(self, ticket: Ticket) -> None:
        self.add(-ticket.num_requests, -ticket.num_prompt_tokens)
        self.num_bytes -= ticket.num_bytes
