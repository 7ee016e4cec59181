"""The interface of a routing policy, and the data that routing decisions are made of.

A policy computes a cost per replica group for a request; the group with the least cost wins. It
sees the request, each group's load, and how many prompt tokens each group is expected to find in
its cache (*hits*). It reads no clock and no global: the time, and a number that replaces
randomness, are part of the request. The policies are in `quire.router.policies`.

Wherever possible the unit of cost is the *token*: the time in which a group prefills one prompt
token. So a policy does not need to know how fast the hardware is.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from quire.router.prefix_index.directory import GroupId
from quire.worker.blocks.hashing import BlockHash

if TYPE_CHECKING:
    from quire.router.policies.fetching import Elsewhere, Fetches
    from quire.router.policies.loads import Loads

Column: TypeAlias = npt.NDArray[np.float64]
"""One number per group, as float64: exact for every count that can occur."""

_DECODE_TOKENS = 24.0
"""Time that a running sequence adds to a step, in tokens of prefill."""
LATE_STEPS = 2.0
"""The estimate of a step is ignored once the step exceeds its expected time by this factor: the
estimate was wrong, or its frame went to other gateways only, or the group hangs."""

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
    """The properties of a request that a policy may use."""

    hashes: Sequence[BlockHash]
    """Hashes of the prompt's full blocks."""
    num_prompt_tokens: int
    block_size: int
    cache_key: str = ""
    """Replaces the first block's hash where groups are chosen by prefix; empty: not replaced."""
    adapter: str = ""
    """The digest of the request's LoRA adapter; empty for the base model."""
    exclude: frozenset[GroupId] = frozenset()
    """Groups that must not take the request: they failed it before, or are draining."""
    ordinal: int = 0
    """The request's number in its gateway's order of routing, from any start. Policies use it in
    place of randomness and state."""
    now_s: float = 0.0

    @property
    def usable_blocks(self) -> int:
        """The largest number of prompt blocks that can be a cache hit.

        The engine always computes the last prompt token, because it samples from that token's
        logits. So a block that ends with that token is never a hit.
        """
        return max(self.num_prompt_tokens - 1, 0) // self.block_size

    def lacks_adapter(self, state: "GroupState") -> bool:
        """Whether the group has to load the request's adapter."""
        return bool(self.adapter) and self.adapter not in state.adapters


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """A group's load, as one frame of its stream reports it (``quire.v1.Load``)."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_available_blocks: int = 0
    """Free and cached blocks."""
    num_prompt_tokens: int = 0
    """Counter of prompt tokens of requests that began to run."""
    num_hit_tokens: int = 0
    """Counter of those prompt tokens that were cached."""
    num_output_tokens: int = 0
    """Counter of output tokens."""
    num_host_tokens: int = 0
    """Counter of tokens whose KV was copied from host memory."""
    num_disk_tokens: int = 0
    """Counter of tokens whose KV was read from disk."""
    disk_s: float = 0.0
    """Counter of seconds that requests waited for KV from disk."""
    num_peer_tokens: int = 0
    """Counter of tokens whose KV was fetched from other groups."""
    peer_s: float = 0.0
    """Counter of seconds that requests waited for KV from other groups."""
    num_failed_pulls: int = 0
    """Counter of failed fetches from other groups."""
    max_num_seqs: int | None = None
    """Sequences that the group runs at a time; None: not reported, treated as unlimited."""
    num_gateways: int = 0
    """Gateways that may send requests to the group; 0: not reported."""
    num_shown: int | None = None
    """How many of this gateway's requests, in the order of submission, these numbers include.
    None: not reported, and estimated from the number of frames."""
    num_steps: int | None = None
    """Steps that the group has completed. None: not reported; its current step is unknown."""
    adapters: frozenset[str] = frozenset()
    """Adapters that are loaded."""
    num_adapters: int = 0
    """Adapters that have requests."""
    max_adapters: int = 0
    """How many adapters can be loaded at a time; 0: not reported."""

    @property
    def fetched(self) -> tuple[float, ...]:
        """The counters of fetched tokens and of the seconds spent waiting for them."""
        return (
            self.num_host_tokens,
            self.num_disk_tokens,
            self.disk_s,
            self.num_peer_tokens,
            self.peer_s,
        )


@dataclass(slots=True, kw_only=True)
class GroupState:
    """A group's load: the numbers of its last frame plus the requests sent to it since."""

    group: GroupId
    num_running: int = 0
    num_waiting: int = 0
    num_pending_prefill_tokens: int = 0
    """Prompt tokens neither cached nor computed yet, of waiting and running requests."""
    num_available_blocks: int | None = None
    """Free blocks and cached blocks that may be evicted; None before the group's first frame."""
    num_blocks: int | None = None
    """The most blocks ever available at once: the group's total, once it was seen idle."""
    num_reserved_requests: int = 0
    """Requests sent to the group that the numbers above do not count yet."""
    num_reserved_tokens: int = 0
    """Prompt tokens that the reserved requests have to prefill."""
    max_num_seqs: int | None = None
    num_gateways: int = 0
    step_began_s: float = 0.0
    """When the group's current step began, as `StepClock` estimates."""
    step_s: float = 0.0
    """How long the current step is expected to take; 0 if unknown."""
    num_step_tokens: int = 0
    """Pending prompt tokens that the current step computes."""
    wait: tuple[float, float] | None = None
    """Learned time to first token: fixed seconds, and seconds per prompt token to compute, queued
    and the request's own. None before enough observations."""
    adapters: frozenset[str] = frozenset()
    """Adapters that are loaded, or that requests under way will load."""
    num_adapters: int = 0
    """Adapters that have requests."""
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
        """How many turns of other adapters a request for ``adapter`` waits for: 0 if all adapters
        that have requests fit at once."""
        num = self.num_adapters + (adapter not in self.adapters)
        return max(num - self.max_adapters, 0) / self.max_adapters if self.max_adapters else 0.0

    def step_rest_s(self, now_s: float) -> float:
        """Seconds left in the current step; 0 if unknown, or if the step is long overdue."""
        over_s = now_s - self.step_began_s
        return max(self.step_s - over_s, 0.0) if over_s < LATE_STEPS * self.step_s else 0.0

    def forecast_s(self, num_prefill_tokens: int) -> float | None:
        """Seconds to the first token of a request with ``num_prefill_tokens`` uncached tokens here;
        None before enough observations."""
        if self.wait is None:
            return None
        fixed_s, per_token_s = self.wait
        return fixed_s + per_token_s * (self.num_queued_tokens + num_prefill_tokens)


