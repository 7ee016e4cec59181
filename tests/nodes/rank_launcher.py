"""Starts ranks on several nodes as plain processes, without Ray."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np

from quire.cluster.features.nodes.remote_rank import RemoteRankTask
from quire.cluster.features.nodes.remote_ranks import RemoteRanks
from quire.worker.model.facts import ModelFacts
from quire.worker.model.read_facts import model_facts
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.request.config import EngineConfig
from quire.worker.step.messages import Executor, StepInput
from quire.worker.step.sampling_batch import SamplingBatch

RANK = """
import pickle, sys
from quire.cluster.features.nodes.remote_rank import become_rank
become_rank(pickle.load(sys.stdin.buffer), host=sys.argv[1])
"""

Wrap = Callable[[Sequence[str]], Sequence[str]]


class NodeProcesses:
    """A `quire.cluster.features.nodes.remote_ranks.ProcessStarter` with subprocesses."""

    def __init__(self, nodes: Sequence[tuple[str, Wrap]]) -> None:
        """Each of ``nodes`` has an address, and a function that wraps a command to run there."""
        self._nodes = nodes
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, tasks: Sequence[RemoteRankTask]) -> None:
        for task in tasks:
            address, wrap = self._nodes[task.node]
            process = subprocess.Popen(
                wrap([sys.executable, "-P", "-c", RANK, address]), stdin=subprocess.PIPE
            )
            self.processes.append(process)
            assert process.stdin is not None
            with process.stdin:
                pickle.dump(task, process.stdin)

    def why_not(self, rank: int) -> str | None:
        code = self.processes[rank].poll()
        return None if code is None else f"its process ended with {code}"

    def release(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def make_executor(
    config: EngineConfig, nodes: Sequence[tuple[str, Wrap]]
) -> tuple[Executor, ModelFacts]:
    """Replaces `quire.worker.rank.executor.make_executor`. The first of ``nodes`` is this
    machine."""
    ranks = RemoteRanks(NodeProcesses(nodes), num_nodes=len(nodes), host=nodes[0][0])
    executor = LockstepExecutor(config, ranks)
    return executor, model_facts(config)


def decode_step(num_rows: int, *, num_blocks: int) -> StepInput:
    """A step with the shapes of ``num_rows`` decodes and zeros as values."""
    longs, ints = np.zeros(num_rows, np.int64), np.zeros(num_rows, np.int32)
    return StepInput(
        token_ids_T=longs,
        positions_T=longs,
        slot_mapping_T=longs,
        block_tables_BM=np.zeros((num_rows, num_blocks), np.int32),
        seq_lens_B=ints,
        query_starts_B1=np.arange(num_rows + 1, dtype=np.int32),
        num_decodes=num_rows,
        samples_S=ints,
        sampling=SamplingBatch.filled(num_rows, whole=0, real=0),
    )
