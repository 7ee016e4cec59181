"""The ranks of one group as processes on several nodes.

Ray starts them (`quire.cluster.group.rank_actors`) and has no further part. Each rank connects back
to its executor, and the group depends on these connections only: a rank that ends, hangs or is cut
off fails the group at once, and ranks end when their connections do.
"""

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from quire.cluster.group.rank_socket import Reception, RemoteRank
from quire.cluster.group.remote_rank import RemoteRankTask, RemoteStart
from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import RankFailure
from quire.worker.model.config import read_model_spec, resolve_max_model_len
from quire.worker.model.hub import fetch_checkpoint
from quire.worker.ranks.lockstep import START_TIMEOUT_S, LockstepExecutor
from quire.worker.step.codec import output_of, slot_bytes, step_to_bytes
from quire.worker.step.messages import StepInput, StepOutput

_LOOK_S = 0.5
"""How often it is asked whether a rank that has not come will not come."""


class RankLauncher(Protocol):
    """Starts the ranks of one group."""

    def start(self, tasks: Sequence[RemoteRankTask]) -> None:
        """Starts all: on rank r's node, a process that calls `run_rank` with task r."""

    def why_not(self, rank: int) -> str | None:
        """Why a rank will never come; ``None`` while it may."""

    def release(self) -> None:
        """The group has ended: nobody wants the ranks any more, hung ones among them."""


class RemoteExecutor(LockstepExecutor):
    """Steps and outputs travel through sockets. Rank r is on node ``r // (ranks / nodes)``."""

    def __init__(
        self, config: EngineConfig, launcher: RankLauncher, *, num_nodes: int, host: str
    ) -> None:
        """``host`` is the address of this node, at which the others reach it.

        Raises:
            ConfigError, CheckpointError: As a rank says.
            RankFailure: A rank died on the way.
        """
        connected = _Connected(launcher)
        super().__init__(config, stop=connected.stop)
        self.ranks = connected.ranks
        try:
            self._start(config, launcher, num_nodes, host)
        except BaseException:
            self.close()
            raise

    def _start(
        self, config: EngineConfig, launcher: RankLauncher, num_nodes: int, host: str
    ) -> None:
        model = read_model_spec(fetch_checkpoint(config.model), model_impl=config.model_impl)
        max_model_len = resolve_max_model_len(config, model)
        self._slot = np.zeros(slot_bytes(config, max_model_len=max_model_len), np.uint8)
        num_ranks = config.tensor_parallel_size
        reception = Reception(host)
        try:
            launcher.start(
                [
                    RemoteRankTask(
                        rank=rank,
                        ranks_per_node=num_ranks // num_nodes,
                        executor=reception.address,
                        key=reception.key,
                    )
                    for rank in range(num_ranks)
                ]
            )
            self._gather(reception, launcher, num_ranks)
        finally:
            reception.close()
        first = self.ranks[0].hello
        assert first.store_port is not None, "rank 0 has the store"
        start = RemoteStart(config=config, store=(first.host, first.store_port))
        self._start_ranks(config, self.ranks, [start] * num_ranks)

    def _gather(self, reception: Reception, launcher: RankLauncher, num_ranks: int) -> None:
        """Fills ``ranks``, by number."""
        deadline = time.monotonic() + START_TIMEOUT_S
        missing = set(range(num_ranks))
        while missing:
            rank = reception.accept(wait_s=_LOOK_S, timeout_s=self._step_timeout_s)
            if rank is not None:
                missing.remove(rank.number)
                self.ranks.append(rank)
                continue
            for number in sorted(missing):
                reason = launcher.why_not(number)
                if reason is not None:
                    raise RankFailure(f"rank {number} did not start: {reason}")
            for rank in self.ranks:
                death = rank.how_it_died()
                if death is not None:
                    raise RankFailure(f"{rank.describe()} {death} before the others had come")
            if time.monotonic() > deadline:
                raise RankFailure(
                    f"ranks {sorted(missing)} did not come within {START_TIMEOUT_S:g} s"
                )
        self.ranks.sort(key=lambda rank: rank.number)

    def _write_step(self, step: StepInput, number: int) -> bytes:
        return step_to_bytes(step, self._slot)

    def _read_output(self, message: Any, number: int) -> StepOutput:
        return output_of(message)


class _Connected:
    """The ranks that have come."""

    def __init__(self, launcher: RankLauncher) -> None:
        self.ranks: list[RemoteRank] = []
        self._launcher = launcher

    def stop(self) -> None:
        """Hangs up, at which ranks end themselves."""
        for rank in self.ranks:
            rank.connection.close()
        self._launcher.release()
