"""Runs ``quire serve`` as a child process."""

import contextlib
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextlib.contextmanager
def serving(
    *flags: str, module: str = "quire", sigint: signal.Handlers = signal.SIG_DFL
) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """Runs ``quire serve`` with the demo model; yields it and its gRPC and HTTP addresses.
    ``sigint`` is the handler that it inherits: shells let background processes ignore SIGINT."""
    free = ["--grpc-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", str(32 * 2**20)]
    # Not by `preexec_fn`, which forks: after a fork gRPC's threads may end the child.
    ours = signal.signal(signal.SIGINT, sigint)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", *free, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
    finally:
        signal.signal(signal.SIGINT, ours)
    with process as server:
        assert server.stdout is not None
        assert server.stderr is not None
        printed = ""
        addresses = re.compile(r"gRPC\s+(\S+).*HTTP\s+http://([^/\s]+)/", re.DOTALL)
        while not (found := addresses.search(printed)):
            line = server.stdout.readline()
            assert line, f"it ended: {server.stderr.read()}"
            printed += line
        try:
            yield server, found[1], found[2]
        finally:
            if server.poll() is None:
                server.send_signal(signal.SIGINT)
