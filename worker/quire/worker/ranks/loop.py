"""The main loop of a rank, independent of how it was started and how steps reach it."""

import gc
import itertools
import os
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from quire.worker.api.config import EngineConfig
from quire.worker.api.errors import CheckpointError, ConfigError
from quire.worker.ranks.messages import Failed, Loaded, Ready
from quire.worker.step.codec import unpack
from quire.worker.step.messages import StepInput, StepOutput

if TYPE_CHECKING:  # Slow to import, and a rank first sees to it that it does not outlive others.
    import torch

    from quire.worker.model.tensor_parallel import TensorParallel
    from quire.worker.step.late_tokens import Pending


def run_steps(
    connection: Connection,
    config: EngineConfig,
    *,
    device: "torch.device",
    tp: "TensorParallel",
    read: Callable[[int, bytes], StepInput],
    write: Callable[[int, StepOutput], bytes],
) -> NoReturn:
    """Loads the rank's share of the model and runs steps for ever.

    ``read`` makes a step of its number and its message, ``write`` a message of an output.

    Raises:
        EOFError, OSError: The executor is gone.
    """
    from quire.worker.runner.model_runner import ModelRunner

    runner = ModelRunner(config, device=device, tp=tp)
    num_blocks = runner.num_blocks_that_fit()
    is_gpu = device.type == "cuda"
    connection.send(Loaded(num_blocks=num_blocks, is_gpu=is_gpu, numerics=runner.numerics))
    runner.allocate(connection.recv())
    gc.collect()
    gc.freeze()  # A full collection looked through all that was loaded, while every rank waited.
    connection.send(Ready())

    answers = Answers(connection, write, in_thread=is_gpu)
    for number in itertools.count():
        step = read(number, connection.recv_bytes())
        pending = runner.launch(step, edits=lambda: unpack(connection.recv_bytes()))
        if pending is not None:
            answers.add(number, pending)
    raise AssertionError("numbers do not end")


class Answers:
    """Sends rank 0's outputs in the order of their steps.

    ``in_thread``: a thread waits for the device, so that the next step can be launched meanwhile.
    """

    def __init__(
        self,
        connection: Connection,
        write: Callable[[int, StepOutput], bytes],
        *,
        in_thread: bool,
        end: Callable[[int], object] = os._exit,
    ) -> None:
        """``end`` ends the process where the thread cannot go on."""
        self._connection = connection
        self._write = write
        self._end = end
        self._thread = ThreadPoolExecutor(1, "quire-answers") if in_thread else None

    def add(self, number: int, pending: "Pending") -> None:
        """Answers step ``number`` once its output is there."""
        if self._thread is None:
            self._send(number, pending)
        else:
            self._thread.submit(self._send_or_end, number, pending)

    def _send(self, number: int, pending: "Pending") -> None:
        self._connection.send_bytes(self._write(number, pending.wait()))

    def _send_or_end(self, number: int, pending: "Pending") -> None:
        try:
            self._send(number, pending)
        except BaseException as error:
            with suppress(OSError):
                self._connection.send(failed(error))
            self._end(1)


def failed(error: BaseException) -> Failed:
    """The message about the exception that ends a rank."""
    kind = type(error)
    # By its base, so that a subclass arrives as what a caller can handle.
    name = next((k.__name__ for k in (ConfigError, CheckpointError) if issubclass(kind, k)), None)
    return Failed(
        kind=name or kind.__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
