"""A gateway's Prometheus metrics, named ``quire_*``; a model's metrics have the label ``model``.

Counts of this gateway's own requests are updated here as they happen. Counts of groups and of the
routing table are read from those at each scrape.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.cluster.links.groups import Groups
from quire.cluster.telemetry.routing_metrics import RoutingCollector
from quire.cluster.telemetry.timeline import CompletionRecord, Counters, Timeline
from quire.cluster.telemetry.vllm_metrics import vllm_metrics
from quire.router.table import RoutingTable

TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)
_LENGTHS = tuple(4**power for power in range(10))
_TOTAL_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Telemetry(Counters):
    """The metrics of one model at one gateway, in a registry of their own."""

    def __init__(self, *, groups: Groups, table: RoutingTable) -> None:
        self.registry = registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self.completions = counter(
            "quire_completions",
            "Completions that ended, by outcome: stop, length, cancelled, deadline or error.",
            ["outcome"],
        )
        self.prompt_tokens = counter("quire_prompt_tokens", "Prompt tokens of completions begun.")
        self.cached_tokens = counter(
            "quire_cached_prompt_tokens", "Prompt tokens that groups found in their cache."
        )
        self.output_tokens = counter("quire_output_tokens", "Tokens sent to clients.")
        self.resumes = counter(
            "quire_resumes",
            "Times that a completion was resumed after a group loss, there or on another group.",
        )
        self.handovers = counter(
            "quire_handovers",
            "Times that a completion went elsewhere since its group drained or put it off.",
        )
        self.quarantined = counter(
            "quire_quarantined_completions",
            "Completions refused since too many groups had died under them.",
        )
        self.retry_budget = gauge("quire_retry_budget", "Resumes that could be done at once now.")
        self.isolated = gauge(
            "quire_isolated_completions",
            "Completions under which groups died in a row: they run one at a time.",
        )
        self.inflight = gauge("quire_inflight_completions", "Completions under way.")
        self.time_to_first_token = histogram(
            "quire_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS,
        )
        self.time_per_output_token = histogram(
            "quire_time_per_output_token_seconds",
            "Mean time between a completion's tokens, behind the first.",
            buckets=TPOT_BUCKETS,
        )
        self.prefill_time = histogram(
            "quire_prefill_seconds",
            "From a completion's leave to go to a group to its first token.",
            buckets=TTFT_BUCKETS,
        )
        self.decode_time = histogram(
            "quire_decode_seconds",
            "From a completion's first token to its last.",
            buckets=_TOTAL_BUCKETS,
        )
        self.total_time = histogram(
            "quire_completion_seconds",
            "From a request's arrival to its last token.",
            buckets=_TOTAL_BUCKETS,
        )
        self.prompt_lengths = histogram(
            "quire_completion_prompt_tokens", "Prompt tokens of a completion.", buckets=_LENGTHS
        )
        self.output_lengths = histogram(
            "quire_completion_output_tokens", "Tokens of a completion.", buckets=_LENGTHS
        )
        registry.register(_GroupCollector(groups))
        registry.register(RoutingCollector(table))

    def begun(self, record: CompletionRecord) -> None:
        self.prompt_tokens.inc(record.num_prompt_tokens)
        self.cached_tokens.inc(record.num_cached_tokens or 0)

    def arrived(self, num_tokens: int) -> None:
        self.output_tokens.inc(num_tokens)

    def first_token(self, record: CompletionRecord) -> None:
        assert record.time_to_first_token_s is not None
        assert record.first_token_s is not None
        self.time_to_first_token.observe(record.time_to_first_token_s)
        self.prefill_time.observe(record.first_token_s - record.attempts[0].routed_s)

    def resumed(self) -> None:
        self.resumes.inc()

    def handed_over(self) -> None:
        self.handovers.inc()

    def found_poison(self) -> None:
        self.quarantined.inc()

    def finished(self, record: CompletionRecord) -> None:
        total_s, num_output = record.total_s, record.num_output_tokens
        first_token_s = record.time_to_first_token_s
        decode_s = 0.0 if first_token_s is None else total_s - first_token_s
        self.total_time.observe(total_s)
        self.decode_time.observe(decode_s)
        self.prompt_lengths.observe(record.num_prompt_tokens)
        self.output_lengths.observe(num_output)
        if num_output > 1:
            self.time_per_output_token.observe(decode_s / (num_output - 1))

    def ended(self, record: CompletionRecord) -> None:
        self.completions.labels(record.outcome).inc()

    def first_tokens(self) -> tuple[Sequence[float], list[int]]:
        """A histogram of the time to the first token: the upper bounds of its buckets in seconds,
        without the last bucket's, and the count of each bucket."""
        (metric,) = self.time_to_first_token.collect()
        upto = [int(each.value) for each in metric.samples if each.name.endswith("_bucket")]
        counts = [high - low for low, high in zip([0, *upto], upto, strict=False)]
        return TTFT_BUCKETS, counts


