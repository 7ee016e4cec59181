"""The ranks of one group, as the engine sees them: in this process, or one process each.

Ranks hold no requests, so on the first sign of trouble all are killed, and the group is lost as
a whole.
"""

import pickle
import time
import weakref
from multiprocessing.connection import wait
from typing import NoReturn, TypeVar

from quire.worker.config import EngineConfig
from quire.worker.errors import CheckpointError, ConfigError, RankFailure
from quire.worker.model_config import check_parallel, read_model_config
from quire.worker.model_facts import ModelFacts, model_facts
from quire.worker.rank_messages import Failed, Loaded, RankStart, Ready
from quire.worker.rank_process import RankProcess, RankProcesses
from quire.worker.step import Executor, StepInput, StepOutput

START_TIMEOUT_S = 1800.0
"""Loading from slow storage takes minutes; a rank that dies meanwhile is noticed at once."""

_SETTLE_S = 0.3
"""When one rank dies the others soon fail too, in a collective: wait this long for the cause."""

_Message = TypeVar("_Message")


def make_executor(config: EngineConfig) -> tuple[Executor, ModelFacts]:
    """Starts the ranks of ``config.model`` and waits until they are ready.

    Raises:
        CheckpointError: The model's files cannot be read.
        ConfigError: The model cannot be run like this.
        RankFailure: A rank died or raised while starting. No process is left.
    """
    facts = model_facts(config)
    check_parallel(read_model_config(config.model), config.tensor_parallel_size)
    if config.tensor_parallel_size == 1:
        return InProcessExecutor(config), facts
    return ProcessExecutor(config), facts


class InProcessExecutor:
    """The only rank of a group, in this process. ``step_timeout_s`` has no effect."""

    def __init__(self, config: EngineConfig) -> None:
        # Not above: with rank processes, this one needs no torch, whose import takes a second.
        import torch

        from quire.worker.model_runner import ModelRunner, pick_device
        from quire.worker.tensor_parallel import TensorParallel

        if config.num_threads is not None:  # else as this process has it
            torch.set_num_threads(config.num_threads)
        device = pick_device(config, rank=0)
        runner = ModelRunner(config, device=device, tp=TensorParallel())
        self._num_blocks = runner.num_blocks_that_fit()
        runner.allocate(self._num_blocks)
        self._runner: ModelRunner | None = runner

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def execute(self, step: StepInput) -> StepOutput:
        if self._runner is None:
            raise RankFailure("the executor is closed")
        try:
            output = self._runner.execute(step)
        except Exception as error:
            self.close()
            raise RankFailure(f"rank 0 raised {type(error).__name__}: {error}") from error
        assert output is not None, "rank 0 samples"
        return output

    def close(self) -> None:
        self._runner = None


