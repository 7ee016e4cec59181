"""The highest arrival rate of a trace at which times to first token meet a target."""

from collections.abc import Callable
from typing import NamedTuple

from quire.simulate.result import Result


class ClusterCapacity(NamedTuple):
    speed: float
    """The fastest replay at which the 99th percentile of TTFT stays within the target."""
    result: Result | None
    """The result of that replay; None where even the slowest one tried misses the target."""


def find_capacity(
    replay: Callable[[float], Result], *, target_s: float, tolerance: float = 0.02
) -> ClusterCapacity:
    """Bisects the speed, to a share of ``tolerance``.

    It assumes that a target met at some speed is met at any lower one; bursts in a trace can
    violate that by a few per cent.
    """
    slow, fast = 0.0, 1.0
    best: Result | None = None
    while fast < 2**20:
        result = replay(fast)
        if result.ttft_quantile_s(0.99) > target_s:
            break
        slow, best, fast = fast, result, 2 * fast
    slow = slow or fast / 1024
    while fast / slow > 1 + tolerance:
        middle = (slow * fast) ** 0.5
        result = replay(middle)
        if result.ttft_quantile_s(0.99) > target_s:
            fast = middle
        else:
            slow, best = middle, result
    return ClusterCapacity(slow if best is not None else 0.0, best)
