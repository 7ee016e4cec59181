"""Requests that wait for blocks from disk or from another group while other requests run.

A request waits at most the time that computing the blocks received so far would take, plus a tenth
of the time that computing all blocks it wants would take. Then it begins with the blocks that have
arrived. So fetching delays its end by at most that tenth.

Requests that wait for the same source would be computed one after another, so a block that arrives
for one of them extends the wait of all. Streams that a draining group hands over wait together:
their tenth is that of their mean.

If steps are full of other prompts, a request whose wait is over is queued, and its blocks continue
to arrive until its turn. If a source's first block takes longer than a request may wait, and
nothing else runs meanwhile, only one such request in `_TRIED_EVERY` asks the source.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from quire.worker.engine.sequence import Sequence, Status
from quire.worker.parts.tiers.checker import Check
from quire.worker.parts.tiers.pulls import Arrival, Origin
from quire.worker.parts.tiers.transfers import Transfers
from quire.worker.request.outputs import Fetched

SLACK = 0.1
_FADING = 0.8
"""Weight of the earlier measurements when a new step is added."""
MIN_SLACK_S = 0.003
"""Least extra wait: about a group's response time. With less, no short prefix would be fetched."""
_UNKNOWN_SLACK_S = 0.25
"""How long a request waits for each block while the prefill speed is unknown."""
_TRIED_EVERY = 8


@dataclass
class _Waiting:
    arrival: Arrival
    began_s: float
    num_wanted: int
    """Blocks of the arrival that were missing when the request began to wait."""
    num_before: int
    """Blocks of the arrival that were in the cache when the request began to wait."""
    origin_before: int
    """Blocks that the source had sent by then, for any request."""
    is_stream: bool
    """Whether the request continues a stream of another group."""
    before: Fetched
    """Tokens that the request had fetched before this wait."""


