"""A gateway's side of `quire.cluster.deploy.watcher`."""

import asyncio
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

from quire.cluster.deploy import watcher
from quire.cluster.links.liveness import Liveness

_log = logging.getLogger(__name__)

_AGAIN_S = 5.0


async def be_watched(*, silence_timeout_s: float) -> None:
    """Runs a watcher for this process and its event loop until cancelled."""
    if not Path("/proc/self/schedstat").exists():
        _log.warning("the kernel does not tell what runs: a gateway that hangs is found by Serve")
        return
    while True:
        await _be_watched_once(silence_timeout_s)
        _log.warning("the gateway's watcher ended: another starts")
        await asyncio.sleep(_AGAIN_S)


async def _be_watched_once(silence_timeout_s: float) -> None:
    """Returns when the watcher has ended."""
    beat_s = Liveness(silence_timeout_s=silence_timeout_s, step_deadline_s=silence_timeout_s).beat_s
    this = (os.getpid(), threading.get_native_id(), silence_timeout_s)
    with subprocess.Popen(
        [sys.executable, "-m", watcher.__name__, *map(str, this)],
        stdin=subprocess.PIPE,
        bufsize=0,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        try:
            while True:
                process.stdin.write(
                    b"."
                )  # None where the pipe is full, as the watcher was stopped.
                await asyncio.sleep(beat_s)
        except BrokenPipeError:
            return
        finally:
            process.kill()  # It may be stopped, and is waited for.
