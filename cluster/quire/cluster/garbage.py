"""Keeps garbage collection from stopping a process that serves."""

import gc

_THRESHOLDS = (5_000, 10, 50)
"""Allocations, and collections of the younger generation, before each generation's collection. With
Python's defaults, a burst of 1,500 calls caused four full collections of 0.15 to 2.4 s."""


def collect_seldom() -> None:
    """Excludes everything loaded so far from garbage collection, and makes full collections rare: a
    full collection would visit 275,000 objects, which stopped all streams for 0.1 s or more."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
