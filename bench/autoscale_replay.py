"""Groups of the simulator that come and go as the autoscaling policy says, on a virtual clock.

Groups report once a second and the policy is asked twice a second, a fifth of a second after them:
slower than under Ray Serve. A request goes to the group with the least prefill ahead of it and of
its own, cached prefixes subtracted. The newest group goes; it finishes what it has,
and counts until then.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import inf

from quire.cluster.scaling.policy import Observation, Sample, State, decide
from quire.cluster.scaling.settings import AutoscalingSettings
from quire.simulate.cost import PRESETS
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.group import Group
from quire.simulate.pool import WorkerPool
from quire.simulate.trace import Trace
from quire.worker.api.events import EventLog

REPORT_MS = 1000.0
DECIDE_MS = 500.0
LAG_MS = 200.0
_WINDOW = 7  # Samples in what Serve looks back on.
COST = PRESETS["h100-8b"]
ENGINE = SimulatedEngine(max_num_seqs=256)


def at_rates(trace: Trace, rates: list[float], *, minutes: float) -> Trace:
    """The trace's requests in parts of equal length, each at its own rate. The trace repeats when
    it ends. A part at rate 0 is empty."""
    part_ms = 60_000 * minutes / len(rates)
    rows, source = [], trace.rows
    length_ms = source[-1].arrival_ms + 1
    taken = 0

    def source_ms() -> float:
        rounds, index = divmod(taken, len(source))
        return rounds * length_ms + source[index].arrival_ms

    for number, rate in enumerate(rates):
        begin_ms = source_ms()
        while rate and (now_ms := (source_ms() - begin_ms) / rate) < part_ms:
            row = source[taken % len(source)]
            rows.append(row._replace(arrival_ms=number * part_ms + now_ms))
            taken += 1
    return Trace.of(rows, name=trace.name, block_size=trace.block_size)


@dataclass(eq=False)
class Elastic:
    """A simulated group with what it reports."""

    group: Group
    pool: WorkerPool
    asked_ms: float
    ready_ms: float
    is_leaving: bool = False
    num_tokens: int = 0
    num_full_tokens: int = 0
    full_ms: float = 0.0
    began: tuple[float, int] = (0.0, 0)
    """The step under way: when, and with how many tokens pending."""
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=_WINDOW))

    def end(self, now_ms: float) -> None:
        """Ends a step, counts it, and begins the next."""
        before = self.group.num_pending
        self.group.end(now_ms)
        done = before - self.group.num_pending
        began_ms, began_pending = self.began
        self.num_tokens += done
        if done and began_pending > done:
            self.num_full_tokens += done
            self.full_ms += now_ms - began_ms
        self.group.begin(now_ms)
        self.began = now_ms, self.group.num_pending

    def report(self, now_ms: float) -> None:
        group, pool = self.group, self.pool
        kv_use = 1 - pool.num_available / pool.num_blocks
        self.samples.append(
            Sample(
                time_s=now_ms / 1000,
                num_pending_prefill_tokens=group.num_pending,
                num_prefilled_tokens=self.num_tokens,
                num_full_step_tokens=self.num_full_tokens,
                full_step_s=self.full_ms / 1000,
                num_running=group.num_running,
                num_waiting=group.num_waiting,
                max_num_seqs=ENGINE.max_num_seqs,
                kv_use=kv_use,
            )
        )


class Replay:
    """One run. ``fixed`` keeps that number of groups instead of asking the policy."""

    def __init__(
        self,
        trace: Trace,
        settings: AutoscalingSettings,
        *,
        start_ms: float,
        fixed: int | None = None,
    ) -> None:
        self.ttft_ms = [inf] * len(trace)
        self.changes: list[tuple[float, int, str]] = []
        """Seconds, groups from then on, and why."""
        self.pending: list[tuple[float, int]] = []
        self.group_ms = 0.0
        """Time of all groups, those that start and those that leave too."""
        self._trace, self._settings, self._start_ms = trace, settings, start_ms
        self._fixed = fixed
        self._state = State()
        self._now_ms = 0.0
        self._next_request, self._next_report_ms, self._next_decision_ms = 0, REPORT_MS, LAG_MS
        self._queue: list[int] = []  # Requests that wait at the gateway.
        self._groups: list[Elastic] = []
        self._ends: list[tuple[float, int]] = []
        self._all: list[Elastic] = []
        for _ in range(settings.min_groups if fixed is None else fixed):
            self._start(ready_ms=0.0)

    def run(self) -> None:
        arrivals = self._trace.arrival_ms
        while self._next_request < len(arrivals) or self._ends or self._queue:
            arrival = arrivals[self._next_request] if self._next_request < len(arrivals) else inf
            end = self._ends[0][0] if self._ends else inf
            next_ms = min(arrival, end, self._next_report_ms, self._next_decision_ms)
            self._now_ms = next_ms
            if next_ms == end:
                self._end(heappop(self._ends))
            elif next_ms == self._next_report_ms:
                self._next_report_ms += REPORT_MS
                for each in self._running():
                    each.report(next_ms)
            elif next_ms == self._next_decision_ms:
                self._next_decision_ms += DECIDE_MS
                self._decide()
            else:
                self._next_request += 1
                self._route(self._next_request - 1)
        for each in self._groups:
            self.group_ms += self._now_ms - each.asked_ms

    def steps(self) -> list[tuple[tuple[float, int, str], tuple[float, int, str]]]:
        """Each change with the one before it."""
        return list(zip(self.changes[1:], self.changes, strict=False))

    def _running(self) -> list[Elastic]:
        return [each for each in self._groups if each.ready_ms <= self._now_ms]

    def _decide(self) -> None:
        running = self._running()
        while self._queue and any(not each.is_leaving for each in running):
            self._route(self._queue.pop(0))
        self.pending.append((self._now_ms / 1000, sum(each.group.num_pending for each in running)))
        if self._fixed is not None:
            return
        staying = [each for each in self._groups if not each.is_leaving]
        candidates = [each for each in running if not each.is_leaving]
        observation = Observation(
            num_groups=len(staying),
            groups=[tuple(each.samples) for each in candidates],
            num_gateway_tokens=sum(self._trace.num_input[request] for request in self._queue),
        )
        now_s = self._now_ms / 1000
        decision, self._state = decide(observation, self._state, now_s, self._settings)
        if not self.changes or self.changes[-1][1] != decision.num_groups:
            self.changes.append((now_s, decision.num_groups, decision.reason))
        for _ in range(decision.num_groups - len(staying)):
            self._start(ready_ms=self._now_ms + self._start_ms)
        # What does not run yet goes first, as under Ray Serve.
        order = [each for each in reversed(staying) if each not in candidates]
        order += reversed(candidates)
        for each in order[: max(len(staying) - decision.num_groups, 0)]:
            each.is_leaving = True
            self._leave(each)

    def _start(self, *, ready_ms: float) -> None:
        size = self._trace.block_size
        pool = WorkerPool(
            num_blocks=COST.num_cache_tokens // size, block_size=size, log=EventLog(epoch=1)
        )
        group = Group(
            trace=self._trace,
            cost=COST,
            config=ENGINE,
            pool=pool,
            on_first_token=self._first_token,
            on_finish=lambda _: None,
        )
        each = Elastic(group=group, pool=pool, asked_ms=self._now_ms, ready_ms=ready_ms)
        self._groups.append(each)
        self._all.append(each)

    def _leave(self, each: Elastic) -> None:
        if each.group.wake_at is None:
            self._groups.remove(each)
            self.group_ms += self._now_ms - each.asked_ms

    def _route(self, request_id: int) -> None:
        groups = [each for each in self._running() if not each.is_leaving]
        if not groups:
            self._queue.append(request_id)
            return
        trace = self._trace
        chain, num_input = trace.chains[request_id], trace.num_input[request_id]
        limit = (num_input - 1) // trace.block_size

        def cost(each: Elastic) -> tuple[float, int]:
            missing = num_input - trace.block_size * each.pool.match(chain, limit)
            return each.group.num_pending + missing, each.group.num_running

        best = min(groups, key=cost)
        before = best.group.wake_at
        best.group.add(request_id, self._now_ms)
        if best.group.wake_at != before and best.group.wake_at is not None:
            if before is None:
                best.began = self._now_ms, best.group.num_pending
            heappush(self._ends, (best.group.wake_at, self._all.index(best)))

    def _end(self, event: tuple[float, int]) -> None:
        now_ms, index = event
        each = self._all[index]
        if each.group.wake_at != now_ms:
            return  # That run of steps was cut short.
        each.end(now_ms)
        if each.group.wake_at is not None:
            heappush(self._ends, (each.group.wake_at, index))
        elif each.is_leaving:
            self._leave(each)

    def _first_token(self, request_id: int, _: int) -> None:
        self.ttft_ms[request_id] = self._now_ms - self._trace.arrival_ms[request_id]
