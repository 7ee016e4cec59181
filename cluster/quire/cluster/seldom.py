"""Warnings that strangers can cause as often as they like: one line in a while, with a count."""

import logging
import time
from collections.abc import Callable

EVERY_S = 60.0


class SeldomWarning:
    """Logs the first warning at once, and counts the others until `EVERY_S` have passed. Belongs to
    one thread."""

    def __init__(self, log: logging.Logger, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._next_s = clock()
        self._num_silent = 0

    def __call__(self, message: str, *values: object) -> None:
        now_s = self._clock()
        if now_s < self._next_s:
            self._num_silent += 1
            return
        if self._num_silent:
            message += f"; since the last such line, {self._num_silent} more times"
        self._log.warning(message, *values)
        self._next_s, self._num_silent = now_s + EVERY_S, 0
