"""Logs repeated failures with a rate limit: the first of each kind, then one per interval."""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

_MAX_KINDS = 64
"""The number of kinds of failures remembered."""


class FailureLog:
    """Logs failures of each kind at most once per interval. A kind is a type of exception and the
    action that failed. Not thread-safe."""

    def __init__(
        self,
        log: logging.Logger,
        *,
        every_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._every_s = every_s
        self._clock = clock
        self._seen: OrderedDict[tuple[type[BaseException], str], tuple[float, int]] = OrderedDict()

    def report(self, error: BaseException, doing: str, *, with_stack: bool = True) -> None:
        """Logs ``error``, unless one of its kind was logged within ``every_s``."""
        kind, now_s = (type(error), doing), self._clock()
        logged_s, num_unlogged = self._seen.get(kind, (-float("inf"), 0))
        if now_s - logged_s < self._every_s:
            self._seen[kind] = (logged_s, num_unlogged + 1)
            return
        more = f" ({num_unlogged} more like the last one since)" if num_unlogged else ""
        stack = error if with_stack else None
        self._log.warning("%s failed%s: %r", doing, more, error, exc_info=stack)
        self._seen[kind] = (now_s, 0)
        self._seen.move_to_end(kind)
        if len(self._seen) > _MAX_KINDS:
            self._seen.popitem(last=False)
