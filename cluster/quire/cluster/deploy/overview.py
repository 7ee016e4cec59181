"""What runs on the Ray cluster that this process is connected to."""

import contextlib
from typing import Any

from quire.cluster.deploy.app_watch import missing
from quire.cluster.deploy.change import gateways_of
from quire.cluster.deploy.names import deployments_of
from quire.cluster.deploy.start import label_of, num_running

_TIMEOUT_S = 10.0


def overview() -> list[dict[str, Any]]:
    """One entry for each application, by name, as values of JSON: its state in Serve's words,
    whether it ``is_whole`` and what is ``missing``, and its ``deployments``, ``models`` and
    ``addresses``, as far as a gateway answers."""
    from ray import serve

    applications = serve.status().applications
    names = dict.fromkeys(name.partition(":")[0] for name in sorted(applications))
    found = []
    for name in names:
        deployments = deployments_of(name, applications)
        state = applications[name].status.value.lower() if name in applications else "stopping"
        lacks = missing(deployments)
        entry: dict[str, Any] = {
            "application": name,
            "state": state,
            "is_whole": state == "running" and not lacks,
            "missing": lacks,
            "deployments": {
                label_of(each): {
                    "running": num_running(status),
                    "wanted": sum(
                        num for of, num in status.replica_states.items() if of != "STOPPING"
                    ),
                }
                for each, status in deployments.items()
            },
            "models": [],
            "addresses": {},
        }
        # Many kinds of error are possible if no gateway runs. The rest is still reported.
        with contextlib.suppress(Exception):
            handle = gateways_of(name)
            grpc, http = handle.addresses.remote().result(timeout_s=_TIMEOUT_S)
            entry["addresses"] = {"gRPC": grpc, "HTTP": http}
            models = handle.models.remote().result(timeout_s=_TIMEOUT_S)
            entry["models"] = [
                {
                    "name": each.name,
                    "state": each.state,
                    "num_groups": each.num_groups,
                    "reason": each.reason,
                }
                for each in models
            ]
        found.append(entry)
    return found
