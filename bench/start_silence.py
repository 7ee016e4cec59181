"""The longest pause between two lines of output while ``quire serve`` starts.

    python -m bench.start_silence [--rounds 3] [--cache FOLDER] [-- FLAGS OF QUIRE SERVE]

With an empty cache, which is the default, the first start is a cold one: our C++ libraries are
compiled, unless a wheel brought them. Output goes to a pipe, as in a log.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from bench.report import command

FLAGS = ["--grpc-port", "0", "--http-port", "0", "--kv-cache-memory-bytes", str(32 * 2**20)]
SERVES = "Serving "


@dataclass(frozen=True)
class Start:
    """The times of one start, in seconds."""

    up_s: float
    longest_silence_s: float
    silent_after: str
    """The line of output before the longest pause."""


def main() -> None:
    parser = command("bench.start_silence", __doc__)
    parser.add_argument("--rounds", type=int, default=3, help="starts, one after the other")
    parser.add_argument("--cache", type=Path, help="of compiled libraries")
    parser.add_argument("flags", nargs="*", help="flags of quire serve")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "QUIRE_CACHE_DIR": str(arguments.cache or cache)}
        for number in range(arguments.rounds):
            start = measure([*FLAGS, *arguments.flags], environment)
            print(
                f"start {number + 1}: up after {start.up_s:.1f} s, longest silence "
                f"{start.longest_silence_s:.1f} s, after {start.silent_after!r}",
                flush=True,
            )


def measure(flags: list[str], environment: dict[str, str]) -> Start:
    """Starts it, waits until it serves, and stops it."""
    begin_s = said_s = time.monotonic()
    longest, line = (0.0, ""), "the command"
    with subprocess.Popen(
        [sys.executable, "-m", "quire", "serve", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        process_group=0,
    ) as server:
        assert server.stdout is not None
        try:
            while not line.startswith(SERVES):
                previous, line = line, server.stdout.readline()
                if not line:
                    raise SystemExit(f"it ended: {previous}")
                now_s = time.monotonic()
                longest = max(longest, (now_s - said_s, previous.strip()))
                said_s = now_s
            # Once it has printed all, Ctrl-C drains it.
            while "logs" not in server.stdout.readline():
                pass
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()
    return Start(said_s - begin_s, *longest)


if __name__ == "__main__":
    main()
