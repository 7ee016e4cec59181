"""The autoscaling policy as Serve calls it: its input and its answer."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from quire.cluster.features.autoscale.serve import ServePolicy, observe


def context(**given: Any) -> Any:
    """The part of Serve's context that the policy reads."""
    return SimpleNamespace(
        **{
            "deployment_id": "groups",
            "policy_state": {},
            "target_num_replicas": 1,
            "current_time": 100.0,
            **given,
        }
    )


def series(*points: tuple[float, float]) -> list[Any]:
    return [SimpleNamespace(timestamp=time_s, value=value) for time_s, value in points]


def raw_metrics() -> Iterator[tuple[str, dict[str, list[Any]]]]:
    counters = {"num_prefilled_tokens": (0.0, 2000.0), "num_full_step_tokens": (0.0, 500.0)}
    counters["full_step_s"] = (0.0, 0.5)
    gauges = {"num_pending_prefill_tokens": 500.0, "num_running": 3.0, "num_waiting": 1.0}
    gauges |= {"max_num_seqs": 16.0, "kv_use": 0.5}
    for name, (before, now) in counters.items():
        yield name, {"a": series((98.0, before), (99.0, now))}
    for name, value in gauges.items():
        yield name, {"a": series((98.0, value), (99.0, value))}


def test_what_serve_hands_over_is_understood() -> None:
    metrics = dict(raw_metrics())
    # Reported to one group and then another: the later report counts. Lost gateways do not count.
    metrics["gateway_tokens/g1"] = {"a": series((97.0, 900.0)), "b": series((99.0, 40.0))}
    metrics["gateway_tokens/g2"] = {"a": series((99.0, 2.0))}
    metrics["gateway_tokens/gone"] = {"a": series((90.0, 5000.0))}
    observation = observe(context(raw_metrics=metrics, running_replicas=["a", "b"]), now_s=100)
    samples, none = observation.groups
    assert [sample.time_s for sample in samples] == [98.0, 99.0]
    assert samples[-1].num_prefilled_tokens == 2000
    assert not none
    assert observation.num_gateway_tokens == 42


def test_the_policy_keeps_its_state_with_serve() -> None:
    policy = ServePolicy(min_groups=0, max_groups=4)
    metrics = dict(raw_metrics())
    num_groups, state = policy(context(raw_metrics=metrics, running_replicas=["a"]))
    assert num_groups == 3  # 2,000 tokens/s arrive at a speed of 1,000.
    again = context(raw_metrics=metrics, running_replicas=["a"], policy_state=state)
    assert policy(again)[1]["quire"].speed == 1000
