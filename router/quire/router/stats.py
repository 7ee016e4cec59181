"""What routing counts, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.router.accuracy import AccuracyStats
from quire.router.directory import DirectoryStats, GroupId
from quire.router.pace import Pace


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupForecasts:
    """How well one group is known."""

    pace: Pace | None
    mean_error: float | None
    """Of its forecasts of late, as a share of the wait; None before the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Counters since the start, and how full what has a limit is."""

    num_routed: Mapping[str, int]
    """By reason."""
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
