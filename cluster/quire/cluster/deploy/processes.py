"""Ends what may hang: calls into Ray after their time, and processes without asking them.

Ray brings psutil: it can be imported once Ray has been.
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
_LAST_WISH_S = 2.0  # For a process to remove its temporary files.
_KILLED_S = 10.0  # Until a killed process is gone, unless it hangs in the kernel.


def finished(call: Callable[[], object], *, unless: Callable[[], bool]) -> bool:
    """Whether ``call``, which may hang, returned before ``unless`` was true; it is then abandoned.
    Raises what ``call`` raises."""
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
    """Kills also what they started, which would notice a minute later that they are gone."""
    import psutil

    found, unseen = [], list(started)
    while unseen:
        process = unseen.pop()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.suspend()  # It starts nothing more behind our back.
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
    """Ends ``also``, and each process that was started with ``setting`` in its environment: those
    that lost their parent are found by nothing else. (On Linux; elsewhere they are not found, nor
    are those that wrote their title over it.)

    They are asked first, for Python then removes its temporary files.
    """
    for number, limit_s in ((signal.SIGINT, _LAST_WISH_S), (signal.SIGKILL, _KILLED_S)):
        told: set[int] = set()
        end_s = time.monotonic() + limit_s
        # Looked for again, as they may start others.
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
        with contextlib.suppress(OSError):  # It has ended, or is somebody else's.
            if setting in file.read_bytes().split(b"\0"):
                pids.add(int(file.parent.name))
    return pids - {os.getpid()}


def _runs(process: "psutil.Process") -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
