"""Makes the executor of one group: its rank runs in this process, or each rank in its own."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

from quire.worker.model.facts import ModelFacts
from quire.worker.model.read_facts import model_facts
from quire.worker.rank.host_memory import map_host_blocks
from quire.worker.rank.lockstep import LockstepExecutor
from quire.worker.rank.process import RankProcesses
from quire.worker.request.config import EngineConfig
from quire.worker.request.errors import RankFailure
from quire.worker.step.messages import Executor, StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments

if TYPE_CHECKING:
    from quire.worker.rank.late_tokens import Pending


def make_executor(config: EngineConfig) -> tuple[Executor, ModelFacts]:
    """Starts the ranks of ``config.model`` and waits until they are ready.

    The facts have no fingerprint unless blocks are kept on disk: only processes that compare
    block names need it.

    Raises:
        CheckpointError: The model's files cannot be read.
        ConfigError: The model cannot be run with this configuration.
        RankFailure: A rank died or raised while starting. No process is left.
    """
    facts = model_facts(config, with_fingerprint=config.kv_disk_dir is not None)
    if config.tensor_parallel_size == 1:
        return InProcessExecutor(config), facts
    return LockstepExecutor(config, RankProcesses()), facts


class InProcessExecutor:
    """The only rank of a group, in this process. ``step_timeout_s`` has no effect."""

    def __init__(self, config: EngineConfig) -> None:
        # Imported here: with rank processes, this process needs no torch (a second to import).
        import torch

        from quire.worker.rank.collectives import TensorParallel
        from quire.worker.rank.runner import ModelRunner, pick_device

        if config.num_threads is not None:  # else the process's setting stays
            torch.set_num_threads(config.num_threads)
        device = pick_device(config, rank=0)
        runner = ModelRunner(config, device=device, tp=TensorParallel())
        self._num_blocks = runner.num_blocks_that_fit()
        self.kv_format = runner.kv_format
        self.host_blocks_XC = map_host_blocks(runner.kv_format, num_slots=runner.num_host_blocks)
        runner.allocate(self._num_blocks, self.host_blocks_XC)
        self.numerics = runner.numerics
        self._runner: ModelRunner | None = runner
        self.num_ahead = config.num_ahead(is_gpu=device.type == "cuda")
        self._thread = None
        if self.num_ahead:
            # torch keeps the number of threads per calling thread.
            self._thread = ThreadPoolExecutor(
                1, "quire-rank", torch.set_num_threads, (torch.get_num_threads(),)
            )
        self._results: deque[Callable[[], StepOutput | None]] = deque()
        self._edits: SimpleQueue[Adjustments | None] = SimpleQueue()

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def submit(self, step: StepInput) -> None:
        if self._runner is None:
            raise RankFailure("the executor is closed")
        if self._thread is None:
            self._results.append(partial(self._runner.execute, step))
            return
        # The thread launches the next step while the device runs this one; `result` waits for it.
        launched = self._thread.submit(self._runner.launch, step, edits=self._edits.get)
        self._results.append(lambda: _output(launched))

    def send_edits(self, adjustments: Adjustments | None) -> None:
        self._edits.put(adjustments)

    def result(self) -> StepOutput:
        if self._runner is None:
            raise RankFailure("the executor is closed")
        try:
            output = self._results.popleft()()
        except Exception as error:
            self.close()
            raise RankFailure(f"rank 0 raised {type(error).__name__}: {error}") from error
        assert output is not None, "rank 0 samples"
        return output

    def close(self) -> None:
        self._runner = None
        self._results.clear()
        if self._thread is not None:
            self._edits.put(None)  # Releases a step that waits for edits; its tokens are dropped.
            self._thread.shutdown(wait=False, cancel_futures=True)


def _output(launched: "Future[Pending | None]") -> StepOutput | None:
    pending = launched.result()
    return None if pending is None else pending.wait()
