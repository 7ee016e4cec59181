"""Starts a gateway's watcher process (`features.watcher.watcher`) and sends it heartbeats."""

import asyncio
import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.cluster.features.watcher import watcher

_log = logging.getLogger(__name__)

_AGAIN_S = 5.0
_BEATS = 16
"""Heartbeats within the silence timeout, twice as many as the watcher expects."""


async def be_watched(
    listeners: Callable[[], Iterator[socket.socket]], *, silence_timeout_s: float
) -> None:
    """Runs a watcher for this process and its event loop until cancelled. Returns once the watcher
    has shut down the sockets of ``listeners``, of which it gets duplicates."""
    if not Path("/proc/self/schedstat").exists():
        _log.warning("the kernel does not tell what runs: a gateway that hangs is found by Serve")
        await asyncio.Event().wait()
    while await _be_watched_once(listeners, silence_timeout_s) != watcher.CUT_OFF:
        _log.warning("the gateway's watcher ended: another starts")
        await asyncio.sleep(_AGAIN_S)


async def _be_watched_once(
    listeners: Callable[[], Iterator[socket.socket]], silence_timeout_s: float
) -> int:
    """Runs one watcher process; returns its exit status."""
    with contextlib.ExitStack() as stack:
        passed = [stack.enter_context(each).fileno() for each in listeners()]
        this = (os.getpid(), threading.get_native_id(), silence_timeout_s)
        process = subprocess.Popen(
            [sys.executable, "-m", watcher.__name__, *map(str, (*this, *passed))],
            stdin=subprocess.PIPE,
            bufsize=0,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            pass_fds=passed,
        )
    with process:
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            while process.poll() is None:
                # Writes nothing if the pipe is full, as when the watcher is stopped.
                process.stdin.write(b".")
                await asyncio.sleep(silence_timeout_s / _BEATS)
        except BrokenPipeError:
            return await asyncio.to_thread(process.wait)
        finally:
            process.kill()  # Has no effect if it has ended. SIGKILL also ends a stopped one.
    return process.returncode
