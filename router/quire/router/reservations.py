"""The requests under way at each group: its *reservations* and *in-flight prefixes*.

A reservation counts as load from routing until the group's own frames include the request. An
in-flight prefix counts as cached until the request ends. `quire.router.table` says why. Nothing
here is thread-safe.
"""

from array import array
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from quire.router.accuracy import moved_mean
from quire.router.in_flight import new_counts
from quire.router.policies.fetching import FetchCosts
from quire.router.policies.loads import Loads
from quire.router.policies.policy import Decision, GroupLoad, GroupState, RouteRequest
from quire.router.policies.speeds import Line, Speeds, StepClock
from quire.router.prefix_index.directory import GroupId
from quire.router.prefix_index.index import Slot
from quire.worker.blocks.hashing import BlockHashes

_FRAMES_UNTIL_SHOWN = 2
"""Frames after which a request counts as shown, if frames do not report which requests they
include. The first frame after a submit may have left the group before the submit arrived; the
second follows a step that had the request. An idle group's first frame brings the first token, on
which `RoutingTable.started` ends the reservation."""
_WAITS_KEPT = 20
"""First tokens over which forecasts of the wait are fitted; see `Line`."""
_MIN_WAIT_S = 1e-3
"""Differences of less than a millisecond are noise."""


@dataclass(slots=True)
class Group:
    """The state of one group while it is a member."""

    group_id: GroupId
    number: int
    """Identifies its in-flight prefixes. Unique, also among groups that had the same name."""
    speeds: Speeds
    fetch_costs: FetchCosts = field(default_factory=FetchCosts)
    load: GroupLoad | None = None
    num_blocks: int | None = None
    """The most blocks that were ever available; None before the first frame."""
    num_frames: int = 0
    num_submitted: int = 0
    """Requests routed to the group so far that the gateway itself submits."""
    num_reserved_requests: int = 0
    num_reserved_tokens: int = 0
    adapters: Counter[str] = field(default_factory=Counter)
    """How many requests under way use each adapter."""
    reserved: deque["InFlight"] = field(default_factory=deque)
    """Reserved requests in the order of routing; entries already unreserved are skipped."""
    waits: Line = field(default_factory=lambda: Line(window=_WAITS_KEPT))
    wait: tuple[float, float] | None = None
    """See `GroupState.wait`."""
    clock: StepClock = field(default_factory=StepClock)
    forecast_error: float | None = None
    """Mean error of recent forecasts, as a share of the wait; None before the first."""
    position: int = 0
    """The group's index among the members."""
    slots: tuple[Slot, ...] = ()
    """The directory's slots of the group's tiers; empty before its first events."""
    loads: Loads | None = None
    """The arrays that hold the group's state while it is a member."""
    state: GroupState = field(init=False)
    """The current load. It is replaced and never modified, because decisions keep it."""

    def __post_init__(self) -> None:
        self._changed()

    def take_frame(self, load: GroupLoad, *, at_s: float, is_awaited: bool) -> None:
        self.speeds.observe(load, at_s=at_s, is_awaited=is_awaited)
        if self.loads is not None:
            self.loads.put_speeds(self.position, self.speeds)
        if self.fetch_costs.observe(load, at_s=at_s):
            self.put_fetch_costs()
        if load.num_steps is not None:
            self.clock.frame(
                step=load.num_steps,
                at_s=at_s,
                num_queued=load.num_pending_prefill_tokens,
                is_idle=not (load.num_running or load.num_waiting),
            )
        self.load = load
        self.num_blocks = max(self.num_blocks or 0, load.num_available_blocks)
        self.num_frames += 1
        while self.reserved and (
            not self.reserved[0].is_reserved or self._is_shown(self.reserved[0], load.num_shown)
        ):
            self.reserved.popleft().unreserve()
        self._changed()

    def put_fetch_costs(self) -> None:
        if self.loads is not None:
            costs_2K = self.fetch_costs.tokens(self.speeds.prefill_per_s)
            self.loads.put_fetch_costs(self.position, costs_2K)

    def _is_shown(self, request: "InFlight", num_shown: int | None) -> bool:
        if num_shown is None or request.number is None:
            return request.shown_at_frame <= self.num_frames
        return request.number <= num_shown

    def expire(self, *, routed_before_s: float) -> None:
        while self.reserved and (
            not self.reserved[0].is_reserved or self.reserved[0].routed_at_s < routed_before_s
        ):
            self.reserved.popleft().unreserve()

    def learn(self, request: "InFlight", *, num_cached_tokens: int, waited_s: float) -> None:
        """Learns forecasts from the wait for a request's first token."""
        num_missing = max(request.request.num_prompt_tokens - num_cached_tokens, 0)
        num_before = num_missing + request.fetch_cost + request.state.num_queued_tokens
        # Weighted by relative error, so that short waits count as much as long ones.
        weight = 1 / max(waited_s, _MIN_WAIT_S) ** 2
        self.waits.add(num_before, waited_s, weight=weight)
        self.wait = self.waits.parts
        self._changed()

    def reserve(self, request: "InFlight", *, is_submitted: bool) -> None:
        if is_submitted:
            self.num_submitted += 1
            request.number = self.num_submitted
        self.reserved.append(request)
        self.num_reserved_requests += 1
        self.num_reserved_tokens += request.num_prefill_tokens
        if request.request.adapter:
            self.adapters[request.request.adapter] += 1
        self._changed()

    def ended(self, adapter: str) -> None:
        """Stops counting a request of ``adapter`` as under way."""
        self.adapters[adapter] -= 1
        if not self.adapters[adapter]:
            del self.adapters[adapter]
            self._changed()

    def unreserve(self, request: "InFlight") -> None:
        self.num_reserved_requests -= 1
        self.num_reserved_tokens -= request.num_prefill_tokens
        self._changed()

    def count_error(self, ratio: float) -> None:
        self.forecast_error = moved_mean(self.forecast_error, ratio)

    def _changed(self) -> None:
        load = self.load
        self.state = GroupState(
            group=self.group_id,
            num_running=load.num_running if load else 0,
            num_waiting=load.num_waiting if load else 0,
            num_pending_prefill_tokens=load.num_pending_prefill_tokens if load else 0,
            num_available_blocks=load.num_available_blocks if load else None,
            num_blocks=self.num_blocks,
            num_reserved_requests=self.num_reserved_requests,
            num_reserved_tokens=self.num_reserved_tokens,
            max_num_seqs=load.max_num_seqs if load else None,
            num_gateways=load.num_gateways if load else 0,
            step_began_s=self.clock.began_s,
            step_s=self.clock.length_s,
            num_step_tokens=self.clock.num_tokens,
            wait=self.wait,
            adapters=(load.adapters if load else frozenset()).union(self.adapters),
            num_adapters=max(load.num_adapters if load else 0, len(self.adapters)),
            max_adapters=load.max_adapters if load else 0,
        )
        if self.loads is not None:
            self.loads.put(self.position, self.state)


