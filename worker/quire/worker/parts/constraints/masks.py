"""Computes the masks of constrained outputs in threads, in parallel with the model.

When a step's tokens are known, requests with a constraint are added here. The next step waits a
bounded time for masks that should be cheap. A request whose mask is late skips steps until the mask
is ready, and keeps its blocks. Its tokens do not depend on that.
"""

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items

from quire.worker.engine.sequence import Sequence
from quire.worker.parts.constraints.choices import Constrained
from quire.worker.parts.constraints.mask_queue import Job, Lane, MaskQueue
from quire.worker.text.grammar.matcher import Key, Matcher, Place

_TRUSTED_WAIT_S, _UNKNOWN_WAIT_S = 0.02, 0.002
"""How long a step waits for masks of grammars known to be cheap (far longer than those take), and
for masks of unknown cost."""
_IDLE_WAIT_S = 0.005
"""How long an idle engine waits here before it looks for new requests."""
_MAX_KNOWN = 256
"""Places in grammars that are kept with their masks, for requests that reach them later."""
_MAX_THREADS = 8
_SLOW_SHARE_A_CORE = 1 / 32


class Masks:
    """Used from the engine's thread. Starts its own threads when masks need them."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        num_cores = os.cpu_count() or 1
        self._num_threads = min(_MAX_THREADS, num_cores) + 1
        self._threads: list[threading.Thread] = []
        self._is_closed = False
        self._lacking: dict[Sequence, Constrained] = {}
        # Everything below is guarded by the lock.
        self._queue = MaskQueue(slow_share=min(1.0, num_cores * _SLOW_SHARE_A_CORE))
        self._jobs: dict[Place, Job] = {}
        """Jobs that are not done."""
        self._known: OrderedDict[Key, Place] = OrderedDict()
        self._awaited: set[Job] = set()
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._done = threading.Condition(lock)

    def add(self, sequences: Items[Sequence]) -> None:
        """Adds sequences with constraints and new tokens. The choices of each are pending until
        `take` returns it."""
        num_new = 0
        with self._work:
            for seq in sequences:
                choices = seq.choices
                assert isinstance(choices, Constrained)
                choices.is_pending = True
                self._lacking[seq] = choices
                num_new += self._enter(choices.matcher)
            is_work_for_others = num_new > 1 or any(
                job.next_lane is not Lane.TRUSTED for job in self._jobs.values()
            )
            if is_work_for_others:
                self._start()
                self._work.notify(num_new)

    def take(self, *, running: Items[Sequence]) -> list[tuple[Sequence, str | None]]:
        """Waits for masks as long as a step may. Returns the requests whose masks are ready, each
        with ``None`` or why it cannot continue. ``running`` are the requests of the last step."""
        if not self._lacking:
            return []
        self._queue.is_idle = all(seq.choices.is_slow for seq in running)
        while job := self._take_trusted():
            self._run(job)
        self._wait()
        return self._settle()

    def take_first(self) -> list[tuple[Sequence, str | None]]:
        """Like `take`, for an engine with nothing else to do: waits for the first mask."""
        with self._done:
            if self._jobs:
                self._queue.is_idle = True
                self._work.notify_all()
                self._done.wait(_IDLE_WAIT_S)
        return self._settle()

    def drop(self, seq: Sequence) -> None:
        """Removes ``seq``, which has ended, and its job if that has not begun and no other request
        waits for it."""
        choices = self._lacking.pop(seq, None)
        if choices is None:
            return
        with self._work:
            job = self._jobs.get(choices.matcher.place)
            if job is None:
                return
            job.num_holders -= 1
            if not job.num_holders and job.lane is None:
                self._queue.remove(job)
                self._leave(job)
                key = job.place.key
                if key is not None and self._known.get(key) is job.place:
                    del self._known[key]

    def close(self) -> None:
        with self._work:
            self._is_closed = True
            self._work.notify_all()

    def _enter(self, matcher: Matcher) -> bool:
        """Adds a job for the place of ``matcher``. Returns false if the place already has one or is
        known."""
        key = matcher.place.key
        assert key is not None
        known = self._known.get(key)
        if known is None:
            job = Job(matcher, matcher.place)
            self._jobs[job.place] = job
            self._queue.put(job)
            self._known[key] = job.place
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            return True
        self._known.move_to_end(key)
        matcher.place = known
        if known in self._jobs:
            self._jobs[known].num_holders += 1
        return False

    def _wait(self) -> None:
        began_s = self._clock()
        with self._done:
            while True:
                waited_s = self._clock() - began_s
                left_s = _TRUSTED_WAIT_S
                for job in self._jobs.values():
                    lane = job.next_lane if job.lane is None else job.lane
                    limit_s = _TRUSTED_WAIT_S if lane is Lane.TRUSTED else _UNKNOWN_WAIT_S
                    job.is_late |= lane is Lane.SLOW or waited_s >= limit_s
                    if not job.is_late:
                        self._awaited.add(job)
                        left_s = min(left_s, limit_s - waited_s)
                if not self._awaited:
                    return
                self._done.wait(left_s)
                self._awaited.clear()

    def _settle(self) -> list[tuple[Sequence, str | None]]:
        matchers = [choices.matcher for choices in self._lacking.values()]
        # Each cost is charged once, however many completions of a prompt fail together.
        for cost in {each.cost for each in matchers if each.is_ready and each.error}:
            cost.failed()
        found = []
        for seq, choices in list(self._lacking.items()):
            if choices.matcher.is_ready or choices.matcher.cost.is_spent:
                reason = choices.take_mask(num_output=seq.num_output_tokens)
                found.append((seq, reason))
                if reason is None:
                    del self._lacking[seq]
                    choices.is_pending = False
        return found

    def _take_trusted(self) -> Job | None:
        with self._work:
            return self._queue.take(self._clock(), only_trusted=True)

    def _run(self, job: Job) -> None:
        num_tokens, cost_s = job.matcher.num_unread, 0.0
        try:
            cost_s = job.matcher.fill(is_slow=job.lane is Lane.SLOW)
        finally:
            with self._done:
                self._queue.finished(job, cost_s, num_tokens=num_tokens, now_s=self._clock())
                self._leave(job)

    def _leave(self, job: Job) -> None:
        del self._jobs[job.place]
        self._awaited.discard(job)
        if not self._awaited:
            self._done.notify()

    def _start(self) -> None:
        while len(self._threads) < self._num_threads:
            thread = threading.Thread(target=self._work_on, name="quire-mask", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _work_on(self) -> None:
        """The loop of a thread that computes masks."""
        while True:
            with self._work:
                while (job := self._queue.take(self._clock())) is None and not self._is_closed:
                    self._work.wait(self._queue.pause_s(self._clock()))
                if job is None or self._is_closed:
                    return
            self._run(job)
