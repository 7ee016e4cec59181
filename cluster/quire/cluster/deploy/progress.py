"""Prints the steps of a start, so that there are no long silences.

Each finished step is a line with its duration. The pending step is printed at least every two
seconds: on a terminal in one line that changes, elsewhere as a new line each time.

This module imports only the standard library, because the first step is to import the rest.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Self, TextIO

from quire.cluster.deploy import ticker

_NAME_CHARS = 12
_BETWEEN = "starting"
"""The pending step's name between two steps."""
_END_S = 5.0


class Progress:
    """Prints progress to ``stream``; without one, nothing. The pending step is printed only inside
    the block, until `end`, and only if ``stream`` is a file."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream
        self._is_live = stream is not None and stream.isatty()
        self._pending = (_BETWEEN, "")
        self._ticker: subprocess.Popen[bytes] | None = None
        self._start_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # The stream is no file, or no process starts.
                self._ticker = subprocess.Popen(
                    [sys.executable, "-I", "-S", ticker.__file__],
                    stdin=subprocess.PIPE,
                    stdout=self._stream.fileno(),
                    stderr=subprocess.DEVNULL,
                )
            self._tell_ticker()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Stops printing the pending step."""
        child, self._ticker = self._ticker, None
        if child is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()  # type: ignore[union-attr]
            try:
                child.wait(_END_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    @property
    def elapsed_s(self) -> float:
        """Seconds since this object was made."""
        return time.monotonic() - self._start_s

    def say(self, line: str) -> None:
        if self._stream is None:
            return
        self._tell_ticker(was_said=True)
        with contextlib.suppress(OSError):  # A closed stream must not fail the start.
            self._stream.write(f"{ticker.ERASE if self._is_live else ''}{line}\n")
            self._stream.flush()

    @contextlib.contextmanager
    def step(
        self, name: str, *, told_from_s: float = 0.0, has_bars: bool = False
    ) -> Iterator[None]:
        """Reports the block as a step. Its line is printed at the end, unless it fails or took less
        than ``told_from_s``. With ``has_bars``, the block draws its own progress on a terminal."""
        begin_s = time.monotonic()
        self.pending("" if has_bars and self._is_live else name)
        try:
            yield
        finally:
            self.pending(_BETWEEN)
        if (duration_s := time.monotonic() - begin_s) >= told_from_s:
            self.done(name, duration_s)

    def pending(self, name: str, detail: str = "") -> None:
        """Sets the pending step; ``detail`` is its progress."""
        if (name, detail) != self._pending:
            self._pending = (name, detail)
            self._tell_ticker()

    def done(self, name: str, duration_s: float, detail: str = "") -> None:
        self.say(f"  {name:{_NAME_CHARS}} {duration_s:5.1f} s  {detail}".rstrip())

    def _tell_ticker(self, *, was_said: bool = False) -> None:
        if self._ticker is not None and self._ticker.stdin is not None:
            line = "\t".join([*self._pending, "1" if was_said else ""]).replace("\n", " ")
            with contextlib.suppress(OSError):  # The ticker has ended.
                self._ticker.stdin.write(f"{line}\n".encode())
                self._ticker.stdin.flush()


def on_stdout() -> Progress:
    return Progress(sys.stdout)
