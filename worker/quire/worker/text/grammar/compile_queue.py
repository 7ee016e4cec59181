"""The fair queue of constraints to compile, and the threads that compile them.

Each tenant has two flows, for short and for long texts: slow constraints usually have long texts,
and so do not delay short ones. One constraint of a flow is compiled at a time. After one that took
long, its flow pauses, so that no tenant gets more than a share of one core. The flow that used the
least time in the last minute goes first.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from quire.worker.request.structured import Constraint
from quire.worker.text.grammar.recent import RecentSeconds

T = TypeVar("T")

_LONG_CHARS = 1024
_SHARE = 0.25
"""The share of one core for constraints that take longer than usual ones."""
_HONEST_S = 0.05
_MAX_FLOWS = 1024
"""Most flows whose used time is remembered."""

FlowKey = tuple[str, bool]


@dataclass
class _Flow:
    used: RecentSeconds
    waiting: deque[Callable[[], object]] = field(default_factory=deque)
    is_running: bool = False
    from_s: float = 0.0


class CompileQueue:
    """Decides which constraint is compiled next. Compiles nothing."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._flows: dict[FlowKey, _Flow] = {}

    def put(self, work: Callable[[], object], *, tenant: str, num_chars: int) -> None:
        key = tenant, num_chars > _LONG_CHARS
        if key not in self._flows and len(self._flows) >= _MAX_FLOWS:
            self._forget_one()
        flow = self._flows.setdefault(key, _Flow(RecentSeconds(self._clock)))
        flow.waiting.append(work)

    def take(self) -> tuple[FlowKey, Callable[[], object]] | None:
        """Removes the next work and returns it with its flow; `finished` must follow. ``None`` if
        none may begin now."""
        now_s = self._clock()
        ready = [
            (flow.used.sum_s, number, key)
            for number, (key, flow) in enumerate(self._flows.items())
            if flow.waiting and not flow.is_running and flow.from_s <= now_s
        ]
        if not ready:
            return None
        *_, key = min(ready)
        flow = self._flows[key]
        flow.is_running = True
        return key, flow.waiting.popleft()

    def finished(self, key: FlowKey, took_s: float) -> None:
        flow = self._flows[key]
        flow.is_running = False
        flow.used.add(took_s)
        flow.from_s = self._clock() + max(0.0, took_s - _HONEST_S) * (1 / _SHARE - 1)

    def pause_s(self) -> float | None:
        """Seconds until a paused flow may continue; ``None`` if none waits."""
        paused = [
            flow.from_s for flow in self._flows.values() if flow.waiting and not flow.is_running
        ]
        return max(0.0, min(paused) - self._clock()) if paused else None

    def _forget_one(self) -> None:
        idle = [
            (flow.used.sum_s, key)
            for key, flow in self._flows.items()
            if not flow.waiting and not flow.is_running
        ]
        if idle:
            del self._flows[min(idle)[1]]


class CompileThreads:
    """Up to ``number`` threads that compile constraints. They start when needed."""

    def __init__(self, number: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._number = number
        self._clock = clock
        self._queue = CompileQueue(clock=clock)
        self._work = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
        self._is_closed = False

    def submit(
        self, function: Callable[[], T], constraint: Constraint, *, tenant: str
    ) -> Future[T]:
        """Runs ``function``, which compiles ``constraint`` of ``tenant``, when its turn comes."""
        future: Future[T] = Future()
        with self._work:
            self._queue.put(
                partial(_run, future, function), tenant=tenant, num_chars=len(constraint.text)
            )
            if not self._num_idle and len(self._threads) < self._number:
                thread = threading.Thread(target=self._go, name="quire-grammar", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._work.notify()
        return future

    def close(self) -> None:
        """Ends the threads. Waiting work is never run."""
        with self._work:
            self._is_closed = True
            self._work.notify_all()

    def _go(self) -> None:
        while True:
            with self._work:
                self._num_idle += 1
                while (turn := self._queue.take()) is None and not self._is_closed:
                    self._work.wait(self._queue.pause_s())
                self._num_idle -= 1
                if turn is None or self._is_closed:
                    return
            key, work = turn
            began_s = self._clock()
            work()
            with self._work:
                self._queue.finished(key, self._clock() - began_s)
                self._work.notify()


def _run(future: "Future[Any]", function: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = function()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