class ProcessExecutor:
    """Ranks as child processes that work in lockstep. Used from one thread; `close` from any."""

    def __init__(self, config: EngineConfig) -> None:
        self._step_timeout_s = config.step_timeout_s
        self._failure: str | None = None
        processes = RankProcesses()
        self._ranks = processes.ranks
        self._stop = weakref.finalize(self, processes.stop)
        try:
            processes.start(config, send_timeout_s=config.step_timeout_s)
            for rank in self._ranks:
                rendezvous = processes.directory / "rendezvous"
                start = RankStart(rank=rank.number, config=config, rendezvous=rendezvous)
                self._send(rank, pickle.dumps(start))
            loaded = self._receive_all(Loaded)
            self._num_blocks = min(message.num_blocks for message in loaded)
            for rank in self._ranks:
                self._send(rank, pickle.dumps(self._num_blocks))
            self._receive_all(Ready)
        except BaseException:
            self.close()
            raise

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids."""
        return tuple(rank.process.pid for rank in self._ranks)

    def execute(self, step: StepInput) -> StepOutput:
        if self._failure is not None or not self._stop.alive:
            raise RankFailure(self._failure or "the executor is closed")
        deadline = time.monotonic() + self._step_timeout_s
        message = pickle.dumps(step, protocol=5)
        try:
            for rank in self._ranks:
                self._send(rank, message)
            # The others only speak to say that they failed; rank 0 has the tokens.
            while True:
                for rank in self._wait(self._ranks, deadline, self._step_timeout_s):
                    output = self._receive(rank, StepOutput)
                    if rank is self._ranks[0]:
                        return output
        except BaseException:  # after a KeyboardInterrupt too: the answer is still on its way
            self.close()
            raise

    def close(self) -> None:
        self._stop()

    def _receive_all(self, kind: type[_Message]) -> list[_Message]:
        """One message of each rank, in whatever order they come."""
        deadline = time.monotonic() + START_TIMEOUT_S
        missing = list(self._ranks)
        messages: list[_Message] = []
        while missing:
            for rank in self._wait(missing, deadline, START_TIMEOUT_S):
                messages.append(self._receive(rank, kind))
                missing.remove(rank)
        return messages

    def _send(self, rank: RankProcess, message: bytes) -> None:
        try:
            rank.connection.send_bytes(message)
        except BlockingIOError:
            self._time_out([rank], self._step_timeout_s)
        except OSError:
            self._fail()

    def _wait(
        self, ranks: list[RankProcess], deadline: float, timeout_s: float
    ) -> list[RankProcess]:
        """The ranks that have something to say, at least one."""
        remaining_s = max(0.0, deadline - time.monotonic())
        try:
            ready = wait([rank.connection for rank in ranks], remaining_s)
        except (OSError, ValueError):  # another thread has closed the connections
            self._fail()
        if not ready:
            self._time_out(ranks, timeout_s)
        return [rank for rank in ranks if rank.connection in ready]

    def _receive(self, rank: RankProcess, kind: type[_Message]) -> _Message:
        try:
            message = rank.connection.recv()
        except (EOFError, OSError):
            self._fail()
        if isinstance(message, Failed):
            self._fail((rank, message))
        assert isinstance(message, kind)
        return message

    def _time_out(self, ranks: list[RankProcess], timeout_s: float) -> NoReturn:
        silent = " and ".join(rank.describe() for rank in ranks)
        states = ", ".join(f"rank {rank.number} {rank.state()}" for rank in self._ranks)
        self._lose(f"{silent} did not answer within {timeout_s:g} s; now: {states}")

    def _fail(self, first: tuple[RankProcess, Failed] | None = None) -> NoReturn:
        """Finds the rank that failed first, in all likelihood, and raises for it.

        A rank that was killed says nothing, and those that waited for it in a collective then
        raise: so a death comes before all that was said, and what was said first before the rest.
        """
        said = [first] if first is not None else []
        deadline = time.monotonic() + _SETTLE_S
        while self._stop.alive and time.monotonic() < deadline:
            for rank in self._ranks:
                death = rank.how_it_died()
                if death is not None:
                    self._lose(f"{rank.describe()} {death}")
            if not said:
                said = self._drain_failures()
            time.sleep(0.005)
        if not said:
            self._lose("a rank hung up" if self._stop.alive else "the executor is closed")
        rank, failed = said[0]
        for kind in (ConfigError, CheckpointError):
            if failed.kind == kind.__name__:
                self.close()
                raise kind(failed.message)
        self._lose(
            f"{rank.describe()} raised {failed.kind}: {failed.message}", note=failed.traceback
        )

    def _drain_failures(self) -> list[tuple[RankProcess, Failed]]:
        said = []
        for rank in self._ranks:
            try:
                while rank.connection.poll():
                    message = rank.connection.recv()
                    if isinstance(message, Failed):
                        said.append((rank, message))
            except (EOFError, OSError):
                continue
        return said

    def _lose(self, message: str, *, note: str | None = None) -> NoReturn:
        self._failure = message
        self.close()
        error = RankFailure(message)
        if note is not None:
            error.add_note(note)
        raise error
