"""What the next step computes: decodes first, then prompts in chunks, first come, first served.

Always true: running sequences are older than waiting ones, and both stand in order of arrival;
a sequence that lacks blocks takes them from newer ones only, so that the oldest always goes on;
no block is let go before the last step that uses it has run.

A full block is registered when the step that fills it is scheduled, not when it has run: the
forward pass writes the KV of all its rows before any of them attends, so that requests of one
step share the prefix that one of them computes. A block with a token in flight has no name yet:
it is registered when the token comes.
"""

from collections import deque
from dataclasses import dataclass

from quire.worker.blocks import BlockId, BlockPool
from quire.worker.sequence import Sequence, Status


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: how many tokens of which sequences, from each one's ``num_computed`` on."""

    sequences: list[Sequence]
    num_tokens: list[int]
    num_decodes: int
    """So many at the beginning compute exactly one token, be it the last of a prompt."""
    sampled_rows: list[int]
    """Indices of the sequences whose next token is sampled."""


NOTHING = Schedule([], [], 0, [])


class Scheduler:
    """Who runs, who waits, and who holds which blocks. Decides, and executes nothing."""

    def __init__(self, *, pool: BlockPool, max_num_seqs: int, max_num_batched_tokens: int) -> None:
        self._pool = pool
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Of the requests that began to run, each counted once; so are the hits among them."""
        self.num_hit_tokens = 0
        self._num_queued_tokens = 0
        self._num_submitted = 0
        self._num_finished = 0
        # Blocks whose hash another one bears: (sequence, index in its table, the other block).
        self._duplicates: list[tuple[Sequence, int, BlockId]] = []
        # Blocks that nobody will use any more, by the last step that does.
        self._parting: list[tuple[int, list[BlockId]]] = []

    @property
    def num_pending_prefill_tokens(self) -> int:
        """Tokens to compute before all requests at hand decode; for waiting ones an estimate."""
        pending = (seq.num_uncomputed for seq in self.running)
        return self._num_queued_tokens + sum(num_tokens for num_tokens in pending if num_tokens > 1)

    def add(self, seq: Sequence) -> None:
        """Queues a new request. The pool must be large enough for all of its tokens."""
        self._estimate(seq)
        self.waiting.append(seq)

    def remove(self, seq: Sequence) -> None:
        """Takes a request out, finished or not, and gives its blocks back: now, or when the last
        step that uses them has run."""
        if seq.status is Status.WAITING:
            self.waiting.remove(seq)
            self._num_queued_tokens -= seq.num_queued
        else:
            if seq.status is Status.RUNNING:
                self.running.remove(seq)
            self._release(seq.take_blocks(), after_step=seq.last_step)
        seq.status = Status.FINISHED

    def schedule(self) -> Schedule:
        """Chooses the next step and takes its blocks; `submitted` must follow.

        Every running decode has its token of the budget set aside; prompts share the rest in
        order of arrival. A sequence that lacks blocks takes those of the newest one; the newest
        itself sits the step out and keeps what it has.

        While steps are under way nobody is preempted. Where that would be necessary, or a token
        in flight must be known first, nothing is chosen: take a step's tokens and try again.
        """
        if self._num_finished < self._num_submitted and self._must_wait():
            return NOTHING
        chosen: list[tuple[Sequence, int]] = []
        num_ready = sum([seq.num_uncomputed == 1 for seq in self.running])
        budget = self._max_num_batched_tokens - num_ready
        enough_blocks = True
        for seq in self.running.copy():
            if seq.status is not Status.RUNNING:
                break  # Preempted by an older one, as is every sequence after it.
            is_ready = seq.num_uncomputed == 1
            if is_ready and seq.num_slots - seq.num_computed > 1:
                chosen.append((seq, 1))  # Most decodes neither need a block nor fill one.
                continue
            # No one is admitted behind a prompt that is not through, so only the newest can have
            # one, and then the others' tokens leave it at least one.
            num_tokens = 1 if is_ready else min(seq.num_uncomputed, budget)
            if self._lacks_blocks(seq, num_tokens):
                enough_blocks = False
                if not self._make_room(seq, num_tokens):
                    break
            budget -= 0 if is_ready else num_tokens
            self._extend(seq, num_tokens)
            chosen.append((seq, num_tokens))
        if enough_blocks:
            chosen += self._admit(budget)
        return _in_row_order(chosen)

    def submitted(self, schedule: Schedule) -> None:
        """The step is under way, and the next one may build on what it computes."""
        self._num_submitted += 1
        for seq, num_tokens in zip(schedule.sequences, schedule.num_tokens, strict=True):
            seq.num_computed += num_tokens
            seq.last_step = self._num_submitted
        num_leaving = 0
        for sampled_row, row in enumerate(schedule.sampled_rows):
            seq = schedule.sequences[row]
            seq.num_in_flight += 1
            seq.sampled_row = sampled_row
            if seq.is_last_in_flight:
                seq.status = Status.LEAVING
                num_leaving += 1
        if num_leaving:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        self._settle_duplicates()

    def finished(self) -> None:
        """The oldest step under way has run: blocks that only it still used can be let go."""
        self._num_finished += 1
        parting, self._parting = self._parting, []
        for step, block_ids in parting:
            self._release(block_ids, after_step=step)

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Takes the oldest token in flight of ``seq``, which must not have been removed."""
        seq.append_token(token_id)
        if seq.num_computed // self._pool.block_size > seq.num_registered:
            # A step ahead has computed more than was known.
            self._register(seq, seq.num_computed)
            self._settle_duplicates()

    def _admit(self, budget: int) -> list[tuple[Sequence, int]]:
        """Starts waiting requests, the oldest first, until one does not fit."""
        admitted: list[tuple[Sequence, int]] = []
        while self.waiting and budget > 0 and len(self.running) < self._max_num_seqs:
            seq = self.waiting[0]
            if not self._acquire_prefix(seq):
                break
            self.waiting.popleft()
            self._num_queued_tokens -= seq.num_queued
            self.running.append(seq)
            seq.status = Status.RUNNING
            num_tokens = min(seq.num_uncomputed, budget)
            budget -= num_tokens
            self._extend(seq, num_tokens)
            admitted.append((seq, num_tokens))
        return admitted

    def _acquire_prefix(self, seq: Sequence) -> bool:
        """Takes the cached prefix of ``seq`` if all of its tokens so far then find room.

        All of them, though only a chunk may run now: a prompt that is let in by its first chunk
        ends up waiting for blocks, or preempted, with blocks in hand. One block for each running
        sequence stays free too, or the next decodes would preempt what was just admitted.
        """
        hits = self._find_prefix(seq)
        num_blocks = -(-seq.num_tokens // self._pool.block_size) - len(hits)
        num_available = self._pool.num_available - self._pool.num_unheld(hits)
        if num_blocks + len(self.running) > num_available:
            return False
        self._pool.acquire(hits)
        seq.append_blocks(hits)
        seq.num_registered = len(hits)
        seq.num_computed = len(hits) * self._pool.block_size
        if seq.num_cached is None:
            seq.num_cached = min(seq.num_computed, seq.num_prompt_tokens)
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_hit_tokens += seq.num_cached
        return True

    def _find_prefix(self, seq: Sequence) -> list[BlockId]:
        """Cached blocks to begin with, less the last token's: its logits must be computed."""
        return self._pool.match(seq.hashes[: (seq.num_tokens - 1) // self._pool.block_size])

    def _must_wait(self) -> bool:
        """Whether the steps under way must be over before the next one can be chosen."""
        if any(seq.needs_tokens and seq.num_in_flight for seq in self.running):
            return True
        budget = self._max_num_batched_tokens
        num_missing = sum(
            max(0, self._num_missing_blocks(seq, min(seq.num_uncomputed, budget)))
            for seq in self.running
            if seq.num_computed + seq.num_uncomputed > seq.num_slots
        )
        return num_missing > self._pool.num_available

    def _lacks_blocks(self, seq: Sequence, num_tokens: int) -> bool:
        num_missing = self._num_missing_blocks(seq, num_tokens)
        return num_missing > 0 and num_missing > self._pool.num_available

    def _num_missing_blocks(self, seq: Sequence, num_tokens: int) -> int:
        return -(-(seq.num_computed + num_tokens) // self._pool.block_size) - seq.num_blocks

    def _make_room(self, seq: Sequence, num_tokens: int) -> bool:
        """Preempts sequences newer than ``seq``, the newest first, until its tokens find room."""
        while self._lacks_blocks(seq, num_tokens):
            victim = self.running[-1]
            if victim is seq:
                return False
            self.running.pop()
            # Its full blocks stay cached: it may find them again when its turn comes.
            self._pool.release(victim.take_blocks())
            victim.status = Status.WAITING
            self._estimate(victim)
            self.waiting.appendleft(victim)
            self.num_preemptions += 1
        return True

    def _extend(self, seq: Sequence, num_tokens: int) -> None:
        """Gives ``seq`` the blocks for its next tokens, and registers those that they fill."""
        num_missing = self._num_missing_blocks(seq, num_tokens)
        if num_missing > 0:
            seq.append_blocks(self._pool.allocate(num_missing))
        self._register(seq, seq.num_computed + num_tokens)

    def _register(self, seq: Sequence, num_computed: int) -> None:
        """Names the blocks that the first ``num_computed`` tokens fill, as far as those are known.

        The table points to a duplicate's other block only after the step that is being scheduled:
        until then the sequence writes to its own, and a full block has one writer.
        """
        begin = seq.num_registered
        end = min(num_computed // self._pool.block_size, len(seq.hashes))
        if end <= begin:
            return
        block_ids: list[BlockId] = seq.block_ids[begin:end].tolist()
        parent = BlockId(int(seq.block_ids[begin - 1])) if begin else None
        named = self._pool.register(block_ids, seq.hashes[begin:end], parent=parent)
        seq.num_registered = end
        for index, (own, block_id) in enumerate(zip(block_ids, named, strict=True), begin):
            if own != block_id:
                self._duplicates.append((seq, index, block_id))

    def _settle_duplicates(self) -> None:
        for seq, index, block_id in self._duplicates:
            self._release([seq.replace_block(index, block_id)], after_step=seq.last_step)
        self._duplicates.clear()

    def _release(self, block_ids: list[BlockId], *, after_step: int) -> None:
        if after_step <= self._num_finished:
            self._pool.release(block_ids)
        else:
            self._parting.append((after_step, block_ids))

    def _estimate(self, seq: Sequence) -> None:
        hits = self._find_prefix(seq)
        seq.num_queued = seq.num_tokens - len(hits) * self._pool.block_size
        self._num_queued_tokens += seq.num_queued


def _in_row_order(chosen: list[tuple[Sequence, int]]) -> Schedule:
    decodes = [seq for seq, num_tokens in chosen if num_tokens == 1]
    chunks = [(seq, num_tokens) for seq, num_tokens in chosen if num_tokens > 1]
    sequences = decodes + [seq for seq, _ in chunks]
    num_tokens_B = [1] * len(decodes) + [num_tokens for _, num_tokens in chunks]
    return Schedule(
        sequences=sequences,
        num_tokens=num_tokens_B,
        num_decodes=len(decodes),
        sampled_rows=[
            row
            for row, (seq, num_tokens) in enumerate(zip(sequences, num_tokens_B, strict=True))
            if num_tokens == seq.num_uncomputed
        ],
    )