class GatewayTelemetry:
    """The metrics of one gateway: its own, and every model's with the label ``model``."""

    def __init__(self) -> None:
        registry = CollectorRegistry()
        counter = partial(Counter, registry=registry)
        gauge = partial(Gauge, registry=registry)
        self.refused = refused_counter(registry)
        """Refused requests whose model was not known yet."""
        self.spans = counter(
            "quire_spans",
            "Spans of traces, by outcome: sent, failed (the collector did not take them), dropped "
            "(too many waited to be sent).",
            ["outcome"],
        )
        self.connections = gauge("quire_http_connections", "HTTP connections that are open.")
        self.max_connections = gauge(
            "quire_http_max_connections", "Up to how many HTTP connections there may be."
        )
        self.cut_connections = counter(
            "quire_http_cut_connections",
            "HTTP connections refused (full, address), closed to make room for another (room), or "
            "closed since a request's head or body took too long (head, body).",
            ["reason"],
        )
        self.grpc_connections = gauge("quire_grpc_connections", "gRPC connections that are open.")
        self.cut_grpc_connections = counter(
            "quire_grpc_cut_connections",
            "gRPC connections ended since they flooded (flood), an address had too many (address), "
            "or to make room for another (room).",
            ["reason"],
        )
        self.body_bytes = gauge(
            "quire_body_bytes", "Bytes of large requests that are read or not tokenized yet."
        )
        self.requests = counter(
            "quire_requests", "Calls of clients, by endpoint and status.", ["endpoint", "status"]
        )
        self.keys_read = gauge(
            "quire_api_keys_read_timestamp_seconds",
            "When the file of API keys that is in use was read, since 1970; 0 without one.",
        )
        self.keys_unusable = gauge(
            "quire_api_keys_unusable",
            "1 while the file of API keys that is there cannot be used, and a former one is.",
        )
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)
        self._registry = registry
        self._page = _Page(registry)

    def count(self, call: Timeline) -> None:
        """Counts an ended call."""
        self.requests.labels(call.endpoint, call.status).inc()

    def register(self, collector: Collector) -> None:
        """Adds the metrics of ``collector``, which belong to no single model."""
        self._registry.register(collector)

    def add(self, model: str, registry: CollectorRegistry) -> None:
        """Adds a model's registry. If the model has several, their values are summed."""
        self._page.registries.setdefault(model, []).append(registry)

    def remove(self, model: str, registry: CollectorRegistry) -> None:
        """Removes a model's registry. If the model has another one, counts of the removed one stay
        in the sums."""
        registries = self._page.registries[model]
        registries.remove(registry)
        if registries:
            self._page.keep(model, registry)
        else:
            del self._page.registries[model]
            self._page.kept.pop(model, None)

    def render(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._page)


