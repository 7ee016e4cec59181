"""Counters of routing, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.router.accuracy import AccuracyStats
from quire.router.prefix_index.directory import DirectoryStats, GroupId


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForecasts:
    """One group's learned forecast of waits, and its accuracy."""

    wait: tuple[float, float] | None
    """See `GroupState.wait`."""
    mean_error: float | None
    """Mean error of recent forecasts, as a share of the wait; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Counters since the start, and the fill of each bounded structure with its limit."""

    num_routed: Mapping[str, int]
    """Requests routed so far, by reason."""
    num_unroutable: int
    accuracy: AccuracyStats
    forecasts: Mapping[GroupId, GroupForecasts]
    num_in_flight: int
    max_in_flight: int
    num_in_flight_blocks: int
    max_in_flight_blocks: int
    num_reserved_tokens: int
    num_decisions_kept: int
    max_decisions_kept: int
    num_candidates_kept: int
    max_candidates_kept: int
    directory: DirectoryStats
