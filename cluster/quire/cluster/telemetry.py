"""What a gateway counts, as Prometheus metrics named ``quire_*``.

Counts of this gateway's own requests are kept here as they happen. What groups and routing table
count themselves is read from them when someone scrapes.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.cluster.groups import Groups
from quire.router.table import RoutingTable

_TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_TOTAL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Telemetry:
    """The metrics of one gateway, in a registry of their own."""

    def __init__(self, *, groups: Groups, table: RoutingTable) -> None:
        self.registry = registry = CollectorRegistry()
        self.completions = Counter(
            "quire_completions",
            "Completions that ended, by outcome: stop, length, cancelled or error.",
            ["outcome"],
            registry=registry,
        )
        self.prompt_tokens = Counter(
            "quire_prompt_tokens", "Prompt tokens of completions begun.", registry=registry
        )
        self.cached_tokens = Counter(
            "quire_cached_prompt_tokens",
            "Prompt tokens that groups found in their cache.",
            registry=registry,
        )
        self.output_tokens = Counter(
            "quire_output_tokens", "Tokens sent to clients.", registry=registry
        )
        self.resumes = Counter(
            "quire_resumes",
            "Times that a completion went on elsewhere, or there anew, as its group was lost.",
            registry=registry,
        )
        self.handovers = Counter(
            "quire_handovers",
            "Times that a completion went elsewhere since its group drained or put it off.",
            registry=registry,
        )
        self.quarantined = Counter(
            "quire_quarantined_completions",
            "Completions refused since too many groups had died under them.",
            registry=registry,
        )
        self.retry_budget = Gauge(
            "quire_retry_budget", "Resumes that could be done at once now.", registry=registry
        )
        self.suspects = Gauge(
            "quire_suspects",
            "Completions under which groups died in a row, on probation or waiting for it.",
            registry=registry,
        )
        self.inflight = Gauge(
            "quire_inflight_completions", "Completions under way.", registry=registry
        )
        self.time_to_first_token = Histogram(
            "quire_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=_TTFT_BUCKETS,
        )
        self.time_per_output_token = Histogram(
            "quire_time_per_output_token_seconds",
            "Mean time between a completion's tokens, behind the first.",
            registry=registry,
            buckets=_TPOT_BUCKETS,
        )
        self.total_time = Histogram(
            "quire_completion_seconds",
            "From a request's arrival to its last token.",
            registry=registry,
            buckets=_TOTAL_BUCKETS,
        )
        registry.register(_ClusterCollector(groups, table))

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _ClusterCollector(Collector):
    """The groups' load and the routing table's counts, as of the moment of the scrape."""

    _GAUGES = (
        ("num_running", "quire_group_running", "Sequences that a group runs."),
        ("num_waiting", "quire_group_waiting", "Requests that wait in a group's queue."),
        (
            "num_pending_prefill_tokens",
            "quire_group_pending_prefill_tokens",
            "Prompt tokens that a group has yet to compute.",
        ),
        ("num_free_blocks", "quire_group_free_blocks", "KV blocks that hold nothing."),
        ("num_cached_blocks", "quire_group_cached_blocks", "KV blocks kept as known prefixes."),
        ("num_held_blocks", "quire_group_held_blocks", "KV blocks that running requests read."),
        (
            "num_unsent_tokens",
            "quire_group_unsent_tokens",
            "Output tokens that a group keeps for readers that are behind.",
        ),
    )
    _COUNTERS = (
        ("num_prompt_tokens", "quire_group_prompt_tokens", "Prompt tokens that a group began."),
        ("num_hit_tokens", "quire_group_hit_tokens", "Those among them that were cached."),
        ("num_output_tokens", "quire_group_output_tokens", "Tokens that a group generated."),
        ("num_preemptions", "quire_group_preemptions", "Sequences put back for want of blocks."),
    )

    def __init__(self, groups: Groups, table: RoutingTable) -> None:
        self._groups = groups
        self._table = table

    def collect(self) -> Iterator[Metric]:
        yield from self._collect_groups()
        stats = self._table.stats()
        routed = CounterMetricFamily(
            "quire_routing_decisions", "Routing decisions by reason.", labels=["reason"]
        )
        for reason, count in stats.num_routed.items():
            routed.add_metric([reason], count)
        yield routed
        yield CounterMetricFamily(
            "quire_unroutable", "Requests for which there was no group.", stats.num_unroutable
        )
        yield CounterMetricFamily(
            "quire_routing_predicted_cached_tokens",
            "Prompt tokens predicted to be cached, of requests that have begun.",
            stats.num_started_predicted_tokens,
        )
        yield CounterMetricFamily(
            "quire_routing_found_cached_tokens",
            "Prompt tokens really found in the cache, of the same requests.",
            stats.num_started_cached_tokens,
        )
        yield GaugeMetricFamily(
            "quire_directory_blocks", "Blocks in the directory.", stats.directory.num_blocks
        )

    def _collect_groups(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "quire_ready_groups", "Groups that take requests.", self._groups.num_ready
        )
        for row in self._GAUGES:
            yield self._per_group(GaugeMetricFamily, *row)
        for row in self._COUNTERS:
            yield self._per_group(CounterMetricFamily, *row)

    def _per_group(
        self,
        family: type[GaugeMetricFamily] | type[CounterMetricFamily],
        field: str,
        name: str,
        help_text: str,
    ) -> Metric:
        metric = family(name, help_text, labels=["group"])
        for group_id, load in self._groups.loads.items():
            metric.add_metric([group_id], getattr(load, field))
        return metric