@dataclass(slots=True)
class InFlight:
    """A routed request that has not ended."""

    request: RouteRequest
    group: Group
    """The group that it was routed to, also after that has left or its name was reused."""
    state: GroupState
    """The group's load before this request."""
    forecast_s: float | None
    num_predicted_tokens: int
    num_prefill_tokens: int
    fetch_cost: float
    """The cost of fetching, in tokens."""
    source: GroupId | None
    blocks: BlockHashes
    """Blocks that the directory did not list at the group at routing; counted as in flight."""
    shown_at_frame: int
    routed_at_s: float
    number: int | None = None
    """Number among the requests submitted to ``group``, from 1; None if Serve submits it."""
    is_reserved: bool = True

    def unreserve(self) -> None:
        if self.is_reserved:
            self.is_reserved = False
            self.group.unreserve(self)


class Reservations:
    """The requests under way. Past ``max_requests`` the caller must remove the oldest; past
    ``max_blocks`` a request's prefix is not counted."""

    def __init__(self, *, max_requests: int, max_blocks: int) -> None:
        self.num_blocks = 0
        self._max_requests = max_requests
        self._max_blocks = max_blocks
        self._requests: dict[str, InFlight] = {}
        self._calls: dict[str, InFlight] = {}  # Those of them that Serve submits.
        self._prefixes = new_counts()

    def __len__(self) -> int:
        return len(self._requests)

    def get(self, request_id: str) -> InFlight | None:
        return self._requests.get(request_id)

    def oldest_in_excess(self) -> str | None:
        """The request to remove before another is added; None if there is room."""
        if len(self._requests) < self._max_requests:
            return None
        return next(iter(self._requests))

    def overdue_calls(self, *, routed_before_s: float) -> list[str]:
        """Calls through a Serve handle that were routed before the given time. Their end may never
        be reported."""
        overdue = takewhile(lambda r: r[1].routed_at_s < routed_before_s, self._calls.items())
        return [request_id for request_id, _ in overdue]

    def extend(
        self, hashes: BlockHashes, numbers: Sequence[int], lengths: Sequence[int]
    ) -> "array[int]":
        """The prefix length in blocks that each group will have, given its cached ``lengths``."""
        return self._prefixes.extend(hashes.data, numbers, lengths)

    def add(
        self,
        request_id: str,
        request: RouteRequest,
        decision: Decision,
        *,
        group: Group,
        blocks: BlockHashes,
        now_s: float,
        is_submitted: bool = True,
    ) -> None:
        """Adds a routed request. ``blocks``: all blocks that the directory does not list at the
        group. Blocks of other requests in flight are included, since those may end first."""
        if self.num_blocks + len(blocks) > self._max_blocks:
            blocks = BlockHashes()
        in_flight = InFlight(
            request=request,
            group=group,
            state=decision.groups[decision.index],
            forecast_s=decision.forecast_s,
            num_predicted_tokens=decision.predicted_cached_tokens,
            num_prefill_tokens=request.num_prompt_tokens - decision.predicted_cached_tokens,
            fetch_cost=decision.fetch_cost,
            source=decision.source,
            blocks=blocks,
            shown_at_frame=group.num_frames + _FRAMES_UNTIL_SHOWN,
            routed_at_s=now_s,
        )
        self._requests[request_id] = in_flight
        if not is_submitted:
            self._calls[request_id] = in_flight
        self.num_blocks += len(blocks)
        self._prefixes.add(blocks.data, group=group.number)
        group.reserve(in_flight, is_submitted=is_submitted)

    def remove(self, request_id: str) -> InFlight | None:
        request = self._requests.pop(request_id, None)
        self._calls.pop(request_id, None)
        if request is not None:
            request.unreserve()
            if request.request.adapter:
                request.group.ended(request.request.adapter)
            self.num_blocks -= len(request.blocks)
            self._prefixes.remove(request.blocks.data, group=request.group.number)
        return request
