"""One request as the engine sees it: its tokens, how many have KV, and the blocks that hold it.

    0 ≤ num_computed < num_tokens + num_in_flight ≤ prompt + max_tokens
    tokens[:num_computed] have their KV in blocks[: ceil(num_computed / block_size)], or will have
    it once the steps that are submitted have run; these sample the tokens in flight, which stand
    behind those that are known

Prefill, decode, resume and recomputation after a preemption are one thing here: tokens whose KV
is missing. Once only the last one's is, the next token can be sampled, though the last one may
still be in flight itself.
"""

import enum
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.worker.blocks import BlockId
from quire.worker.hashing import BlockHash, HashChain, TokenIds
from quire.worker.outputs import FinishReason
from quire.worker.sampling_params import SamplingParams
from quire.worker.step import Ints, Longs, Penalties


class Status(enum.Enum):
    WAITING = enum.auto()
    """In the queue, for the first time or preempted. Holds no blocks."""
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """The last token that it may have is in flight. Still holds its blocks."""
    FINISHED = enum.auto()
    """Ended or aborted. Holds no blocks."""


class Sequence:
    """The state of one request.

    ``root`` is the hash its chain begins from, or ``None`` where blocks are not to be shared.
    ``seed`` and ``max_tokens`` are those of ``params``, resolved.
    """

    def __init__(
        self,
        *,
        request_id: str,
        prompt_token_ids: TokenIds,
        resumed_token_ids: TokenIds,
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        eos_token_ids: Items[int],
        block_size: int,
        root: BlockHash | None,
        arrival_s: float,
        priority: int = 0,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.seed = seed
        self.max_tokens = max_tokens
        self.arrival_s = arrival_s
        self.priority = priority
        self.number = 0
        """Its place in the order of arrival at the scheduler."""
        self.arrived_at_token = 0
        """How many tokens the engine had computed by then."""
        self.status = Status.WAITING
        self.num_cached: int | None = None
        """Prompt tokens found in the cache when it first ran; ``None`` until then."""
        self.num_queued = 0
        """Tokens it will have to compute, as it seemed when it was queued."""

        self._tokens: TokenIds = np.concatenate([prompt_token_ids, resumed_token_ids])
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self._tokens)
        """Those that are known."""
        self.num_in_flight = 0
        self.num_computed = 0
        self.last_step = 0
        """Number of the newest submitted step that it has a part in."""
        self.sampled_row = 0
        """Which of the sampled rows of that step is its own."""

        self._block_size = block_size
        self._blocks: Ints = np.empty(self.num_tokens // block_size + 2, dtype=np.int32)
        self.num_blocks = 0
        self.num_slots = 0
        """``num_blocks * block_size``"""
        self.num_registered = 0
        """Blocks at the beginning that bear their hash in the pool."""
        self._chain = None if root is None else HashChain(root, block_size=block_size)
        self.row: int | None = None
        """Where step input keeps its block table, and how many blocks of it are there."""
        self.num_blocks_in_row = 0
        self.hashes: list[BlockHash] = []
        """Of every block that known tokens fill, computed or not; empty without a root."""
        self._extend_hashes()

        stop_ids = params.stop_token_ids or ()
        self._last_end = len(prompt_token_ids) + max_tokens
        self._end_ids = frozenset(stop_ids if params.ignore_eos else (*stop_ids, *eos_token_ids))
        # As in vLLM, min_tokens keeps the end token away even where it would be ignored.
        self._banned_ids = np.array(sorted({*stop_ids, *eos_token_ids}), dtype=np.int64)
        self._counts = (
            _TokenCounts(self._tokens, len(prompt_token_ids), params)
            if params.has_penalties
            else None
        )
        self.needs_tokens = self._counts is not None
        """Whether the engine must know all tokens before it can ask for the next one."""
        self.is_plain = self._counts is None and not params.min_tokens
        """Whether its sampling parameters are the same in every step."""

    @property
    def num_output_tokens(self) -> int:
        """Resumed ones counted, and those in flight not."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing. 1 means: ready to sample the next token."""
        return self.num_tokens + self.num_in_flight - self.num_computed

    @property
    def num_queued_hits(self) -> int:
        """Blocks that were cached for it, as it seemed when it was queued."""
        return (self.num_tokens - self.num_queued) // self._block_size

    @property
    def num_shareable(self) -> int:
        """Blocks that others may compute for it. Its last token it computes in any case: the next
        one comes of it."""
        return min(len(self.hashes), (self.num_tokens - 1) // self._block_size)

    @property
    def num_end_tokens(self) -> int:
        """Tokens behind those."""
        return self.num_tokens - self.num_shareable * self._block_size

    @property
    def num_missing_blocks(self) -> int:
        """Blocks that it or another one has to compute, behind those found or computed so far."""
        return max(self.num_shareable - self._num_found, 0)

    @property
    def missing_blocks(self) -> list[BlockHash]:
        return self.hashes[self._num_found : self.num_shareable]

    @property
    def _num_found(self) -> int:
        return self.num_queued_hits if self.status is Status.WAITING else self.num_registered

    @property
    def is_last_in_flight(self) -> bool:
        """Whether no token may follow those in flight."""
        return self.num_tokens + self.num_in_flight >= self._last_end

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and output. A view, as are all arrays here."""
        return self._tokens[: self.num_tokens]

    @property
    def block_ids(self) -> Ints:
        return self._blocks[: self.num_blocks]

    @property
    def banned_ids(self) -> Longs | None:
        """Tokens that must not be sampled behind those in flight."""
        too_early = self.num_output_tokens + self.num_in_flight < self.params.min_tokens
        return self._banned_ids if too_early and len(self._banned_ids) else None

    def penalties(self, *, row: int) -> Penalties | None:
        return self._counts.penalties(row=row) if self._counts else None

    def token_at(self, position: int) -> int:
        """A token that is known."""
        return int(self._tokens[position])

    def append_token(self, token_id: int) -> None:
        """Takes the oldest token in flight."""
        self.num_in_flight -= 1
        if self.num_tokens == len(self._tokens):
            self._tokens = _grown(self._tokens, self.num_tokens + 1)
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.num_tokens % self._block_size == 0:
            self._extend_hashes()
        if self._counts:
            self._counts.add_output(token_id)

    def finish_reason(self) -> FinishReason | None:
        """Why no token follows those at hand: "stop", "length" or ``None``."""
        if self.num_output_tokens == 0:
            return None
        if int(self._tokens[self.num_tokens - 1]) in self._end_ids:
            return "stop"
        return "length" if self.num_output_tokens >= self.max_tokens else None

    def append_blocks(self, block_ids: Items[BlockId]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self._blocks):
            self._blocks = _grown(self._blocks, end)
        self._blocks[self.num_blocks : end] = block_ids
        self.num_blocks = end
        self.num_slots = end * self._block_size

    def replace_block(self, index: int, block_id: BlockId) -> BlockId:
        """Puts ``block_id``, of the same contents, at ``index``; returns the one it replaces."""
        old = BlockId(int(self._blocks[index]))
        self._blocks[index] = block_id
        self.num_blocks_in_row = min(self.num_blocks_in_row, index)
        return old

    def take_blocks(self) -> list[BlockId]:
        """Empties the block table, for the pool to release: no KV is left."""
        block_ids: list[BlockId] = self.block_ids.tolist()
        self.num_blocks = self.num_slots = self.num_registered = self.num_computed = 0
        self.num_blocks_in_row = 0
        return block_ids

    def _extend_hashes(self) -> None:
        if self._chain is not None:
            self.hashes += self._chain.extend(self.token_ids)


class _TokenCounts:
    """What the penalties of one request need to know, kept up to date token by token."""

    def __init__(self, tokens: TokenIds, num_prompt_tokens: int, params: SamplingParams) -> None:
        self._params = params
        self._seen: Longs = np.unique(tokens).astype(np.int64)
        self._seen_set = set(self._seen.tolist())
        self._num_seen = len(self._seen)
        ids, counts = np.unique(tokens[num_prompt_tokens:], return_counts=True)
        self._output_ids: Longs = ids.astype(np.int64)
        self._output_counts: Ints = counts.astype(np.int32)
        self._index_of = {token_id: index for index, token_id in enumerate(ids.tolist())}

    def add_output(self, token_id: int) -> None:
        if token_id not in self._seen_set:
            self._seen_set.add(token_id)
            if self._num_seen == len(self._seen):
                self._seen = _grown(self._seen, self._num_seen + 1)
            self._seen[self._num_seen] = token_id
            self._num_seen += 1
        index = self._index_of.setdefault(token_id, len(self._index_of))
        if index == len(self._output_ids):
            self._output_ids = _grown(self._output_ids, index + 1)
            self._output_counts = _grown(self._output_counts, index + 1)
        self._output_ids[index] = token_id
        self._output_counts[index] += 1

    def penalties(self, *, row: int) -> Penalties:
        num_distinct = len(self._index_of)
        return Penalties(
            row=row,
            presence=self._params.presence_penalty,
            frequency=self._params.frequency_penalty,
            repetition=self._params.repetition_penalty,
            output_ids_R=self._output_ids[:num_distinct],
            output_counts_R=self._output_counts[:num_distinct],
            seen_ids_R=self._seen[: self._num_seen],
        )


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy with room for ``size`` items at least, the new ones 0; doubles."""
    grown = np.zeros(max(size, 2 * len(array), 16), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
