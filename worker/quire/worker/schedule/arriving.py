"""Requests whose blocks are on their way from disk or from another group, while others run.

A request waits for more as long as what has landed would have taken longer to compute than it has
waited, but for a tenth of the time in which all that it wants could be computed. After that it
begins with what is there: so it ends at most that tenth later than if nothing had been fetched.

Requests that wait for the same source would be computed one after another. So what lands for one of
them keeps all waiting. Streams that a draining group hands over wait together: the tenth is that of
the mean of them.

Where steps are full of other prompts, it is queued then, and goes on fetching until its turn comes.
Where a source's first block takes longer than a request may wait, and nothing else runs meanwhile,
the source is asked for one such request in `_TRIED_EVERY` only.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from quire.worker.api.outputs import Fetched
from quire.worker.cache.checker import Check
from quire.worker.cache.pulls import Arrival, Origin
from quire.worker.cache.travel import Travel
from quire.worker.schedule.sequence import Sequence, Status

SLACK = 0.1
_FADING = 0.8
"""Part of what was measured that counts beside the next step."""
MIN_SLACK_S = 0.003
"""A group's answer alone takes about as long: without it, no short prefix would be fetched."""
_UNKNOWN_SLACK_S = 0.25
"""How long a request waits for the next block before prompts were computed here."""
_TRIED_EVERY = 8


@dataclass
class _Waiting:
    arrival: Arrival
    began_s: float
    num_wanted: int
    """Blocks that were to come when it began to wait."""
    num_before: int
    """Those that had come by then."""
    origin_before: int
    """Those that had come from the same source by then, for any request."""
    is_stream: bool
    """Whether it goes on with a stream of another group."""
    before: Fetched
    """What it had fetched by then."""


