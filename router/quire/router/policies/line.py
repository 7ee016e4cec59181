"""A line through what was seen lately: how long work takes, by its tokens.

    seconds = fixed + per_token * tokens

fitted by least squares to about the last ``window`` observations, neither part negative. Memory
does not grow with what was seen.
"""

from math import inf

MIN_OBSERVATIONS = 8
"""Before that, nothing is known."""


class Line:
    __slots__ = ("_kept", "_moments", "_num_seen")

    def __init__(self, *, window: int) -> None:
        """``window``: observations after which one counts for a third (1/e) of a new one."""
        self._kept = 1 - 1 / window
        self._num_seen = 0
        self._moments = (0.0, 0.0, 0.0, 0.0, 0.0)  # Of 1, x, y, x * x, x * y.

    def add(self, num_tokens: float, seconds: float, *, weight: float = 1.0) -> None:
        if not 0 < seconds < inf:
            return  # A clock that went back teaches nothing.
        n, x, y, xx, xy = [self._kept * moment for moment in self._moments]
        x_w, y_w = weight * num_tokens, weight * seconds
        self._moments = (
            n + weight,
            x + x_w,
            y + y_w,
            xx + x_w * num_tokens,
            xy + x_w * seconds,
        )
        self._num_seen += 1

    @property
    def parts(self) -> tuple[float, float] | None:
        """``fixed`` and ``per_token``; None where too little was seen."""
        if self._num_seen < MIN_OBSERVATIONS:
            return None
        n, x, y, xx, xy = self._moments
        spread = n * xx - x * x
        slope = max((n * xy - x * y) / spread, 0.0) if spread > 1e-6 * n * xx else 0.0
        fixed = (y - slope * x) / n
        # Both parts at 0 or above: the line goes through the origin.
        return (fixed, slope) if fixed >= 0 else (0.0, xy / xx)