class _GroupCollector(Collector):
    """The groups' loads at the time of the scrape."""

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
        ("adapters", "quire_group_loaded_adapters", "LoRA adapters that a group has loaded."),
        ("num_adapters", "quire_group_adapters", "LoRA adapters that a group has requests for."),
    )
    _COUNTERS = (
        ("num_prompt_tokens", "quire_group_prompt_tokens", "Prompt tokens that a group began."),
        ("num_hit_tokens", "quire_group_hit_tokens", "Those among them that were cached."),
        ("num_output_tokens", "quire_group_output_tokens", "Tokens that a group generated."),
        ("num_preemptions", "quire_group_preemptions", "Sequences put back for want of blocks."),
        ("num_drafted_tokens", "quire_group_drafted_tokens", "Tokens that a group guessed."),
        ("num_accepted_tokens", "quire_group_accepted_tokens", "Guesses that were right."),
        (
            "num_host_tokens",
            "quire_group_host_tokens",
            "Prompt tokens whose KV a group took from host memory instead of computing it.",
        ),
        ("num_disk_tokens", "quire_group_disk_tokens", "The same, from its disk."),
        ("num_peer_tokens", "quire_group_peer_tokens", "The same, from other groups."),
        (
            "disk_s",
            "quire_group_disk_wait_seconds",
            "How long a group's requests waited for its disk.",
        ),
        (
            "peer_s",
            "quire_group_peer_wait_seconds",
            "How long a group's requests waited for other groups.",
        ),
        ("num_lent_tokens", "quire_group_lent_tokens", "Tokens whose KV it sent to other groups."),
        (
            "num_failed_pulls",
            "quire_group_failed_pulls",
            "Times that a group did not get all the blocks that it was to.",
        ),
        (
            "num_corrupt_blocks",
            "quire_group_corrupt_blocks",
            "Blocks that came to a group with other bytes than they left, and were thrown away.",
        ),
        ("num_adapter_loads", "quire_group_adapter_loads", "Times that a group loaded an adapter."),
    )

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "quire_ready_groups", "Groups that take requests.", self._groups.num_ready
        )
        yield GaugeMetricFamily(
            "quire_requests_without_group",
            "Requests that wait because no group can take them, those in the queue among them.",
            self._groups.demand.num_requests,
        )
        yield GaugeMetricFamily(
            "quire_unsent_commands",
            "Commands for groups that wait until their connections take them.",
            self._groups.num_unsent_commands,
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
            value = getattr(load, field)
            is_number = isinstance(value, int | float)
            metric.add_metric([group_id], value if is_number else len(value))
        return metric


_Key = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


class _Page(Collector):
    """All registries combined, so that each metric is one family."""

    def __init__(self, registry: CollectorRegistry) -> None:
        """``registry``: metrics that belong to no single model."""
        self.registries: dict[str, list[CollectorRegistry]] = {"": [registry]}
        """Registries by model, for the label ``model``; those of "" have no such label."""
        self.kept: dict[str, dict[_Key, float]] = {}
        """Counts of removed registries by model. Without them, the sums would decrease."""

    def keep(self, model: str, registry: CollectorRegistry) -> None:
        kept = self.kept.setdefault(model, {})
        for metric in registry.collect():
            if metric.type not in ("counter", "histogram"):
                continue
            for sample in metric.samples:
                # Groups' names are not reused.
                if "group" not in sample.labels and not sample.name.endswith("_created"):
                    key = sample.name, tuple(sample.labels.items())
                    kept[key] = kept.get(key, 0.0) + sample.value

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for model, registries in self.registries.items():
            labels = {"model": model} if model else {}
            counts = self.kept.get(model, {})
            seen: dict[_Key, tuple[Metric, int]] = {}
            for metric in (each for registry in registries for each in registry.collect()):
                family = families.setdefault(
                    metric.name, Metric(metric.name, metric.documentation, metric.type)
                )
                for sample in metric.samples:
                    key = sample.name, tuple(sample.labels.items())
                    if key not in seen:
                        seen[key] = family, len(family.samples)
                        value = sample.value + counts.get(key, 0.0)
                        family.samples.append(
                            sample._replace(labels=labels | sample.labels, value=value)
                        )
                    elif not sample.name.endswith("_created"):
                        of, place = seen[key]
                        so_far = of.samples[place]
                        of.samples[place] = so_far._replace(value=so_far.value + sample.value)
        return [*families.values(), *vllm_metrics(families)]


def refused_counter(registry: CollectorRegistry) -> Counter:
    return Counter(
        "quire_refused",
        "Requests refused for want of room, by reason: wait (it would be too long), deadline "
        "(it would pass before the first token), queue_full, displaced (by higher priority, or by "
        "a tenant with less waiting), tenant_requests, tenant_tokens, tenant_concurrency (the "
        "tenant's limits), "
        "timeout (the wait was longer than predicted), inflight (the gateway's hard limit), "
        "bodies (other large requests hold all the memory that there is for them).",
        ["reason"],
        registry=registry,
    )
