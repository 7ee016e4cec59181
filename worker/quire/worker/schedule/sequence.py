"""One request as the engine sees it: its tokens, how many have KV, and the blocks that hold it.

    0 ≤ num_computed < num_tokens + num_in_flight ≤ prompt + max_tokens
    tokens[:num_computed] have their KV in blocks[: ceil(num_computed / block_size)], or will have
    it once the steps that are submitted have run; these sample the tokens in flight, which stand
    behind those that are known

Prefill, decode, resume and recomputation after a preemption are the same here: tokens whose KV is
missing. Once only the last token's KV is missing, the next token can be sampled, even if the last
token is still in flight.
"""

import enum
import time
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.worker.api.arrays import Ints
from quire.worker.api.hashing import BlockHash, HashChain, TokenIds
from quire.worker.api.outputs import Fetched, FinishReason, TokenLogprobs
from quire.worker.api.request import Prepared
from quire.worker.cache.blocks import BlockId
from quire.worker.sampling.adjustments import RequestEdits
from quire.worker.schedule.draft import RECENT_MATCH, Drafter, RecentOutputs
from quire.worker.step.sampling_batch import Edits
from quire.worker.text.matcher import Matcher


class Status(enum.Enum):
    WAITING = enum.auto()
    """The sequence is in the queue, for the first time or preempted. It holds no blocks."""
    RUNNING = enum.auto()
    LEAVING = enum.auto()
    """The last token that it may have is in flight. Still holds its blocks."""
    FINISHED = enum.auto()
    """Ended or aborted. Holds no blocks."""


