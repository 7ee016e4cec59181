"""``quire serve`` as users start it, for as long as a bench runs."""

import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Addresses:
    http: str
    """The HTTP address, with its scheme."""
    grpc: str
    pid: int
    """The process ID of ``quire serve``."""


@contextmanager
def serving(*arguments: str) -> Iterator[Addresses]:
    """``quire serve`` with these arguments, from its start to its stop."""
    ports = ("--grpc-port", "0", "--http-port", "0")
    command = [sys.executable, "-m", "quire", "serve", *arguments, *ports]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0) as server:
        assert server.stdout is not None
        try:
            said = ""
            for line in server.stdout:
                said += line
                http = re.search(r"HTTP\s+(http://[^/\s]+)/", said)
                grpc = re.search(r"gRPC\s+(\S+:\d+)", said)
                if http and grpc:
                    yield Addresses(http[1], grpc[1], server.pid)
                    break
            else:
                raise SystemExit("quire serve ended")
        finally:
            server.send_signal(signal.SIGINT)
            server.communicate()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port
