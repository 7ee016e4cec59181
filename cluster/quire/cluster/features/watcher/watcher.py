"""A process that watches its parent, a gateway: ``… PID THREAD SILENCE_S [LISTENER ...]``.

A gateway that hangs still has its listening sockets, and the kernel assigns new connections to
them. So the watcher has duplicates of these sockets, and shuts them down once the gateway is
silent; the kernel then assigns connections only to other gateways. Streams are kept, in case the
gateway was only paused; after a longer silence it is killed.

The gateway's event loop sends heartbeats to the watcher's standard input. The gateway is silent if
none arrives *and* its thread neither ran nor waited for a processor or a disk meanwhile: on a busy
machine a healthy gateway may be late by any time.
"""

import os
import select
import signal
import socket
import sys
import time
from math import inf
from pathlib import Path

from quire.cluster.links.liveness import Liveness

CUT_OFF = 3
"""Exit status: the gateway continued after its listening sockets had been shut down."""
_KILLED_AFTER = 5
"""Silence after which the gateway is killed, as a multiple of the silence timeout."""
_AT_WORK = ("R", "D")
"""The kernel's states of a thread that runs or could run (R), or waits for a disk (D), which a
signal would not end either."""


class Pulse:
    """Tells from the kernel's data whether a thread is scheduled."""

    def __init__(self, thread: Path) -> None:
        self._thread = thread
        self._times = ""

    def is_felt(self) -> bool:
        """Whether the thread works, or has since the last call. Raises OSError: it has ended."""
        # The state follows the name, which may have spaces.
        state = (self._thread / "stat").read_text().rpartition(")")[2].split()[0]
        before, self._times = self._times, (self._thread / "schedstat").read_text()
        return state in _AT_WORK or self._times != before


def main() -> int:
    pid, thread_id, silence_timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The gateway decides when this ends.
    pulse = Pulse(Path(f"/proc/{pid}/task/{thread_id}"))
    try:
        _wait_until_silent(pulse, timeout_s=silence_timeout_s)
        for each in sys.argv[4:]:
            socket.socket(fileno=int(each)).shutdown(socket.SHUT_RD)
        _say(
            f"the gateway's process {pid} has not run for {silence_timeout_s:g} s: its new "
            "connections go to others"
        )
        killed_after_s = _KILLED_AFTER * silence_timeout_s
        if _wait_until_silent(pulse, timeout_s=killed_after_s, is_over_when_heard=True):
            return CUT_OFF
        if os.getppid() == pid:  # Otherwise it has ended, and another process may have its id.
            _say(f"it has not for another {killed_after_s:g} s: killed")
            os.kill(pid, signal.SIGKILL)
    except OSError:
        pass  # The gateway has ended.
    return 0


def _wait_until_silent(pulse: Pulse, *, timeout_s: float, is_over_when_heard: bool = False) -> bool:
    """Waits until the gateway is silent for ``timeout_s`` (False), or until its next heartbeat if
    ``is_over_when_heard`` (True). Raises OSError: the gateway has closed its end."""
    liveness = Liveness(silence_timeout_s=timeout_s, step_deadline_s=inf)
    while True:
        is_heard = _listen(liveness.beat_s)
        if is_heard and is_over_when_heard:
            return True
        if is_heard or pulse.is_felt():
            liveness.frame(0)
        if liveness.beat(is_owed=False) is not None:
            return False


def _listen(for_s: float) -> bool:
    """Reads heartbeats for ``for_s``; returns whether there were any. Raises OSError at once if the
    other end is closed."""
    end_s = time.monotonic() + for_s
    is_heard = False
    while (left_s := end_s - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left_s)[0]:
            if not os.read(sys.stdin.fileno(), 4096):
                raise BrokenPipeError
            is_heard = True
    return is_heard


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
