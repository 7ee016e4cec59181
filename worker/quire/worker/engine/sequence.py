"""One request as the engine sees it: its tokens, how many have KV, and the blocks that hold it.

    0 ≤ num_computed < num_tokens + num_in_flight ≤ prompt + max_tokens
    tokens[:num_computed] have their KV in blocks[: ceil(num_computed / block_size)], or will have
    it once the submitted steps have run. These steps sample the tokens in flight, which follow
    the known tokens.

Prefill, decode, resume and recomputation after a preemption are the same here: tokens whose KV is
missing. Once only the last token's KV is missing, the next token can be sampled, even if the last
token is still in flight.
"""

import enum
import time
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from quire.worker.blocks.hashing import BlockHash, HashChain, TokenIds
from quire.worker.cache.block_pool import BlockId
from quire.worker.engine.choices import PLAIN, Choices
from quire.worker.request.arrays import Ints
from quire.worker.request.outputs import Fetched, FinishReason, TokenLogprobs
from quire.worker.request.request import Prepared
from quire.worker.step.sampling_batch import Edits

if TYPE_CHECKING:
    from quire.worker.engine.part import Part


class Status(enum.Enum):
    WAITING = enum.auto()
    """The sequence is in the queue, for the first time or preempted. It holds no blocks."""
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """The last token that it may have is in flight. It still holds its blocks."""
    FINISHED = enum.auto()
    """The sequence has ended or was aborted. It holds no blocks."""


