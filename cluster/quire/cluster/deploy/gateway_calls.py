"""How commands call the gateways of a cluster, and what these answer.

An answer is read where its class can be imported: that must cost a command nothing, so this module
imports no other.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Importing Ray takes over a second, and Serve must find its environment set.
    from ray.serve.handle import DeploymentHandle

    from quire.cluster.deploy.deployments import Gateway


@dataclass(frozen=True, kw_only=True)
class ModelState:
    """A model as one gateway sees it."""

    name: str
    aliases: tuple[str, ...]
    path: str
    num_groups: int
    """Groups that requests can be routed to."""
    state: str
    """As ``GET /v1/models`` tells it."""
    reason: str
    """Why it failed."""
    unsettled: str
    """Why what was told last of it does not serve yet; empty where it does."""


def gateways_of(name: str) -> "DeploymentHandle[Gateway]":
    """What calls the gateways of the application ``name``."""
    from ray import serve

    return serve.get_deployment_handle("Gateway", app_name=name)
