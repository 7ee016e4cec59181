"""`tests/run` ends with 0 when all tests pass, and leaves no process behind."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run")


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A program in pytest's place, which does what the test writes into it."""
    program = tmp_path / "pytest"
    program.touch(mode=0o755)
    return program


@pytest.mark.parametrize(
    ("fails", "status"),
    [
        ("none", 0),
        ("--ignore=tests/golden", 1),  # In the half that waits.
        (" tests/worker", 1),
        (" tests/kernels/interpreted", 1),
    ],
)
@pytest.mark.parametrize("last", ["the half that waits", "the half that computes"])
def test_the_exit_status_says_if_a_half_failed(
    stand_in: Path, fails: str, status: int, last: str
) -> None:
    waits = "--ignore=tests/golden" if last == "the half that waits" else " tests/worker"
    stand_in.write_text(
        f'#!/bin/sh\ncase " $*" in *"{waits}"*) sleep 0.3;; esac\n'
        f'case " $*" in *"{fails}"*) exit 1;; esac\n'
    )
    run = subprocess.run([RUN], env={**os.environ, "PYTEST": str(stand_in)}, capture_output=True)
    assert run.returncode == status, run


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_both_halves(stand_in: Path, sent: signal.Signals) -> None:
    # The second process of each half does not hear the interrupt. All hold the pipe's writing end.
    stand_in.write_text("#!/usr/bin/env bash\n(trap '' INT; exec sleep 600) &\necho started >&$PIPE\nwait\n")
    reads, writes = os.pipe()
    run = subprocess.Popen(
        [RUN],
        env={**os.environ, "PYTEST": str(stand_in), "PIPE": str(writes)},
        pass_fds=[writes],
        start_new_session=True,
    )
    os.close(writes)
    with open(reads) as told:
        assert [told.readline(), told.readline()] == ["started\n"] * 2
        run.send_signal(sent)
        assert run.wait() == 128 + sent
        assert select.select([told], [], [], 60)[0], "a process is left"
        assert told.read() == ""