class Sequence:
    """The progress of one request.

    ``chain`` names its blocks; ``None`` where they are not to be shared.
    ``seed`` and ``max_tokens`` are those of ``request.sampling``, resolved.
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
    ) -> None:
        sampling, prompt_token_ids = request.sampling, request.prompt_token_ids
        self.request = request
        self.seed = seed
        self.is_embedded = request.task == "embed"
        self.wants_hidden = self.is_embedded or "hidden" in request.outputs
        self.number = 0
        """Its place in the order of arrival at the scheduler."""
        self.arrived_at_token = 0
        """How many tokens the engine had computed by then."""
        self.status = Status.WAITING
        self.num_cached: int | None = None
        """Prompt tokens found in the cache when it first ran; ``None`` until then."""
        self.progress = request.progress
        self.fetched: Fetched | None = None
        """What of that came from beyond the KV cache; until it was told."""
        self.root = None if chain is None else chain.root
        """What the names of its blocks begin from."""
        self.drafter = Drafter()
        self.draft: list[int] = []
        """Guessed tokens that the next step computes, or the one under way."""
        self._draft_edits: Items[Edits | None] = ()
        """Changes to the logits of the token behind each of them."""
        self.num_scored = 0
        """Tokens of the prompt behind which the next one's log-probability is known, under way or
        not asked for."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """Those that are known."""
        self.num_queued = 0
        """Tokens it will have to compute, as it seemed when it was queued."""

        # The prompt's own array, which is copied before anything is written: see `append_token`.
        self._tokens = prompt_token_ids
        if len(request.resumed_token_ids):
            self._tokens = np.concatenate([prompt_token_ids, request.resumed_token_ids])
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_tokens = len(self._tokens)
        """Those that are known."""
        self.num_in_flight = 0
        self.num_computed = 0
        self.last_step = 0
        """Number of the newest submitted step that it has a part in."""
        self.last_sample = 0
        """Which sample of that step is its newest."""

        self._block_size = block_size
        self._blocks: Ints = np.empty(self.num_tokens // block_size + 2, dtype=np.int32)
        self.num_blocks = 0
        self.num_slots = 0
        """``num_blocks * block_size``"""
        self.num_registered = 0
        """Blocks at the beginning that bear their hash in the pool."""
        self._chain = chain
        self.row: int | None = None
        """Where step input keeps its block table, and how many blocks of it are there."""
        self.num_blocks_in_row = 0
        self.hashes: list[BlockHash] = []
        """Hash of every block that known tokens fill, computed or not; empty without a chain."""
        self._extend_hashes()

        stop_ids = sampling.stop_token_ids or ()
        self._last_end = len(prompt_token_ids) + max_tokens
        # Behind the end of a constrained output nothing may come.
        ignores_eos = sampling.ignore_eos and sampling.constraint is None
        self._end_ids = frozenset(stop_ids if ignores_eos else (*stop_ids, *eos_token_ids))
        edits = RequestEdits(
            sampling,
            prompt_ids=prompt_token_ids,
            output_ids=request.resumed_token_ids,
            # As in vLLM, min_tokens keeps the end token away even where it would be ignored.
            end_ids=frozenset((*stop_ids, *eos_token_ids)),
        )
        self._edits = None if edits.is_empty else edits
        self._needs_tokens = edits.needs_tokens
        # The output that a resumed request begins with came with them.
        is_scored = sampling.prompt_logprobs is not None and not len(request.resumed_token_ids)
        self._num_to_score = self.num_prompt_tokens - 1 if is_scored else 0
        self.num_scored = max(0, sampling.logprob_start_len - 1)
        self.must_score = self.num_scored < self._num_to_score
        """Whether log-probabilities of the prompt are yet to be asked for."""
        self.matcher: Matcher | None = None
        """The place of its output in the grammar of its constraint. Set, with the output that is
        there, before it is scheduled."""
        self.adapter_slot = -1
        """Where the ranks have its adapter; -1 while they do not, and where it has none."""
        self.lacks_adapter = bool(request.adapter)
        """No step may compute any of its tokens yet: others' adapters are in the slots."""
        self.lacks_mask = False
        """Whether it is not known yet which tokens its constraint allows next."""

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
        one comes of it; so it does those of a prompt whose logits are asked for and not known."""
        num_tokens = self.num_scored if self.must_score else self.num_tokens - 1
        return min(len(self.hashes), num_tokens // self._block_size)

    def num_to_score(self, num_tokens: int) -> int:
        """Behind how many of its next ``num_tokens`` the prompt's next token is to be scored."""
        end = min(self.num_computed + num_tokens, self._num_to_score)
        return max(0, end - max(self.num_computed, self.num_scored))

    def score(self, num_tokens: int) -> None:
        """So many more of the prompt's tokens are scored by a step that is submitted."""
        self.num_scored += num_tokens
        self.must_score = self.num_scored < self._num_to_score

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
    def is_slow(self) -> bool:
        """Whether the masks of its constraint take long."""
        return self.matcher is not None and self.matcher.cost.is_slow

    def begins(self) -> bool:
        """It is let in with what was found in the cache. Whether for the first time."""
        if self.num_cached is not None:
            return False
        self.num_cached = min(self.num_computed, self.num_prompt_tokens)
        if self.progress is not None:
            self.progress.scheduled_s = time.monotonic()
        return True

    def computes(self, num_tokens: int) -> None:
        """A chunk of so many of its tokens is in a step."""
        if self.progress is not None:
            self.progress.num_chunks += 1
            self.progress.num_prefilled_tokens += num_tokens

    def preempted(self) -> None:
        """It waits again, without blocks."""
        self.status = Status.WAITING
        if self.progress is not None:
            self.progress.num_preemptions += 1

    def take_slot(self, slot: int) -> None:
        """Its adapter is in this slot from now on; -1: in none."""
        self.adapter_slot, self.lacks_adapter = slot, slot < 0

    @property
    def sits_out(self) -> bool:
        """Whether no step may draw its next token yet. A slow one's is not asked for before those
        in flight are known: its mask would be late."""
        return self.lacks_mask or self.lacks_adapter or (self.num_in_flight > 0 and self.is_slow)

    def guess(self, max_tokens: int, recent: RecentOutputs) -> list[int]:
        """At most ``max_tokens`` that may come next; none of them can be the request's last."""
        max_tokens = min(max_tokens, self._last_end - self.num_tokens - 2)
        # Masks of guesses are computed within the step.
        if max_tokens <= 0 or (self.matcher is not None and not self.matcher.cost.is_trusted):
            return []
        found = self.drafter.draft(
            self.token_ids,
            max_tokens=max_tokens,
            forced=() if self.matcher is None else self.matcher.forced(),
            recent=recent,
            root=self.root,
        )
        ends = [place for place, token_id in enumerate(found) if token_id in self._end_ids]
        return found[: ends[0]] if ends else found

    def take_draft(self, token_ids: list[int]) -> None:
        """Has the next step compute ``token_ids``, as far as they may be the next ones."""
        self.draft = token_ids
        if self._edits is not None and token_ids:
            masks = None if self.matcher is None else self.matcher.masks_behind(token_ids)
            self._draft_edits = self._edits.behind(
                token_ids, num_output=self.num_output_tokens, masks=masks
            )
            self.draft = token_ids[: len(self._draft_edits)]

    def drop_draft(self) -> None:
        self.draft, self._draft_edits = [], ()

    @property
    def output_to_recall(self) -> TokenIds:
        """The output, and the prompt's last tokens before it."""
        return self._tokens[max(0, self.num_prompt_tokens - RECENT_MATCH) : self.num_tokens]

    @property
    def token_ids(self) -> TokenIds:
        """Prompt and output. A view, as are all arrays here."""
        return self._tokens[: self.num_tokens]

    @property
    def block_ids(self) -> Ints:
        return self._blocks[: self.num_blocks]

    @property
    def lacks_edits(self) -> bool:
        """Whether its tokens in flight decide how the logits of the next one are changed."""
        return self._needs_tokens and self.num_in_flight > 0

    def edits(self, num_guessed: int = 0) -> Edits | None:
        """Changes to the logits of the token that follows those in flight and so many guesses."""
        if self._edits is None:
            return None
        if num_guessed:
            return self._draft_edits[num_guessed - 1]
        return self._edits.at(self.num_output_tokens + self.num_in_flight)

    def edits_in_flight(self) -> Edits | None:
        """Changes to the logits of the newest token in flight, the only one."""
        return None if self._edits is None else self._edits.at(self.num_output_tokens)

    def token_at(self, position: int) -> int:
        """A token that is known."""
        return int(self._tokens[position])

    def settle_draft(self, drawn: Items[int]) -> int:
        """How many of the tokens ``drawn`` behind the last known one and each guessed one count.

        The KV of guessed tokens that are not among them will be written again.
        """
        num = 1
        while num <= len(self.draft) and self.draft[num - 1] == drawn[num - 1]:
            num += 1
        self.drafter.learn(num_drafted=len(self.draft), num_accepted=num - 1)
        num_wrong = len(self.draft) + 1 - num
        self.num_in_flight -= num_wrong
        self.num_computed -= num_wrong
        self.drop_draft()
        return num

    def void_sample(self) -> None:
        """What the newest step draws for it does not count."""
        self.num_in_flight -= 1
        self.num_computed -= 1

    def append_token(self, token_id: int) -> None:
        """Takes the oldest token in flight."""
        self.num_in_flight -= 1
        if self.num_tokens == len(self._tokens):
            self._tokens = _grown(self._tokens, self.num_tokens + 1)
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1
        if self.num_tokens % self._block_size == 0:
            self._extend_hashes()
        if self._edits is not None:
            self._edits.add_output(token_id)
        if self.matcher is not None:
            self.matcher.consume((token_id,))

    def constraint_error(self) -> str | None:
        """Why its constraint allows no next token, if so; else that token will be an allowed one.

        Its matcher is ready, or its grammar's time is spent.
        """
        assert self.matcher is not None
        assert self._edits is not None
        if self.matcher.cost.is_spent:
            return self.matcher.cost.error
        if self.matcher.error is not None:
            return self.matcher.error
        if not self._edits.allow(self.matcher.mask_W, num_output=self.num_output_tokens):
            return "none of the tokens that it allows next is among allowed_token_ids"
        return None

    def finish_reason(self) -> FinishReason | None:
        """Why no token follows the present ones: "stop", "length" or ``None``."""
        if self.num_output_tokens == 0:
            return None
        if int(self._tokens[self.num_tokens - 1]) in self._end_ids:
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

    def stop_naming(self) -> None:
        """Its further blocks get no names, as blocks before them have lost theirs."""
        del self.hashes[self.num_registered :]
        self._chain = None

    def _extend_hashes(self) -> None:
        if self._chain is not None:
            self.hashes += self._chain.extend(self.token_ids)


def _grown(array: npt.NDArray[Any], size: int) -> npt.NDArray[Any]:
    """A copy with room for ``size`` items at least, the new ones 0; doubles."""
    grown = np.zeros(max(size, 2 * len(array), 16), dtype=array.dtype)
    grown[: len(array)] = array
    return grown