class Policy(Protocol):
    """Chooses groups for one gateway. A policy may keep state through the last three methods."""

    reason: Reason
    """The reason that is reported when the prefix did not decide."""
    pressure: float | None = None
    """Cost that each computed token imposes on later requests, as of the last `costs`; None if the
    policy has no such term."""
    adapter_costs: Column | None = None
    """The part of the last `costs` that the request's adapter caused; None without an adapter."""

    def fetches(
        self, request: RouteRequest, groups: "Loads", cached: Column, elsewhere: "Elsewhere"
    ) -> "Fetches | None":
        """The tokens that each of ``groups`` would fetch besides the ``cached`` tokens of its KV
        cache; None if no group would fetch any."""
        return elsewhere.fetches(
            groups.fetch_costs_2KG,
            cached,
            groups.step_rest(request.now_s),
            _DECODE_TOKENS * groups.num_running,
            usable_blocks=request.usable_blocks,
            block_size=request.block_size,
        )

    def costs(self, request: RouteRequest, groups: "Loads", hits: Column) -> Column:
        """A cost for each of ``groups``, which is not empty; the least wins.

        ``hits``: for each group, the prompt tokens that it is expected to find in its cache or to
        fetch, less the cost of fetching. The order of the groups has no meaning.
        """

    def second_home(
        self, request: RouteRequest, groups: "Loads", hits: Column, home: int, num_coming: int
    ) -> int:
        """The index of the group that takes the request instead of ``home``, the cheapest group, so
        that it too gets the prefix; ``home`` if the prefix shall not be replicated.

        Called right after `costs`, with the same arguments. The last ``num_coming`` tokens of the
        hit are not in the cache of ``home`` yet.
        """
        return home

    def routed(self, request: RouteRequest, group: GroupId) -> None:
        """Called when the request is routed to ``group``."""
        return

    def finished(self, request: RouteRequest, group: GroupId) -> None:
        """Called when the request ended at ``group``, for any reason, or is to be routed again."""
        return

    def left(self, group: GroupId) -> None:
        """Called when the group is gone. A later group of the same name shares no state with it.
        `finished` may still be called for its requests."""
        return


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One group's numbers in a decision, as the decision's explanation shows them."""

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
    """Forecast seconds to the first token at this group; None before enough observations."""
    adapter_cost: float | None
    """The part of ``cost`` that the request's adapter causes; None without an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The group chosen for a request, and everything that the choice was based on."""

    group: GroupId
    reason: Reason
    predicted_cached_tokens: int
    """Prompt tokens in the chosen group's KV cache, or to be fetched by it."""
    num_prompt_tokens: int
    groups: Sequence[GroupState]
    """The groups' states at the time of the decision; never modified."""
    index: int
    """Index of the chosen group in ``groups``."""
    forecast_s: float | None
    """Forecast seconds to the first token; None before enough observations of the group."""
    cached: Column
    """Prompt tokens in each group's KV cache."""
    costs: Column
    fetches: "Fetches | None" = None
    """The tokens that each group would fetch; ``None`` if no group would fetch any."""
    source: GroupId | None = None
    """The group from which the chosen group may fetch KV; ``None`` if from none."""
    num_source_blocks: int = 0
    """How many leading blocks of the prompt the source has."""
    adapter_costs: Column | None = None
    """The part of ``costs`` that the adapter causes; None if the request has no adapter."""

    @property
    def num_fetched_tokens(self) -> int:
        """How many prompt tokens the chosen group is expected to fetch."""
        return 0 if self.fetches is None else int(self.fetches.num_RG[:, self.index].sum())

    @property
    def fetch_cost(self) -> float:
        """Cost of fetching those tokens, in tokens."""
        return 0.0 if self.fetches is None else float(self.fetches.costs_RG[:, self.index].sum())

    @property
    def fetch_s(self) -> float | None:
        """Seconds that fetching takes, a part of ``forecast_s``; None if ``forecast_s`` is None."""
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
