"""The autoscaling of gateways: the decision, and its use by Serve."""

from types import SimpleNamespace
from typing import Any

import pytest

from quire.cluster.config import ClusterConfig
from quire.cluster.features.autoscale.gateways import INFLIGHT, GatewayPolicy, decide
from quire.cluster.features.autoscale.serve import ServePolicy
from quire.cluster.features.autoscale.settings import GatewayAutoscaling
from quire.cluster.settings import config_from
from quire.worker.request.errors import ConfigError

SETTINGS = GatewayAutoscaling(max_gateways=4, target_inflight=10, down_delay_s=60)


@pytest.mark.parametrize(
    ("num_inflight", "wanted"),
    [([], 1), ([0], 1), ([10], 1), ([11], 2), ([11, 12], 3), ([500], 4)],
)
def test_there_is_one_for_each_share_of_what_is_under_way(
    num_inflight: list[float], wanted: int
) -> None:
    given: dict[str, Any] = {"enough_since_s": None, "now_s": 0, "settings": SETTINGS}
    assert decide(num_inflight, num_gateways=1, **given) == (wanted, None)


def test_they_go_one_by_one_when_fewer_were_enough_without_a_break() -> None:
    number, since_s = 3, None
    seen = []
    # Ticks of ten seconds; the load returns for one tick, the fourth.
    for beat in range(20):
        load = [30.0] if beat == 3 else [4.0]
        number, since_s = decide(
            load,
            num_gateways=number,
            enough_since_s=since_s,
            now_s=beat * 10.0,
            settings=SETTINGS,
        )
        seen.append(number)
    assert seen == [3] * 10 + [2] * 6 + [1] * 4


def test_gateways_that_stop_are_not_counted() -> None:
    def series(value: float) -> list[Any]:
        return [
            SimpleNamespace(timestamp=0.0, value=0.0),
            SimpleNamespace(timestamp=1, value=value),
        ]

    context: Any = SimpleNamespace(
        raw_metrics={INFLIGHT: {"a": series(15), "b": series(3), "gone": series(900)}},
        running_replicas=["a", "b"],
        target_num_replicas=1,
        current_time=5.0,
        policy_state={},
    )
    policy = GatewayPolicy(max_gateways=4, target_inflight=10)
    assert policy(context) == (2, {"quire": None})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_gateways": 1, "min_gateways": 2}, "max_gateways=1: must not be below min_gat"),
        ({"max_gateways": 1, "min_gateways": 0}, "min_gateways=0: must be 1 or more"),
        ({"max_gateways": 2, "target_inflight": 0}, "target_inflight=0: must be 1 or more"),
        ({"max_gateways": 2, "down_delay_s": -1}, "down_delay_s=-1"),
        ({"most": 2}, "gateway_autoscaling.most: unknown; there are min_gateways"),
        ({}, "max_gateways"),
    ],
)
def test_what_cannot_work_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_from({"gateway_autoscaling": given})


def test_a_file_says_it() -> None:
    config = config_from({"gateway_autoscaling": {"max_gateways": 3, "target_inflight": 7}})
    assert config.gateway_autoscaling == GatewayAutoscaling(max_gateways=3, target_inflight=7)


@pytest.mark.cluster
@pytest.mark.parametrize("policy", [ServePolicy, GatewayPolicy])
def test_settings_are_read_as_before_where_serve_read_its_copy_of_a_policy(policy: type) -> None:
    from pydantic import TypeAdapter
    from ray.serve.config import AutoscalingPolicy

    path = f"{policy.__module__}:{policy.__name__}"
    AutoscalingPolicy(policy_function=path).get_policy()
    TypeAdapter(ClusterConfig)
