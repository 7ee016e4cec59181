"""What one process knows of the replica groups, and the routing decisions it takes from that.

Who the groups are, how loaded each said it was in its last frame, what was sent to each since
(*reservations*), which prompts run there now (*in-flight prefixes*), and the block directory.

A reservation counts as load from the moment of routing until the group's own frames show it, so
that a burst, which arrives faster than frames do, does not fall on one group. An in-flight prefix
counts as cached from routing until the request ends, since the group will hold those blocks before
it gets to a request routed there later.

Any thread may call: a gateway does on its event loop, Serve's request router on another. The lock
is held for microseconds, but for a snapshot of a whole cache.
"""

import itertools
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.router.config import RoutingConfig
from quire.router.directory import (
    Applied,
    BlockDirectory,
    GroupId,
    NeedsResync,
    Position,
)
from quire.router.errors import NoGroupAvailable
from quire.router.in_flight import new_counts
from quire.router.policies.catalog import POLICIES
from quire.router.policy import Decision, GroupState, RouteRequest, decide
from quire.router.stats import RoutingStats
from quire.worker.events import EventBatch
from quire.worker.hashing import BlockHash, BlockHashes

_FRAMES_UNTIL_SHOWN = 2
"""The first frame after a request was sent may have left the group before it came; the group
stepped with it before the second. An idle group's first frame answers with the first token, which
`RoutingTable.started` takes as proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoad:
    """What a group's frame says of it (``quire.v1.Load``)."""

    num_running: int
    num_waiting: int
    num_pending_prefill_tokens: int
    num_available_blocks: int
    """Free and cached blocks."""


@dataclass(slots=True)
class _Group:
    number: int
    """Tells its in-flight prefixes from those of any other, or of an earlier one of its name."""
    load: GroupLoad | None = None
    num_blocks: int | None = None
    """The most that were ever available."""
    num_frames: int = 0
    num_reserved_requests: int = 0
    num_reserved_tokens: int = 0
    reserved: deque["_InFlight"] = field(default_factory=deque)
    """In the order of routing; those shown since by other means are passed over."""


@dataclass(slots=True)
class _InFlight:
    """A routed request; ``group`` is the incarnation of the membership that it was routed to."""

    request: RouteRequest
    group_id: GroupId
    group: _Group
    num_predicted_tokens: int
    num_prefill_tokens: int
    blocks: BlockHashes
    """Those that the directory lacked when it was routed, counted as in flight."""
    shown_at_frame: int
    routed_at_s: float
    is_reserved: bool = True


