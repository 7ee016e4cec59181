"""A process that kills its parent, a gateway, once that hangs: ``… PID THREAD SILENCE_S``.

A hung gateway still has its listening sockets, and the kernel deals new connections to them as
before; only its end stops that. The gateway's event loop writes to the watcher's standard input in
beats. It hangs if none comes for the silence timeout *and* its thread neither ran nor waited for a
processor or a disk meanwhile: on a busy machine a healthy gateway may be late for any time.
"""

import os
import signal
import sys
import time
from math import inf
from pathlib import Path

from quire.cluster.links.liveness import Liveness

_AT_WORK = ("R", "D")
"""States of a thread that runs or could; and of one that waits for a disk, which a signal would not
end either."""


class Pulse:
    """Whether a thread of a process is scheduled, from what the kernel says of it."""

    def __init__(self, thread: Path) -> None:
        self._thread = thread
        self._times = ""

    def is_felt(self) -> bool:
        """Whether it is at work, or has been since the last call. Raises OSError: it has ended."""
        # Behind the name, which may have spaces.
        state = (self._thread / "stat").read_text().rpartition(")")[2].split()[0]
        before, self._times = self._times, (self._thread / "schedstat").read_text()
        return state in _AT_WORK or self._times != before


def main() -> None:
    pid, thread_id, silence_timeout_s = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The gateway decides when this ends.
    liveness = Liveness(silence_timeout_s=silence_timeout_s, step_deadline_s=inf)
    pulse = Pulse(Path(f"/proc/{pid}/task/{thread_id}"))
    os.set_blocking(sys.stdin.fileno(), False)
    while True:
        time.sleep(liveness.beat_s)
        try:
            if _is_heard() or pulse.is_felt():
                liveness.frame(0)
        except OSError:
            return
        # Our parent may have become another process since.
        if liveness.beat(is_owed=False) is not None and os.getppid() == pid:
            print(
                f"the gateway's process {pid} has not run for {silence_timeout_s:g} s: killed, so "
                "that its clients go to others",
                file=sys.stderr,
                flush=True,
            )
            os.kill(pid, signal.SIGKILL)
            return


def _is_heard() -> bool:
    """Raises OSError: the gateway has closed its end."""
    try:
        if not os.read(sys.stdin.fileno(), 4096):
            raise BrokenPipeError
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    main()