class Sequence:
    """The progress of one request.

    ``chain`` names its blocks; ``None`` if they are not to be shared.
    ``seed`` and ``max_tokens`` are those of ``request.sampling``, resolved. ``choices`` says which
    tokens may follow; ``owner`` is the part that runs the sequence for itself, without a client.
    """

    def __init__(
        self,
        request: Prepared,
        *,
        seed: int,
        max_tokens: int,
        eos_token_ids: Items[int],
        block_size: int,
        chain: HashChain | None,
        choices: Choices = PLAIN,
        owner: "Part | None" = None,
    ) -> None:
        sampling, prompt_token_ids = request.sampling, request.prompt_token_ids
        self.request = request
        self.seed = seed
        self.choices = choices
        self.owner = owner
        self.waits: set[str] = set()
        """Names of the parts for which no step may compute its tokens yet."""
        self.is_embedded = request.task == "embed"
        self.wants_hidden = self.is_embedded or "hidden" in request.outputs
        self.number = 0
        """Its place in the order of arrival at the scheduler."""
        self.arrived_at_token = 0
        """How many tokens the engine had computed when the request arrived."""
        self.status = Status.WAITING
        self.num_cached: int | None = None
        """Prompt tokens found in the cache when it first ran; ``None`` until then."""
        self.progress = request.progress
        self.fetched: Fetched | None = None
        """Cached tokens that came from other tiers or groups; ``None`` once an output has it."""
        self.root = None if chain is None else chain.root
        """The root of its block hashes."""
        self.draft: list[int] = []
        """Draft tokens of the next step or of the step under way."""
        self._draft_edits: Items[Edits | None] = ()
        """For each draft token, changes to the logits of the token after it."""
        self.num_scored = 0
        """Prompt tokens after which the next token's log-probability is known, being computed or
        not requested."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Log-probabilities of prompt tokens that are known and not in an output yet."""
        self.num_queued = 0
        """Tokens that it would have to compute, estimated when it was queued."""

        # The request's own array; `append_token` copies it before the first write.
        self._tokens = prompt_token_ids
        if len(request.resumed_token_ids):
            self._tokens = np.concatenate([prompt_token_ids, request.resumed_token_ids])
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self._tokens)
        """Known tokens of prompt and output."""
        self.num_in_flight = 0
        self.num_computed = 0
        self.last_step = 0
        """Number of the newest submitted step that includes it."""
        self.last_sample = 0
        """Index in that step of its newest sample."""

        self._block_size = block_size
        self._blocks: Ints = np.empty(self.num_tokens // block_size + 2, dtype=np.int32)
        self.num_blocks = 0
        self.num_slots = 0
        """``num_blocks * block_size``"""
        self.num_registered = 0
        """Blocks at the beginning that are registered in the pool."""
        self._chain = chain
        self.row: int | None = None
        """Row of `StepInputs` with its block table; ``num_blocks_in_row`` blocks are copied."""
        self.num_blocks_in_row = 0
        self.hashes: list[BlockHash] = []
        """Hash of every block that known tokens fill, computed or not; empty without a chain."""
        self._extend_hashes()

        self._last_end = len(prompt_token_ids) + max_tokens
        # No token may follow the end of a constrained output.
        ignores_eos = sampling.ignore_eos and sampling.constraint is None
        self.end_ids = sampling.end_ids(() if ignores_eos else eos_token_ids)
        """The tokens that end its output."""
        # The first attempt of a resumed request has already returned them.
        is_scored = sampling.prompt_logprobs is not None and not len(request.resumed_token_ids)
        self._num_to_score = self.num_prompt_tokens - 1 if is_scored else 0
        self.num_scored = max(0, sampling.logprob_start_len - 1)
        self.must_score = self.num_scored < self._num_to_score
        """Whether log-probabilities of the prompt are still to be computed."""

    @property
    def num_output_tokens(self) -> int:
        """Known output tokens, including resumed ones, without those in flight."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed(self) -> int:
        """Tokens whose KV is missing. 1 means: ready to sample the next token."""
        return self.num_tokens + self.num_in_flight - self.num_computed

    @property
    def num_queued_hits(self) -> int:
        """Blocks of it that were found in the cache when it was queued."""
        return (self.num_tokens - self.num_queued) // self._block_size

    @property
    def num_shareable(self) -> int:
        """Blocks that it may take from the cache. It must compute its last token, to sample the
        next, and prompt tokens whose requested log-probabilities are not known."""
        num_tokens = self.num_scored if self.must_score else self.num_tokens - 1
        return min(len(self.hashes), num_tokens // self._block_size)

    def num_to_score(self, num_tokens: int) -> int:
        """How many of its next ``num_tokens`` return the next prompt token's log-probability."""
        end = min(self.num_computed + num_tokens, self._num_to_score)
        return max(0, end - max(self.num_computed, self.num_scored))

    def score(self, num_tokens: int) -> None:
        """Records that a submitted step scores ``num_tokens`` more prompt tokens."""
        self.num_scored += num_tokens
        self.must_score = self.num_scored < self._num_to_score

    @property
    def num_end_tokens(self) -> int:
        """Tokens behind the shareable blocks."""
        return self.num_tokens - self.num_shareable * self._block_size

    @property
    def num_missing_blocks(self) -> int:
        """Shareable blocks that are neither cached nor computed yet."""
        return max(self.num_shareable - self._num_found, 0)

    @property
    def missing_blocks(self) -> list[BlockHash]:
        return self.hashes[self._num_found : self.num_shareable]

    @property
    def _num_found(self) -> int:
        return self.num_queued_hits if self.status is Status.WAITING else self.num_registered

    @property
    def is_last_in_flight(self) -> bool:
        """Whether the length limit ends the output after the tokens in flight."""
        return self.num_tokens + self.num_in_flight >= self._last_end

    def begins(self) -> bool:
        """Records that it was admitted with its cached blocks. Returns whether it was the first
        time."""
        if self.num_cached is not None:
            return False
        self.num_cached = min(self.num_computed, self.num_prompt_tokens)
        if self.progress is not None:
            self.progress.scheduled_s = time.monotonic()
        return True

    def computes(self, num_tokens: int) -> None:
        """Records that a chunk of ``num_tokens`` of its tokens is in a step."""
        if self.progress is not None:
            self.progress.num_chunks += 1
            self.progress.num_prefilled_tokens += num_tokens

    def preempted(self) -> None:
        """Records that it was preempted: it waits again, without blocks."""
        self.status = Status.WAITING
        if self.progress is not None:
            self.progress.num_preemptions += 1

    @property
    def skips(self) -> bool:
        """Whether no step may sample its next token yet. If its choices are slow, it waits until
        the tokens in flight are known, since the mask would be late."""
        choices = self.choices
        if self.waits or choices.is_pending:
            return True
        return self.num_in_flight > 0 and choices.is_slow

    @property
    def num_undrafted(self) -> int:
        """How many of the tokens that may follow may be drafted: not the request's last one."""
        return self._last_end - self.num_tokens - 2

    def take_draft(self, token_ids: list[int]) -> None:
        """Makes ``token_ids`` the draft of the next step, as far as they may follow."""
        if token_ids:
            self._draft_edits = self.choices.draft(token_ids, num_output=self.num_output_tokens)
        self.draft = token_ids[: len(self._draft_edits)]

    def drop_draft(self) -> None:
        self.draft, self._draft_edits = [], ()

    @property
    def token_ids(self) -> TokenIds:
        """Known tokens of prompt and output. A view, as are all arrays here."""
        return self._tokens[: self.num_tokens]

    @property
    def block_ids(self) -> Ints:
        return self._blocks[: self.num_blocks]

    @property
    def lacks_edits(self) -> bool:
        """Whether the changes to the next token's logits depend on tokens in flight."""
        return self.choices.follows_tokens and self.num_in_flight > 0

    def edits(self, num_guessed: int = 0) -> Edits | None:
        """Changes to the logits of the token after those in flight and ``num_guessed`` drafts."""
        if self.choices is PLAIN:
            return None
        if num_guessed:
            return self._draft_edits[num_guessed - 1]
        return self.choices.edits(self.num_output_tokens + self.num_in_flight)

    def edits_in_flight(self) -> Edits | None:
        """Changes to the logits of the only token in flight."""
        return self.choices.edits(self.num_output_tokens)

    def token_at(self, position: int) -> int:
        """The known token at ``position``."""
        return int(self._tokens[position])

    def settle_draft(self, drawn: Items[int]) -> int:
        """How many of the tokens ``drawn`` after the last known token and each draft token are
        valid. The KV of rejected draft tokens will be overwritten.
        """
        num = 1
        while num <= len(self.draft) and self.draft[num - 1] == drawn[num - 1]:
            num += 1
        num_wrong = len(self.draft) + 1 - num
        self.num_in_flight -= num_wrong
        self.num_computed -= num_wrong
        self.drop_draft()
        return num

    def void_sample(self) -> None:
        """Discards its sample of the newest step."""
        self.num_in_flight -= 1
        self.num_computed -= 1

    def append_token(self, token_id: int) -> None:
        """Appends the oldest token in flight, which is now known."""
        self.num_in_flight -= 1
        if self.num_tokens == len(self._tokens):
            self._tokens = _grown(self._tokens, self.num_tokens + 1)
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.num_tokens % self._block_size == 0:
            self._extend_hashes()
        self.choices.accept(token_id)

    def finish_reason(self) -> FinishReason | None:
        """Why no token follows the known ones: "stop", "length", or ``None`` if more may follow."""
        if self.num_output_tokens == 0:
            return None
        if int(self._tokens[self.num_tokens - 1]) in self.end_ids:
            return "stop"
        return "length" if self.num_tokens >= self._last_end else None

    def append_blocks(self, block_ids: Items[BlockId]) -> None:
        end = self.num_blocks + len(block_ids)
        if end > len(self._blocks):
            self._blocks = _grown(self._blocks, end)
        self._blocks[self.num_blocks : end] = block_ids
        self.num_blocks = end
        self.num_slots = end * self._block_size

    def replace_block(self, index: int, block_id: BlockId) -> BlockId:
        """Puts ``block_id``, which has equal contents, at ``index``; returns the old block."""
        old = BlockId(int(self._blocks[index]))
        self._blocks[index] = block_id
        self.num_blocks_in_row = min(self.num_blocks_in_row, index)
        return old

    def take_blocks(self) -> list[BlockId]:
        """Empties the block table and returns its blocks, which the caller must release."""
        block_ids: list[BlockId] = self.block_ids.tolist()
        self.num_blocks = self.num_slots = self.num_registered = self.num_computed = 0
        self.num_blocks_in_row = 0
        return block_ids

    def stop_naming(self) -> None:
        """Gives its further blocks no names, because blocks before them have lost theirs."""
        del self.hashes[self.num_registered :]
        self._chain = None

    def _extend_hashes(self) -> None:
        if self._chain is not None:
            self.hashes += self._chain.extend(self.token_ids)


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy with at least ``size`` items and twice the length; new items are 0."""
    grown = np.zeros(max(size, 2 * len(array), 16), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
