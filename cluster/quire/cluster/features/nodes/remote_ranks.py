"""Runs the ranks of one group as processes on several nodes.

Ray only starts them (`rank_actors`). Each rank connects back to its executor, and the group depends
on these connections alone: a rank that ends, hangs or is cut off fails the group at once, and ranks
end when their connections do.
"""

import time
from collections.abc import Sequence
from typing import Protocol

from quire.cluster.features.nodes.rank_socket import Reception, RemoteRank
from quire.cluster.features.nodes.remote_rank import RemoteRankTask
from quire.worker.rank.lockstep import START_TIMEOUT_S
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import RankFailure

_LOOK_S = 0.5
"""Interval of the checks whether a rank that has not connected has failed."""


class ProcessStarter(Protocol):
    """Starts the ranks of one group."""

    def start(self, tasks: Sequence[RemoteRankTask]) -> None:
        """Starts, on each rank's node, a process that calls `become_rank` with the rank's task."""

    def why_not(self, rank: int) -> str | None:
        """Why a rank will never connect; ``None`` while it may."""

    def release(self) -> None:
        """Releases all ranks, including hung ones, because the group has ended."""


class RemoteRanks:
    """Starts ranks and waits for them. Rank r is on node ``r // (ranks / nodes)``."""

    shared_fd = None

    def __init__(self, starter: ProcessStarter, *, num_nodes: int, host: str) -> None:
        """``host`` is the address at which other nodes reach this one."""
        self.num_nodes = num_nodes
        self._starter = starter
        self._host = host
        self._ranks: list[RemoteRank] = []

    def start(
        self, config: EngineConfig, *, shared_bytes: int
    ) -> tuple[list[RemoteRank], tuple[str, int]]:
        num_ranks = config.tensor_parallel_size
        reception = Reception(self._host)
        try:
            self._starter.start(
                [
                    RemoteRankTask(
                        rank=rank,
                        node=rank * self.num_nodes // num_ranks,
                        executor=reception.address,
                        key=reception.key,
                    )
                    for rank in range(num_ranks)
                ]
            )
            self._gather(reception, num_ranks)
        finally:
            reception.close()
        first = self._ranks[0]
        assert first.store_port is not None, "rank 0 has the store"
        return self._ranks, (first.host, first.store_port)

    def stop(self) -> None:
        """Closes the connections, at which ranks end themselves."""
        for rank in self._ranks:
            rank.connection.close()
        self._starter.release()

    def _gather(self, reception: Reception, num_ranks: int) -> None:
        """Waits for all ranks to connect, and fills ``_ranks`` in order."""
        deadline = time.monotonic() + START_TIMEOUT_S
        missing = set(range(num_ranks))
        while missing:
            rank = reception.accept(wait_s=_LOOK_S)
            if rank is not None:
                missing.remove(rank.number)
                self._ranks.append(rank)
                continue
            for number in sorted(missing):
                reason = self._starter.why_not(number)
                if reason is not None:
                    raise RankFailure(f"rank {number} did not start: {reason}")
            for rank in self._ranks:
                death = rank.how_it_died()
                if death is not None:
                    raise RankFailure(f"{rank.describe()} {death} before the others had come")
            if time.monotonic() > deadline:
                raise RankFailure(
                    f"ranks {sorted(missing)} did not come within {START_TIMEOUT_S:g} s"
                )
        self._ranks.sort(key=lambda rank: rank.number)
