"""The groups that died recently, as far as this gateway noticed.

Groups can die together: of a power cut, a network fault, a bad rollout. Such a death convicts none
of the requests that ran on them.
"""

from collections import OrderedDict
from collections.abc import Callable

from quire.cluster.errors import Death

_MAX_DEATHS = 64
"""Deaths that are remembered: far more than are asked about at a time."""

Life = tuple[str, int]
"""A group, and which life of it."""


class Deaths:
    """Groups that died within ``window_s`` of each other may have died together."""

    def __init__(self, *, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._deaths: OrderedDict[Life, tuple[float, Death]] = OrderedDict()

    def add(self, death: Death) -> None:
        """Counts that a group has died now. A repeated report of one incarnation counts once."""
        life = (death.group, death.epoch)
        if life in self._deaths and not self._deaths[life][1].is_refuted:
            return
        self._deaths[life] = (self._clock(), death)
        if len(self._deaths) > _MAX_DEATHS:
            self._deaths.popitem(last=False)

    @property
    def unrest_s(self) -> float:
        """How long a group that died together with the last one may still go unnoticed; 0: all
        are known."""
        times_s = [at_s for at_s, death in self._deaths.values() if not death.is_refuted]
        return max(0.0, max(times_s) + self._window_s - self._clock()) if times_s else 0.0

    def is_alone(self, death: Death) -> bool:
        """Whether its group has died, and no other one within the window before or after it."""
        life = (death.group, death.epoch)
        at_s, known = self._deaths.get(life, (self._clock(), death))
        return not (death.is_refuted or known.is_refuted) and not any(
            other != life and not another.is_refuted and abs(other_s - at_s) < self._window_s
            for other, (other_s, another) in self._deaths.items()
        )
