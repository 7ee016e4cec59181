"""Abandons calls into Ray that hang, and kills processes.

psutil comes with Ray, and can only be imported after it.
"""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import psutil

_LOOK_EVERY_S = 0.2
_LAST_WISH_S = 2.0  # Time for a process to remove its temporary files.
_KILLED_S = 10.0  # Time for a killed process to be gone, unless it hangs in the kernel.


def finished(call: Callable[[], object], *, unless: Callable[[], bool]) -> bool:
    """Runs ``call``, which may hang, in a thread; returns whether it ended. It is abandoned once
    ``unless`` is true. Raises what ``call`` raises."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        if unless():
            return False
        thread.join(_LOOK_EVERY_S)
    if raised:
        raise raised[0]
    return True


def kill(started: "Iterable[psutil.Process]") -> None:
    """Kills processes and their descendants, which would only notice a minute later that they are
    gone."""
    import psutil

    found, unseen = [], list(started)
    while unseen:
        process = unseen.pop()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()  # So that it starts no further processes.
            unseen += process.children()
            found.append(process)
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(found, timeout=_KILLED_S)


def descendants(pid: int) -> "list[psutil.Process]":
    import psutil

    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def end_all_with(setting: str, also: "Sequence[psutil.Process]") -> None:
    """Ends ``also``, and each process with ``setting`` in its environment: orphans cannot be found
    otherwise. (They are found on Linux only, and not if their title has overwritten it.)

    They get SIGINT first, at which Python removes its temporary files, and then SIGKILL.
    """
    for number, limit_s in ((signal.SIGINT, _LAST_WISH_S), (signal.SIGKILL, _KILLED_S)):
        told: set[int] = set()
        end_s = time.monotonic() + limit_s
        # Repeated, because they may start others.
        while pids := _pids_with(setting.encode()) | {each.pid for each in also if _runs(each)}:
            if time.monotonic() > end_s:
                break
            for pid in pids - told:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            told |= pids
            time.sleep(_LOOK_EVERY_S / 2)


def _pids_with(setting: bytes) -> set[int]:
    pids = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
            if setting in file.read_bytes().split(b"\0"):
                pids.add(int(file.parent.name))
    return pids - {os.getpid()}


def _runs(process: "psutil.Process") -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
