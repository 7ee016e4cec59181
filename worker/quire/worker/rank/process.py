"""Launches the ranks of one group as child processes on this node.

Rank processes are started with ``subprocess`` and not with ``multiprocessing``, whose "spawn" runs
the user's main module again and so needs a guard in every script.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path

from quire.worker.rank.lockstep import Rank
from quire.worker.request.config import EngineConfig

RANK_MODULE = "quire.worker.rank.rank"
"""The module that a rank's process runs."""

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
}


@dataclass(frozen=True, kw_only=True)
class RankProcess(Rank):
    process: subprocess.Popen[bytes]

    def state(self) -> str:
        """The process's state according to the kernel, such as "running" or "stopped"."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        except (OSError, ValueError):
            return "gone"
        letter = stat.rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"in state {letter}")

    def how_it_died(self) -> str | None:
        """How the process ended, such as "died with signal 9"; ``None`` while it runs and after a
        clean exit."""
        code = self.process.poll()
        if not code:
            return None
        return f"died with signal {-code}" if code < 0 else f"died with exit code {code}"


class RankProcesses:
    """Starts rank processes that all end when this process does, even by SIGKILL."""

    num_nodes = 1

    def __init__(self) -> None:
        self._ranks: list[RankProcess] = []
        self._owner_pid = os.getpid()
        # Anonymous memory: freed with its last user, however that ends.
        self.shared_fd = os.memfd_create("quire-ranks")
        self._store_fd = os.memfd_create("quire-store")

    def start(self, config: EngineConfig, *, shared_bytes: int) -> tuple[list[RankProcess], Path]:
        environment = os.environ | {
            # A rank can import everything that this process can.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            # All ranks are on this machine, and gloo should not listen outside of it.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        os.ftruncate(self.shared_fd, shared_bytes)
        for number in range(config.tensor_parallel_size):
            ours, theirs = Pipe()
            with theirs:
                fds = (theirs.fileno(), self.shared_fd)
                process = subprocess.Popen(
                    # -P: Python must not import from the working directory.
                    [sys.executable, "-P", "-m", RANK_MODULE, *map(str, fds)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*fds, self._store_fd),
                    # Not in the terminal's foreground group: only this process gets Ctrl-C.
                    process_group=0,
                )
            rank = RankProcess(number=number, pid=process.pid, connection=ours, process=process)
            self._ranks.append(rank)
        # The path of the store as each rank sees it.
        return self._ranks, Path(f"/proc/self/fd/{self._store_fd}")

    def stop(self) -> None:
        """Kills and reaps every rank. They hold no state that needs a clean shutdown."""
        if os.getpid() != self._owner_pid:  # a forked child of the owner, at its exit
            return
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.connection.close()
        os.close(self.shared_fd)
        os.close(self._store_fd)
