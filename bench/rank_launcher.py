"""Ranks on several nodes without Ray: plain processes, here or on hosts of a `bench.namespaces`."""

import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from quire.cluster.group.remote_executor import RemoteExecutor
from quire.cluster.group.remote_rank import RemoteRankTask
from quire.worker.api.config import EngineConfig
from quire.worker.model.facts import ModelFacts, model_facts
from quire.worker.step.messages import Executor

RANK = """
import pickle, sys
from quire.cluster.group.remote_rank import run_rank
run_rank(pickle.load(sys.stdin.buffer), host=sys.argv[1])
"""

ECHO_RANK = f"""
import sys
sys.path.append({str(Path(__file__).resolve().parents[1])!r})
from quire.worker.runner import model_runner
from quire.worker.model import tensor_parallel
from bench.echo_rank import EchoRunner
model_runner.ModelRunner = EchoRunner
tensor_parallel.join_over_network = lambda *, rank, **_: rank
{RANK}
"""
"""Without a model, to time messages alone."""

Wrap = Callable[[Sequence[str]], Sequence[str]]


class ProcessLauncher:
    """A `quire.cluster.group.remote_executor.RankLauncher`."""

    def __init__(self, nodes: Sequence[tuple[str, Wrap]], *, program: str = RANK) -> None:
        """``nodes`` have an address each, and what makes a command one that runs there."""
        self._nodes = nodes
        self._program = program
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, tasks: Sequence[RemoteRankTask]) -> None:
        for task in tasks:
            address, wrap = self._nodes[task.rank // task.ranks_per_node]
            process = subprocess.Popen(
                wrap([sys.executable, "-P", "-c", self._program, address]), stdin=subprocess.PIPE
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
    config: EngineConfig, nodes: Sequence[tuple[str, Wrap]], *, program: str = RANK
) -> tuple[Executor, ModelFacts]:
    """In the place of `quire.worker.ranks.executor.make_executor`, with the first node as this
    one."""
    launcher = ProcessLauncher(nodes, program=program)
    executor = RemoteExecutor(config, launcher, num_nodes=len(nodes), host=nodes[0][0])
    return executor, model_facts(config)
