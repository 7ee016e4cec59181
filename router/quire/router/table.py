"""The routing table: one process's view of the replica groups, and its routing decisions.

It holds the groups and their load as of the last frame, the requests sent to each since then
(*reservations*), the prompts that run there now (*in-flight prefixes*), the block directory, each
group's speed, and the last decisions with their results. Admission reads loads and speeds here,
too.

A reservation counts as load from routing until the group's own frames include the request. So a
burst, which arrives faster than frames do, is spread over the groups. An in-flight prefix counts as
cached from routing until the request ends, since the group will hold those blocks before it runs
any request that is routed there later.

All methods are thread-safe: a gateway calls them on its event loop, Serve's request router on
another. The lock is held for microseconds, except while a snapshot of a whole cache is applied.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quire.router.accuracy import Accuracy, ComputedShare
from quire.router.config import RoutingConfig
from quire.router.decision_log import DecisionLog, Explanation
from quire.router.errors import NoGroupAvailable, UnknownDecision
from quire.router.hot_prefixes import HotPrefix, HotPrefixes
from quire.router.lenders import Lenders, Source
from quire.router.members import Members
from quire.router.policies.catalog import POLICIES
from quire.router.policies.decide import decide
from quire.router.policies.fetching import Elsewhere
from quire.router.policies.loads import Loads
from quire.router.policies.policy import (
    Decision,
    GroupLoad,
    GroupState,
    Policy,
    RouteRequest,
)
from quire.router.prefix_index.directory import (
    Applied,
    BlockDirectory,
    GroupId,
    NeedsResync,
    Position,
)
from quire.router.prefix_index.index import Lengths
from quire.router.reservations import Reservations
from quire.router.stages import Stages
from quire.router.stats import GroupForecasts, RoutingStats
from quire.worker.blocks.events import EventBatch
from quire.worker.blocks.hashing import HASH_BYTES, BlockHash, BlockHashes
from quire.worker.request.outputs import Fetched


class RoutingTable:
    """Routes the requests of one deployment, whose blocks have ``block_size`` tokens."""

    def __init__(
        self,
        *,
        block_size: int,
        config: RoutingConfig | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
        policy: Policy | None = None,
        first_ordinal: int = 0,
    ) -> None:
        """``wall_clock`` gives the time of explanations; everything else uses ``clock``.

        ``policy`` replaces the one that ``config`` names. ``first_ordinal`` is the number of the
        first decision: gateways that start with the same number draw the same groups for their
        first request, second request, and so on.
        """
        self._config = config = config or RoutingConfig()
        self._policy = policy or POLICIES[config.policy]()
        self.block_size = block_size
        self._clock = clock
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._members = Members()
        self._lenders = Lenders()
        self._stages = Stages(num_prefill_groups=config.num_prefill_groups)
        self._exchanging: frozenset[GroupId] = frozenset()
        self._are_lenders_stale = False
        self._known: frozenset[GroupId] = frozenset()  # Members and groups that exchange blocks.
        self._in_flight = Reservations(
            max_requests=config.max_in_flight, max_blocks=config.max_in_flight_blocks
        )
        self._directory = BlockDirectory(
            max_blocks=config.max_directory_blocks, stale_after_s=config.stale_after_s
        )
        self._log = DecisionLog(
            max_decisions=config.max_decisions_kept, max_candidates=config.max_candidates_kept
        )
        self._hot = HotPrefixes()
        self._accuracy = Accuracy()
        self._first_ordinal = first_ordinal
        self._num_decisions = 0
        self._num_routed: Counter[str] = Counter()
        self._num_unroutable = 0
        self._computed = ComputedShare()

    def route(
        self,
        request_id: str,
        *,
        hashes: Sequence[BlockHash],
        num_prompt_tokens: int,
        exclude: frozenset[GroupId] = frozenset(),
        adapter: str = "",
        cache_key: str = "",
        client_id: str = "",
        tenant: str = "",
        moved_because: str = "",
        former: Source | None = None,
        has_tokens: bool = False,
        is_submitted: bool = True,
    ) -> Decision:
        """Chooses a group and counts the request as its load until `completed`.

        Routing a request again, after its group failed, first removes it from that group's load.
        ``moved_because``, ``client_id`` (the id that the client gave the request) and ``tenant``
        (who may see it) are for its explanation. ``former``: the group that ran the request until
        now and how many of its blocks that has, output included. ``has_tokens``: the request has
        output, so prefill groups cannot take it. ``is_submitted``: a gateway submits the request,
        so `GroupLoad.num_shown` counts it; False for a call through a Serve handle.

        Raises:
            NoGroupAvailable: Every group is excluded, or there is none. Nothing is counted.
        """
        with self._lock:
            self._forget(request_id)
            hashes = BlockHashes.of(hashes)
            members = self._members
            now_s = self._clock()
            lengths = self._directory.prefix_lengths(hashes)
            held = members.by_slot(lengths)
            elsewhere = self._elsewhere(lengths, former, now_s)
            others = self._stages.others(
                has_tokens=has_tokens,
                num_prompt_tokens=num_prompt_tokens,
                held=held,
                members=members.groups,
                block_size=self.block_size,
            )
            if others and not members.groups.keys() <= others | exclude:
                exclude |= others
            request = RouteRequest(
                hashes=hashes,
                num_prompt_tokens=num_prompt_tokens,
                block_size=self.block_size,
                adapter=adapter,
                cache_key=cache_key,
                exclude=exclude,
                ordinal=self._first_ordinal + self._num_decisions,
                now_s=now_s,
            )
            try:
                overlap = self._in_flight.extend(hashes, members.numbers, held)
                decision = decide(self._policy, request, members.loads, overlap, held, elsewhere)
            except NoGroupAvailable:
                self._num_unroutable += 1
                raise
            self._num_decisions += 1
            self._num_routed[decision.reason] += 1
            if not moved_because:
                self._hot.saw(hashes)
            if self._config.use_directory:
                self._computed.add(num_prompt_tokens, decision.predicted_cached_tokens)
            oldest = self._in_flight.oldest_in_excess()
            if oldest is not None:
                self._forget(oldest)
                self._log.ended(oldest, "forgotten: too many are in flight")
            group = members.groups[decision.group]
            use_directory = self._config.use_directory
            self._in_flight.add(
                request_id,
                request,
                decision,
                group=group,
                blocks=BlockHashes(
                    hashes.data[HASH_BYTES * held[group.position] :] if use_directory else b""
                ),
                now_s=now_s,
                is_submitted=is_submitted,
            )
            if decision.source is not None:
                self._lenders.asked(decision.source, 1)
                lender = members.groups.get(decision.source)
                rest_s = 0.0 if lender is None else lender.state.step_rest_s(now_s)
                group.fetch_costs.asked(source_rest_s=rest_s)
            self._log.add(
                request_id,
                decision,
                client_id=client_id,
                tenant=tenant,
                decided_at_s=self._wall_clock(),
                policy=self._config.policy,
                pressure=self._policy.pressure,
                moved_because=moved_because,
            )
            return decision

    def only_prefills(self, group_id: GroupId) -> bool:
        """Whether the group is a prefill group, which only computes prompts."""
        return group_id in self._stages.prefill

    def started(
        self, request_id: str, *, num_cached_tokens: int, fetched: Fetched | None = None
    ) -> None:
        """Takes in the request's first frame: from now on the group's own load includes it.

        ``num_cached_tokens``: prompt tokens that the group found in its cache or fetched, to check
        the prediction. ``fetched``: the group's fetch and its result. The time since `route` checks
        the forecast of the wait and improves the next ones.
        """
        with self._lock:
            request = self._in_flight.get(request_id)
            if request is None:
                return
            waited_s = self._clock() - request.routed_at_s
            group = request.group
            self._accuracy.count_cached(
                num_predicted_tokens=request.num_predicted_tokens,
                num_cached_tokens=num_cached_tokens,
            )
            if request.forecast_s is not None:
                ratio = self._accuracy.count_wait(forecast_s=request.forecast_s, waited_s=waited_s)
                group.count_error(ratio)
            if not self._config.use_directory:
                self._computed.add(request.request.num_prompt_tokens, num_cached_tokens)
            # Without a directory, forecasts assume that nothing is cached; so must learning.
            known = num_cached_tokens if self._config.use_directory else 0
            group.learn(request, num_cached_tokens=known, waited_s=waited_s)
            request.unreserve()
            if request.source is not None:
                self._lenders.asked(request.source, -1)
                if fetched is not None and fetched.error:
                    self._lenders.failed(request.source, now_s=self._clock())
                request.source = None
            self._log.started(
                request_id, num_cached_tokens=num_cached_tokens, waited_s=waited_s, fetched=fetched
            )

    def completed(self, request_id: str, *, outcome: str = "ended") -> None:
        """Ends the request with ``outcome``. Ignored if it has ended already or is unknown."""
        with self._lock:
            self._forget(request_id)
            self._log.ended(request_id, outcome)

    def explain(self, name: str, *, tenant: str | None = None) -> list[Explanation]:
        """The decisions on a completion, oldest attempt first; or, for the id of a whole request,
        Quire's or the client's own, on all of its completions. ``tenant``: finds only that tenant's
        requests; ``None`` finds all. The list is never empty.

        Raises:
            UnknownDecision: It was not routed here, or its decisions were dropped from the log.
        """
        with self._lock:
            found = self._log.find(name, tenant=tenant) if name else []
        if not found:
            raise UnknownDecision(name)
        return found

    def recent(self, limit: int, *, tenant: str | None = None) -> list[Explanation]:
        """The last ``limit`` decisions, newest first; ``tenant`` as for `explain`."""
        with self._lock:
            return self._log.recent(limit, tenant=tenant)

    def hot_prefixes(self, limit: int) -> list[HotPrefix]:
        """The prefixes that most requests shared, with their holders; see `HotPrefixes.top`."""
        with self._lock:
            return self._hot.top(limit, lambda name: self._directory.longest_prefix([name]))

    def update_members(self, groups: Iterable[GroupId], *, lenders: Iterable[GroupId] = ()) -> None:
        """Makes exactly these groups the ones to route to; drops all state of others. ``lenders``:
        the groups that exchange blocks, which may include groups that are not routed to."""
        with self._lock:
            former = self._known
            for group_id in self._members.update(groups):
                self._policy.left(group_id)
            self._stages.update(self._members.groups)
            self._exchanging = frozenset(lenders)
            self._known = self._exchanging | self._members.groups.keys()
            for group_id in former - self._known:
                self._directory.drop(group_id)
            self._are_lenders_stale = True

    def update_load(self, group_id: GroupId, load: GroupLoad, *, is_awaited: bool = False) -> None:
        """Takes in the load of a group's frame; ignored if the group has left.
        ``is_awaited``: requests wait at the gateway for a group."""
        with self._lock:
            group = self._members.groups.get(group_id)
            if group is not None:
                group.take_frame(load, at_s=self._clock(), is_awaited=is_awaited)

    def apply_events(self, group_id: GroupId, batch: EventBatch) -> Applied | NeedsResync:
        """Applies a group's block events to the directory; ignored if the group has left."""
        with self._lock:
            if group_id not in self._known:
                return Applied(0)
            before = self._directory.slots(group_id)
            answer = self._directory.apply(group_id, batch, now_s=self._clock())
            if (slots := self._directory.slots(group_id)) != before:
                self._members.heard(group_id, slots)
                self._are_lenders_stale = True
            return answer

    def events_position(self, group_id: GroupId) -> Position:
        """The position from which to subscribe to the group's events."""
        with self._lock:
            return self._directory.position(group_id)

    def expire(self) -> list[GroupId]:
        """Drops expired reservations, and the blocks of groups that stopped sending events.

        Call it about every second. Returns the groups whose events stopped.
        """
        with self._lock:
            now_s = self._clock()
            timely_s = now_s - self._config.reservation_timeout_s
            for group in self._members.groups.values():
                group.expire(routed_before_s=timely_s)
            for request_id in self._in_flight.overdue_calls(routed_before_s=timely_s):
                self._forget(request_id)  # `completed` still updates the log if it is called later.
            return self._directory.expire(now_s=now_s)

    def states(self) -> list[GroupState]:
        """Each group's current load, which the next decision would use."""
        return self.loads().states

    def loads(self) -> Loads:
        """A copy of each group's current load, with the numbers also as arrays."""
        with self._lock:
            return self._members.loads.copy()

    @property
    def num_gateways(self) -> int:
        """Gateways that send to the groups, this one included: the most that any group reports."""
        with self._lock:
            return self._members.loads.most_gateways

    def num_to_compute(self, num_prompt_tokens: float) -> float:
        """How many of ``num_prompt_tokens`` are uncached, by the share in recent decisions."""
        return self._computed.share * num_prompt_tokens

    def stats(self) -> RoutingStats:
        config, groups = self._config, self._members.groups
        with self._lock:
            return RoutingStats(
                num_routed=dict(self._num_routed),
                num_unroutable=self._num_unroutable,
                accuracy=self._accuracy.stats(),
                forecasts={
                    name: GroupForecasts(wait=group.wait, mean_error=group.forecast_error)
                    for name, group in groups.items()
                },
                num_in_flight=len(self._in_flight),
                max_in_flight=config.max_in_flight,
                num_in_flight_blocks=self._in_flight.num_blocks,
                max_in_flight_blocks=config.max_in_flight_blocks,
                num_reserved_tokens=sum(group.num_reserved_tokens for group in groups.values()),
                num_decisions_kept=self._log.num_decisions,
                max_decisions_kept=config.max_decisions_kept,
                num_candidates_kept=self._log.num_candidates,
                max_candidates_kept=config.max_candidates_kept,
                directory=self._directory.stats(),
            )

    def _elsewhere(self, lengths: Lengths, former: Source | None, now_s: float) -> Elsewhere | None:
        """Where blocks of a prompt are held, other than in the groups' KV caches."""
        members, lenders = self._members, self._lenders
        if self._are_lenders_stale:
            # Updated here rather than at each change: hundreds of groups change at about one time.
            lenders.update(self._exchanging, members.groups, self._directory.slots)
            self._are_lenders_stale = False
        if former is not None and former.group in self._exchanging:
            source: Source | None = former
        else:
            source = lenders.best(lengths, now_s=now_s) if lenders.names else None
        if source is None and members.num_tiers == 1:
            return None
        rest = 0.0
        if source is not None and (lender := members.groups.get(source.group)) is not None:
            rest = lender.state.step_rest_s(now_s) * lender.speeds.prefill_per_s
        return Elsewhere(
            members.slower_tiers(lengths),
            source=None if source is None else source.group,
            num_lent=0 if source is None else source.num_blocks,
            takes_G=lenders.takes_G,
            source_rest=rest,
        )

    def _forget(self, request_id: str) -> None:
        request = self._in_flight.remove(request_id)
        if request is not None:
            if request.source is not None:
                self._lenders.asked(request.source, -1)
            self._policy.finished(request.request, request.group.group_id)
