"""Runs `Admission` in a gateway's event loop.

A waiting request is a future; changes of the groups' load or membership wake it. A request has left
the queue when the context of `AdmissionQueue.admit` ends, whether it finished, was cancelled or
missed its deadline.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from math import inf
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Gauge, Histogram

from quire.cluster.errors import (
    DeadlineExceeded,
    Overloaded,
    RefusalReason,
    Unavailable,
)
from quire.cluster.links.groups import Groups
from quire.cluster.serving.admission import Admission
from quire.cluster.serving.admission_config import AdmissionConfig
from quire.cluster.serving.bounds import Hold, Inflight
from quire.cluster.serving.capacity import Capacity
from quire.cluster.serving.ticket import Queued, Stage, Ticket
from quire.cluster.telemetry.metrics import refused_counter
from quire.router.table import RoutingTable

_MIN_PATIENCE_S = 5.0
"""A request may wait at least this long before it fails for exceeding its predicted wait."""
_WAIT_BUCKETS = (0.001, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _Waiter(NamedTuple):
    future: asyncio.Future[None]
    timeout: asyncio.Timeout
    begin_s: float


class AdmissionQueue:
    """The queue of one gateway's requests for admission. Belongs to one event loop."""

    def __init__(
        self,
        config: AdmissionConfig,
        *,
        groups: Groups,
        table: RoutingTable,
        registry: CollectorRegistry,
        start_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._capacity = Capacity(block_size=table.block_size, num_to_compute=table.num_to_compute)
        self._config = config
        self._start_wait_s = start_wait_s
        self._admission = Admission(config, self._capacity)
        self._groups = groups
        self._table = table
        self._clock = clock
        self._waiters: dict[Ticket, _Waiter] = {}
        self._starting = 0
        self._starting_tokens = 0
        self._will_pump = False
        self._has_groups = False
        self._changed_s = clock()  # When `_has_groups` changed.
        self._metrics = _Metrics(self, registry)
        groups.watch(self._on_members)
        groups.watch_loads(self._pump_soon)

    @property
    def queued(self) -> Queued:
        """Sums over the requests that wait at this gateway."""
        load = self._admission.queued_load
        return Queued(load.num_requests + self._starting, load.num_tokens + self._starting_tokens)

    def refused(self, reason: RefusalReason) -> None:
        """Counts a refusal in the metrics."""
        self._metrics.refused.labels(reason).inc()

    def check(self, priority: int, *, tenant: str = "", weight: float = 1.0) -> None:
        """Raises Overloaded if a request would be refused whatever its size. Called before it is
        tokenized."""
        if not self._some_wait:
            return
        now_s = self._clock()
        try:
            self._admission.check(
                priority, self._table.loads(), now_s=now_s, tenant=tenant, weight=weight
            )
        except Overloaded as error:
            self.refused(error.reason)
            raise

    def place_of(self, ticket: Ticket, inflight: Inflight) -> Hold:
        """Takes places in ``inflight`` for the ticket's completions. If there are too few, waiting
        requests that rank behind it are displaced. Raises Overloaded: these are too few."""
        missing = inflight.missing(ticket.num_requests)
        if missing:
            loads, now_s = self._table.loads(), self._clock()
            try:
                displaced = self._admission.make_way(
                    ticket, loads, num_requests=missing, now_s=now_s
                )
            except Overloaded as error:
                self.refused(error.reason)
                raise
            for each in displaced:
                self._displace(each)
        ticket.place = inflight.entered(ticket.num_requests)
        return ticket.place

    @contextmanager
    def starting(self, num_prompt_tokens: int) -> Iterator[None]:
        """Counts a request as waiting while the block runs, before the first group has attached.

        Raises:
            Overloaded: Too many requests wait.
        """
        if self.queued.num_requests >= self._config.max_queued_requests:
            raise self._overloaded(
                "queue_full",
                f"{self.queued.num_requests} requests wait for a first replica group, "
                f"--max-queued-requests is {self._config.max_queued_requests}",
            )
        self._starting += 1
        self._starting_tokens += num_prompt_tokens
        try:
            with self._groups.demand.waiting(max(num_prompt_tokens, 1)):
                yield
        finally:
            self._starting -= 1
            self._starting_tokens -= num_prompt_tokens

    @asynccontextmanager
    async def admit(self, ticket: Ticket) -> AsyncIterator[None]:
        """Enters the block when ``ticket`` may be sent to a group, and removes it at the end.

        Raises:
            Overloaded: The request is refused, nearly always at once.
            DeadlineExceeded: Its deadline passed while it waited.
            Unavailable: There was no group for ``start_wait_s``, or none will start.
        """
        begin_s = self._clock()
        try:
            try:
                displaced = self._admission.offer(ticket, self._table.loads(), now_s=begin_s)
            except Overloaded as error:
                self.refused(error.reason)
                raise
            for each in displaced:
                self._displace(each)
            if ticket.stage is Stage.QUEUED:
                self._pump_soon()  # Requests before it may wait for slots of their own tenants.
                await self._wait(ticket)
            self._metrics.wait.observe(self._clock() - begin_s)
            yield
        finally:
            if ticket.stage is Stage.BEGUN:
                self._capacity.ended(ticket.num_requests)
            self._admission.leave(ticket)
            self._pump_soon()

    def sending(self, ticket: Ticket) -> None:
        """Notes that the caller is about to create the tasks that route the request.

        A completion is routed before it awaits anything, so the routing table has the request after
        the tasks' first turn in the event loop.
        """
        if ticket.max_tokens:
            self._capacity.asked(ticket.max_tokens)
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(lambda: self._admission.routed(ticket)))

    def took(self, ticket: Ticket, *, num_tokens: int, num_cached_tokens: int = 0) -> None:
        """Counts ``num_tokens`` more output tokens; the first show that a group has begun the
        request. ``num_cached_tokens``: prompt tokens that the group found in its cache."""
        self._capacity.generated(num_tokens)
        if num_cached_tokens:
            self._admission.began_cached(ticket, num_cached_tokens=num_cached_tokens)
        self._admission.took(ticket, num_tokens=num_tokens)

    @property
    def _some_wait(self) -> bool:
        return self._admission.queued_load.num_requests > 0

    async def _wait(self, ticket: Ticket) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        begin_s = self._clock()
        try:
            with self._groups.demand.waiting(ticket.num_prompt_tokens):
                async with asyncio.timeout(None) as timeout:
                    self._waiters[ticket] = _Waiter(future, timeout, begin_s)
                    self._set_timeout(ticket)
                    await future
        except TimeoutError:
            raise self._impatience(ticket, begin_s) from None
        finally:
            self._waiters.pop(ticket, None)

    def _set_timeout(self, ticket: Ticket) -> None:
        """Sets how long the ticket may wait, by its deadline and by whether there are groups."""
        waiter = self._waiters[ticket]
        if waiter.timeout.expired():
            return
        # The predicted wait was at most half of this: the groups have become slower or fewer.
        wait_s = max(2 * self._config.max_queue_wait_s, _MIN_PATIENCE_S)
        if not self._has_groups:
            wait_s = self._start_wait_s if self._groups.may_come else 0.0
        end_s = min(max(waiter.begin_s, self._changed_s) + wait_s, ticket.deadline_s)
        now_s = asyncio.get_running_loop().time()
        waiter.timeout.reschedule(None if end_s == inf else now_s + end_s - self._clock())

    def _impatience(self, ticket: Ticket, begin_s: float) -> Exception:
        if self._clock() >= ticket.deadline_s:
            return DeadlineExceeded(
                "the request's deadline passed before a replica group began it: give it more time"
            )
        if not self._has_groups:
            return unavailable(self._groups)
        return self._overloaded(
            "timeout",
            f"no replica group began the request within {self._clock() - begin_s:.0f} s, though "
            f"one was expected to: --max-queue-wait-s is {self._config.max_queue_wait_s:g}",
        )

    def _displace(self, ticket: Ticket) -> None:
        error = self._overloaded(
            "displaced",
            f"requests of a higher priority than {ticket.priority}, or of tenants of which less "
            "waits, took its place in the queue",
        )
        if ticket.place is not None:
            ticket.place.release()
        waiter = self._waiters.get(ticket)
        if waiter is not None and not waiter.future.done():
            waiter.future.set_exception(error)

    def _overloaded(self, reason: RefusalReason, message: str) -> Overloaded:
        self.refused(reason)
        return Overloaded(f"{message}; try again in 1 s", reason=reason, retry_after_s=1.0)

    def _on_members(self) -> None:
        has_groups = self._groups.num_ready > 0
        if has_groups != self._has_groups:
            self._has_groups, self._changed_s = has_groups, self._clock()
        for ticket in self._waiters:
            self._set_timeout(ticket)
        self._pump_soon()

    def _pump_soon(self) -> None:
        """Schedules `_pump` once for all events of this turn of the event loop."""
        if self._some_wait and not self._will_pump:
            self._will_pump = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._will_pump = False
        if not self._some_wait:
            return
        for ticket in self._admission.release(self._table.loads(), now_s=self._clock()):
            future = self._waiters[ticket].future
            if not future.done():
                future.set_result(None)


