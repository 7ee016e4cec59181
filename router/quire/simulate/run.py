"""Runs a trace through simulated gateways and groups, event by event.

Nothing is read but the trace, the configuration and the seed: the same three give the same result
to the last bit (`Result.digest`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from math import ceil, inf
from typing import Literal, get_args

from quire.simulate.baselines import SIMULATED_POLICIES
from quire.simulate.clock import Clock
from quire.simulate.cost import PRESETS, CostModel
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.gateway import SimulatedGateway
from quire.simulate.group import Group
from quire.simulate.network import Network
from quire.simulate.pool import Lru, Pool, WorkerPool
from quire.simulate.result import Result
from quire.simulate.trace import Trace
from quire.simulate.travel import Fetching, HostLog, TravelConfig
from quire.worker.blocks.events import EventLog
from quire.worker.cache.eviction import LowestUtility
from quire.worker.request.errors import ConfigError

Eviction = Literal["plain-lru", "utility"]
_ORDINALS_APART = 1_000_003
"""Distance between the first ordinals of two gateways, so that their draws differ."""


@dataclass(frozen=True, kw_only=True)
class SimulationConfig:
    """Raises:
    ConfigError: A value cannot work; the message names it and what would be right.
    """

    num_groups: int = 16
    num_gateways: int = 1
    """Requests go to them in turn. Each knows only of its own requests until frames show them."""
    policy: str = "prefix_aware"
    cost: CostModel = PRESETS["h100-8b"]
    engine: SimulatedEngine = field(default_factory=SimulatedEngine)
    eviction: Eviction = "plain-lru"
    """``utility`` is the engine's policy. Both run in the engine's block pool."""
    event_lag_ms: float = 0.0
    event_loss: float = 0.0
    """The share of block events that are lost on their way; the protocol notices the next one."""
    slow_factor: float = 1.0
    """Every fourth group is slower than the others by this factor, and the router is not told."""
    contention: float = 0.0
    """How much longer a step takes for each other group that computes as it begins, as a share of
    the step: groups that share cores."""
    seed: int = 0
    travel: TravelConfig = field(default_factory=TravelConfig)

    def __post_init__(self) -> None:
        if self.policy not in SIMULATED_POLICIES:
            names = ", ".join(SIMULATED_POLICIES)
            raise ConfigError(f"policy={self.policy!r}: must be one of {names}")
        if self.eviction not in get_args(Eviction):
            names = ", ".join(get_args(Eviction))
            raise ConfigError(f"eviction={self.eviction!r}: must be one of {names}")
        for name in ("num_groups", "num_gateways", "slow_factor"):
            if not getattr(self, name) > 0:  # Nor is what is not a number.
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be above 0")
        for name in ("event_lag_ms", "contention"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must not be negative")
        if not 0 <= self.event_loss < 1:
            raise ConfigError(f"event_loss={self.event_loss!r}: must be at least 0 and below 1")
        if not self.cost.kv_bytes_per_token and self.travel.is_used:
            raise ConfigError(
                "kv_bytes_per_token=0: must be what a token's KV takes, for KV to travel"
            )


MakePool = Callable[[EventLog], Pool]


def simulate(
    trace: Trace,
    config: SimulationConfig,
    *,
    make_pool: MakePool | None = None,
) -> Result:
    """``make_pool``: a pool to try instead of the configuration's, at each group; it says in the
    log what comes and goes.

    Raises:
        ConfigError: A request of the trace does not fit into a group's cache.
    """
    return _Simulation(trace, config, make_pool).run()


class _Simulation:
    def __init__(self, trace: Trace, config: SimulationConfig, make_pool: MakePool | None) -> None:
        self._trace = trace
        self._config = config
        self._clock = Clock()
        self._num_blocks = config.cost.num_cache_tokens // trace.block_size
        _check_fit(trace, num_blocks=self._num_blocks)
        size = len(trace)
        self._group_of = [0] * size
        self._first_ms, self._last_ms = [0.0] * size, [0.0] * size
        self._predicted, self._hit = [0] * size, [0] * size
        travel, block_bytes = config.travel, config.cost.kv_bytes_per_token * trace.block_size
        num_host_blocks = travel.host_tokens // trace.block_size
        logs = [HostLog(epoch=1, num_blocks=num_host_blocks) for _ in range(config.num_groups)]
        self._copy_ms = block_bytes / travel.host_gb_s / 1e6
        self._network = None
        if travel.transfer_gb_s:
            self._network = Network(
                num_groups=config.num_groups, blocks_per_ms=travel.transfer_gb_s * 1e6 / block_bytes
            )
        self._gateways = [self._build_gateway(i, logs) for i in range(config.num_gateways)]
        pools = [(make_pool or self._build_pool)(log) for log in logs]
        self._groups = [
            self._build_group(index, pool, log)
            for index, (pool, log) in enumerate(zip(pools, logs, strict=True))
        ]
        self._ends: list[tuple[float, int]] = []  # Of steps, and the groups that run them.

    def run(self) -> Result:
        """Arrivals and ends of steps in the order of time; an end goes first."""
        trace, clock, groups = self._trace, self._clock, self._groups
        arrivals, num_requests = trace.arrival_ms, len(trace)
        ends = self._ends
        request_id = 0
        while True:
            arrival = arrivals[request_id] if request_id < num_requests else inf
            if self._network is not None and self._network.next_ms < inf:
                end = ends[0][0] if ends else inf
                if self._network.next_ms <= min(arrival, end):
                    self._advance_network(self._network)
                    continue
            if ends and ends[0][0] <= arrival:
                now, index = heappop(ends)
                group = groups[index]
                if group.wake_at != now:
                    continue  # That run of steps was cut short.
                clock.now_ms = now
                group.end(now)
                for gateway in self._gateways:
                    gateway.frame(index, group)
                group.begin(now)
                if group.wake_at is not None:
                    heappush(ends, (group.wake_at, index))
                continue
            if request_id == num_requests:
                break
            clock.now_ms = arrival
            self._send(request_id)
            request_id += 1
        return self._result()

    def _send(self, request_id: int) -> None:
        routed = self._gateway_of(request_id).route(request_id)
        self._group_of[request_id] = routed.group
        self._predicted[request_id] = routed.num_predicted_tokens
        now, offer = self._clock.now_ms, None
        if routed.source is not None:
            chain = self._trace.chains[request_id]
            lender = self._groups[routed.source]
            offer = lender.offer(routed.source, chain, routed.num_source_blocks, now)
            offer = offer._replace(starts_ms=offer.starts_ms + self._config.travel.transfer_ms)
        with self._woken(routed.group) as group:
            group.add(request_id, now, offer)

    def _advance_network(self, network: Network) -> None:
        now = self._clock.now_ms = max(network.next_ms, self._clock.now_ms)
        for transfer in network.advance(now):
            with self._woken(transfer.target) as group:
                group.resume(transfer, now)

    @contextmanager
    def _woken(self, index: int) -> Iterator[Group]:
        """A group whose next step may be another one afterwards."""
        group = self._groups[index]
        before = group.wake_at
        yield group
        if group.wake_at is not None and group.wake_at != before:
            heappush(self._ends, (group.wake_at, index))

    def _first_token(self, request_id: int, num_hit_tokens: int) -> None:
        self._first_ms[request_id] = self._clock.now_ms
        self._hit[request_id] = num_hit_tokens
        self._gateway_of(request_id).started(request_id, num_hit_tokens)

    def _finish(self, request_id: int) -> None:
        self._last_ms[request_id] = self._clock.now_ms
        self._gateway_of(request_id).finished(request_id)

    def _slowdown(self, index: int) -> float:
        others = (group for number, group in enumerate(self._groups) if number != index)
        num_computing = sum(group.wake_at is not None for group in others)
        return 1.0 + self._config.contention * num_computing

    def _gateway_of(self, request_id: int) -> SimulatedGateway:
        return self._gateways[request_id % len(self._gateways)]

    def _build_gateway(self, number: int, logs: Sequence[EventLog]) -> SimulatedGateway:
        config = self._config
        return SimulatedGateway(
            trace=self._trace,
            clock=self._clock,
            logs=logs,
            policy=SIMULATED_POLICIES[config.policy](),
            lag_ms=config.event_lag_ms,
            loss=config.event_loss,
            seed=config.seed + number,
            first_ordinal=number * _ORDINALS_APART,
            lends=config.travel.transfer_gb_s > 0,
        )

    def _build_pool(self, log: EventLog) -> Pool:
        return WorkerPool(
            num_blocks=self._num_blocks,
            block_size=self._trace.block_size,
            log=log,
            policy=LowestUtility if self._config.eviction == "utility" else Lru,
        )

    def _build_group(self, index: int, pool: Pool, log: HostLog) -> Group:
        config, fetching = self._config, None
        if config.travel.is_used:
            fetching = Fetching(
                index=index,
                log=log,
                network=self._network,
                patience=config.travel.patience,
                block_size=self._trace.block_size,
            )
        slow = config.slow_factor if index % 4 == 0 else 1.0
        return Group(
            trace=self._trace,
            cost=config.cost.slowed(slow),
            config=config.engine,
            pool=pool,
            on_first_token=self._first_token,
            on_finish=self._finish,
            slowdown=partial(self._slowdown, index) if config.contention else None,
            fetching=fetching,
            copy_ms=self._copy_ms,
        )

    def _result(self) -> Result:
        trace = self._trace
        assert all(self._last_ms), "a request was never served"
        return Result(
            num_groups=self._config.num_groups,
            num_input=trace.num_input,
            arrival_ms=trace.arrival_ms,
            first_token_ms=self._first_ms,
            last_token_ms=self._last_ms,
            group=self._group_of,
            predicted_hit=self._predicted,
            hit=self._hit,
        )


def _check_fit(trace: Trace, *, num_blocks: int) -> None:
    room = num_blocks * trace.block_size
    for index, (num_input, num_output) in enumerate(
        zip(trace.num_input, trace.num_output, strict=True)
    ):
        needed = ceil((num_input + num_output) / trace.block_size)
        if needed > num_blocks:
            raise ConfigError(
                f"request {index} of {trace.name} has {num_input} + {num_output} tokens, a group "
                f"has room for {room}: give groups a larger cache, or leave it out"
            )
