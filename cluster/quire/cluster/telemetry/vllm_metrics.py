"""Metrics under vLLM's names, for dashboards, autoscalers and gateways that are written for vLLM.

Each is computed from Quire's metrics at the scrape, for all groups of a model together. The labels
``model_name`` and ``engine`` (always "0") replace ``model`` and ``group``.
"""

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.samples import Sample

SUMS: Mapping[str, tuple[str, ...]] = {
    "vllm:num_requests_running": ("quire_group_running",),
    "vllm:num_requests_waiting": ("quire_group_waiting", "quire_requests_without_group"),
    "vllm:prompt_tokens": ("quire_prompt_tokens",),
    "vllm:prompt_tokens_cached": ("quire_cached_prompt_tokens",),
    "vllm:generation_tokens": ("quire_output_tokens",),
    "vllm:prefix_cache_queries": ("quire_prompt_tokens",),
    "vllm:prefix_cache_hits": ("quire_cached_prompt_tokens",),
    "vllm:num_preemptions": ("quire_group_preemptions",),
    "vllm:spec_decode_num_draft_tokens": ("quire_group_drafted_tokens",),
    "vllm:spec_decode_num_accepted_tokens": ("quire_group_accepted_tokens",),
    "vllm:time_to_first_token_seconds": ("quire_time_to_first_token_seconds",),
    "vllm:request_time_per_output_token_seconds": ("quire_time_per_output_token_seconds",),
    "vllm:inter_token_latency_seconds": ("quire_time_per_output_token_seconds",),
    "vllm:e2e_request_latency_seconds": ("quire_completion_seconds",),
    "vllm:request_queue_time_seconds": ("quire_queue_wait_seconds",),
    "vllm:request_prefill_time_seconds": ("quire_prefill_seconds",),
    "vllm:request_decode_time_seconds": ("quire_decode_seconds",),
    "vllm:request_prompt_tokens": ("quire_completion_prompt_tokens",),
    "vllm:request_generation_tokens": ("quire_completion_output_tokens",),
    "vllm:request_max_num_generation_tokens": ("quire_completion_output_tokens",),
}
"""vLLM's metrics as sums, over groups, of Quire's. For the inter-token latency, only each
completion's mean is known. vLLM's prefill time begins at the end of the engine's queue, Quire's
when the request is sent to its group. Completions of one prompt count separately."""

_FINISHED = {"stop": "stop", "length": "length", "cancelled": "abort", "deadline": "abort"}
"""vLLM's finish reasons by Quire's outcomes; vLLM has none for failed requests."""
_BLOCKS = ("quire_group_held_blocks", "quire_group_cached_blocks", "quire_group_free_blocks")

_Labels = tuple[tuple[str, str], ...]


def vllm_metrics(ours: Mapping[str, Metric]) -> Iterator[Metric]:
    """vLLM's metrics from ``ours``, all families of a page by name."""
    for name, sources in SUMS.items():
        found = [ours[source] for source in sources if source in ours]
        if found:
            yield _renamed(name, found)
    if "quire_completions" in ours:
        yield _success(ours["quire_completions"])
    if all(block in ours for block in _BLOCKS):
        yield _usage(*(ours[block] for block in _BLOCKS))


def _renamed(name: str, sources: list[Metric]) -> Metric:
    first = sources[0]
    metric = Metric(name, first.documentation, first.type)
    sums: dict[tuple[str, _Labels], float] = {}
    for source in sources:
        for sample in source.samples:
            if not sample.name.endswith("_created"):
                key = sample.name.replace(source.name, name, 1), _labels(sample)
                sums[key] = sums.get(key, 0.0) + sample.value
    metric.samples = [Sample(each, dict(labels), value) for (each, labels), value in sums.items()]
    return metric


def _success(completions: Metric) -> Metric:
    metric = Metric("vllm:request_success", "Completions that ended, by reason.", "counter")
    sums: dict[_Labels, float] = {}
    for sample in completions.samples:
        reason = _FINISHED.get(sample.labels.get("outcome", ""))
        if reason is not None and sample.name.endswith("_total"):
            labels = (("finished_reason", reason), *_labels(sample, leave_out=("outcome",)))
            sums[labels] = sums.get(labels, 0.0) + sample.value
    metric.samples = [
        Sample(f"{metric.name}_total", dict(labels), value) for labels, value in sums.items()
    ]
    return metric


def _usage(held: Metric, *others: Metric) -> Metric:
    """The share of all groups' blocks that running requests hold."""
    metric = Metric("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 0 to 1.", "gauge")
    in_use, blocks = _by_model([held]), _by_model([held, *others])
    metric.samples = [
        Sample(metric.name, dict(labels), in_use[labels] / num if num else 0.0)
        for labels, num in blocks.items()
    ]
    return metric


def _by_model(metrics: Iterable[Metric]) -> dict[_Labels, float]:
    sums: dict[_Labels, float] = {}
    for sample in (each for metric in metrics for each in metric.samples):
        labels = _labels(sample)
        sums[labels] = sums.get(labels, 0.0) + sample.value
    return sums


def _labels(sample: Sample, *, leave_out: tuple[str, ...] = ()) -> _Labels:
    gone = ("model", "group", *leave_out)
    kept = [(name, value) for name, value in sample.labels.items() if name not in gone]
    return (("model_name", sample.labels.get("model", "")), ("engine", "0"), *kept)
