"""A base class for executors of tests, which compute each step in the caller's thread."""

from abc import ABC, abstractmethod
from collections import deque
from dataclasses import replace

import numpy as np

from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.step.messages import StepInput, StepOutput
from quire.worker.step.sampling_batch import Adjustments

# N blocks of the cache   L tokens of a block   W words that are the "KV" of a token
# X blocks in host memory   C bytes of a block

NUM_HOST_BLOCKS = 32
"""Minimum number of slots of host memory, the same as for ranks."""


class DirectExecutor(ABC):
    """An executor that makes a step's copies first and runs it when its result is requested.

    Its KV cache is an array of 64-bit words, ``num_words`` for each token. Subclasses define what
    the words mean, and run the model.
    """

    num_ahead = 0
    numerics = ""

    def __init__(
        self, *, num_blocks: int, block_size: int, num_words: int = 1, host_kv_bytes: int = 0
    ) -> None:
        self._submitted: deque[StepInput] = deque()
        self.num_blocks = num_blocks
        self.kv_NLW = np.zeros((num_blocks, block_size, num_words), np.int64)
        self.kv_format = KvFormat(
            num_layers=1,
            num_kv_heads=1,
            head_bytes=4 * block_size * num_words,
            block_size=block_size,
        )
        self.host_blocks_XC: Bytes | None = None
        if host_kv_bytes:
            block_bytes = self.kv_format.block_bytes
            num_host_blocks = max(NUM_HOST_BLOCKS, host_kv_bytes // block_bytes)
            self.host_blocks_XC = np.zeros((num_host_blocks, block_bytes), np.uint8)

    def submit(self, step: StepInput) -> None:
        self._submitted.append(step)

    def send_edits(self, adjustments: Adjustments | None) -> None:
        step = self._submitted.pop()
        sampling = replace(step.sampling, adjustments=adjustments)
        self._submitted.append(replace(step, sampling=sampling))

    def result(self) -> StepOutput:
        step = self._submitted.popleft()
        if step.copies_X22 is not None:
            self._copy(step.copies_X22.tolist())
        return self.execute(step)

    @abstractmethod
    def execute(self, step: StepInput) -> StepOutput:
        """Runs the model once, or not at all where the step has no tokens."""

    def close(self) -> None:  # noqa: B027  # Most of them have nothing to free.
        """Frees what the executor holds."""

    def _copy(self, copies: list[list[list[int]]]) -> None:
        """Makes the copies in order, one block at a time."""
        tiers = [self.kv_NLW.reshape(self.num_blocks, -1).view(np.uint8), self.host_blocks_XC]
        for (source, block), (target, place) in copies:
            from_XC, to_XC = tiers[source], tiers[target]
            assert from_XC is not None
            assert to_XC is not None
            assert 0 <= block < len(from_XC)
            assert 0 <= place < len(to_XC)
            assert (source, target) != (1, 1), "no step needs that"
            to_XC[place] = from_XC[block]