def unavailable(groups: Groups) -> Unavailable:
    """The error for a model without a group that takes requests, with the groups' reasons."""
    reasons = "; ".join(groups.troubles()) or "none is known"
    return Unavailable(f"no replica group is ready, try again later: {reasons}")


class _Metrics:
    def __init__(self, queue: AdmissionQueue, registry: CollectorRegistry) -> None:
        self.refused = refused_counter(registry)
        self.wait = Histogram(
            "quire_queue_wait_seconds",
            "From a request's arrival in the gateway's queue to its leave to go to a group.",
            registry=registry,
            buckets=_WAIT_BUCKETS,
        )
        for name, help_text, index in (
            ("quire_queued_requests", "Completions that wait at the gateway.", 0),
            ("quire_queued_tokens", "Prompt tokens of these.", 1),
        ):
            gauge = Gauge(name, help_text, registry=registry)
            gauge.set_function(partial(_queued, queue, index))
        gauge = Gauge("quire_queued_bytes", "Memory that their prompts take up.", registry=registry)
        gauge.set_function(lambda: queue._admission.queued_load.num_bytes)
        gauge = Gauge(
            "quire_gateways", "Gateways that send to the groups, as these say.", registry=registry
        )
        gauge.set_function(lambda: queue._table.loads().most_gateways)


def _queued(queue: AdmissionQueue, index: int) -> float:
    return queue.queued[index]
