"""Requests whose blocks are on their way from disk or from another group, while others run.

A request waits for more as long as what has landed would have taken longer to compute than it has
waited, but for a tenth of the time in which all that it wants could be computed. After that it
begins with what is there: so it ends at most that tenth later than if nothing had been fetched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from quire.worker.api.outputs import Fetched
from quire.worker.cache.pulls import Arrival
from quire.worker.cache.travel import Travel
from quire.worker.schedule.sequence import Sequence

SLACK = 0.1
_FADING = 0.8
"""Part of what was measured that counts beside the next step."""
MIN_SLACK_S = 0.003
"""A group's answer alone takes about as long: without it, no short prefix would be fetched."""
_UNKNOWN_SLACK_S = 0.25
"""How long a request waits for the next block before prompts were computed here."""


@dataclass
class _Waiting:
    arrival: Arrival
    began_s: float
    num_wanted: int
    """Blocks that were to come when it began to wait."""
    num_before: int
    """Those that had come by then."""


class Arriving:
    """Belongs to the engine's thread."""

    def __init__(self, travel: Travel, *, block_size: int, clock: Callable[[], float]) -> None:
        self._travel = travel
        self._block_size = block_size
        self._clock = clock
        self._waiting: dict[Sequence, _Waiting] = {}
        # Of recent steps with chunks of prompts; both fade.
        self._num_tokens = 0.0
        self._seconds = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._waiting

    def computed(self, num_tokens: int, seconds: float) -> None:
        """A step computed so many tokens of prompts."""
        # Summed up, and not a mean of rates: a step of few tokens says little about long prompts.
        self._num_tokens = _FADING * self._num_tokens + num_tokens
        self._seconds = _FADING * self._seconds + seconds

    def add(self, seq: Sequence) -> bool:
        """Whether ``seq`` waits for blocks; `take` hands it out when it may begin."""
        began_s = self._clock()  # To begin a pull takes a while, too.
        arrival = self._travel.want(
            seq.hashes, num_useful=seq.num_shareable, source=seq.request.source
        )
        if arrival is None:
            return False
        num_wanted = len(arrival.pull.hashes) - arrival.num_here
        self._waiting[seq] = _Waiting(arrival, began_s, num_wanted, arrival.num_here)
        return True

    @property
    def left_s(self) -> float:
        """When the next one waits no longer, if nothing more lands; infinite where none waits."""
        return min(map(self._left_s, self._waiting.values()), default=inf)

    def take(self) -> list[Sequence]:
        """Those that wait no longer."""
        taken = []
        for seq, waiting in list(self._waiting.items()):
            if self._is_worth_it(waiting):
                continue
            self._note(seq, waiting)
            self.remove(seq)
            arrival = waiting.arrival
            is_whole = arrival.num_here == len(arrival.pull.hashes) > waiting.num_before
            # The disk may have had the beginning, and another group has more.
            if not (is_whole and self.add(seq)):
                taken.append(seq)
        return taken

    def remove(self, seq: Sequence) -> None:
        """``seq`` waits no longer, or has ended."""
        self._travel.pulls.let_go(self._waiting.pop(seq).arrival)

    def _is_worth_it(self, waiting: _Waiting) -> bool:
        arrival = waiting.arrival
        if arrival.is_over or arrival.num_here == len(arrival.pull.hashes):
            return False
        return self._left_s(waiting) > 0

    def _left_s(self, waiting: _Waiting) -> float:
        """How much longer it waits if nothing more lands."""
        num_landed = waiting.arrival.num_here - waiting.num_before
        if self._num_tokens:
            block_s = self._seconds / self._num_tokens * self._block_size
            slack_s = max(SLACK * block_s * waiting.num_wanted, MIN_SLACK_S)
            patience_s = block_s * num_landed + slack_s
        else:
            patience_s = _UNKNOWN_SLACK_S * (1 + num_landed)
        return waiting.began_s + patience_s - self._clock()

    def _note(self, seq: Sequence, waiting: _Waiting) -> None:
        arrival = waiting.arrival
        num_tokens = (arrival.num_here - waiting.num_before) * self._block_size
        is_peer = arrival.pull.source is not None
        error = arrival.pull.error
        if not error and arrival.num_here < len(arrival.pull.hashes):
            rest = len(arrival.pull.hashes) - arrival.num_here
            error = f"{rest} blocks came too late: computing them is sooner"
        before = seq.fetched or Fetched()
        seq.fetched = before._replace(
            num_disk_tokens=before.num_disk_tokens + (0 if is_peer else num_tokens),
            num_peer_tokens=before.num_peer_tokens + (num_tokens if is_peer else 0),
            wait_s=before.wait_s + self._clock() - waiting.began_s,
            error=error,
        )
