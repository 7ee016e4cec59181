"""The groups that died recently, as noticed by this gateway.

Groups can die together of a power cut, a network fault or a bad rollout. Such deaths convict none
of the requests that ran on the groups.
"""

from collections import OrderedDict
from collections.abc import Callable

from quire.cluster.errors import Death

_MAX_DEATHS = 64
"""Most deaths that are remembered, far more than are needed at a time."""

Life = tuple[str, int]
"""A group and its epoch."""


class Deaths:
    """Remembers deaths. Groups that died within ``window_s`` of each other may have died
    together."""

    def __init__(self, *, window_s: float, clock: Callable[[], float]) -> None:
        self._window_s = window_s
        self._clock = clock
        self._deaths: OrderedDict[Life, tuple[float, Death]] = OrderedDict()

    def add(self, death: Death) -> None:
        """Adds a death that happened now. Repeated reports of one incarnation count once."""
        life = (death.group, death.epoch)
        if life in self._deaths and not self._deaths[life][1].is_refuted:
            return
        self._deaths[life] = (self._clock(), death)
        if len(self._deaths) > _MAX_DEATHS:
            self._deaths.popitem(last=False)

    @property
    def unrest_s(self) -> float:
        """Seconds in which deaths together with the last one may still be noticed; 0 if all are
        known."""
        times_s = [at_s for at_s, death in self._deaths.values() if not death.is_refuted]
        return max(0.0, max(times_s) + self._window_s - self._clock()) if times_s else 0.0

    def is_alone(self, death: Death) -> bool:
        """Whether the death is not refuted, and no other group died within the window before or
        after it."""
        life = (death.group, death.epoch)
        at_s, known = self._deaths.get(life, (self._clock(), death))
        return not (death.is_refuted or known.is_refuted) and not any(
            other != life and not another.is_refuted and abs(other_s - at_s) < self._window_s
            for other, (other_s, another) in self._deaths.items()
        )
