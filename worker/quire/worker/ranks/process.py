"""Starting, watching and ending the process of a rank.

Rank processes are started by ``subprocess`` and not by ``multiprocessing``, whose "spawn" runs
the user's main module again and so needs a guard in every script.
"""

import os
import socket
import struct
import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

from quire.worker.api.config import EngineConfig

COLLECTIVES_BYTES_PER_RANK = 4 << 20
"""Memory that all ranks map for their collectives; untouched pages cost nothing."""

RANK_MODULE = "quire.worker.ranks.rank"
"""The module that a rank's process runs; the step profile substitutes one with timers."""

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device",
    "T": "stopped",
    "t": "stopped by a debugger",
    "Z": "dead",
}


@dataclass(frozen=True, slots=True)
class RankProcess:
    """A rank and this end of its socket."""

    number: int
    process: subprocess.Popen[bytes]
    connection: Connection

    def describe(self) -> str:
        return f"rank {self.number} (pid {self.process.pid})"

    def state(self) -> str:
        """The process's state according to the kernel, such as "running" or "stopped"."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="ascii")
        except (OSError, ValueError):
            return "gone"
        letter = stat.rpartition(")")[2].split()[0]
        return _STATES.get(letter, f"in state {letter}")

    def how_it_died(self) -> str | None:
        """ "died with signal 9"; ``None`` while it runs and after a clean exit."""
        code = self.process.poll()
        if not code:
            return None
        return f"died with signal {-code}" if code < 0 else f"died with exit code {code}"


class RankProcesses:
    """The rank processes of one group. All end when this one does, even by SIGKILL."""

    def __init__(self) -> None:
        self.ranks: list[RankProcess] = []
        self._owner_pid = os.getpid()
        # Nothing is ever written: when the last write end closes, every rank sees the end.
        self._lifeline_read, self._lifeline_write = os.pipe()
        # Memory without a name: gone with its last user, however that ends.
        self.shared_fd = os.memfd_create("quire-ranks")
        self._rendezvous_fd = os.memfd_create("quire-rendezvous")

    @property
    def rendezvous(self) -> Path:
        """An empty file for the ranks to meet by, under the name that each of them has for it."""
        return Path(f"/proc/self/fd/{self._rendezvous_fd}")

    def start(self, config: EngineConfig, *, shared_bytes: int, send_timeout_s: float) -> None:
        """Starts all ranks at once. A message that one does not take in time raises
        `BlockingIOError`: a hung rank's full socket must not hang its executor too."""
        environment = os.environ | {
            # A rank can import whatever this process can, however the paths got there.
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "OMP_NUM_THREADS": str(threads_per_rank(config)),
            # All ranks are on this machine, and gloo should not listen outside of it.
            "GLOO_SOCKET_IFNAME": "lo",
        }
        os.ftruncate(self.shared_fd, shared_bytes)
        seconds, fraction = divmod(send_timeout_s, 1)
        for number in range(config.tensor_parallel_size):
            ours, theirs = Pipe()
            with socket.socket(fileno=os.dup(ours.fileno())) as raw:
                raw.setsockopt(
                    socket.SOL_SOCKET,
                    socket.SO_SNDTIMEO,
                    struct.pack("ll", int(seconds), int(fraction * 1e6)),
                )
            with theirs:
                fds = (theirs.fileno(), self._lifeline_read, self.shared_fd)
                process = subprocess.Popen(
                    # -P: the working directory is no place to import from unasked.
                    [sys.executable, "-P", "-m", RANK_MODULE, *map(str, fds)],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(*fds, self._rendezvous_fd),
                    # Not in the terminal's foreground group: Ctrl-C is for this process alone.
                    process_group=0,
                )
            self.ranks.append(RankProcess(number, process, ours))

    def stop(self) -> None:
        """Kills and reaps every rank; they hold nothing that is worth a farewell."""
        if os.getpid() != self._owner_pid:  # a forked child of the owner, at its exit
            return
        for rank in self.ranks:
            rank.process.kill()
        for rank in self.ranks:
            rank.process.wait()
            rank.connection.close()
        os.close(self._lifeline_write)
        os.close(self._lifeline_read)
        os.close(self.shared_fd)
        os.close(self._rendezvous_fd)


def threads_per_rank(config: EngineConfig) -> int:
    """CPU threads of each rank: as configured, or an equal share of the cores."""
    cores = len(os.sched_getaffinity(0))
    return config.num_threads or max(1, cores // config.tensor_parallel_size)
