"""How busy the machine was, and how much of that was somebody else: runs beside it are worth less.

Read from /proc; where there is none, nothing is known.
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
    """Seconds since the machine started."""

    time_s: float
    busy_s: float
    """CPU time of all cores, what the host took of them included."""
    ours_s: float
    """CPU time of this process and its descendants."""

    @classmethod
    def now(cls, *, proc: Path = _PROC) -> Self | None:
        try:
            busy, ours = _busy(proc), sum(tree(os.getpid(), proc=proc).values())
        except (OSError, ValueError):
            return None
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


class Bystanders:
    """How much of the machine other processes take, from now on, while process ``pid`` is measured.

    A figure made beside others' work is low, and not equally so for all engines: one that waits for
    its threads at barriers loses most.
    """

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
        spent_s = after - self._before - _CLOCK_ERROR_S
        return max(0.0, spent_s / (elapsed_s * (os.cpu_count() or 1)))


def others_s(pid: int) -> float | None:
    """CPU seconds so far that were neither idle nor spent by ``pid``; see proc(5)."""
    try:
        busy = _busy(_PROC)
        # The name, in parentheses, may have spaces in it.
        process = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    own = int(process[11]) + int(process[12])
    return (busy - own) / os.sysconf("SC_CLK_TCK")


def _busy(proc: Path) -> int:
    """Ticks of all cores since the machine started, what the host took of them included."""
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
    """0 for a process that has ended."""
    with contextlib.suppress(OSError):
        pages = int((_PROC / str(pid) / "statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def descendants(pid: int) -> Iterator[int]:
    """Its children, theirs, and so on: cheaper than `tree`."""
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            for child in (task / "children").read_text().split():
                yield int(child)
                yield from descendants(int(child))
