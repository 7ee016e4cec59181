"""Chooses the next step: decodes first, then prompts in chunks, in the order of their turns.

`quire.worker.engine.waiting` defines turns: a short prompt may overtake a long one that has
begun, which keeps its blocks. Preemption follows another order, the *rank*: priority, then arrival.
A running sequence preempts only sequences of lower rank.

Always true: blocks that a begun prompt still lacks are not given to newly admitted ones. If a step
can be chosen at all, some sequence proceeds: the highest-ranked one can take every block.
"""

from bisect import insort

from quire.worker.blocks.hashing import BlockHash
from quire.worker.cache.block_pool import BlockPool
from quire.worker.engine.part import NO_PARTS, Parts
from quire.worker.engine.pending import PendingPrefill
from quire.worker.engine.schedule import NOTHING, Schedule, in_row_order
from quire.worker.engine.sequence import Sequence, Status
from quire.worker.engine.tables import BlockTables, Prefix
from quire.worker.engine.waiting import Turn, WaitingQueue, turn_of
from quire.worker.request.config import SchedulingPolicy
from quire.worker.step.messages import MAX_SCORED_TOKENS

MAX_UPDATED_TURNS = 128
"""Most waiting requests whose turns one step updates after others have computed blocks for them.
An update takes about 20 µs."""

_SHORT = 4
"""A short step computes at most 1 / `_SHORT` of the prefill tokens of other steps."""


