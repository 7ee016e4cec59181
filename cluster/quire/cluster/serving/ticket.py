"""Requests on their way from their arrival at a gateway to their first token, and sums of them."""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf
from typing import NamedTuple

from quire.cluster.serving.bounds import Hold


class Queued(NamedTuple):
    """Requests that wait."""

    num_requests: int
    num_tokens: int
    """Tokens in their prompts."""


class Stage(Enum):
    NEW = auto()
    QUEUED = auto()
    RELEASED = auto()
    """May be sent to a group."""
    ROUTED = auto()
    """Counts among its group's load."""
    BEGUN = auto()
    LEFT = auto()


@dataclass(eq=False, kw_only=True, slots=True)
class Ticket:
    """A client's request on its way to its first token: completions that are taken together."""

    num_requests: int = 1
    """Completions."""
    num_prompt_tokens: int
    max_tokens: int = 0
    """How long each output may become; 0 says nothing."""
    priority: int = 0
    """Less is sooner."""
    deadline_s: float = inf
    """On the clock that `Admission.offer` is told."""
    stage: Stage = Stage.NEW
    number: int = 0
    num_bytes: int = 0
    """Memory that it takes up while it waits, beyond what each request does."""
    place: Hold | None = None
    """Its places among the requests under way, which it gives up when it is displaced."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's share against others'."""
    work: float = 0.0
    """What it is expected to cost, in prompt tokens; `Admission.offer` sets it."""
    charged: float = 0.0
    """The work that its tenant has been charged."""
    num_done: float = 0.0
    """The work that was done for it; its prompt counts from when it is released."""


class WaitingLoad:
    """Sums over several tickets; tokens are those of their prompts."""

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
        """A part of it, in whole requests, tokens and bytes."""
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
