"""Host time of a decode step besides replaying its graph, on any machine.

Before each step the host looks for a prefix that decodes share, since reading it once may pay.
"bound" is the look that every step takes; "search" is the exact one, which every step took before
there was a bound, and which follows now only where the bound says that it may pay. "fill" puts the
step where the graph reads it.
"""

import statistics
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
from bench.gpu.lines import Lines
from bench.gpu.model import decode_step
from bench.gpu.shapes import BLOCK_SIZE

from quire.kernels.shared_prefix import find_shared
from quire.worker.api.arrays import Ints
from quire.worker.runner.decode_graphs import Bucket, DecodeGraphs
from quire.worker.step.messages import StepInput

_REPEATS = 50
_GROUP = 4


def time_host(lines: Lines) -> None:
    """Microseconds, medians, of 128 and 256 decodes, alone or in pairs that share 2,048 tokens."""
    for rows, context in ((128, 4096), (256, 1024)):
        step = decode_step(rows, context, 128256)
        paired = step.block_tables_BM.copy()
        common = context // 2 // BLOCK_SIZE
        paired[1::2, :common] = paired[::2, :common]
        for kind, tables in (("apart", step.block_tables_BM), ("in pairs", paired)):
            for look, least in (("bound", 1 << 18), ("search", 1)):
                micros = _micros(partial(_look, tables, step, least))
                lines.fact(f"host, {rows} x {context} {kind}: {look}, µs", micros)
        bucket = Bucket(rows, context)
        graphs = DecodeGraphs(
            lambda batch: None,
            buckets=[bucket],
            block_size=BLOCK_SIZE,
            spare_block=0,
            vocab_size=None,
            device=torch.device("cpu"),
            capture=mock.Mock(),
        )
        graphs.capture(bucket)
        fill = _micros(partial(graphs.run, step, bucket))
        lines.fact(f"host, {rows} x {context}: fill, µs", fill)


def _look(tables: Ints, step: StepInput, least: int) -> None:
    find_shared(
        tables, step.seq_lens_B, block_size=BLOCK_SIZE, group=_GROUP, min_saved_tokens=least
    )


def _micros(call: Callable[[], object]) -> float:
    durations = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        call()
        durations.append(time.perf_counter() - start)
    return statistics.median(durations) * 1e6
