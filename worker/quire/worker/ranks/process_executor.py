"""The ranks of one group as child processes, one each, on one node."""

from typing import Any

from quire.worker.api.config import EngineConfig
from quire.worker.model.config import read_model_spec, resolve_max_model_len
from quire.worker.ranks.lockstep import LockstepExecutor
from quire.worker.ranks.messages import RankStart
from quire.worker.ranks.process import COLLECTIVES_BYTES_PER_RANK, RankProcesses
from quire.worker.step.codec import (
    StepSlots,
    all_slots_bytes,
    pack,
    read_output,
    slot_bytes,
    write_step,
)
from quire.worker.step.messages import StepInput, StepOutput


class ProcessExecutor(LockstepExecutor):
    """Steps and outputs lie in memory that all share; messages say that they are there."""

    def __init__(self, config: EngineConfig) -> None:
        self._processes = RankProcesses()
        super().__init__(config, stop=self._processes.stop)
        try:
            self._start(config)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """The ranks' process ids."""
        return tuple(rank.process.pid for rank in self._processes.ranks)

    def _start(self, config: EngineConfig) -> None:
        processes = self._processes
        model = read_model_spec(config.model, model_impl=config.model_impl)
        size = slot_bytes(config, max_model_len=resolve_max_model_len(config, model))
        offset = COLLECTIVES_BYTES_PER_RANK * config.tensor_parallel_size
        processes.start(
            config,
            shared_bytes=offset + all_slots_bytes(size),
            send_timeout_s=config.step_timeout_s,
        )
        self._slots = StepSlots(processes.shared_fd, offset=offset, slot_bytes=size)
        starts = [
            RankStart(
                rank=rank.number,
                config=config,
                rendezvous=processes.rendezvous,
                slots_offset=offset,
                slot_bytes=size,
            )
            for rank in processes.ranks
        ]
        self._start_ranks(config, processes.ranks, starts)

    def _write_step(self, step: StepInput, number: int) -> bytes:
        return pack(write_step(step, self._slots.step(number)))

    def _read_output(self, message: Any, number: int) -> StepOutput:
        return read_output(self._slots.output(number), message)
