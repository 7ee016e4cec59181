"""CUDA graphs for decode steps: a step's hundreds of kernel launches become one.

A graph is a forward pass of a fixed number of rows, with a fixed greatest length, over buffers with
fixed addresses. One is captured for each combination of a series of both. A step runs in the
smallest graph that fits, padded with rows of length 0 that write to a spare block. A step that fits
no graph, because it has a prefill chunk, or too many or too long rows, runs eagerly.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from quire.kernels.batch import Batch
from quire.kernels.triton.launch import SPLIT_TOKENS
from quire.worker.rank.late_tokens import LateTokens
from quire.worker.rank.staging import Array, stage
from quire.worker.step.messages import StepInput

# N rows of the largest graph   B rows of a step   M blocks of the longest possible sequence
# V vocabulary

MAX_PARTS = 8192
"""Most rows times splits of their context in one graph. It bounds the partial results that decode
attention keeps (134 MB at 32 heads of 128) and the programs without work. Above it, a step takes so
long that its launches no longer matter."""
_SMALL_SIZES = (1, 2, 4, 8, 16, 32)
_SIZE_STEP = 32
_LENGTH_STEP = 4


class Graph(Protocol):
    """A captured graph, such as a `torch.cuda.CUDAGraph`."""

    def replay(self) -> None: ...


Capture = Callable[[Callable[[], None]], Graph]
"""Runs a function once and captures its work on the device for replay."""


@dataclass(frozen=True, order=True, slots=True)
class Bucket:
    """The steps that one graph can run."""

    num_rows: int
    max_seq_len: int
    has_adapters: bool = False


class DecodeGraphs:
    """The graphs of one rank. Ranks of a group capture and run them in lockstep."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor | None],
        *,
        buckets: list[Bucket],
        block_size: int,
        spare_block: int,
        vocab_size: int | None,
        dtype: torch.dtype = torch.float32,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """Captures nothing yet.

        ``forward`` computes a step on the device. Padding rows write to ``spare_block``, which no
        sequence may have. ``vocab_size`` is ``None`` if ``forward`` returns no logits; ``dtype`` is
        the type of the logits.
        """
        self._forward = forward
        self.buckets = sorted(buckets)
        self._spare_slot = spare_block * block_size
        self._device = device
        self._capture = capture
        self._graphs: dict[Bucket, Graph] = {}
        rows = max(bucket.num_rows for bucket in buckets)
        num_blocks = -(-max(bucket.max_seq_len for bucket in buckets) // block_size)

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        # Token ids, positions and slots.
        self._longs_3N = zeros(3, rows, dtype=torch.int64)
        self._longs_3N[2] = self._spare_slot
        self._seq_lens_N = zeros(rows, dtype=torch.int32)
        self._tables_NM = zeros(rows, num_blocks, dtype=torch.int32)
        self._starts_N1 = torch.arange(rows + 1, dtype=torch.int32, device=device)
        self._adapter_slots_N = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._last_tokens_N = torch.arange(rows, device=device)
        # All graphs write here, or each would keep its own logits alive.
        self._logits_NV = None if vocab_size is None else zeros(rows, vocab_size, dtype=dtype)

    def capture(self, bucket: Bucket) -> None:
        """Captures one bucket, on rows of length 0. Capturing the largest first takes the least
        memory, as later ones reuse its memory."""
        batch = self._batch(bucket)
        self._longs_3N[2].fill_(self._spare_slot)
        self._seq_lens_N.zero_()

        def run() -> None:
            logits_BV = self._forward(batch)
            if logits_BV is not None:
                assert self._logits_NV is not None, "vocab_size says that there are no logits"
                self._logits_NV[: bucket.num_rows].copy_(logits_BV)

        run()  # compilation and allocation on first use must not happen during the capture
        self._graphs[bucket] = self._capture(run)

    def bucket_of(self, step: StepInput) -> Bucket | None:
        """The smallest captured bucket that fits a step; ``None`` if there is none."""
        num_rows = len(step.seq_lens_B)
        # There is no graph for rows that are not sampled, chunks or hidden states.
        if step.num_decodes != num_rows or len(step.samples_S) != num_rows:
            return None
        if step.hidden_rows_H is not None:
            return None
        max_seq_len = int(step.seq_lens_B.max())
        has_adapters = len(step.adapter_slots_A) > 0
        fits = (
            bucket
            for bucket in self._graphs
            if bucket.num_rows >= num_rows
            and bucket.max_seq_len >= max_seq_len
            and bucket.has_adapters == has_adapters
        )
        return min(fits, default=None)

    @torch.inference_mode()
    def run(self, step: StepInput, bucket: Bucket, late: LateTokens | None = None) -> Tensor | None:
        """The step's logits ``[B, V]``, valid until the next run; ``None`` on other ranks."""
        self._fill(step, bucket, late)
        self._graphs[bucket].replay()
        return None if self._logits_NV is None else self._logits_NV[: len(step.seq_lens_B)]

    def _fill(self, step: StepInput, bucket: Bucket, late: LateTokens | None) -> None:
        """Copies a step into the buffers that the graphs read."""
        used, num_rows = len(step.seq_lens_B), bucket.num_rows
        longs = np.zeros((3, num_rows), np.int64)
        longs[2] = self._spare_slot
        for row, values in enumerate((step.token_ids_T, step.positions_T, step.slot_mapping_T)):
            longs[row, :used] = values
        seq_lens = np.zeros(num_rows, np.int32)
        seq_lens[:used] = step.seq_lens_B
        arrays: list[Array] = [longs, seq_lens, step.block_tables_BM]
        slots = np.full(num_rows if bucket.has_adapters else 0, -1, np.int32)
        slots[:used] = step.adapter_slots_A
        arrays.append(slots)
        if late is not None:
            arrays += [late.tokens_L, late.rows_L]
        longs_3B, seq_lens_B, tables_BM, slots_B, *late_L = stage(arrays, self._device)
        self._longs_3N[:, :num_rows].copy_(longs_3B)
        self._seq_lens_N[:num_rows].copy_(seq_lens_B)
        self._tables_NM[:used, : tables_BM.shape[1]].copy_(tables_BM)
        self._adapter_slots_N[: len(slots_B)].copy_(slots_B)
        if late is not None:
            late.put(self._longs_3N[0], *late_L)

    def _batch(self, bucket: Bucket) -> Batch:
        rows = bucket.num_rows
        token_ids_T, positions_T, slot_mapping_T = self._longs_3N[:, :rows].unbind()
        return Batch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            slot_mapping_T=slot_mapping_T,
            block_tables_BM=self._tables_NM[:rows],
            seq_lens_B=self._seq_lens_N[:rows],
            query_starts_B1=self._starts_N1[: rows + 1],
            last_tokens_S=self._last_tokens_N[:rows],
            num_decodes=rows,
            max_query_len=1,
            max_seq_len=bucket.max_seq_len,
            adapter_slots_T=self._adapter_slots_N[:rows] if bucket.has_adapters else None,
        )


def make_buckets(
    *, max_num_seqs: int, max_model_len: int, with_adapters: bool = False
) -> list[Bucket]:
    """All buckets: batch sizes close enough that padding costs little, and lengths by factors of
    four. ``with_adapters``: each with and without, as adapters launch more kernels."""
    sizes = {size for size in _SMALL_SIZES if size < max_num_seqs}
    sizes |= {*range(2 * _SIZE_STEP, max_num_seqs, _SIZE_STEP), max_num_seqs}
    lengths = [max_model_len]
    length = _LENGTH_STEP * SPLIT_TOKENS
    while length < max_model_len:
        lengths.append(length)
        length *= _LENGTH_STEP
    return [
        Bucket(size, length, has_adapters)
        for size in sorted(sizes)
        for length in sorted(lengths)
        for has_adapters in ((False, True) if with_adapters else (False,))
        if size * -(-length // SPLIT_TOKENS) <= MAX_PARTS
    ]


class CudaCapture:
    """`Capture` on a GPU. The graphs share memory, since they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, function: Callable[[], None]) -> Graph:
        graph = torch.cuda.CUDAGraph()
        # Only this thread is checked for calls that a capture forbids, since NCCL has its own.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            function()
        return graph
