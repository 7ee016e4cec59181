"""Which mask is computed next. Decides, and computes nothing; time is an argument.

Masks of grammars that are known to take little go first, and to any thread. Of all others one is
computed at a time, and one more of those that are known to take long: while other requests run,
these have a share of one core, as they take the cores from the model. The tenant goes first that
took least above its allowance, and of its grammars the one that did.
"""

from dataclasses import dataclass, field
from enum import Enum, auto

from quire.worker.text.mask_cost import MaskCost
from quire.worker.text.matcher import Matcher, Place


class Lane(Enum):
    TRUSTED = auto()
    UNKNOWN = auto()
    SLOW = auto()


@dataclass(eq=False, slots=True)
class Job:
    """A place to be made ready by a matcher that stands there."""

    matcher: Matcher
    place: Place
    num_holders: int = 1
    """Requests that wait for it."""
    lane: Lane | None = None
    """The lane in which it was begun."""
    is_late: bool = False
    """A step went on without it: no other one waits for it."""

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
    """Jobs that have not begun, by their order of arrival, and how many have."""

    slow_share: float
    """The share of one core for slow masks."""
    is_idle: bool = False
    """Nothing runs that slow masks could hold up."""
    _waiting: dict[Job, None] = field(default_factory=dict)
    _num_begun: dict[Lane, int] = field(default_factory=lambda: dict.fromkeys(Lane, 0))
    _slow_from_s: float = 0.0

    def put(self, job: Job) -> None:
        self._waiting[job] = None

    def remove(self, job: Job) -> None:
        del self._waiting[job]

    def take(self, now_s: float, *, only_trusted: bool = False) -> Job | None:
        """The next job, which is begun; ``None`` where none may be begun now."""
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
        """After what time another one may begin though nothing else happens; ``None``: never."""
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
