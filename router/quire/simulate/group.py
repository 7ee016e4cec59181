"""One simulated group: an engine that computes prompts in chunks beside its decodes.

Always true: what is registered in the pool has been scheduled to be computed, what a running
request may need until its end is set aside at its admission (so nothing is ever preempted), and
``wake_at`` is the end of the step, or of the run of equal decode steps, that is under way.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from quire.simulate.attended import Attended
from quire.simulate.cost import CostModel
from quire.simulate.engine_config import SimulatedEngine
from quire.simulate.network import Transfer
from quire.simulate.pool import Chain, Pool
from quire.simulate.trace import Trace
from quire.simulate.travel import Counters, Fetching, Offer
from quire.worker.blocks.hashing import BlockHash

_Waiting = tuple[float, int, int]
"""Key, request and missing tokens."""


class Group:
    """Times are in milliseconds, and never read but given."""

    def __init__(
        self,
        *,
        trace: Trace,
        cost: CostModel,
        config: SimulatedEngine,
        pool: Pool,
        on_first_token: Callable[[int, int], None],
        on_finish: Callable[[int], None],
        slowdown: Callable[[], float] | None = None,
        fetching: Fetching | None = None,
        copy_ms: float = 0.0,
    ) -> None:
        """``slowdown`` says how many times as long a step takes that begins now; without it, every
        step takes what it costs. ``fetching`` brings blocks from elsewhere; ``copy_ms`` is what
        copying one of them into the KV cache takes."""
        self._num_input, self._num_output = trace.num_input, trace.num_output
        self._chains, self._block_size = trace.chains, trace.block_size
        self._cost, self.pool, self._config = cost, pool, config
        self._is_srpf = config.order == "srpf"
        # With srpf: what waiting requests lack, and those that lack a block first; some have begun.
        self._missing: dict[int, int] = {}
        self._lacking: dict[BlockHash, list[int]] = {}
        self._on_first_token, self._on_finish = on_first_token, on_finish
        self._slowdown = slowdown
        self._fetching, self._copy_ms = fetching, copy_ms
        self._num_copies = 0  # Of the step.
        self._arrival_ms = trace.arrival_ms
        self._waiting: list[_Waiting] = []
        self._parked: dict[int, _Waiting] = {}  # By request: those that wait for a transfer.
        self._begun: list[tuple[float, int, int, int]] = []  # Key, request, computed, hits.
        self._decodes: list[tuple[int, int]] = []  # Step of its last token, request.
        self._chunks: list[tuple[int, int, int]] = []  # Of the step: request, computed, hits.
        self._num_context = 0  # Tokens that the decodes attend to, shared ones once for each.
        # None where each reads those for itself.
        self._attended = Attended() if cost.shared_read < 1 else None
        self._step = 0
        self._num_steps = 0  # That are under way.
        self._step_began = 0.0
        self._step_ms = 0.0
        self._num_chunk_tokens = 0
        self._num_context_products = 0
        # Blocks that prompts at hand lack, the step's too, and the tokens behind each one's last.
        self._lacked: set[BlockHash] = set()
        self._blocks_of_step: list[BlockHash] = []
        self._num_end_tokens = 0
        self.num_prompt_tokens = 0
        """Prompt tokens of requests that began to run; hits count the same requests."""
        self.num_hit_tokens = 0
        self.num_output_tokens = 0
        self.wake_at: float | None = None

    def last_step(self, now: float) -> tuple[int, float]:
        """How many steps have ended before ``now``, and when the present one began.

        Not between `end` and `begin`.
        """
        if self._num_steps < 2:
            return self._step, self._step_began
        ended = min(int((now - self._step_began) // self._step_ms), self._num_steps - 1)
        return self._step + ended, self._step_began + ended * self._step_ms

    @property
    def num_steps(self) -> int:
        """Steps that have ended, but for those of a run that is under way."""
        return self._step

    @property
    def is_in_run(self) -> bool:
        """Whether several steps are run together."""
        return self._num_steps > 1

    @property
    def num_pending(self) -> int:
        """Prompt tokens neither cached nor computed before this step, what several requests lack
        once."""
        return len(self._lacked) * self._block_size + self._num_end_tokens

    @property
    def num_running(self) -> int:
        return len(self._decodes) + len(self._begun) + len(self._chunks)

    @property
    def num_waiting(self) -> int:
        if self._is_srpf:
            return len(self._missing)
        return len(self._waiting) + (self._fetching.num_parked if self._fetching else 0)

    @property
    def counters(self) -> Counters:
        """Counters of what it has fetched."""
        return self._fetching.counters if self._fetching else Counters()

    def offer(self, index: int, chain: Chain, num_blocks: int, now: float) -> Offer:
        """What this group, ``index``, lends of the chain's first ``num_blocks``: it begins with its
        next step."""
        num_held = self.pool.match(chain, num_blocks)
        if self._fetching is not None:
            num_held = self._fetching.in_host(chain, num_held, num_blocks)
        starts_ms = now
        if self.wake_at is not None:
            _, began_ms = self.last_step(now)
            starts_ms = min(began_ms + self._step_ms, self.wake_at)
        return Offer(index, num_held, starts_ms)

    def add(self, request_id: int, now: float, offer: Offer | None = None) -> None:
        """``offer``: who else has some of its prompt."""
        num_input, chain = self._num_input[request_id], self._chains[request_id]
        most_hits = self._most_hits(request_id)
        num_hits = self.pool.match(chain, most_hits)
        if self._fetching is not None:
            num_lacking = num_input - num_hits * self._block_size
            num_hits = self._fetching.begin(
                request_id,
                chain,
                num_hits,
                most_hits,
                offer=offer,
                now_ms=now,
                compute_ms=self._cost.prefill_ms(num_lacking) / num_lacking * self._block_size,
            )
        self._lacked.update(chain[num_hits:most_hits])
        self._num_end_tokens += num_input - most_hits * self._block_size
        self._queue(request_id, num_input - num_hits * self._block_size)
        self._wake(now)

    def resume(self, transfer: Transfer, now: float) -> None:
        """Resumes the requests that waited for the transfer."""
        assert self._fetching is not None
        resumed = self._fetching.resumed(transfer)
        for request_id in resumed:
            heappush(self._waiting, self._parked.pop(request_id))
        if resumed:
            self._wake(now)

    def _wake(self, now: float) -> None:
        """Something has come for the next step."""
        if self.wake_at is None:
            self.begin(now)
        elif self._num_steps > 1:
            # Decode steps of one length were run together: stop at the end of the present one.
            num_steps = max(-int((self._step_began - now) // self._step_ms), 1)
            if num_steps < self._num_steps:
                self._num_steps = num_steps
                self.wake_at = self._step_began + num_steps * self._step_ms

    def _queue(self, request_id: int, missing: int) -> None:
        arrived = self._arrival_ms[request_id]
        heappush(self._waiting, (self._key(missing, request_id, arrived), request_id, missing))
        if not self._is_srpf:
            return
        self._missing[request_id] = missing
        num_hits = (self._num_input[request_id] - missing) // self._block_size
        if num_hits < self._most_hits(request_id):
            same = self._lacking.setdefault(self._chains[request_id][num_hits], [])
            same.append(request_id)
            first = same[0]
            if first != request_id and first in self._missing:
                left = self._missing[first]
                key = self._key(left / len(same), first, self._arrival_ms[first])
                heappush(self._waiting, (key, first, left))

    def _most_hits(self, request_id: int) -> int:
        most = (self._num_input[request_id] - 1) // self._block_size
        return min(most, len(self._chains[request_id]))

    def _tell_followers(self, chain: Sequence[BlockHash], begin: int, end: int) -> None:
        """The blocks of ``chain`` from ``begin`` to ``end`` are computed in this step: who waits
        for the first of them has less to compute."""
        end = min(end, len(chain))
        for request_id in self._lacking.pop(chain[begin], ()) if begin < end else ():
            if request_id in self._missing:
                own = self._chains[request_id]
                both = range(begin, min(end, self._most_hits(request_id)))
                num_same = bisect_left(both, True, key=lambda i: own[i] != chain[i])
                missing = self._num_input[request_id] - (begin + num_same) * self._block_size
                self._queue(request_id, missing)

    def _num_followers(self, request_id: int, num_computed: int) -> int:
        at = num_computed // self._block_size
        chain = self._chains[request_id]
        if not self._is_srpf or at >= len(chain):
            return 0
        return sum(other in self._missing for other in self._lacking.get(chain[at], ()))

    def end(self, now: float) -> None:
        """Ends the step: hands out its tokens."""
        self._step += self._num_steps
        self._num_context += self._num_steps * len(self._decodes)
        self.num_output_tokens += self._num_steps * len(self._decodes)
        if self._num_chunk_tokens:
            self._end_chunks()
        decodes = self._decodes
        step = self._step
        while decodes and decodes[0][0] <= step:
            self._finish(heappop(decodes)[1])

    def _end_chunks(self) -> None:
        self._num_chunk_tokens = 0
        self._lacked.difference_update(self._blocks_of_step)
        self._blocks_of_step.clear()
        for request_id, computed, num_hits in self._chunks:
            num_input = self._num_input[request_id]
            if computed < num_input:
                left = (num_input - computed) / (1 + self._num_followers(request_id, computed))
                key = self._key(left, request_id, self._arrival_ms[request_id])
                heappush(self._begun, (key, request_id, computed, num_hits))
                continue
            self._num_end_tokens -= num_input - self._most_hits(request_id) * self._block_size
            self._on_first_token(request_id, num_hits * self._block_size)
            self.num_output_tokens += 1
            num_output = self._num_output[request_id]
            heappush(self._decodes, (self._step + num_output - 1, request_id))
            self._num_context += num_input + 1
            if self._attended is not None:
                self._attended.add(self._full_blocks(request_id))
        self._chunks = []

    def begin(self, now: float) -> None:
        """Begins the next step, if there is anything to compute."""
        self._step_began = now
        if self._waiting or self._begun:
            self._fill_step(now)
        cost, decodes = self._cost, self._decodes
        num_shared = self._attended.num_further * self._block_size if self._attended else 0
        if self._num_chunk_tokens:
            step_ms = cost.prefill_ms(self._num_chunk_tokens)
            if cost.per_context:
                step_ms += cost.per_context * self._num_context_products
            if decodes:
                step_ms += cost.decode_ms(self._num_context, num_shared)
            step_ms += self._copy_ms * self._num_copies
            self._num_copies = 0
            self._num_steps = 1
        elif decodes:
            # Activity of other groups changes the length of steps: run them one at a time.
            self._num_steps = 1 if self._slowdown is not None else decodes[0][0] - self._step
            # Each step attends to one token more of each sequence: take the middle one's time.
            num_context = self._num_context + self._num_steps * len(decodes) / 2
            step_ms = cost.decode_ms(num_context, num_shared)
        else:
            self.wake_at = None
            self._num_steps = 0
            return
        if self._slowdown is not None:
            step_ms *= self._slowdown()
        self._step_ms = step_ms
        self.wake_at = now + self._num_steps * step_ms

    def _fill_step(self, now: float) -> None:
        budget = max(self._config.chunk_tokens - len(self._decodes), 1)
        waiting, begun, size = self._waiting, self._begun, self._block_size
        pool, is_srpf = self.pool, self._is_srpf
        total = context = 0
        is_blocked = False
        while budget > 0:
            while is_srpf and waiting and self._missing.get(waiting[0][1]) != waiting[0][2]:
                heappop(waiting)  # It had more to compute then, or has begun.
            if waiting and not is_blocked and (not begun or waiting[0] < begun[0]):
                _, request_id, missing = waiting[0]
                is_parked = request_id in self._parked  # Then this is what it lacks by now.
                if is_parked or (
                    self._fetching is not None and self._fetching.is_awaited(request_id, now)
                ):
                    self._parked[request_id] = heappop(waiting)
                    continue
                entry = heappop(waiting)
                num_hits = self._admit(request_id, now)
                if num_hits is None:
                    heappush(waiting, entry)
                    is_blocked = True
                    continue
                if is_srpf:
                    del self._missing[request_id]
                computed = num_hits * size
                seemed_computed = self._num_input[request_id] - missing
                # The prefix that it would have found is gone.
                if computed < seemed_computed:
                    gone = self._chains[request_id][num_hits : seemed_computed // size]
                    self._lacked.update(gone)
            elif begun:
                _, request_id, computed, num_hits = heappop(begun)
            else:
                break
            num_input = self._num_input[request_id]
            num_tokens = num_input - computed
            if num_tokens > budget:
                num_tokens = budget
            budget -= num_tokens
            total += num_tokens
            context += num_tokens * computed
            done = computed + num_tokens
            chain, first, end = self._chains[request_id], computed // size, done // size
            pool.register(request_id, chain, first, end)
            self._blocks_of_step += chain[first:end]
            if is_srpf and end > first:
                self._tell_followers(chain, first, end)
            self._chunks.append((request_id, done, num_hits))
        self._num_chunk_tokens = total
        self._num_context_products = context

    def _admit(self, request_id: int, now: float) -> int | None:
        """Takes the request's blocks and what has been fetched of it. Returns how many blocks it
        need not compute, or None where there is no room."""
        if self.num_running >= self._config.max_num_seqs:
            return None
        chain, size = self._chains[request_id], self._block_size
        num_input, most = self._num_input[request_id], self._most_hits(request_id)
        num_hits = self.pool.match(chain, most)
        num_blocks = -(-(num_input + self._num_output[request_id]) // size)
        if not self.pool.admit(request_id, chain, num_hits, num_blocks - num_hits):
            return None
        if self._fetching is not None:
            begin = num_hits
            num_hits, others = self._fetching.take(request_id, chain, begin, most, now_ms=now)
            self.pool.register(request_id, chain, begin, num_hits)
            self._lacked.difference_update(chain[begin:num_hits])
            self._num_copies += num_hits - begin
            for other in others:
                heappush(self._waiting, self._parked.pop(other))
        self.num_prompt_tokens += num_input
        self.num_hit_tokens += num_hits * size
        return num_hits

    def _full_blocks(self, request_id: int) -> Chain:
        return self._chains[request_id][: self._num_input[request_id] // self._block_size]

    def _finish(self, request_id: int) -> None:
        self._num_context -= self._num_input[request_id] + self._num_output[request_id]
        blocks = self._full_blocks(request_id)
        if self._attended is not None:
            self._attended.remove(blocks)
        self.pool.release(request_id, blocks, len(blocks))
        self._on_finish(request_id)

    def _key(self, missing: float, request_id: int, arrived: float) -> float:
        if self._is_srpf:
            return self._cost.prefill_ms(missing) + self._config.aging * arrived
        return request_id
