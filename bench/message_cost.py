"""The cost of sending a step to the ranks and its tokens back, without a model."""

import time
from collections.abc import Callable
from unittest import mock

import numpy as np

from quire.worker.api.config import EngineConfig
from quire.worker.ranks import process as rank_process
from quire.worker.ranks.process_executor import ProcessExecutor
from quire.worker.step.messages import Executor, StepInput
from quire.worker.step.sampling_batch import SamplingBatch

_PAUSE_S = 0.002
"""Between two steps, so that the ranks sleep as they do while an engine has none for them."""


def time_messages(
    config: EngineConfig,
    *,
    num_rows: int,
    context: int,
    num_steps: int,
    make_executor: Callable[[EngineConfig], Executor] = ProcessExecutor,
) -> list[int]:
    """Nanoseconds from each of ``num_steps`` steps of decodes to its output. ``make_executor``
    starts ranks without a model, which those of a `ProcessExecutor` are here."""
    step = decode_step(num_rows, num_blocks=-(-context // config.block_size))
    with mock.patch.object(rank_process, "RANK_MODULE", "bench.echo_rank"):
        executor = make_executor(config)
    times_ns = []
    try:
        for _ in range(num_steps):
            time.sleep(_PAUSE_S)
            begin_ns = time.perf_counter_ns()
            executor.submit(step)
            executor.result()
            times_ns.append(time.perf_counter_ns() - begin_ns)
    finally:
        executor.close()
    return times_ns


def decode_step(num_rows: int, *, num_blocks: int) -> StepInput:
    """A step of the shape of ``num_rows`` decodes, of zeros."""
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
