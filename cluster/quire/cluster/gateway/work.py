"""A request under way: what the layers of the pipeline hand on to each other."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from quire.cluster.gateway.chunk import Chunk
from quire.cluster.gateway.losses import CompletionConfig, Losses
from quire.cluster.gateway.output import Output
from quire.cluster.links.group_stream import GroupStream
from quire.cluster.links.groups import Groups
from quire.cluster.telemetry.metrics import Telemetry
from quire.cluster.telemetry.timeline import CompletionRecord
from quire.router.lenders import Source
from quire.router.policies.policy import Decision
from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.request.errors import QuireError
from quire.worker.request.request import Prepared
from quire.worker.text.tokenizer import Tokenizer

Take = Callable[[Chunk], Awaitable[object]]
"""Consumes chunks. It is called with the next chunk when it has returned."""

W = TypeVar("W")
Run = Callable[[W, Take], Awaitable[None]]
"""Runs a request or a completion, and hands its chunks to ``take``."""
Layer = Callable[[W, Take, Run[W]], Awaitable[None]]
"""Runs it by means of the layers within, and does something before, after or around them."""


def layered(layers: Sequence[Layer[W]], last: Run[W]) -> Run[W]:
    """Runs ``layers`` around ``last``, the first outermost."""
    for layer in reversed(layers):
        last = _around(layer, last)
    return last


def _around(layer: Layer[W], within: Run[W]) -> Run[W]:
    def run(work: W, take: Take) -> Awaitable[None]:
        return layer(work, take, within)

    return run


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a gateway that layers use for one model."""

    groups: Groups
    table: RoutingTable
    tokenizer: Tokenizer
    telemetry: Telemetry
    config: CompletionConfig
    clock: Callable[[], float]


class Count(Protocol):
    """Counts a group's work for a completion when it arrives, before the client receives it."""

    def __call__(self, index: int, *, num_tokens: int, num_cached_tokens: int) -> object:
        """Counts ``num_tokens`` more output tokens of the completion ``index``. The first call
        shows that a group has begun its prompt. ``num_cached_tokens``: prompt tokens that turned
        out to be cached; those of a prompt's first completion alone."""


@dataclass(slots=True, eq=False, kw_only=True)
class Work:
    """A client's request: one or more prompts, each with one or more completions."""

    requests: Sequence[Prepared]
    """Its prompts. They are admitted together, on the terms of the first one."""
    model: str = ""
    """The client's name of the model."""
    shows_output: bool = True
    """Whether output tokens are part of the answer, and are counted as used. Some answers are about
    the prompt alone, though a token is generated for them."""
    weight: float = 1.0
    """Its share relative to the requests of others. Set by `meter`."""
    counts: list[Count] = field(default_factory=list)
    """Functions that count its tokens. `meter` and `admit` add theirs."""
    is_failed: bool = False
    """Whether one of its completions has failed, which cancels the others."""

    @property
    def first(self) -> Prepared:
        return self.requests[0]

    @property
    def num_completions(self) -> int:
        return sum(each.sampling.n for each in self.requests)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(each.prompt_token_ids) for each in self.requests)


@dataclass(slots=True, eq=False, kw_only=True)
class Completion:
    """One completion of a client's request. `fan_out` makes it.

    A *try* is one pass through the layers within `resume`. An *attempt* is a try in which the
    completion was sent to a group.
    """

    work: Work
    request: Prepared
    index: int
    """Its number in the client's request."""
    encoded: bytes
    """The request for groups, the same for all completions of the prompt."""
    losses: Losses
    record: CompletionRecord
    output: Output
    give_up_s: float | None = None
    """The end of the search for a group, on the gateway's clock; ``None`` if there is no search."""
    avoided: set[GroupId] = field(default_factory=set)
    """Groups that could not take it just now."""
    num_refusals: int = 0
    """Number of attempts that groups refused for a full queue."""
    full_since_s: float | None = None
    """When it was first refused for a full queue, since its last token."""
    end_turn: Callable[[], None] | None = None
    """Ends its turn to run alone; ``None`` if it does not run alone. May be called repeatedly."""
    routed_to: Decision | None = None
    """The last routing decision."""
    num_attempts: int = 0
    """Number of routing decisions. Group and gateway match messages to an attempt by it."""
    stream: GroupStream | None = None
    """The stream of the last attempt."""
    former: Source | None = None
    """The group of the last attempt as a source of KV blocks, if it generated tokens."""
    lost: QuireError | None = None
    """How the last attempt was lost, until `resume` has seen it: a `GroupLost` or `QueueFull`."""
    error: QuireError | None = None
    """Why the completion moved or waited last."""
    is_sent: bool = False
    """Whether an attempt is under way."""

    @property
    def decision(self) -> Decision:
        """The last routing decision; there must be one."""
        assert self.routed_to is not None
        return self.routed_to

    @property
    def is_new(self) -> bool:
        """Whether it has no tokens and no lost attempt, so that it may be refused."""
        return not (self.output.token_ids or self.losses.num_lost)

    def leave_turn(self) -> None:
        """Ends its turn to run alone, if it has one."""
        if self.end_turn is not None:
            self.end_turn()
            self.end_turn = None
