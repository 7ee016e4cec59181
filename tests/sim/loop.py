"""An event loop whose clock jumps, whose order is drawn from a seed, and whose processes can stop.

Nothing waits for real time: where a loop would sleep, the clock jumps to the next timer. Of the
callbacks that are ready in the same instant any order is one that a real cluster could show, so
the seed chooses one. Callbacks that a thread would post keep the order among themselves that
`loop.call_soon_threadsafe` promises.

A `Process` stands for one of the operating system's: whatever a task of it starts belongs to it
too, by way of its context. A frozen one's callbacks are put aside until it is thawed, those of
timers that went off in between included, as SIGSTOP and SIGCONT would have it.

When nothing is ready and no timer is set, nothing will ever happen again: `Deadlock` is raised.
"""

import asyncio
import contextvars
import heapq
import random
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_process: contextvars.ContextVar["Process | None"] = contextvars.ContextVar("process", default=None)


class Deadlock(Exception):
    """Every task waits for another one."""


class Process:
    """Tasks that are stopped, continued and killed together."""

    def __init__(self, loop: "SimLoop", name: str) -> None:
        self.name = name
        self.is_frozen = False
        self.is_dead = False
        self._loop = loop
        self._context = contextvars.copy_context()
        self._context.run(_process.set, self)
        self._parked: list[asyncio.Handle] = []
        self._tasks: dict[asyncio.Task[Any], None] = {}  # In the order in which they began.
        self._prune_at = 64

    def run(self, function: Callable[[], T]) -> T:
        """Calls ``function`` as code of this process."""
        return self._context.copy().run(function)

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task: asyncio.Task[T] = self._loop.create_task(coroutine, context=self._context.copy())
        return task

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen = False
        self._loop.resume(self._parked)
        self._parked = []

    def kill(self) -> None:
        """Cancels all tasks of the process. Code that sends messages on their behalf must check
        ``is_dead``, because a dead process sends nothing."""
        self.is_dead = True
        self.thaw()
        for task in self._tasks:
            task.cancel()

    @property
    def tasks(self) -> list[asyncio.Task[Any]]:
        """The tasks that have not ended."""
        return [task for task in self._tasks if not task.done()]

    def park(self, handle: asyncio.Handle) -> None:
        self._parked.append(handle)

    def adopt(self, task: asyncio.Task[Any]) -> None:
        if self.is_dead:
            task.cancel()
        self._tasks[task] = None
        if len(self._tasks) > self._prune_at:
            self._tasks = dict.fromkeys(self.tasks)
            self._prune_at = 2 * len(self._tasks) + 64


class SimLoop(asyncio.BaseEventLoop):
    """Made and run in one thread; it has no sockets, no signals and no threads."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._now_s = 0.0
        self._random = random.Random(seed)
        self._posted: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def time(self) -> float:
        return self._now_s

    def call_soon_threadsafe(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.Handle:
        self._posted.append((callback, args))
        return self.call_soon(self._run_posted, context=context)

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        task = super().create_task(coro, name=name, context=context)
        process = _process.get() if context is None else context.get(_process)
        if process is not None:
            process.adopt(task)
        return task

    def resume(self, handles: list[asyncio.Handle]) -> None:
        """Makes callbacks ready that had been parked."""
        self._ready.extend(handles)  # type: ignore[attr-defined]

    def _run_posted(self) -> None:
        callback, args = self._posted.popleft()
        callback(*args)

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        timers: list[asyncio.TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not ready and not self._stopping:  # type: ignore[attr-defined]
            while timers and timers[0].cancelled():
                heapq.heappop(timers)
            if not timers:
                raise Deadlock(f"at {self._now_s:.3f} s every task waits and no timer is set")
            self._now_s = max(self._now_s, timers[0].when())
        while timers and timers[0].when() <= self._now_s:
            ready.append(heapq.heappop(timers))
        handles = list(ready)
        ready.clear()
        if len(handles) > 1:
            self._random.shuffle(handles)
        for handle in handles:
            if handle.cancelled():
                continue
            process = handle._context.get(_process)  # type: ignore[attr-defined]
            if process is not None and process.is_frozen:
                process.park(handle)
                continue
            handle._run()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It stays in the heap until its time has come."""

    def _write_to_self(self) -> None:
        pass


def simulate(main: Callable[[SimLoop], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Runs ``main`` to its end.

    Raises:
        Deadlock: It can never end. Which tasks waited is in the exception's notes.
    """
    loop = SimLoop(seed)
    try:
        return loop.run_until_complete(main(loop))
    except Deadlock as error:
        for task in asyncio.all_tasks(loop):
            error.add_note(repr(task))
        raise
    finally:
        _cancel_all(loop)
        loop.close()


def _cancel_all(loop: SimLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_asyncgens())
