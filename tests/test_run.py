"""`tests/run` ends with 0 if all tests pass, repeats failed ones, and leaves no process behind."""

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


@pytest.mark.parametrize("empty", ["tests/kernels/interpreted", "tests/cluster"])
def test_a_selection_may_have_no_test_of_a_part(stand_in: Path, empty: str) -> None:
    stand_in.write_text(f'#!/bin/sh\ncase "$*" in *"{empty}"*) exit 5;; esac\n')
    assert run(stand_in, "-m", "slow").returncode == 0


def test_a_selection_without_any_test_fails(stand_in: Path) -> None:
    stand_in.write_text("#!/bin/sh\nexit 5\n")
    assert run(stand_in, "-k", "a_typo").returncode == 5


FAILS_ONCE = """#!/bin/sh
case "$*" in *cache_dir=*/{part}*) ;; *) exit 0;; esac
case "$*" in
*--last-failed*) echo "PASSED tests/test_it.py::test[a b]"; exit {again};;
esac
folder="${{2#cache_dir=}}/v/cache"
mkdir -p "$folder"
[ -z "{listed}" ] || echo '{{"tests/test_it.py::test[a b]": true}}' >"$folder/lastfailed"
exit {first}
"""


@pytest.mark.parametrize("part", ["waiting", "cluster", "others", "compiled", "interpreted"])
def test_a_test_that_passes_at_its_second_run_is_called_flaky(stand_in: Path, part: str) -> None:
    stand_in.write_text(FAILS_ONCE.format(part=part, first=1, again=0, listed="yes"))
    outcome = run(stand_in, "-m", "slow")
    assert outcome.returncode == 0
    assert outcome.stdout.decode().splitlines()[-1] == "flaky: tests/test_it.py::test[a b]"


@pytest.mark.parametrize(
    ("first", "again", "listed"),
    [(1, 1, "yes"), (1, 0, ""), (2, 0, "yes"), (139, 0, "yes")],
    ids=["fails again", "no list", "not collected", "crashed"],
)
def test_what_does_not_pass_at_its_second_run_fails(
    stand_in: Path, first: int, again: int, listed: str
) -> None:
    stand_in.write_text(FAILS_ONCE.format(part="cluster", first=first, again=again, listed=listed))
    assert run(stand_in).returncode == 1


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
        assert [told.readline() for _ in range(5)] == ["started\n"] * 5
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