def short_step(max_num_batched_tokens: int) -> int:
    """Most prefill tokens of a short step."""
    return max(1, max_num_batched_tokens // _SHORT)


class Scheduler:
    """Running and waiting sequences, and their blocks. Decides, and executes nothing."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: SchedulingPolicy = "fcfs",
        takes_whole: bool = False,
        parts: Parts = NO_PARTS,
    ) -> None:
        """``takes_whole``: prompts are computed whole, not in chunks; each must fit into a step."""
        self._tables = BlockTables(pool, parts.tier)
        self._parts = parts.every
        self._drafting = parts.drafting
        self._block_size = pool.block_size
        self._policy: SchedulingPolicy = policy
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._takes_whole = takes_whole
        # Waiting requests that no step may compute. Outside the queue, they block no others.
        self._held_back: set[Sequence] = set()
        self.running: list[Sequence] = []
        """Running sequences by rank."""
        self.waiting = WaitingQueue()
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of requests that began to run, once each; hits are counted alike."""
        self.num_hit_tokens = 0
        self._pending = PendingPrefill(block_size=pool.block_size)
        self._num_turns_left = 0  # Turns that this step may still update.
        self._num_added = 0
        self._num_computed = 0  # Tokens of all requests in all steps so far.

    @property
    def num_pending_prefill_tokens(self) -> int:
        """Estimated tokens to compute before all requests decode; shared tokens count once."""
        return self._pending.num_tokens(self.running)

    @property
    def num_waiting(self) -> int:
        return len(self.waiting) + len(self._held_back)

    def add(self, seq: Sequence) -> None:
        """Queues a new request. The pool must be large enough for all of its tokens."""
        self._num_added += 1
        seq.number = self._num_added
        seq.arrived_at_token = self._num_computed
        for part in self._parts:
            part.queued(seq)
        self._queue(seq)

    def remove(self, seq: Sequence) -> None:
        """Removes a request, finished or not, and releases its blocks: now, or when the last step
        that uses them has run."""
        if seq.status is Status.WAITING:
            self._unqueue(seq)
        elif seq.status is Status.RUNNING:
            self.running.remove(seq)
        self._release(seq)
        seq.status = Status.FINISHED

    def schedule(self, *, is_short: bool = False) -> Schedule:
        """Chooses the next step and allocates its blocks; `submitted` must follow. A step that
        ``is_short`` computes fewer prefill tokens.

        Every running decode has one token of the budget; running and waiting prompts share the
        rest in the order of their turns. A sequence that lacks blocks preempts the lowest-ranked
        one. The lowest-ranked sequence cannot preempt itself; it skips this step and keeps its
        blocks. So does a sequence of which it is not known which tokens may follow.

        No sequence is preempted while steps are under way. If that would be necessary, the result
        is empty: the caller must take a step's tokens and try again.
        """
        is_under_way = self._tables.num_finished < self._tables.num_submitted
        if is_under_way and self._must_wait():
            return NOTHING
        # Sequences that wait no longer may lack blocks too.
        if self._ask_parts() and is_under_way and self._must_wait():
            return NOTHING
        chosen: list[tuple[Sequence, int]] = []
        begun: list[Sequence] = []
        num_skipping = sum([seq.num_uncomputed == 1 and seq.skips for seq in self.running])
        num_ready = sum([seq.num_uncomputed == 1 for seq in self.running]) - num_skipping
        budget = self._max_num_batched_tokens - num_ready
        if is_short:
            budget = min(budget, short_step(self._max_num_batched_tokens))
        enough_blocks = True
        num_drafts = self._num_drafts(num_ready, num_skipping)
        for seq in self.running.copy():
            if seq.status is not Status.RUNNING:
                break  # An earlier sequence has preempted it and all behind it.
            if seq.num_uncomputed > 1:
                begun.append(seq)
                continue
            if seq.skips:
                continue
            if num_drafts and self._drafting is not None:
                seq.take_draft(self._drafting.draft(seq, num_drafts))
            num_tokens = 1 + len(seq.draft)
            # Most decodes neither need a block nor fill one.
            if seq.num_slots - seq.num_computed <= num_tokens:
                if self._tables.are_lacking(seq, num_tokens):
                    num_tokens = 1
                    seq.drop_draft()
                if self._tables.are_lacking(seq, 1):
                    enough_blocks = False
                    if not self._make_room(seq, 1, chosen):
                        break
                self._extend(seq, num_tokens)
            chosen.append((seq, num_tokens))
        if begun or self.waiting:
            self._choose_prompts(begun, budget, chosen, may_admit=enough_blocks)
        if not chosen:
            return NOTHING
        return in_row_order(chosen)

    def submitted(self, schedule: Schedule) -> None:
        """Records that the step is under way. The next step may use what it computes."""
        self._tables.submitted()
        for seq, num_tokens in zip(schedule.sequences, schedule.num_tokens, strict=True):
            seq.num_computed += num_tokens
            seq.last_step = self._tables.num_submitted
            self._num_computed += num_tokens
        num_leaving = num_samples = 0
        for seq, num_sampled, num_scored in zip(
            schedule.sequences, schedule.num_samples, schedule.num_scored, strict=True
        ):
            if not num_sampled:
                continue
            num_samples += num_sampled
            if num_scored:
                seq.score(num_scored)
            if num_scored == num_sampled:
                continue
            seq.num_in_flight += num_sampled - num_scored
            seq.last_sample = num_samples - 1
            if seq.is_last_in_flight:
                seq.status = Status.LEAVING
                num_leaving += 1
        if num_leaving:
            self.running = [seq for seq in self.running if seq.status is Status.RUNNING]
        self._tables.settle_duplicates()

    def finished(self) -> None:
        """Records that the oldest step under way has run: blocks that only it used are released."""
        self._tables.finished()

    def settle_draft(self, seq: Sequence, drawn: list[int]) -> int:
        """How many of the tokens sampled for ``seq``, which has a draft, are valid: one for each
        accepted draft token, and one more."""
        num_drafted = len(seq.draft)
        num = seq.settle_draft(drawn)
        if self._drafting is not None:
            self._drafting.learn(seq, num_drafted=num_drafted, num_accepted=num - 1)
        return num

    def void_sample(self, seq: Sequence) -> None:
        """Discards the sample of ``seq`` in the newest step, which is under way. A later step
        samples that token."""
        seq.void_sample()
        self._num_computed -= 1
        if seq.status is Status.LEAVING:
            seq.status = Status.RUNNING
            insort(self.running, seq, key=_rank)

    def append_token(self, seq: Sequence, token_id: int) -> None:
        """Appends the oldest token in flight of ``seq``, which must not have been removed."""
        seq.append_token(token_id)
        self._tables.token_came(seq)

    def _choose_prompts(
        self,
        begun: list[Sequence],
        budget: int,
        chosen: list[tuple[Sequence, int]],
        *,
        may_admit: bool,
    ) -> None:
        """Distributes the budget to ``begun`` and waiting prompts by turn. Once a prompt lacks
        blocks or cannot be admitted, no other one is admitted."""
        self._num_turns_left = MAX_UPDATED_TURNS
        self._update_turns()
        started = begun.copy()
        score_budget = MAX_SCORED_TOKENS
        begun.sort(key=self._turn)
        while budget > 0:
            seq = begun[0] if begun else None
            if may_admit and self.waiting:
                turn, head = self.waiting.head()
                if seq is None or turn < self._turn(seq):
                    prefix = self._tables.find_prefix(head)
                    num_hits = prefix.num_blocks
                    if num_hits < head.num_queued_hits:
                        self._push_again(head, num_hits)
                        continue
                    seq = self._leader(head, num_hits, begun)
                    if seq is None:
                        may_admit = self._admit(head, prefix, started)
                        if not may_admit:
                            continue
                        started.append(head)
                        begun.insert(0, head)
                        seq = head
            if seq is None:
                break
            begun.remove(seq)
            if seq.status is not Status.RUNNING or seq.waits:
                continue  # It has just been preempted, or it waits for a part.
            # After its last token one is sampled, for which its choices must be known.
            num_tokens = min(seq.num_uncomputed - seq.choices.is_pending, budget)
            if not num_tokens:
                continue
            if self._takes_whole and num_tokens < seq.num_uncomputed:
                break
            if seq.must_score:
                num_unscored = max(0, seq.num_scored - seq.num_computed)
                num_tokens = min(num_tokens, num_unscored + score_budget)
                score_budget -= seq.num_to_score(num_tokens)
                if not num_tokens:
                    continue
            if self._tables.are_lacking(seq, num_tokens):
                may_admit = False
                if not self._make_room(seq, num_tokens, chosen):
                    continue
            budget -= num_tokens
            self._extend(seq, num_tokens)
            seq.computes(num_tokens)
            chosen.append((seq, num_tokens))

    def _num_drafts(self, num_ready: int, num_skipping: int) -> int:
        """How many tokens to draft for each of ``num_ready`` decoding sequences; ``num_skipping``
        others skip the step. 0 if prompts run or wait, since their chunks need the time."""
        is_prefilling = num_ready + num_skipping < len(self.running) or self.waiting
        if self._drafting is None or is_prefilling or not num_ready:
            return 0
        return self._drafting.num_each(num_ready)

    def _turn(self, seq: Sequence) -> Turn:
        lacks = self._first_missing(seq, seq.num_registered)
        num_followers = self.waiting.num_lacking(lacks)
        return turn_of(seq, seq.num_uncomputed, self._policy, num_followers=num_followers)

    def _first_missing(self, seq: Sequence, num_hits: int) -> BlockHash | None:
        """The first block that ``seq`` lacks and that another sequence might compute."""
        return seq.hashes[num_hits] if num_hits < seq.num_shareable else None

    def _extend(self, seq: Sequence, num_tokens: int) -> None:
        """Gives ``seq`` the blocks for its next tokens. Updates the turns of requests that wait for
        a block that these tokens fill."""
        begin = seq.num_registered
        self._tables.extend(seq, num_tokens)
        if seq.num_registered == begin:
            return
        self._pending.computed(seq.hashes[begin : seq.num_registered])
        self.waiting.computed(seq.hashes[begin])
        self._update_turns()

    def _update_turns(self) -> None:
        """Updates the turns of some waiting requests for which others have computed blocks."""
        outdated = self.waiting.take_outdated(self._num_turns_left)
        self._num_turns_left -= len(outdated)
        for seq in outdated:
            self._push_again(seq, self._tables.num_hits(seq))

    def _leader(self, seq: Sequence, num_hits: int, begun: list[Sequence]) -> Sequence | None:
        """The sequence in ``begun`` whose next block is also the first that ``seq`` lacks.

        That sequence proceeds instead of ``seq``, which then finds the block in the cache. So only
        one of them computes it.
        """
        missing = self._first_missing(seq, num_hits)
        if missing is None:
            return None
        for other in begun:
            if other.hashes[other.num_registered : other.num_registered + 1] == [missing]:
                return other
        return None

    def _admit(self, seq: Sequence, prefix: Prefix, started: list[Sequence]) -> bool:
        """Starts a waiting request on the cached ``prefix`` if there is room for all of its tokens.
        Returns whether it started.

        The check covers all tokens, although only a chunk may run now: a prompt admitted for its
        first chunk alone could end up waiting for blocks, or preempted, while it holds some. The
        blocks that the ``started`` prompts still lack stay reserved, and one block for each running
        sequence, or the next decodes would preempt the new request.
        """
        if len(self.running) >= self._max_num_seqs:
            return False
        hits = prefix.block_ids
        num_blocks = -(-seq.num_tokens // self._block_size) - len(hits)
        num_promised = sum(
            self._tables.num_missing(other, other.num_uncomputed) for other in started
        )
        pool = self._tables.pool
        num_available = pool.num_available - pool.num_unheld(hits)
        if num_blocks + num_promised + len(self.running) > num_available:
            # If no sequence runs, none will release blocks.
            if not self.running:
                self._tables.yield_room()
            return False
        if not self._tables.may_acquire(prefix):
            return False
        self._unqueue(seq)
        self._pending.computed(seq.hashes[seq.num_queued_hits : prefix.num_blocks])
        seq.status = Status.RUNNING
        insort(self.running, seq, key=_rank)
        self._tables.acquire(seq, prefix)
        self._pending.lost(seq.hashes[seq.num_registered : prefix.num_blocks])
        if seq.begins():
            self.num_prompt_tokens += seq.num_prompt_tokens
            self.num_hit_tokens += seq.num_cached or 0
        return True

    def _must_wait(self) -> bool:
        """Whether the steps under way must finish before the next one can be chosen."""
        budget = self._max_num_batched_tokens
        num_missing = sum(
            max(0, self._tables.num_missing(seq, min(seq.num_uncomputed, budget)))
            for seq in self.running
            if seq.num_computed + seq.num_uncomputed > seq.num_slots and not seq.waits
        )
        return num_missing > self._tables.pool.num_available

    def _make_room(
        self, seq: Sequence, num_tokens: int, chosen: list[tuple[Sequence, int]]
    ) -> bool:
        """Preempts lower-ranked sequences, the lowest first, until ``seq`` has room for its tokens.

        Sequences ``chosen`` for this step are not preempted: then it returns false.
        """
        while self._tables.are_lacking(seq, num_tokens):
            if self._tables.yield_room():
                continue
            victim = self.running[-1]
            if victim is seq or any(victim is other for other, _ in chosen):
                return False
            self.running.pop()
            # Its full blocks stay cached, so that it may find them again in its next turn.
            self._release(victim)
            victim.preempted()
            self._queue(victim)
            self.num_preemptions += 1
        return True

    def _ask_parts(self) -> bool:
        """Puts sequences that wait no longer for a part into the queue, and takes out those that
        wait now. Returns whether any waits no longer."""
        resumes = False
        for part in self._parts:
            resumed, stopped = part.next_step()
            for seq in stopped:
                if seq.status is Status.WAITING and seq not in self._held_back:
                    self.waiting.remove(seq)
                    self._held_back.add(seq)
            for seq in resumed:
                if seq.status is Status.WAITING and not seq.waits:
                    self._held_back.remove(seq)
                    self._push_again(seq, self._tables.num_hits(seq))
            resumes = resumes or bool(resumed)
        return resumes

    def _queue(self, seq: Sequence) -> None:
        num_hits = self._tables.num_hits(seq)
        if seq.waits:
            seq.num_queued = seq.num_tokens - num_hits * self._block_size
            self._held_back.add(seq)
        else:
            self._push(seq, num_hits)
        self._pending.queued(seq)

    def _push_again(self, seq: Sequence, num_hits: int) -> None:
        """Updates the turn of waiting ``seq``, of which ``num_hits`` blocks are now cached."""
        before = seq.num_queued_hits
        self._pending.lost(seq.hashes[num_hits:before])
        self._pending.found(seq.hashes[before:num_hits])
        self._push(seq, num_hits)

    def _push(self, seq: Sequence, num_hits: int) -> None:
        seq.num_queued = seq.num_tokens - num_hits * self._block_size
        lacks = self._first_missing(seq, num_hits)
        self.waiting.push(seq, turn_of(seq, seq.num_queued, self._policy), lacks=lacks)
        first = self.waiting.first_lacking(lacks)
        if first is not None and first is not seq and self._policy != "fcfs":
            num_followers = self.waiting.num_lacking(lacks) - 1
            turn = turn_of(first, first.num_queued, self._policy, num_followers=num_followers)
            self.waiting.push(first, turn, lacks=lacks)

    def _unqueue(self, seq: Sequence) -> None:
        if seq in self._held_back:
            self._held_back.remove(seq)
        else:
            self.waiting.remove(seq)
        self._pending.unqueued(seq)

    def _release(self, seq: Sequence) -> None:
        self._pending.gone(seq)
        self._tables.release(seq)


def _rank(seq: Sequence) -> tuple[int, int]:
    return seq.request.priority, seq.number
