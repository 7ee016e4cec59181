"""The queue of constraint masks: decides which is computed next. Computes nothing; time is an
argument.

Masks of grammars known to be cheap go first, to any thread. At most one mask of unknown cost is
computed at a time, and at most one that is known to be slow. Slow masks take cores from the model,
so they get a share of one core while other requests run. The tenant with the least time above its
allowance goes first, and of its grammars the one with the least.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from quire.worker.text.grammar.mask_cost import MaskCost
from quire.worker.text.grammar.matcher import Matcher, Place


class Lane(Enum):
    TRUSTED = auto()
    UNKNOWN = auto()
    SLOW = auto()


@dataclass(eq=False, slots=True)
class Job:
    """A place in a grammar whose mask is to be computed, by a matcher that is at this place."""

    matcher: Matcher
    place: Place
    num_holders: int = 1
    """Requests that wait for it."""
    lane: Lane | None = None
    """The lane in which it was begun; ``None`` before."""
    is_late: bool = False
    """Whether a step went on without this mask; later steps do not wait for it."""

    @property
    def cost(self) -> MaskCost:
        return self.matcher.cost

    @property
    def next_lane(self) -> Lane:
        if self.cost.is_slow:
            return Lane.SLOW
        return Lane.TRUSTED if self.cost.is_trusted else Lane.UNKNOWN


@dataclass(kw_only=True, slots=True)
class MaskQueue:
    """The jobs that have not begun, in order of arrival, and the number of running ones by lane."""

    slow_share: float
    """The share of one core that slow masks may use."""
    is_idle: bool = False
    """Whether nothing runs that slow masks could delay."""
    _waiting: dict[Job, None] = field(default_factory=dict)
    _num_begun: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    _slow_from_s: float = 0.0

    def put(self, job: Job) -> None:
        self._waiting[job] = None

    def remove(self, job: Job) -> None:
        del self._waiting[job]

    def take(self, now_s: float, *, only_trusted: bool = False) -> Job | None:
        """Removes the next job and counts it as begun; ``None`` if none may begin now."""
        chosen: list[tuple[float, float, int, Job, Lane]] = []
        for number, job in enumerate(self._waiting):
            lane = job.next_lane
            if lane is Lane.TRUSTED:
                return self._begin(job, lane)
            if not only_trusted and self._may_begin(lane, now_s):
                chosen.append((job.cost.tenant.sum_s, job.cost.excess_s, number, job, lane))
        return self._begin(*min(chosen)[3:]) if chosen else None

    def finished(self, job: Job, cost_s: float, *, num_tokens: int, now_s: float) -> None:
        assert job.lane is not None
        self._num_begun[job.lane] -= 1
        job.cost.charge(cost_s, num_tokens=num_tokens)
        if job.lane is Lane.SLOW:
            self._slow_from_s = now_s + cost_s * (1 / self.slow_share - 1)

    def pause_s(self, now_s: float) -> float | None:
        """Seconds until a slow job may begin without another event; ``None`` if none may."""
        is_paused = self._waiting and not self._num_begun[Lane.SLOW] and self._slow_from_s > now_s
        return self._slow_from_s - now_s if is_paused else None

    def _may_begin(self, lane: Lane, now_s: float) -> bool:
        if self._num_begun[lane]:
            return False
        return lane is Lane.UNKNOWN or self.is_idle or self._slow_from_s <= now_s

    def _begin(self, job: Job, lane: Lane) -> Job:
        self.remove(job)
        job.lane = lane
        self._num_begun[lane] += 1
        return job
