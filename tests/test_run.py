"""`tests/run` ends with 0 when all tests pass, and leaves no process behind."""

import os
import select
import signal
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).with_name("run")
WAITS, CLUSTER, COMPUTES = "--ignore=tests/worker", " tests/cluster", " tests/worker"
"""A part of each pytest command line, by which the parts of `tests/run` are told apart."""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """Puts a program in pytest's place, whose code is the test's."""
    program = tmp_path / "pytest"
    program.touch(mode=0o755)
    return program


@pytest.mark.parametrize("last", [WAITS, CLUSTER, COMPUTES])
@pytest.mark.parametrize(
    ("fails", "status"),
    [("none", 0), (WAITS, 1), (CLUSTER, 1), (COMPUTES, 1), (" tests/kernels/interpreted", 1)],
)
def test_the_exit_status_says_if_a_part_failed(
    stand_in: Path, last: str, fails: str, status: int
) -> None:
    stand_in.write_text(
        f'#!/bin/sh\ncase " $*" in *"{last}"*) sleep 0.3;; esac\n'
        f'case " $*" in *"{fails}"*) exit 1;; esac\n'
    )
    assert run(stand_in).returncode == status


def test_a_selection_may_leave_out_the_interpreted_kernels(stand_in: Path) -> None:
    stand_in.write_text('#!/bin/sh\n[ "$*" != "-m slow tests/kernels/interpreted" ] || exit 5\n')
    assert run(stand_in, "-m", "slow").returncode == 0


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_parts(stand_in: Path, sent: signal.Signals) -> None:
    # The second process of each part ignores SIGINT. All hold the pipe's writing end.
    stand_in.write_text(
        "#!/usr/bin/env bash\n(trap '' INT; exec sleep 600) &\necho started >&$PIPE\nwait\n"
    )
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [RUN],
        env={**os.environ, "PYTEST": str(stand_in), "PIPE": str(writes)},
        pass_fds=[writes],
        start_new_session=True,
        preexec_fn=hear_interrupts,
    )
    os.close(writes)
    with open(reads) as told:
        assert [told.readline() for _ in range(3)] == ["started\n"] * 3
        process.send_signal(sent)
        assert process.wait() == 128 + sent
        assert select.select([told], [], [], 60)[0], "a process is left"
        assert told.read() == ""


def hear_interrupts() -> None:
    """Restores SIGINT, which shells have background programs and their children ignore."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def run(stand_in: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    variables = {**os.environ, "PYTEST": str(stand_in)}
    return subprocess.run([RUN, *arguments], env=variables, capture_output=True)
