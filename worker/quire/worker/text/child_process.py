"""Runs work in a child process with limits on time and memory, so that it cannot harm this process.

A thread cannot be killed, and its memory cannot be limited; both are possible for a process. Frames
are sent both ways over a socket: four bytes of length, little-endian, then the data. The first
frame sets the child process up. Each later frame is a request, and each gets one answer. The
process ends when the socket is closed.
"""

import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

_START_TIMEOUT_S = 60.0  # A busy machine takes long to start Python.
_LENGTH = struct.Struct("<I")
_READY = b"ready"


class ChildProcess:
    """A child process that answers one request at a time; concurrent callers wait.

    The process starts with the first request, and starts again after it had to be killed. It ends
    with this object and with the parent process, even by SIGKILL.
    """

    def __init__(
        self, module: str, first: Callable[[], Mapping[str, Any]], *, memory_bytes: int
    ) -> None:
        """``module`` must call `serve`, which receives the result of ``first``. ``memory_bytes``
        limits the whole process."""
        self._module = module
        self._first = first
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., ChildProcess] | None = None

    def ask(self, request: bytes, *, timeout_s: float, max_cpu_s: float | None = None) -> bytes:
        """Returns the answer to one request. ``max_cpu_s`` limits the CPU time of each request, and
        is set when the process starts; by default it is so large that ``timeout_s`` ends it first.

        Raises:
            TimeoutError: There was no answer in time. The process was killed.
            OSError: The process ended during the request.
        """
        self.start(max_cpu_s=max_cpu_s or timeout_s + 1)
        return self._exchange(request, timeout_s=timeout_s)

    def start(self, *, max_cpu_s: float) -> None:
        """Starts the process unless it is running."""
        if self._process is None or self._process.poll() is not None:
            self._start(max_cpu_s)

    def close(self) -> None:
        """Ends the process; a later `ask` starts another."""
        if self._end is not None:
            self._end()

    def _start(self, max_cpu_s: float) -> None:
        self.close()
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = (theirs.fileno(), self._memory_bytes)
            self._process = subprocess.Popen(
                # -P: Python must not import from the working directory.
                [sys.executable, "-P", "-m", self._module, *map(str, arguments)],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Not in the terminal's foreground group: only this process gets Ctrl-C.
                process_group=0,
            )
        self._end = weakref.finalize(self, _end, os.getpid(), self._process, self._socket)
        first = json.dumps({**self._first(), "max_cpu_s": max_cpu_s}).encode()
        ready = self._exchange(first, timeout_s=_START_TIMEOUT_S)
        assert ready == _READY, "the process was set up"

    def _exchange(self, request: bytes, *, timeout_s: float) -> bytes:
        deadline_s = time.monotonic() + timeout_s
        try:
            self._socket.settimeout(timeout_s)
            self._socket.sendall(_LENGTH.pack(len(request)))
            self._socket.sendall(request)
            (num_bytes,) = _LENGTH.unpack(self._receive(_LENGTH.size, deadline_s))
            return self._receive(num_bytes, deadline_s)
        except OSError:
            self.close()
            raise

    def _receive(self, num_bytes: int, deadline_s: float) -> bytes:
        data = bytearray(num_bytes)
        view = memoryview(data)
        while view:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining_s)
            num = self._socket.recv_into(view)
            if not num:
                raise ConnectionError("the process is gone")
            view = view[num:]
        return bytes(data)


def serve(prepare: Callable[[dict[str, Any]], Callable[[bytes], bytes]]) -> None:
    """The child's main program, with arguments ``FD MEMORY_BYTES``. ``prepare`` takes the contents
    of the first frame and returns the function that answers requests."""
    fd, memory_bytes = map(int, sys.argv[1:])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with os.fdopen(fd, "rb") as requests, os.fdopen(os.dup(fd), "wb") as answers:
        first = json.loads(_read(requests) or b"{}")
        if not first:
            return
        max_cpu_s = first.pop("max_cpu_s")
        answer = prepare(first)
        _write(answers, _READY)
        while request := _read(requests):
            signal.setitimer(signal.ITIMER_PROF, max_cpu_s)  # Its signal ends the process.
            _write(answers, answer(request))


def _end(owner_pid: int, process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    if os.getpid() == owner_pid:  # Not in a forked child of the owner, at its exit.
        process.kill()
        process.wait()


def _read(file: BinaryIO) -> bytes:
    """Reads the next frame; empty at the end of the stream."""
    header = file.read(_LENGTH.size)
    return file.read(*_LENGTH.unpack(header)) if len(header) == _LENGTH.size else b""


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()
