"""What a rank does, however it was started and wherever its steps come from."""

import itertools
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from quire.worker.config import EngineConfig
from quire.worker.errors import CheckpointError, ConfigError
from quire.worker.rank_messages import Failed, Loaded, Ready
from quire.worker.step import StepInput, StepOutput

if TYPE_CHECKING:  # Slow to import, and a rank first sees to it that it does not outlive others.
    import torch

    from quire.worker.tensor_parallel import TensorParallel


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
    from quire.worker.model_runner import ModelRunner

    runner = ModelRunner(config, device=device, tp=tp)
    num_blocks = runner.num_blocks_that_fit()
    connection.send(Loaded(num_blocks=num_blocks, is_gpu=device.type == "cuda"))
    runner.allocate(connection.recv())
    connection.send(Ready())
    for number in itertools.count():
        output = runner.execute(read(number, connection.recv_bytes()))
        if output is not None:
            connection.send_bytes(write(number, output))
    raise AssertionError("numbers do not end")


def failed(error: BaseException) -> Failed:
    """What a rank says of the exception that ends it."""
    kind = type(error)
    # By its base, so that a subclass arrives as what a caller can handle.
    name = next((k.__name__ for k in (ConfigError, CheckpointError) if issubclass(kind, k)), None)
    return Failed(
        kind=name or kind.__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
    )