class Arriving:
    """Belongs to the engine's thread."""

    def __init__(
        self,
        travel: Travel,
        *,
        block_size: int,
        step_tokens: int,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """``step_tokens``: of prompts, that a step computes at most while blocks come for queued
        ones. ``is_idle``: whether no other requests run."""
        self._travel = travel
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._is_idle = is_idle
        self._clock = clock
        self._waiting: dict[Sequence, _Waiting] = {}
        # Those whose blocks in host memory are being compared with their checksums before.
        self._checked: dict[Sequence, Check] = {}
        self._queued: dict[Sequence, tuple[_Waiting, float]] = {}  # And how long they had waited.
        # Sums over recent steps with chunks of prompts, which decay.
        self._num_tokens = 0.0
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._checked)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting or seq in self._checked

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        # Summed up, and not a mean of rates: a step of few tokens says little about long prompts.
        self._num_tokens = _FADING * self._num_tokens + num_tokens
        self._seconds = _FADING * self._seconds + seconds

    def add(self, seq: Sequence) -> bool:
        """Whether ``seq`` waits for blocks; `take` hands it out when it may begin."""
        check = self._travel.check(seq.hashes[: seq.num_shareable])
        if check is not None:
            self._checked[seq] = check
            return True
        return self._fetch(seq)

    @property
    def left_s(self) -> float:
        """When the next one waits no longer, if nothing more lands; infinite where none waits."""
        num_wanted = self._num_wanted()
        return min([self._left_s(each, num_wanted) for each in self._waiting.values()], default=inf)

    @property
    def num_queued(self) -> int:
        """Sequences that were handed out while their blocks still come."""
        return len(self._queued)

    def take(self, *, num_pending_tokens: int) -> list[Sequence]:
        """Those that wait no longer. ``num_pending_tokens``: of the prompts that are queued or
        running, those to compute."""
        self._settle_queued()
        taken = []
        for seq in [seq for seq, check in self._checked.items() if check.is_done]:
            self._travel.checker.end(self._checked.pop(seq))
            if not self._fetch(seq):
                num_pending_tokens += seq.num_tokens
                taken.append(seq)
        num_wanted = self._num_wanted()
        for seq, waiting in list(self._waiting.items()):
            if self._is_coming(waiting) and self._left_s(waiting, num_wanted) > 0:
                continue
            waited_s = self._clock() - waiting.began_s
            self._learn(waiting, waited_s)
            self._note(seq, waiting, waited_s)
            if self._is_coming(waiting) and num_pending_tokens >= self._step_tokens:
                del self._waiting[seq]
                self._queued[seq] = waiting, waited_s
            else:
                self.remove(seq)
                arrival = waiting.arrival
                is_whole = arrival.num_here == len(arrival.pull.hashes) > waiting.num_before
                # The disk may have had the beginning, and another group has more.
                if is_whole and self._fetch(seq):
                    continue
            num_pending_tokens += seq.num_tokens - waiting.arrival.num_here * self._block_size
            taken.append(seq)
        return taken

    def _settle_queued(self) -> None:
        """Notes what has come for those that are still queued, and fetches no more for others."""
        for seq, (waiting, waited_s) in list(self._queued.items()):
            is_queued = seq.status is Status.WAITING
            if is_queued:
                self._note(seq, waiting, waited_s)
            # While it is queued, what has come is held for it.
            if not is_queued or waiting.arrival.is_over:
                del self._queued[seq]
                self._travel.pulls.let_go(waiting.arrival)

    def remove(self, seq: Sequence) -> None:
        """``seq`` waits no longer, or has ended."""
        if seq in self._checked:
            self._travel.checker.end(self._checked.pop(seq))
        else:
            self._travel.pulls.let_go(self._waiting.pop(seq).arrival)

    def _fetch(self, seq: Sequence) -> bool:
        """Whether ``seq`` waits for blocks from disk or another group."""
        began_s = self._clock()  # To begin a pull takes a while, too.
        before = seq.fetched or Fetched()

        def pays(origin: Origin, num_blocks: int) -> bool:
            if not self._is_too_slow(origin, num_blocks):
                return True
            seq.fetched = before._replace(error=_too_late(num_blocks, "would come"))
            return False

        arrival = self._travel.want(
            seq.hashes, num_useful=seq.num_shareable, source=seq.request.source, pays=pays
        )
        if arrival is None:
            return False
        self._waiting[seq] = _Waiting(
            arrival,
            began_s,
            num_wanted=len(arrival.pull.hashes) - arrival.num_here,
            num_before=arrival.num_here,
            origin_before=arrival.origin.num_landed,
            is_stream=len(seq.request.resumed_token_ids) > 0,
            before=before,
        )
        return True

    def _is_too_slow(self, origin: Origin, num_blocks: int) -> bool:
        """Whether a request would wait for so many blocks in vain."""
        if not self._num_tokens or not self._is_idle():
            return False
        if self._slack_s(num_blocks) >= origin.first_s or origin.num_declined >= _TRIED_EVERY - 1:
            return False
        origin.num_declined += 1
        return True

    def _learn(self, waiting: _Waiting, waited_s: float) -> None:
        """How long the source takes, from a request that does not wait for it any more."""
        arrival = waiting.arrival
        if arrival.pull.first_s is not None:
            arrival.origin.answered(arrival.pull.first_s)
        elif self._is_coming(waiting):
            arrival.origin.was_silent(waited_s)

    def _is_coming(self, waiting: _Waiting) -> bool:
        arrival = waiting.arrival
        return not arrival.is_over and arrival.num_here < len(arrival.pull.hashes)

    def _num_wanted(self) -> Counter[Origin]:
        """Blocks of each source that streams wait for."""
        num_wanted = Counter[Origin]()
        streams = [each for each in self._waiting.values() if each.is_stream]
        # Those that wait for the same blocks would compute them once.
        for waiting in {each.arrival: each for each in streams}.values():
            num_wanted[waiting.arrival.origin] += waiting.num_wanted
        return num_wanted

    def _left_s(self, waiting: _Waiting, num_wanted: Counter[Origin]) -> float:
        """How much longer it waits if nothing more lands."""
        origin = waiting.arrival.origin
        num_landed = origin.num_landed - waiting.origin_before
        if self._num_tokens:
            num_all = num_wanted[origin] if waiting.is_stream else waiting.num_wanted
            # Its own and all of them, one after another: half of the sum is the mean.
            slack_s = self._slack_s((waiting.num_wanted + num_all) / 2)
            patience_s = self._block_s * num_landed + slack_s
        else:
            patience_s = _UNKNOWN_SLACK_S * (1 + num_landed)
        return waiting.began_s + patience_s - self._clock()

    @property
    def _block_s(self) -> float:
        """How long it takes to compute a block."""
        return self._seconds / self._num_tokens * self._block_size

    def _slack_s(self, num_blocks: float) -> float:
        """How long a request may wait in vain for so many blocks."""
        return max(SLACK * self._block_s * num_blocks, MIN_SLACK_S)

    def _note(self, seq: Sequence, waiting: _Waiting, waited_s: float) -> None:
        """What ``seq`` has of its pull so far."""
        arrival = waiting.arrival
        num_tokens = (arrival.num_here - waiting.num_before) * self._block_size
        is_peer = arrival.pull.source is not None
        error = arrival.pull.error
        if not error and arrival.num_here < len(arrival.pull.hashes):
            error = _too_late(len(arrival.pull.hashes) - arrival.num_here, "came")
        before = waiting.before
        seq.fetched = before._replace(
            num_disk_tokens=before.num_disk_tokens + (0 if is_peer else num_tokens),
            num_peer_tokens=before.num_peer_tokens + (num_tokens if is_peer else 0),
            wait_s=before.wait_s + waited_s,
            error=error,
        )


def _too_late(num_blocks: int, verb: str) -> str:
    return f"{num_blocks} blocks {verb} too late: computing them is sooner"
