"""Work in a process of its own, with limits of time and memory: whatever it does, this one goes on.

A thread cannot be ended, and nothing bounds what it takes; a process can be killed, and the kernel
bounds its memory. Frames go both ways over a socket: four bytes of length, little-endian, and as
many of data. The first frame that comes to the process sets it up; each one behind it is a request,
and each is answered. The process ends with the socket.
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
    """Answers requests one after another; callers take turns.

    The process starts with the first request, and again after one that had to be ended. It ends
    with this object, and with this process, even by SIGKILL.
    """

    def __init__(
        self, module: str, first: Callable[[], Mapping[str, Any]], *, memory_bytes: int
    ) -> None:
        """``module`` calls `serve`, which gets what ``first`` returns. ``memory_bytes``: of all the
        process."""
        self._module = module
        self._first = first
        self._memory_bytes = memory_bytes
        self._process: subprocess.Popen[bytes] | None = None
        self._end: weakref.finalize[..., ChildProcess] | None = None

    def ask(self, request: bytes, *, timeout_s: float, max_cpu_s: float | None = None) -> bytes:
        """The answer to one request. ``max_cpu_s``: of CPU time for any one, from the first on; by
        default so much that ``timeout_s`` ends it earlier.

        Raises:
            TimeoutError: There was none in time. The process was ended.
            OSError: The process ended over it.
        """
        self.start(max_cpu_s=max_cpu_s or timeout_s + 1)
        return self._exchange(request, timeout_s=timeout_s)

    def start(self, *, max_cpu_s: float) -> None:
        """Starts the process, unless it runs."""
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
                # -P: the working directory is no place to import from unasked.
                [sys.executable, "-P", "-m", self._module, *map(str, arguments)],
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # Not in the terminal's foreground group: Ctrl-C is for this process alone.
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
    """The process's main program: ``FD MEMORY_BYTES``. ``prepare`` makes what answers of what the
    first frame holds."""
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
    if os.getpid() == owner_pid:  # And not a forked child of the owner, at its exit.
        process.kill()
        process.wait()


def _read(file: BinaryIO) -> bytes:
    """The next frame; empty at the end."""
    header = file.read(_LENGTH.size)
    return file.read(*_LENGTH.unpack(header)) if len(header) == _LENGTH.size else b""


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(_LENGTH.pack(len(data)))
    file.write(data)
    file.flush()