class RoutingTable:
    """Routes requests whose blocks have ``block_size`` tokens, for one deployment."""

    def __init__(
        self,
        *,
        block_size: int,
        config: RoutingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config or RoutingConfig()
        self._policy = POLICIES[self._config.policy]()
        self._block_size = block_size
        self._clock = clock
        self._lock = threading.Lock()
        self._groups: dict[GroupId, _Group] = {}
        self._in_flight: dict[str, _InFlight] = {}
        self._num_in_flight_blocks = 0
        self._prefixes = new_counts()
        self._group_numbers = itertools.count()
        self._directory = BlockDirectory(
            max_blocks=self._config.max_directory_blocks,
            stale_after_s=self._config.stale_after_s,
        )
        self._num_routed: Counter[str] = Counter()
        self._num_unroutable = 0
        self._num_prompt_tokens = 0
        self._num_predicted_tokens = 0
        self._num_started = 0
        self._num_started_predicted_tokens = 0
        self._num_started_cached_tokens = 0
        self._num_started_wrong_tokens = 0

    def route(
        self,
        request_id: str,
        *,
        hashes: Sequence[BlockHash],
        num_prompt_tokens: int,
        exclude: frozenset[GroupId] = frozenset(),
    ) -> Decision:
        """Chooses a group and counts the request as its load until `completed`.

        Routing a request again, after its group failed, first takes it back from that group.

        Raises:
            NoGroupAvailable: Every group is excluded, or there is none. Nothing is counted.
        """
        with self._lock:
            self._forget(request_id)
            hashes = BlockHashes.of(hashes)
            held = self._directory.longest_prefix(hashes)
            request = RouteRequest(
                hashes=hashes,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self._block_size,
                exclude=exclude,
                ordinal=self._num_routed.total(),
                now_s=self._clock(),
            )
            states = [_state(group_id, group) for group_id, group in self._groups.items()]
            overlap = self._prefixes.extend(
                hashes.data,
                [group.number for group in self._groups.values()],
                [held.get(group_id, 0) for group_id in self._groups],
            )
            try:
                decision = decide(self._policy, request, states, overlap)
            except NoGroupAvailable:
                self._num_unroutable += 1
                raise
            self._num_routed[decision.reason] += 1
            self._num_prompt_tokens += num_prompt_tokens
            self._num_predicted_tokens += decision.predicted_cached_tokens
            in_flight = BlockHashes()
            if self._config.use_directory:
                in_flight = hashes[held.get(decision.group, 0) :]
            self._remember(request_id, request, decision, in_flight)
            return decision

    def started(self, request_id: str, *, num_cached_tokens: int) -> None:
        """The group's first frame for the request came: its load is in the group's own numbers.

        ``num_cached_tokens`` is what the group found in its cache, the truth behind the hint.
        """
        with self._lock:
            request = self._in_flight.get(request_id)
            if request is not None:
                self._num_started += 1
                self._num_started_predicted_tokens += request.num_predicted_tokens
                self._num_started_cached_tokens += num_cached_tokens
                wrong = abs(request.num_predicted_tokens - num_cached_tokens)
                self._num_started_wrong_tokens += wrong
                _unreserve(request)

    def completed(self, request_id: str) -> None:
        """The request ended, however it did. May be called again, or for an unknown one."""
        with self._lock:
            self._forget(request_id)

    def update_members(self, groups: Iterable[GroupId]) -> None:
        """Makes exactly these groups the ones to route to; all about others is forgotten."""
        with self._lock:
            members = set(groups)
            for group_id in self._groups.keys() - members:
                del self._groups[group_id]
                self._directory.drop(group_id)
            for group_id in members - self._groups.keys():
                self._groups[group_id] = _Group(next(self._group_numbers))

    def update_load(self, group_id: GroupId, load: GroupLoad) -> None:
        """Takes in the load of a group's frame; one of a group that left is ignored."""
        with self._lock:
            group = self._groups.get(group_id)
            if group is None:
                return
            group.load = load
            group.num_blocks = max(group.num_blocks or 0, load.num_available_blocks)
            group.num_frames += 1
            while group.reserved and (
                not group.reserved[0].is_reserved
                or group.reserved[0].shown_at_frame <= group.num_frames
            ):
                _unreserve(group.reserved.popleft())

    def apply_events(self, group_id: GroupId, batch: EventBatch) -> Applied | NeedsResync:
        """Takes in block events; those of a group that left are ignored."""
        with self._lock:
            if group_id not in self._groups:
                return Applied(0)
            return self._directory.apply(group_id, batch, now_s=self._clock())

    def events_position(self, group_id: GroupId) -> Position:
        """With what to subscribe to the group's events."""
        with self._lock:
            return self._directory.position(group_id)

    def expire(self) -> list[GroupId]:
        """Lets go of what did not come in time; to be called every second or so.

        Returns the groups whose events fell silent.
        """
        with self._lock:
            now_s = self._clock()
            for group in self._groups.values():
                while group.reserved and (
                    not group.reserved[0].is_reserved
                    or now_s - group.reserved[0].routed_at_s > self._config.reservation_timeout_s
                ):
                    _unreserve(group.reserved.popleft())
            return self._directory.expire(now_s=now_s)

    def states(self) -> list[GroupState]:
        """Each group's load as the next decision will see it."""
        with self._lock:
            return [_state(group_id, group) for group_id, group in self._groups.items()]

    def stats(self) -> RoutingStats:
        with self._lock:
            return RoutingStats(
                num_routed=dict(self._num_routed),
                num_unroutable=self._num_unroutable,
                num_prompt_tokens=self._num_prompt_tokens,
                num_predicted_cached_tokens=self._num_predicted_tokens,
                num_started=self._num_started,
                num_started_predicted_tokens=self._num_started_predicted_tokens,
                num_started_cached_tokens=self._num_started_cached_tokens,
                num_started_wrong_tokens=self._num_started_wrong_tokens,
                num_groups=len(self._groups),
                num_in_flight=len(self._in_flight),
                num_in_flight_blocks=self._num_in_flight_blocks,
                num_reserved_tokens=sum(g.num_reserved_tokens for g in self._groups.values()),
                directory=self._directory.stats(),
            )

    def _remember(
        self, request_id: str, request: RouteRequest, decision: Decision, blocks: BlockHashes
    ) -> None:
        """``blocks`` are all that the directory does not vouch for, also where another request
        in flight does: that one may end first."""
        if len(self._in_flight) >= self._config.max_in_flight:
            self._forget(next(iter(self._in_flight)))
        group = self._groups[decision.group]
        if self._num_in_flight_blocks + len(blocks) > self._config.max_in_flight_blocks:
            blocks = BlockHashes()
        in_flight = _InFlight(
            request=request,
            group_id=decision.group,
            group=group,
            num_predicted_tokens=decision.predicted_cached_tokens,
            num_prefill_tokens=request.num_prompt_tokens - decision.predicted_cached_tokens,
            blocks=blocks,
            shown_at_frame=group.num_frames + _FRAMES_UNTIL_SHOWN,
            routed_at_s=self._clock(),
        )
        self._in_flight[request_id] = in_flight
        self._num_in_flight_blocks += len(blocks)
        self._prefixes.add(blocks.data, group=group.number)
        group.reserved.append(in_flight)
        group.num_reserved_requests += 1
        group.num_reserved_tokens += in_flight.num_prefill_tokens

    def _forget(self, request_id: str) -> None:
        request = self._in_flight.pop(request_id, None)
        if request is None:
            return
        self._policy.finished(request.request, request.group_id)
        _unreserve(request)
        self._num_in_flight_blocks -= len(request.blocks)
        self._prefixes.remove(request.blocks.data, group=request.group.number)


def _state(group_id: GroupId, group: _Group) -> GroupState:
    load = group.load
    return GroupState(
        group=group_id,
        num_running=load.num_running if load else 0,
        num_waiting=load.num_waiting if load else 0,
        num_pending_prefill_tokens=load.num_pending_prefill_tokens if load else 0,
        num_available_blocks=load.num_available_blocks if load else None,
        num_blocks=group.num_blocks,
        num_reserved_requests=group.num_reserved_requests,
        num_reserved_tokens=group.num_reserved_tokens,
    )


def _unreserve(request: _InFlight) -> None:
    if request.is_reserved:
        request.is_reserved = False
        request.group.num_reserved_requests -= 1
        request.group.num_reserved_tokens -= request.num_prefill_tokens
