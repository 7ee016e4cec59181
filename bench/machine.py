"""Measures how busy the machine was, and with what other work, which makes runs less reliable.

It reads /proc; without it, nothing is reported.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Self

_PROC = Path("/proc")
_CLOCK_ERROR_S = 0.02
"""CPU time is counted in ticks of 10 ms, of process and machine apart: a short run is given two."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Counters at one moment, in seconds since the machine started."""

    time_s: float
    busy_s: float
    """CPU time of all cores, including what the host took of them."""
    ours_s: float
    """CPU time of a process and its descendants."""

    @classmethod
    def now(cls, pid: int | None = None, *, proc: Path = _PROC) -> Self | None:
        """Reads the counters now. ``pid`` is the process to watch; by default this one."""
        try:
            busy, ours = _busy(proc), sum(tree(pid or os.getpid(), proc=proc).values())
        except (OSError, ValueError):
            return None
        tick_s = 1 / os.sysconf("SC_CLK_TCK")
        return cls(time_s=time.monotonic(), busy_s=busy * tick_s, ours_s=ours * tick_s)

    def since(self, before: Self) -> dict[str, float]:
        """In cores: how many were busy, and how many of these with others' work.

        A figure made beside others' work is low, and not equally so for all engines: one that
        waits for its threads at barriers loses most.
        """
        duration_s = self.time_s - before.time_s
        busy, ours = self.busy_s - before.busy_s, self.ours_s - before.ours_s
        return {
            "busy_cores": round(busy / duration_s, 3),
            "others_cores": round(max(busy - ours - _CLOCK_ERROR_S, 0.0) / duration_s, 3),
        }


def _busy(proc: Path) -> int:
    """Ticks of all cores since the machine started, including what the host took of them."""
    fields = (proc / "stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, fields)
    return user + nice + system + irq + softirq + steal


def tree(pid: int, *, proc: Path = _PROC) -> dict[int, int]:
    """CPU ticks of the process and of its descendants, by their ids; those of children that have
    ended count as their parent's."""
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
    found = {pid}
    size = 0
    while len(found) > size:
        size = len(found)
        found |= {number for number, parent in parents.items() if parent in found}
    return {number: ticks[number] for number in found if number in ticks}


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB; 0 for one that has ended."""
    with contextlib.suppress(OSError):
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def descendants(pid: int) -> Iterator[int]:
    """Process ids of all descendants of the process; cheaper than `tree`."""
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))
