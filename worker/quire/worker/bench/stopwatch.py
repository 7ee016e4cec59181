"""Times functions by replacing them while they are watched.

Outside of `watching` they are unchanged, so that unprofiled code pays nothing.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple


class Target(NamedTuple):
    """A function to time: the attribute ``name`` of a class or module."""

    owner: Any
    name: str
    label: str
    finish: Callable[[], None] | None = None
    """Called after the function, and timed with it."""


class Stopwatch:
    """Nanoseconds by label. A function's time is its own: less that of others timed within it."""

    def __init__(self) -> None:
        self._times_ns: dict[str, int] = {}
        self._inner_ns: list[int] = []  # Of each timed function under way: time of those within.

    def take(self) -> dict[str, int]:
        """The times since the last call; resets them."""
        times_ns, self._times_ns = self._times_ns, {}
        return times_ns

    @contextmanager
    def watching(self, *targets: Target) -> Iterator[None]:
        """Times ``targets`` until the context ends."""
        with ExitStack() as stack:
            for target in targets:
                timed = self._timed(getattr(target.owner, target.name), target)
                stack.enter_context(replaced(target.owner, target.name, timed))
            yield

    def _timed(self, function: Callable[..., Any], target: Target) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._inner_ns.append(0)
            begin_ns = time.perf_counter_ns()
            try:
                result = function(*args, **kwargs)
                if target.finish is not None:
                    target.finish()
                return result
            finally:
                took_ns = time.perf_counter_ns() - begin_ns
                own_ns = took_ns - self._inner_ns.pop()
                self._times_ns[target.label] = self._times_ns.get(target.label, 0) + own_ns
                if self._inner_ns:
                    self._inner_ns[-1] += took_ns

        return timed


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a class or module until the context ends."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
