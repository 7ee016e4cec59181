"""The other end of `bench.chaos.client`: starts it, tells it what to do, hears what came of it."""

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import IO, Any

from bench.namespaces import Host
from bench.serving.load import Request, Stream

_LIMIT_S = 180.0
"""A stream that is still not done then is broken, and a client that says nothing is too."""


class Load:
    """Streams under way."""

    def __init__(self, clients: "Clients", load_id: int) -> None:
        self._clients = clients
        self._id = load_id

    def wait_begun(self) -> None:
        """Until each stream has some tokens, or has ended."""
        assert self._clients.hear(self._id).get("begun"), "the load ended before it had begun"

    def stop(self) -> None:
        """Stops repeating streams."""
        self._clients.tell("stop", load=self._id)

    def wait(self) -> list[Stream]:
        """To be called behind `wait_begun`."""
        answer = self._clients.hear(self._id)
        return [
            Stream(**{**values, "request": Request(**values["request"])})
            for values in answer["streams"]
        ]


class Clients:
    """A client process on ``host``."""

    def __init__(self, host: Host, *, environment: dict[str, str], log: IO[str]) -> None:
        self._ids = itertools.count(1)
        self._heard: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self.process: subprocess.Popen[str] = host.start(
            [sys.executable, "-m", "bench.chaos.client"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def load(
        self, requests: Sequence[Request], gateways: Sequence[str], *, again: bool = False
    ) -> Load:
        """Sends all at once; with ``again``, each one is repeated when it ends, until stopped."""
        load_id = self.tell(
            "load",
            requests=[asdict(request) for request in requests],
            gateways=list(gateways),
            again=again,
            limit_s=_LIMIT_S,
        )
        return Load(self, load_id)

    def get(self, url: str, *, timeout_s: float = 5.0) -> str | None:
        """The body at ``url``, or ``None``."""
        text: str | None = self.hear(self.tell("get", url=url, timeout_s=timeout_s))["text"]
        return text

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def tell(self, what: str, **values: Any) -> int:
        command_id = next(self._ids)
        self._heard[command_id] = queue.SimpleQueue()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"id": command_id, "do": what, **values}) + "\n")
        self.process.stdin.flush()
        return command_id

    def hear(self, command_id: int) -> dict[str, Any]:
        return self._heard[command_id].get(timeout=_LIMIT_S + 30)

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line)
            self._heard[answer["id"]].put(answer)
