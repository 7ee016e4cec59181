"""A hanging process gets no new connections, and is killed if it stays so; a busy one is not."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cluster.features.guard.listener import listening_socket
from quire.cluster.features.watcher.watcher import Pulse

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell what runs"
)

GATEWAY = """
import asyncio, sys, time
from quire.cluster.features.watcher.watched import be_watched
from quire.cluster.features.guard.leaving import listeners_at
from quire.cluster.features.guard.listener import listening_socket

def spin(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        pass

async def run():
    listener = listening_socket("127.0.0.1", int(sys.argv[2]), is_shared=True)
    port = listener.getsockname()[1]
    watched = asyncio.create_task(be_watched(lambda: listeners_at(port), silence_timeout_s=0.5))
    await asyncio.sleep(1)
    print(port, flush=True)
    exec(sys.argv[1])
    for _ in range(20):  # Several: one timeout may have passed while the process was stopped.
        await asyncio.wait([watched], timeout=0.05)
    print("cut off" if watched.done() else "watched", flush=True)
    watched.cancel()

asyncio.run(run())
"""


@contextlib.contextmanager
def gateway(does: str, *, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A listening process that runs ``does`` in its event loop once it is watched, and its port."""
    with subprocess.Popen(
        [sys.executable, "-c", GATEWAY, does, str(port)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def end_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def stop(process: subprocess.Popen[str]) -> None:
    os.kill(process.pid, signal.SIGSTOP)


def wait_until_refused(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
        except ConnectionRefusedError:
            return
        time.sleep(0.05)


@pytest.mark.slow
def test_a_process_that_was_stopped_gets_no_more_connections_and_goes_on() -> None:
    with gateway("time.sleep(0.1)") as (process, port):
        stop(process)
        wait_until_refused(port)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGCONT)
        assert end_of(process) == "cut off"
        assert process.wait() == 0


@pytest.mark.slow
def test_connections_of_one_that_was_stopped_go_to_another() -> None:
    with gateway("time.sleep(1000)") as (process, port):
        other = listening_socket("127.0.0.1", port, is_shared=True)
        with other:
            stop(process)
            in_a_row = 0
            # If two processes shared them at random, this would happen once in 2^32 times.
            while in_a_row < 32:
                with socket.create_connection(("127.0.0.1", port)) as client:
                    time.sleep(0.01)
                    try:
                        accepted, (_, their_port) = other.accept()
                        accepted.close()
                        in_a_row += their_port == client.getsockname()[1]
                    except BlockingIOError:
                        in_a_row = 0


@pytest.mark.slow
def test_a_process_that_stays_stopped_is_killed() -> None:
    with gateway("time.sleep(1000)") as (process, _):
        stop(process)
        assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_whose_event_loop_waits_without_end_is_killed() -> None:
    with gateway("time.sleep(1000)") as (process, _):
        assert process.wait() == -signal.SIGKILL


@pytest.mark.slow
def test_a_process_whose_event_loop_is_busy_is_let_alone() -> None:
    with gateway("spin(2)") as (process, _):
        assert end_of(process) == "watched"
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
