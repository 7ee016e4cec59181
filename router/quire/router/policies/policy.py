"""A routing policy gives each group a cost for a request; the least cost wins.

A policy sees the request, each group's load, and how many tokens of the prompt each group is
expected to find in its cache (*hits*). It reads no clock and no global: time and the number that
stands in for randomness come with the request. The policies are in `quire.router.policies`.

Costs are counted in *tokens*, the time in which a group prefills one prompt token, wherever that
makes sense, so that a policy does not need to know how fast the hardware is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.router.prefix_index.directory import GroupId
from quire.worker.api.hashing import BlockHash

if TYPE_CHECKING:
    from quire.router.policies.fetching import Elsewhere, Fetches
    from quire.router.policies.loads import Loads

Column: TypeAlias = npt.NDArray[np.float64]
"""A number for each group. Every count that can occur is exact in it."""

_DECODE_TOKENS = 24.0
"""What a running sequence adds to a step, in tokens of prefill."""
LATE_STEPS = 2.0
"""A step that exceeds its expected time by this factor says nothing: the guess was wrong, or its
frame went to other gateways only, or the group hangs."""

Reason = Literal[
    "cached_prefix",
    "fetched_prefix",
    "copied_prefix",
    "loaded_adapter",
    "least_loaded",
    "only_group",
    "round_robin",
    "random",
    "consistent_hash",
]


@dataclass(slots=True, kw_only=True)
class RouteRequest:
    """The facts of a request that a policy may use."""

    hashes: Sequence[BlockHash]
    """Hashes of the prompt's full blocks."""
    num_prompt_tokens: int
    block_size: int
    cache_key: str = ""
    """Stands for the prefix's name where groups are chosen by it; empty is that name."""
    adapter: str = ""
    """The digest of the adapter that it wants; empty is the model alone."""
    exclude: frozenset[GroupId] = frozenset()
    """Groups that must not take it: they failed it before, or are draining."""
    ordinal: int = 0
    """Number among its gateway's requests in the order of routing, from any start; replaces
    randomness and memory."""
    now_s: float = 0.0

    @property
    def usable_blocks(self) -> int:
        """The most blocks that can be a hit.

        The engine computes at least the last token, whose logits it samples from, so the block that
        ends with it is never one.
        """
        return max(self.num_prompt_tokens - 1, 0) // self.block_size

    def lacks_adapter(self, state: "GroupState") -> bool:
        """Whether the group has to load the request's adapter."""
        return bool(self.adapter) and self.adapter not in state.adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """A group's load in its frame (``quire.v1.Load``)."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_available_blocks: int = 0
    """Free and cached blocks."""
    num_prompt_tokens: int = 0
    """Counter, as are the next two: of requests that began to run."""
    num_hit_tokens: int = 0
    num_output_tokens: int = 0
    num_host_tokens: int = 0
    """Counter, as are the next five: tokens whose KV came from host memory."""
    num_disk_tokens: int = 0
    disk_s: float = 0.0
    """How long requests waited for them."""
    num_peer_tokens: int = 0
    """Tokens whose KV came from other groups."""
    peer_s: float = 0.0
    num_failed_pulls: int = 0
    max_num_seqs: int | None = None
    """Sequences that it runs at a time; where the group does not say, the number of slots bounds
    nothing."""
    num_gateways: int = 0
    """Those that may send requests to it; 0: it does not say."""
    num_shown: int | None = None
    """How many of the requests that this gateway submitted there, in order, are in these numbers;
    where the frame does not say, it is guessed from the number of frames."""
    num_steps: int | None = None
    """Steps that the group had ended; where the frame does not say, nothing is known of the one
    under way."""
    adapters: frozenset[str] = frozenset()
    """Those that are loaded."""
    num_adapters: int = 0
    """Those that have requests."""
    max_adapters: int = 0
    """How many can be loaded at a time; 0: it does not say."""

    @property
    def fetched(self) -> tuple[float, ...]:
        """The counters of what was fetched."""
        return (
            self.num_host_tokens,
            self.num_disk_tokens,
            self.disk_s,
            self.num_peer_tokens,
            self.peer_s,
        )


@dataclass(slots=True, kw_only=True)
class GroupState:
    """A group's load: the numbers of its last frame, and the requests sent to it since."""

    group: GroupId
    num_running: int = 0
    num_waiting: int = 0
    num_pending_prefill_tokens: int = 0
    """Prompt tokens neither cached nor computed yet, of waiting and running requests."""
    num_available_blocks: int | None = None
    """Free ones and cached ones that may be evicted; None before the group's first frame."""
    num_blocks: int | None = None
    """The most blocks that were ever available: all of them, seen when the group was idle."""
    num_reserved_requests: int = 0
    """Requests sent to it that the numbers above do not count yet."""
    num_reserved_tokens: int = 0
    """Tokens that those have to prefill."""
    max_num_seqs: int | None = None
    num_gateways: int = 0
    step_began_s: float = 0.0
    """When its present step began, as `StepClock` estimates."""
    step_s: float = 0.0
    """How long that step is expected to take; 0 where nothing is known."""
    num_step_tokens: int = 0
    """Prompt tokens that it computes, of those pending."""
    wait: tuple[float, float] | None = None
    """A first token's seconds, fixed and for each token ahead of it, its own prompt's among them;
    None while too little was seen."""
    adapters: frozenset[str] = frozenset()
    """Those that it has loaded, or will have for requests under way."""
    num_adapters: int = 0
    """Those that have requests."""
    max_adapters: int = 0

    @property
    def num_queued_tokens(self) -> int:
        return self.num_pending_prefill_tokens + self.num_reserved_tokens

    @property
    def num_requests(self) -> int:
        return self.num_running + self.num_waiting + self.num_reserved_requests

    @property
    def fill(self) -> float:
        """The share of the cache that running sequences hold."""
        if not self.num_blocks or self.num_available_blocks is None:
            return 0.0
        return 1 - self.num_available_blocks / self.num_blocks

    def turns(self, adapter: str) -> float:
        """How many turns of other adapters a request of ``adapter`` waits for: none where all
        adapters that have requests can be loaded."""
        num = self.num_adapters + (adapter not in self.adapters)
        return max(num - self.max_adapters, 0) / self.max_adapters if self.max_adapters else 0.0

    def step_rest_s(self, now_s: float) -> float:
        """How long its present step still takes; 0 where nothing is known, or it is long past."""
        over_s = now_s - self.step_began_s
        return max(self.step_s - over_s, 0.0) if over_s < LATE_STEPS * self.step_s else 0.0

    def forecast_s(self, num_prefill_tokens: int) -> float | None:
        """The seconds to the first token of a request that lacks ``num_prefill_tokens`` here."""
        if self.wait is None:
            return None
        fixed_s, per_token_s = self.wait
        return fixed_s + per_token_s * (self.num_queued_tokens + num_prefill_tokens)


