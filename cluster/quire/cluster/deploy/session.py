"""A connection to Ray: tells whether Ray has died, and drains the gateways without it.

Ray itself cannot tell: a call that needs a dead raylet or GCS blocks, for minutes or forever. So a
cluster that this process started is judged by its processes, and another one by whether its
addresses answer.
"""

import os
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path

from quire.cluster.deploy.line import Line

_SILENCE_S = 30.0
"""Silence after which a GCS counts as dead. One with external state may be restarted before; Ray
ends this process after a minute."""
_LOOK_EVERY_S = 1.0
_CONNECT_S = 5.0


class RaySession:
    """The result of `quire.cluster.deploy.local.ray_session`. This base class is a session of which
    nothing is known."""

    logs: Path | None = None
    """The folder with the logs of the processes that Serve runs on this node."""
    kept_logs: Path | None = None
    """The folder that keeps these logs after the end of a cluster that this process started."""

    def lost(self) -> str | None:
        """The process of Ray that has died, in words for a user; ``None`` if all live."""
        return None

    can_drain = False
    """Whether gateways can be drained without Ray."""

    def drain(self, *, timeout_s: float) -> bool:
        """Drains the gateways; returns whether all streams ended within ``timeout_s``."""
        return False


UNKNOWN = RaySession()


@dataclass(frozen=True, kw_only=True)
class OwnNode(RaySession):
    """A Ray node that this process started.

    A dead raylet must stay a zombie until the end: groups and gateways check for its process once a
    second, and exit when it is gone.
    """

    logs: Path | None
    kept_logs: Path | None = None
    line: Line
    pids: dict[str, int]
    """Process ids of raylet and GCS, both children of this process."""
    can_drain = True

    def lost(self) -> str | None:
        for name, pid in self.pids.items():
            try:
                end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return f"Ray's {name} (process {pid}) ended"
            if end is not None:
                by_signal = end.si_code in (os.CLD_KILLED, os.CLD_DUMPED)
                what = _signal_name(end.si_status) if by_signal else f"status {end.si_status}"
                return f"Ray's {name} (process {pid}) ended with {what}"
        return None

    def drain(self, *, timeout_s: float) -> bool:
        return self.line.drain(timeout_s=timeout_s)


class OthersCluster(RaySession):
    """A Ray cluster that ran before, with these addresses; ``None`` if they are unknown."""

    def __init__(self, *, gcs: str | None, raylet: str | None, logs: Path | None = None) -> None:
        self.logs = logs
        self._gcs, self._raylet = gcs, raylet
        self._seen_s = self._looked_s = time.monotonic()
        self._what: str | None = None

    def lost(self) -> str | None:
        now_s = time.monotonic()
        if self._what is None and now_s - self._looked_s >= _LOOK_EVERY_S:
            self._looked_s = now_s
            self._what = self._look(now_s)
        return self._what

    def _look(self, now_s: float) -> str | None:
        if self._raylet is not None and not _answers(socket.AF_UNIX, self._raylet):
            return f"Ray's raylet on this machine ({self._raylet}) does not answer"
        if self._gcs is None:
            return None
        host, _, port = self._gcs.rpartition(":")
        host = host.strip("[]")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if _answers(family, (host, int(port))):
            self._seen_s = now_s
        elif now_s - self._seen_s > _SILENCE_S:
            return f"Ray's GCS at {self._gcs} has not answered for {_SILENCE_S:g} s"
        return None


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _answers(family: socket.AddressFamily, address: str | tuple[str, int]) -> bool:
    with socket.socket(family) as probe:
        probe.settimeout(_CONNECT_S)
        try:
            probe.connect(address)
        except OSError:
            return False
    return True
