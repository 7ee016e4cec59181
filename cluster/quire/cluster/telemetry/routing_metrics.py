"""The routing table's counts as Prometheus metrics: decisions, forecasts, directory, bounds.

They are read from the table at each scrape. Everything bounded has two gauges, its size and its
bound, so that a dashboard can show the ratio without knowing the configuration.
"""

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from quire.router.accuracy import HistogramStats
from quire.router.stats import RoutingStats
from quire.router.table import RoutingTable

_Row = tuple[str, str, float]
"""A metric's name, its help text and its value."""


class RoutingCollector(Collector):
    """The routing table's counts at the time of the scrape."""

    def __init__(self, table: RoutingTable) -> None:
        self._table = table

    def collect(self) -> Iterator[Metric]:
        stats = self._table.stats()
        routed = CounterMetricFamily(
            "quire_routing_decisions", "Routing decisions by reason.", labels=["reason"]
        )
        for reason, count in stats.num_routed.items():
            routed.add_metric([reason], count)
        yield routed
        for name, help_text, value in (*_accuracy_counters(stats), *_directory_counters(stats)):
            yield CounterMetricFamily(name, help_text, value)
        for name, help_text, value in (*_directory_gauges(stats), *_bounds(stats)):
            yield GaugeMetricFamily(name, help_text, value)
        yield _histogram(
            "quire_routing_forecast_error_seconds",
            "How far forecasts of the time from routing to the first token were off, in seconds.",
            stats.accuracy.errors_s,
        )
        yield _histogram(
            "quire_routing_forecast_error_ratio",
            "How far forecasts of the time from routing to the first token were off, as a share "
            "of that time.",
            stats.accuracy.errors_ratio,
        )
        yield from _per_group(stats)


def _accuracy_counters(stats: RoutingStats) -> tuple[_Row, ...]:
    accuracy = stats.accuracy
    return (
        (
            "quire_unroutable",
            "Times that a request found no group; one that waits looks again and again.",
            stats.num_unroutable,
        ),
        (
            "quire_routing_predicted_cached_tokens",
            "Prompt tokens predicted to be cached, of requests that have begun.",
            accuracy.num_predicted_tokens,
        ),
        (
            "quire_routing_found_cached_tokens",
            "Prompt tokens really found in the cache, of the same requests.",
            accuracy.num_cached_tokens,
        ),
        (
            "quire_routing_wrong_cached_tokens",
            "Prompt tokens predicted but not found or found but not predicted, of the same.",
            accuracy.num_wrong_tokens,
        ),
        (
            "quire_routing_forecasts",
            "Requests that have begun and had a forecast of their time to the first token.",
            accuracy.num_forecasts,
        ),
        (
            "quire_routing_forecast_seconds",
            "Seconds from routing to the first token, as forecast for those requests.",
            accuracy.forecast_s,
        ),
        (
            "quire_routing_waited_seconds",
            "Seconds from routing to the first token that the same requests really waited.",
            accuracy.waited_s,
        ),
    )


def _directory_counters(stats: RoutingStats) -> tuple[_Row, ...]:
    directory = stats.directory
    return (
        ("quire_directory_events", "Block events taken in.", directory.num_events),
        (
            "quire_directory_gaps",
            "Batches of events that did not follow on: a resync was asked for.",
            directory.num_gaps,
        ),
        (
            "quire_directory_resyncs",
            "Snapshots taken in, of a group's whole cache or of drifted buckets.",
            directory.num_resyncs,
        ),
        (
            "quire_directory_late_batches",
            "Batches of events from a former life of their group, left out.",
            directory.num_late_batches,
        ),
        (
            "quire_directory_drifted_buckets",
            "Buckets of blocks found to differ from what their group holds, and requested again.",
            directory.num_drifted_buckets,
        ),
        (
            "quire_directory_refused_blocks",
            "Blocks left out because the directory was full.",
            directory.num_refused_blocks,
        ),
    )


def _directory_gauges(stats: RoutingStats) -> tuple[_Row, ...]:
    directory = stats.directory
    return (
        ("quire_directory_blocks", "Blocks in the directory.", directory.num_blocks),
        (
            "quire_directory_max_blocks",
            "Blocks that the directory has room for.",
            directory.max_blocks,
        ),
        (
            "quire_directory_holdings",
            "Pairs of a group and a block that it holds.",
            directory.num_holdings,
        ),
        (
            "quire_directory_holder_sets",
            "Distinct sets of groups that hold the same blocks.",
            directory.num_sets,
        ),
        ("quire_directory_bytes", "Memory that the directory takes.", directory.num_bytes),
        (
            "quire_directory_stale_groups",
            "Groups whose block events fell silent: routed to by load alone.",
            directory.num_stale_groups,
        ),
    )


def _bounds(stats: RoutingStats) -> tuple[_Row, ...]:
    return (
        (
            "quire_routing_inflight_requests",
            "Routed requests that have not ended.",
            stats.num_in_flight,
        ),
        (
            "quire_routing_max_inflight_requests",
            "Routed requests remembered at most; past that the oldest is forgotten.",
            stats.max_in_flight,
        ),
        (
            "quire_routing_inflight_blocks",
            "Blocks of prompts under way that the directory lacked when they were routed.",
            stats.num_in_flight_blocks,
        ),
        (
            "quire_routing_max_inflight_blocks",
            "Those remembered at most; past that a prompt is not counted as cached.",
            stats.max_in_flight_blocks,
        ),
        (
            "quire_routing_reserved_tokens",
            "Prompt tokens sent to groups whose frames do not show them yet.",
            stats.num_reserved_tokens,
        ),
        (
            "quire_routing_decisions_kept",
            "Decisions that can be explained.",
            stats.num_decisions_kept,
        ),
        (
            "quire_routing_max_decisions_kept",
            "Decisions kept at most.",
            stats.max_decisions_kept,
        ),
        (
            "quire_routing_candidates_kept",
            "Candidates of the decisions that can be explained.",
            stats.num_candidates_kept,
        ),
        (
            "quire_routing_max_candidates_kept",
            "Candidates kept at most; past that the oldest decision is forgotten.",
            stats.max_candidates_kept,
        ),
    )


def _per_group(stats: RoutingStats) -> Iterator[Metric]:
    errors = GaugeMetricFamily(
        "quire_group_forecast_error_ratio",
        "Mean error of the last forecasts for a group, as a share of the time waited.",
        labels=["group"],
    )
    paces = GaugeMetricFamily(
        "quire_group_pace_seconds",
        "What a group takes to the first token, as learned: for each missing_token, the prompt's "
        "own or queued before it, and for every request (fixed).",
        labels=["group", "part"],
    )
    for group_id, forecasts in stats.forecasts.items():
        if forecasts.mean_error is not None:
            errors.add_metric([group_id], forecasts.mean_error)
        if forecasts.wait is not None:
            for part, seconds in zip(("fixed", "missing_token"), forecasts.wait, strict=True):
                paces.add_metric([group_id, part], seconds)
    yield errors
    yield paces


def _histogram(name: str, help_text: str, counted: HistogramStats) -> Metric:
    bounds = [*map(floatToGoString, counted.bounds), "+Inf"]
    counts = accumulate(counted.counts)
    buckets = [(bound, float(count)) for bound, count in zip(bounds, counts, strict=True)]
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=counted.total)
