"""Lists the applications on the Ray cluster that this process is connected to."""

import contextlib
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.cluster.deploy.app_watch import missing
from quire.cluster.deploy.gateway_calls import gateways_of
from quire.cluster.deploy.names import deployments_of
from quire.cluster.deploy.start import label_of, num_running

if TYPE_CHECKING:
    from ray.serve.schema import ApplicationStatusOverview

_TIMEOUT_S = 10.0
"""Timeout for the answers of all gateways, which are asked at the same time."""


def overview(only: str | None = None) -> list[dict[str, Any]]:
    """One entry of JSON values for each application, or for the application ``only``: its state as
    in Serve, whether it ``is_whole`` and what is ``missing``, and its ``deployments``, ``models``
    and ``addresses``, as far as a gateway answers."""
    from ray import serve

    applications = serve.status().applications
    names = dict.fromkeys(name.partition(":")[0] for name in sorted(applications))
    names = {name: None for name in names if only in (None, name)}
    asked = {name: _ask(name) for name in names}
    end_s = time.monotonic() + _TIMEOUT_S
    return [
        _entry(name, applications) | _answer(asked[name], end_s - time.monotonic())
        for name in names
    ]


def _entry(name: str, applications: "Mapping[str, ApplicationStatusOverview]") -> dict[str, Any]:
    deployments = deployments_of(name, applications)
    state = applications[name].status.value.lower() if name in applications else "stopping"
    lacks = missing(deployments)
    return {
        "application": name,
        "state": state,
        "is_whole": state == "running" and not lacks,
        "missing": lacks,
        "deployments": {
            label_of(each): {
                "running": num_running(status),
                "wanted": sum(num for of, num in status.replica_states.items() if of != "STOPPING"),
            }
            for each, status in deployments.items()
        },
    }


def _ask(name: str) -> list[Any]:
    """Calls a gateway for its models and one for its addresses, without waiting."""
    # Ray raises many kinds of error if no gateway runs. The rest is still reported.
    with contextlib.suppress(Exception):
        handle = gateways_of(name)
        return [handle.models.remote(), handle.addresses.remote()]
    return []


def _answer(asked: list[Any], timeout_s: float) -> dict[str, Any]:
    with contextlib.suppress(Exception):
        end_s = time.monotonic() + timeout_s
        models, (grpc, http) = (
            each.result(timeout_s=max(0.0, end_s - time.monotonic())) for each in asked
        )
        return {
            "models": [
                {
                    "name": each.name,
                    "state": each.state,
                    "num_groups": each.num_groups,
                    "reason": each.reason,
                }
                for each in models
            ],
            "addresses": {"gRPC": grpc, "HTTP": http},
        }
    return {"models": [], "addresses": {}}
