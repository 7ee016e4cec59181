"""Prints a running cluster's status every few seconds.

On a terminal it is one line that changes; elsewhere a new line each time, while requests run.
"""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable
from typing import Self

from quire.cluster.deploy.gateway_calls import gateways_of
from quire.cluster.deploy.ticker import ERASE
from quire.cluster.telemetry.rates import is_busy, status_line
from quire.v1 import admin_pb2 as pb

_LIVE_EVERY_S = 2.0
_EVERY_S = 10.0
_JOIN_S = 5.0
_TIMEOUT_S = 5.0
_COLUMNS = 80


def look_at(app: str) -> pb.ListGroupsResponse:
    """Asks a gateway of the application for the state of its groups."""
    answer = gateways_of(app).list_groups.remote().result(timeout_s=_TIMEOUT_S)
    return pb.ListGroupsResponse.FromString(answer)


class StatusLine:
    """Prints the status while the block runs. It uses a thread, because a call to a Ray that has
    died may never return."""

    def __init__(self, look: Callable[[], pb.ListGroupsResponse], *, every_s: float | None) -> None:
        """``look`` asks a gateway for the state. ``every_s`` is the interval: 0 prints nothing;
        ``None`` is 2 s on a terminal and 10 s elsewhere."""
        self._look = look
        self._is_live = sys.stdout.isatty()
        default_s = _LIVE_EVERY_S if self._is_live else _EVERY_S
        self._every_s = default_s if every_s is None else every_s
        self._is_shown = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._repeat, name="quire-status", daemon=True)

    def __enter__(self) -> Self:
        if self._every_s > 0:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)
        self.clear()

    def clear(self) -> None:
        """Erases the line, before something else is printed."""
        with self._lock:
            if self._is_shown:
                self._write(ERASE)
            self._is_shown = False

    def _repeat(self) -> None:
        former: tuple[float, pb.ListGroupsResponse] | None = None
        while not self._ended.wait(self._every_s if former else 0.0):
            # Ray raises many kinds of error while it or the gateway is being replaced.
            with contextlib.suppress(Exception):
                now = time.monotonic(), self._look()
                if former is not None:
                    self._tell(former[1], now[1], interval_s=now[0] - former[0])
                former = now
            if former is None and self._ended.wait(self._every_s):
                break

    def _tell(
        self, before: pb.ListGroupsResponse, after: pb.ListGroupsResponse, *, interval_s: float
    ) -> None:
        text = status_line(before, after, interval_s=interval_s)
        with self._lock:
            if self._ended.is_set():
                return
            if self._is_live:
                # A line that wraps could not be erased.
                width = shutil.get_terminal_size((_COLUMNS, 0)).columns
                self._write(f"{ERASE}  {text}"[: len(ERASE) + width - 1])
                self._is_shown = True
            elif is_busy(before, after):
                self._write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # Standard output is closed.
            sys.stdout.write(text)
            sys.stdout.flush()
