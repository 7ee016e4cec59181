"""Decides how many gateways there should be, by the completions that they have in progress.

Gateways are added when the running ones have more than ``target_inflight`` each, and one is stopped
when fewer have been enough for some time. Clients of a stopped gateway are drained as at any stop.

Ray Serve copies this module by value. It defines no dataclass: unpickling a copy in this process
would replace the fields of one, and pydantic would refuse them.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.cluster.features.autoscale.settings import GatewayAutoscaling

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext

INFLIGHT = "num_inflight"
"""The name of the metric with a gateway's completions in progress, for Serve's controller."""
_STATE = "quire"


def decide(
    num_inflight: Sequence[float],
    *,
    num_gateways: int,
    enough_since_s: float | None,
    now_s: float,
    settings: GatewayAutoscaling,
) -> tuple[int, float | None]:
    """How many gateways there should be, and since when fewer than now have been enough.

    ``num_inflight`` has the completions in progress of each gateway that reports them. Only their
    sum counts: new connections are spread over all gateways, and old ones end.
    """
    wanted = math.ceil(sum(num_inflight) / settings.target_inflight)
    wanted = min(max(wanted, settings.min_gateways), settings.max_gateways)
    if wanted >= num_gateways:
        return wanted, None
    since_s = now_s if enough_since_s is None else enough_since_s
    if now_s - since_s < settings.down_delay_s:
        return min(num_gateways, settings.max_gateways), since_s
    return num_gateways - 1, now_s  # The next one stops after another delay.


class GatewayPolicy:
    """Adapts `decide` to Ray Serve, whose controller makes one policy and calls it every 0.1 s."""

    def __init__(self, **settings: Any) -> None:
        """``settings`` are the fields of `GatewayAutoscaling`."""
        self._settings = GatewayAutoscaling(**settings)

    def __call__(self, context: "AutoscalingContext") -> tuple[int, dict[str, Any]]:
        assert context.current_time is not None
        told = (context.raw_metrics or {}).get(INFLIGHT, {})
        running = set(context.running_replicas)
        newest = [series[-1].value for name, series in told.items() if name in running and series]
        number, since_s = decide(
            newest,
            num_gateways=context.target_num_replicas,
            enough_since_s=context.policy_state.get(_STATE),
            now_s=context.current_time,
            settings=self._settings,
        )
        return number, {_STATE: since_s}
