"""Adapts the autoscaling policy to Ray Serve's controller."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from quire.cluster.features.autoscale.policy import (
    STALE_S,
    Observation,
    Sample,
    State,
    decide,
    num_pending,
)
from quire.cluster.features.autoscale.settings import AutoscalingSettings
from quire.worker.request.engine_stats import EngineStats

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

_log = logging.getLogger("ray.serve")  # The controller's log, in which Serve reports scaling too.

_DEMAND_PREFIX = "gateway_tokens/"
"""Prefix, before a gateway's name, of the metric with the prompt tokens that wait there for any
group."""
_STATE = "quire"
_NAMES = [field.name for field in fields(Sample) if field.name != "time_s"]


class ServePolicy:
    """Adapts `decide` to Ray Serve, whose controller makes one policy and calls it every 0.1 s."""

    def __init__(self, **settings: Any) -> None:
        """``settings`` are the fields of `AutoscalingSettings`."""
        self._settings = AutoscalingSettings(**settings)

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        assert context.current_time is not None
        state: State = context.policy_state.get(_STATE) or State()
        observation = observe(context, now_s=context.current_time)
        decision, state = decide(observation, state, context.current_time, self._settings)
        if decision.num_groups != observation.num_groups:
            _log.info(
                "%d groups instead of %d: %s; %d prompt tokens wait, for %s",
                decision.num_groups,
                observation.num_groups,
                decision.reason,
                num_pending(observation),
                "nobody knows how long"
                if decision.predicted_wait_s is None
                else f"{decision.predicted_wait_s:.1f} s",
            )
        return decision.num_groups, {_STATE: state}


def report(
    stats: EngineStats, *, max_num_seqs: int, demand: Mapping[str, float]
) -> dict[str, float]:
    """A group's metrics for Serve, which `observe` reads. ``demand``: prompt tokens that wait, by
    gateway."""
    kv_use = stats.num_held_blocks / stats.num_total_blocks
    others: dict[str, float] = {"max_num_seqs": max_num_seqs, "kv_use": kv_use}
    engine = {name: getattr(stats, name) for name in _NAMES if name not in others}
    return engine | others | {_DEMAND_PREFIX + name: tokens for name, tokens in demand.items()}


def observe(context: "AutoscalingContext", *, now_s: float) -> Observation:
    """Converts Serve's metrics to the input of `decide`."""
    metrics = context.raw_metrics or {}
    groups = []
    for replica in context.running_replicas:
        series = {name: by_replica.get(replica, ()) for name, by_replica in metrics.items()}
        groups.append(_samples(series))
    num_gateway_tokens = 0
    for name, by_replica in metrics.items():
        if name.startswith(_DEMAND_PREFIX):
            points = [series[-1] for series in by_replica.values() if series]
            newest = max(points, key=lambda point: point.timestamp, default=None)
            # A gateway repeats its report while requests wait.
            if newest is not None and now_s - newest.timestamp <= STALE_S:
                num_gateway_tokens += int(newest.value)
    return Observation(
        num_groups=context.target_num_replicas,
        groups=groups,
        num_gateway_tokens=num_gateway_tokens,
    )


def _samples(series: Mapping[str, Sequence[Any]]) -> list[Sample]:
    """One sample for each time at which a group reported all of its values."""
    by_time: dict[float, dict[str, float]] = {}
    for name in _NAMES:
        for point in series.get(name, ()):
            by_time.setdefault(point.timestamp, {})[name] = point.value
    return [
        Sample(time_s=time_s, **values)
        for time_s, values in sorted(by_time.items())
        if len(values) == len(_NAMES)
    ]
