"""A seeded event loop with a virtual clock, random callback order, and processes that can freeze.

Nothing waits for real time: where a loop would sleep, the clock jumps to the next timer. A real
cluster could run callbacks that are ready at the same instant in any order, so the seed chooses
one. Callbacks posted by `loop.call_soon_threadsafe` keep their order among themselves, as asyncio
guarantees.

A `Process` stands for an operating system's process. Tasks that its tasks start belong to it too,
through their context. While it is frozen, its callbacks are put aside, including those of timers
that expire meanwhile, as with SIGSTOP and SIGCONT.

When nothing is ready and no timer is set, nothing can happen again, and `Deadlock` is raised.
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
    """Every task waits and no timer is set."""


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
        self._tasks: dict[asyncio.Task[Any], None] = {}  # In order of their start.
        self._prune_at = 64

    def run(self, function: Callable[[], T]) -> T:
        """Calls ``function`` in the context of this process."""
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
    """The loop: created and run in one thread, without sockets, signals or other threads."""

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
        """Makes parked callbacks ready again."""
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
        """Does nothing: a cancelled timer stays in the heap until its time."""

    def _write_to_self(self) -> None:
        pass


def simulate(main: Callable[[SimLoop], Coroutine[Any, Any, T]], *, seed: int) -> T:
    """Runs ``main`` to its end.

    Raises:
        Deadlock: ``main`` can never end. The exception's notes name the waiting tasks.
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
