"""Progress messages of a start, to a pipe and to a terminal."""

import os
import pty
import re
import subprocess
import sys

import pytest

HANGS = """
import ctypes, sys
from quire.cluster.deploy.progress import on_stdout

with on_stdout() as progress:
    with progress.step("imports"):
        pass
    progress.pending("groups", "0 of 1")
    ctypes.PyDLL(None).sleep(4)  # With the interpreter's lock: no thread of this process runs.
    progress.done("groups", 4, "1 ready")
    progress.end()
    print("serves")
"""


@pytest.mark.slow
def test_a_pipe_gets_lines_even_while_the_process_hangs_in_one_call() -> None:
    command = [sys.executable, "-c", HANGS]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert re.fullmatch(r"  imports +\d+\.\d s", said[0])
    assert len(said) >= 4
    assert all(re.fullmatch(r"  … groups, \d+ s: 0 of 1", line) for line in said[1:-2])
    assert re.fullmatch(r"  groups +4\.0 s  1 ready", said[-2])
    assert said[-1] == "serves"


@pytest.mark.slow
def test_a_terminal_gets_one_line_that_changes_and_is_gone_at_the_end() -> None:
    here, there = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", HANGS], stdout=there):
        os.close(there)
        said = b""
        try:
            while read := os.read(here, 2**16):
                said += read
        except OSError:  # Linux reports the closed end like this.
            pass
    os.close(here)
    lines = said.decode().replace("\r\n", "\n").split("\n")
    assert len(lines) == 4
    assert [line.split("\x1b[K")[-1].split()[:1] for line in lines] == [
        ["imports"],
        ["groups"],
        ["serves"],
        [],
    ]
    assert lines[1].count("\r\x1b[K  … groups") > 4
