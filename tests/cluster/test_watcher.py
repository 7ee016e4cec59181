"""A process that hangs is killed by its watcher; one that is busy or late is not."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cluster.deploy.watcher import Pulse

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell what runs"
)

GATEWAY = """
import asyncio, sys, time
from quire.cluster.deploy.watched import be_watched

def spin(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass

async def run():
    watched = asyncio.create_task(be_watched(silence_timeout_s=0.5))
    await asyncio.sleep(1)
    print("watched", flush=True)
    exec(sys.argv[1])
    await asyncio.sleep(0.1)
    watched.cancel()
    print("alive", flush=True)

asyncio.run(run())
"""


@contextlib.contextmanager
def gateway(does: str) -> Iterator[subprocess.Popen[str]]:
    """A process that ``does`` something in its event loop once it is watched."""
    with subprocess.Popen(
        [sys.executable, "-c", GATEWAY, does], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "watched\n"
        yield process


def test_a_process_that_was_stopped_is_killed() -> None:
    with gateway("time.sleep(1000)") as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait() == -signal.SIGKILL


def test_a_process_whose_event_loop_waits_without_end_is_killed() -> None:
    with gateway("time.sleep(1000)") as process:
        assert process.wait() == -signal.SIGKILL


def test_a_process_whose_event_loop_is_busy_is_not() -> None:
    with gateway("spin(2)") as process:
        assert process.wait() == 0


def test_a_thread_that_waits_for_a_processor_has_a_pulse(tmp_path: Path) -> None:
    pulse = Pulse(tmp_path)
    (tmp_path / "schedstat").write_text("123 456 7\n")
    felt = []
    for state in "SSRDT":
        (tmp_path / "stat").write_text(f"1 (a name) here) {state} 0 0\n")
        felt.append(pulse.is_felt())
    assert felt == [True, False, True, True, False]
    (tmp_path / "schedstat").write_text("124 456 8\n")
    assert pulse.is_felt()
