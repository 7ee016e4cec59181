"""What routing counts, for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.router.directory import DirectoryStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStats:
    """Counters since the start, and how full what has a limit is."""

    num_routed: Mapping[str, int]
    """By reason."""
    num_unroutable: int
    num_prompt_tokens: int
    num_predicted_cached_tokens: int
    num_started: int
    num_started_predicted_tokens: int
    """Predicted to be cached, of requests whose first frame has come: compare the next."""
    num_started_cached_tokens: int
    """Really found in the cache, of the same requests."""
    num_started_wrong_tokens: int
    """Predicted but not found, or found but not predicted, of the same requests."""
    num_groups: int
    num_in_flight: int
    num_in_flight_blocks: int
    num_reserved_tokens: int
    directory: DirectoryStats
