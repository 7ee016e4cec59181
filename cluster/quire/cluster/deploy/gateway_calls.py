"""Calls from commands to the gateways of a cluster, and the types of the answers.

A command must import an answer's class to unpickle the answer. That must be fast, so this module
imports no other of Quire.
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
    """Number of groups that requests can be routed to."""
    state: str
    """The model's state as in ``GET /v1/models``."""
    reason: str
    """Why the model failed; empty if it did not."""
    unsettled: str
    """Why the model's last listed version does not serve yet; empty if it does."""


def gateways_of(name: str) -> "DeploymentHandle[Gateway]":
    """A handle to the gateways of the application ``name``."""
    from ray import serve

    return serve.get_deployment_handle("Gateway", app_name=name)
