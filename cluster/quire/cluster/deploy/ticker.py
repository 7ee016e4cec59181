"""Prints the pending step to standard output repeatedly, until standard input ends.

This runs as a separate process, from this file: Ray connects in one call that holds the interpreter
lock, for seconds on a busy machine, during which no thread of that process could print.

Each line of input has three tab-separated fields: the pending step, empty for none; its progress;
and whether another process has just printed a line, which delays the next print of this one.
"""

import contextlib
import os
import select
import signal
import time

_EVERY_S = 1.5
"""Interval of prints, below two seconds because a busy machine may delay them."""
_LIVE_EVERY_S = 0.25
_COLUMNS = 80
ERASE = "\r\x1b[K"


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # This process ends with its input.
    is_live = os.isatty(1)
    every_s = _LIVE_EVERY_S if is_live else _EVERY_S
    name = detail = ""
    begin_s = said_s = time.monotonic()
    unread = b""
    while True:
        wait_s = max(0.0, said_s + every_s - time.monotonic())
        if select.select([0], [], [], wait_s)[0]:
            read = os.read(0, 2**16)
            if not read:
                break
            *lines, unread = (unread + read).split(b"\n")
            for line in lines:
                before = name
                name, detail, was_said = line.decode().split("\t")
                if name != before:
                    begin_s = time.monotonic()
                if was_said:
                    said_s = time.monotonic()
            continue
        said_s = time.monotonic()
        if name:
            text = f"  … {name}, {said_s - begin_s:.0f} s"
            text = f"{text}: {detail}" if detail else text
            # A line that wraps could not be erased.
            _write(f"{ERASE}{text[: _width() - 1]}" if is_live else f"{text}\n")
        elif is_live:
            _write(ERASE)
    if is_live and name:
        _write(ERASE)


def _width() -> int:
    try:
        return os.get_terminal_size(1).columns or _COLUMNS
    except OSError:
        return _COLUMNS


def _write(text: str) -> None:
    with contextlib.suppress(OSError):  # Standard output is closed.
        os.write(1, text.encode())


if __name__ == "__main__":
    main()
