"""How much of the machine other processes took while one was measured.

A figure made beside others' work is low, and not equally so for all engines: one that waits for
its threads at barriers loses most. Results say how much there was.
"""

import os
import time
from pathlib import Path

CLOCK_ERROR_S = 0.02
"""CPU time is counted in ticks of 10 ms, of process and machine apart: a short run is given two."""


class Bystanders:
    """Watches from now on for what is not process ``pid``. Knows nothing but on Linux."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._begin = time.perf_counter()
        self._before = others_s(pid)

    def share(self) -> float | None:
        """CPU time of other processes since the beginning, of all cores' time."""
        after = others_s(self._pid)
        if self._before is None or after is None:
            return None
        elapsed_s = time.perf_counter() - self._begin
        spent_s = after - self._before - CLOCK_ERROR_S
        return max(0.0, spent_s / (elapsed_s * (os.cpu_count() or 1)))


def others_s(pid: int) -> float | None:
    """CPU seconds so far that were neither idle nor spent by ``pid``; see proc(5)."""
    try:
        machine = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        # The name, in parentheses, may have spaces in it.
        process = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, machine[:8])
    busy = user + nice + system + irq + softirq + steal
    own = int(process[11]) + int(process[12])
    return (busy - own) / os.sysconf("SC_CLK_TCK")