class Policy(Protocol):
    """Chooses groups for one gateway, and may remember what it chose. By default it does not."""

    reason: Reason
    """Why a group was chosen if not for its prefix."""
    pressure: float | None = None
    """Cost of a computed token for the requests behind it, as of the last `costs`; None if not
    used."""
    adapter_costs: Column | None = None
    """Parts of the last `costs` that the request's adapter caused; None if there are none."""

    def fetches(
        self, request: RouteRequest, groups: "Loads", cached: Column, elsewhere: "Elsewhere"
    ) -> "Fetches | None":
        """What each of ``groups`` would fetch besides the ``cached`` tokens of its KV cache; None
        where none would."""
        return elsewhere.fetches(
            groups.fetch_costs_2KG,
            cached,
            groups.step_rest(request.now_s),
            _DECODE_TOKENS * groups.num_running,
            usable_blocks=request.usable_blocks,
            block_size=request.block_size,
        )

    def costs(self, request: RouteRequest, groups: "Loads", hits: Column) -> Column:
        """A cost for each of ``groups``, of which there is one at least; the least wins.

        ``hits`` has for each of them the prompt tokens that it is expected to have cached, or to
        fetch, less what fetching costs. The order of the groups means nothing.
        """

    def second_home(
        self, request: RouteRequest, groups: "Loads", hits: Column, home: int, num_coming: int
    ) -> int:
        """The index of the group that takes the request in place of ``home``, the cheapest one, to
        copy the prefix that this one has; ``home`` where none shall.

        Asked right after `costs`, of the same. The cache of ``home`` still lacks the last
        ``num_coming`` tokens of its hit.
        """
        return home

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        """The request goes to ``group``."""
        return

    def finished(self, request: RouteRequest, group: GroupId) -> None:
        """The request ended there, however it did, or is about to be routed again."""
        return

    def left(self, group: GroupId) -> None:
        """The group is gone; one that comes under its name knows nothing of what was sent to it.
        What is under way there may still end."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One group's part in a decision, for its explanation."""

    group: GroupId
    cost: float
    num_cached_tokens: int
    """Prompt tokens in the group's KV cache."""
    num_fetched_tokens: int
    """Prompt tokens that the group would fetch."""
    num_prefill_tokens: int
    """Prompt tokens that the group would compute."""
    num_queued_tokens: int
    num_sequences: int
    forecast_s: float | None
    """Seconds to the first token there."""
    adapter_cost: float | None
    """The part of ``cost`` that the request's adapter causes; None where it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Where a request goes, and all that led to it."""

    group: GroupId
    reason: Reason
    predicted_cached_tokens: int
    """Prompt tokens in the chosen group's KV cache, or fetched by it."""
    num_prompt_tokens: int
    groups: Sequence[GroupState]
    """The groups' states at the decision; nobody changes them."""
    index: int
    """Which of ``groups`` was chosen."""
    forecast_s: float | None
    """Seconds to the first token; None while too little was seen of the group."""
    cached: Column
    """Prompt tokens in each group's KV cache."""
    costs: Column
    fetches: "Fetches | None" = None
    """What each group would fetch; ``None`` where none would."""
    source: GroupId | None = None
    """The group from which the chosen one may fetch; ``None`` where it is to ask nobody."""
    num_source_blocks: int = 0
    """How many of the prompt's blocks the source has, from the first on."""
    adapter_costs: Column | None = None
    """Parts of ``costs``; None where the request has no adapter."""

    @property
    def num_fetched_tokens(self) -> int:
        """How many prompt tokens the group is to fetch."""
        return 0 if self.fetches is None else int(self.fetches.num_RG[:, self.index].sum())

    @property
    def fetch_cost(self) -> float:
        """What fetching them costs, in tokens."""
        return 0.0 if self.fetches is None else float(self.fetches.costs_RG[:, self.index].sum())

    @property
    def fetch_s(self) -> float | None:
        """The same in seconds, a part of ``forecast_s``; None where that is."""
        wait = self.groups[self.index].wait
        return None if wait is None else wait[1] * self.fetch_cost

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        hits, fetched = self.cached, np.zeros(len(self.cached))
        if self.fetches is not None:
            hits, fetched = self.fetches.hits, self.fetches.num_tokens
        return tuple(
            Candidate(
                group=state.group,
                cost=float(cost),
                num_cached_tokens=num_cached,
                num_fetched_tokens=num_fetched,
                num_prefill_tokens=self.num_prompt_tokens - num_cached - num_fetched,
                num_queued_tokens=state.num_queued_tokens,
                num_sequences=state.num_requests,
                forecast_s=state.forecast_s(self.num_prompt_tokens - int(hit)),
                adapter_cost=None if self.adapter_costs is None else float(adapter_cost),
            )
            for state, num_cached, num_fetched, hit, cost, adapter_cost in zip(
                self.groups,
                map(int, self.cached),
                map(int, fetched),
                hits,
                self.costs,
                self.costs if self.adapter_costs is None else self.adapter_costs,
                strict=True,
            )
        )
