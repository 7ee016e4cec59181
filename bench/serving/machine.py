"""How busy the machine was, and how much of that was somebody else: runs beside it are worth less.

Read from /proc; where there is none, nothing is known.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Seconds since the machine started."""

    time_s: float
    busy_s: float
    """CPU time of all cores, what the host took of them included."""
    ours_s: float
    """Of this process and all that descend from it."""

    @classmethod
    def now(cls, *, proc: Path = _PROC) -> Self | None:
        try:
            fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
            user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
            ours = _ours(proc)
        except (OSError, ValueError):
            return None
        busy = user + nice + system + irq + softirq + steal
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        return cls(time_s=time.monotonic(), busy_s=busy * tick_s, ours_s=ours * tick_s)

    def since(self, before: Self) -> dict[str, float]:
        """In cores: how many were busy, and how many of these with others' work."""
        duration_s = self.time_s - before.time_s
        busy, ours = self.busy_s - before.busy_s, self.ours_s - before.ours_s
        return {
            "busy_cores": round(busy / duration_s, 3),
            "others_cores": round(max(busy - ours, 0.0) / duration_s, 3),
        }


def _ours(proc: Path) -> int:
    """Ticks, those of children that have ended included."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for file in proc.glob("[0-9]*/stat"):
        try:
            text = file.read_text()
        except OSError:
            continue  # It has ended.
        # The name in the middle may contain anything.
        fields = text.rpartition(")")[2].split()
        number = int(file.parent.name)
        parents[number] = int(fields[1])
        ticks[number] = sum(map(int, fields[11:15]))
    ours = {os.getpid()}
    size = 0
    while len(ours) > size:
        size = len(ours)
        ours |= {number for number, parent in parents.items() if parent in ours}
    return sum(ticks.get(number, 0) for number in ours)