class Arriving:
    """The requests that wait for blocks. Used from the engine's thread."""

    def __init__(
        self,
        transfers: Transfers,
        *,
        block_size: int,
        step_tokens: int,
        is_idle: Callable[[], bool],
        clock: Callable[[], float],
    ) -> None:
        """``step_tokens`` is the most prefill tokens of a step while blocks arrive for queued
        requests. ``is_idle`` tells whether no other requests run."""
        self._transfers = transfers
        self._block_size = block_size
        self._step_tokens = step_tokens
        self._is_idle = is_idle
        self._clock = clock
        self._waiting: dict[Sequence, _Waiting] = {}
        # Requests whose blocks in host memory must first be compared with their checksums.
        self._checked: dict[Sequence, Check] = {}
        self._queued: dict[Sequence, tuple[_Waiting, float]] = {}  # With the seconds waited.
        # Exponentially decayed sums over steps with prefill chunks.
        self._num_tokens = 0.0
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._checked)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting or seq in self._checked

    def computed(self, num_tokens: int, seconds: float) -> None:
        """Records that a step computed ``num_tokens`` prefill tokens in ``seconds``."""
        # Sums, not a mean of rates: a step of few tokens says little about long prompts.
        self._num_tokens = _FADING * self._num_tokens + num_tokens
        self._seconds = _FADING * self._seconds + seconds

    def add(self, seq: Sequence) -> bool:
        """Adds ``seq`` if it has blocks to wait for, and returns whether it does. `take` returns
        it when it may begin."""
        check = self._transfers.check(seq.hashes[: seq.num_shareable])
        if check is not None:
            self._checked[seq] = check
            return True
        return self._fetch(seq)

    @property
    def left_s(self) -> float:
        """Seconds until a request stops waiting if no block arrives; infinite if none waits."""
        num_wanted = self._num_wanted()
        return min([self._left_s(each, num_wanted) for each in self._waiting.values()], default=inf)

    @property
    def num_queued(self) -> int:
        """Sequences that `take` has returned and whose blocks are still arriving."""
        return len(self._queued)

    def take(self, *, num_pending_tokens: int) -> list[Sequence]:
        """Returns the sequences that wait no longer. ``num_pending_tokens`` is the number of tokens
        that queued and running prompts have yet to compute."""
        self._settle_queued()
        taken = []
        for seq in [seq for seq, check in self._checked.items() if check.is_done]:
            self._transfers.checker.end(self._checked.pop(seq))
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
                # The disk may have had the beginning, and another group may have more.
                if is_whole and self._fetch(seq):
                    continue
            num_pending_tokens += seq.num_tokens - waiting.arrival.num_here * self._block_size
            taken.append(seq)
        return taken

    def _settle_queued(self) -> None:
        """Records the blocks that arrived for queued sequences; drops sequences that left the queue
        or whose arrival is over."""
        for seq, (waiting, waited_s) in list(self._queued.items()):
            is_queued = seq.status is Status.WAITING
            if is_queued:
                self._note(seq, waiting, waited_s)
            # The blocks that have arrived are held as long as the sequence is queued.
            if not is_queued or waiting.arrival.is_over:
                del self._queued[seq]
                self._transfers.pulls.let_go(waiting.arrival)

    def loaded(self, seq: Sequence, num_blocks: int) -> None:
        """Records that ``seq`` begins with ``num_blocks`` blocks of host memory."""
        if seq.num_cached is None:
            before = seq.fetched or Fetched()
            num_tokens = before.num_host_tokens + num_blocks * self._block_size
            seq.fetched = before._replace(num_host_tokens=num_tokens)

    def remove(self, seq: Sequence) -> None:
        """Removes ``seq``, which waits no longer or has ended."""
        if seq in self._checked:
            self._transfers.checker.end(self._checked.pop(seq))
        else:
            self._transfers.pulls.let_go(self._waiting.pop(seq).arrival)

    def _fetch(self, seq: Sequence) -> bool:
        """Begins to fetch blocks for ``seq`` from disk or another group. Returns whether it waits
        for them."""
        began_s = self._clock()  # Before the pull, which takes some time to begin.
        before = seq.fetched or Fetched()

        def pays(origin: Origin, num_blocks: int) -> bool:
            if not self._is_too_slow(origin, num_blocks):
                return True
            seq.fetched = before._replace(error=_too_late(num_blocks, "would come"))
            return False

        arrival = self._transfers.want(
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
        """Whether a request's wait for ``num_blocks`` would end before the first block arrives."""
        if not self._num_tokens or not self._is_idle():
            return False
        if self._slack_s(num_blocks) >= origin.first_s or origin.num_declined >= _TRIED_EVERY - 1:
            return False
        origin.num_declined += 1
        return True

    def _learn(self, waiting: _Waiting, waited_s: float) -> None:
        """Updates the source's response time from a request that has stopped waiting."""
        arrival = waiting.arrival
        if arrival.pull.first_s is not None:
            arrival.origin.answered(arrival.pull.first_s)
        elif self._is_coming(waiting):
            arrival.origin.was_silent(waited_s)

    def _is_coming(self, waiting: _Waiting) -> bool:
        arrival = waiting.arrival
        return not arrival.is_over and arrival.num_here < len(arrival.pull.hashes)

    def _num_wanted(self) -> Counter[Origin]:
        """For each source, how many blocks handed-over streams wait for."""
        num_wanted = Counter[Origin]()
        streams = [each for each in self._waiting.values() if each.is_stream]
        # Streams that wait for the same arrival would compute its blocks once.
        for waiting in {each.arrival: each for each in streams}.values():
            num_wanted[waiting.arrival.origin] += waiting.num_wanted
        return num_wanted

    def _left_s(self, waiting: _Waiting, num_wanted: Counter[Origin]) -> float:
        """Seconds that the request still waits if no more blocks arrive."""
        origin = waiting.arrival.origin
        num_landed = origin.num_landed - waiting.origin_before
        if self._num_tokens:
            num_all = num_wanted[origin] if waiting.is_stream else waiting.num_wanted
            # Computed one after another, streams end on average after half of the sum.
            slack_s = self._slack_s((waiting.num_wanted + num_all) / 2)
            patience_s = self._block_s * num_landed + slack_s
        else:
            patience_s = _UNKNOWN_SLACK_S * (1 + num_landed)
        return waiting.began_s + patience_s - self._clock()

    @property
    def _block_s(self) -> float:
        """Seconds that prefill takes for one block."""
        return self._seconds / self._num_tokens * self._block_size

    def _slack_s(self, num_blocks: float) -> float:
        """How many seconds a request may wait for ``num_blocks`` without receiving any."""
        return max(SLACK * self._block_s * num_blocks, MIN_SLACK_S)

    def _note(self, seq: Sequence, waiting: _Waiting, waited_s: float) -> None:
        """Records in ``seq`` what it has received from its pull so far."""
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
