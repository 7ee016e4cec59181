"""Writes the logs of groups and gateways into Ray Serve's log of each replica.

Serve keeps a log for each replica, ``logs/serve/replica_quire_…`` in Ray's session folder, and
writes the same to standard error. It only handles its own logger: without this module, Quire's
warnings would have no time or origin, and lower levels would be lost.

A thread writes the lines, so that a slow disk or pipe delays no request. If lines arrive faster
than it can write them, some are dropped, and the log says how many.
"""

import atexit
import contextlib
import logging
import queue
from logging.handlers import QueueHandler, QueueListener

from quire.cluster.config import LogSettings
from quire.cluster.telemetry.timeline import in_call

_MAX_LINES = 10_000
"""Most lines that may wait to be written."""
_CLOSE_S = 5.0


def log_beside_serve(config: LogSettings) -> None:
    """Makes Quire's loggers write where Serve's logger does, with the level and format of
    ``config``. Call it once in a Serve replica."""
    ours = logging.getLogger("quire")
    ours.setLevel(config.log_level.upper())
    theirs = logging.getLogger("ray.serve").handlers
    ours.propagate = not theirs
    if theirs:
        writer = LogWriter(theirs)
        atexit.register(writer.close)
        ours.handlers = [writer]


class LogWriter(QueueHandler):
    """Passes records to ``handlers`` in a thread. It adds the ids of the call to each record."""

    def __init__(self, handlers: list[logging.Handler], *, max_lines: int = _MAX_LINES) -> None:
        self.num_dropped = 0
        self._is_open = True
        self._lines: queue.Queue[logging.LogRecord] = queue.Queue(max_lines)
        super().__init__(self._lines)
        self._writer = _Writer(self._lines, *handlers, respect_handler_level=True)
        self._writer.start()

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        prepared: logging.LogRecord = super().prepare(record)
        call = in_call()
        if call is not None:
            for name in ("request_id", "trace_id", "span_id", "tenant"):
                if value := getattr(call, name):
                    vars(prepared).setdefault(name, value)
        return prepared

    def enqueue(self, record: logging.LogRecord) -> None:
        try:
            self._lines.put_nowait(record)
        except queue.Full:
            self.num_dropped += 1
            return
        if self.num_dropped and self._lines.qsize() < self._lines.maxsize // 2:
            num, self.num_dropped = self.num_dropped, 0
            logging.getLogger("quire").warning("%d lines are missing here: too many came", num)

    def close(self) -> None:
        """Writes the waiting lines, if that can be done in time, and ends the thread."""
        if self._is_open:
            self._is_open = False
            with contextlib.suppress(queue.Full):
                self._writer.stop()
        super().close()


class _Writer(QueueListener):
    """A `QueueListener` that can be stopped when its queue is full."""

    queue: "queue.Queue[logging.LogRecord | None]"

    def enqueue_sentinel(self) -> None:
        self.queue.put(None, timeout=_CLOSE_S)
