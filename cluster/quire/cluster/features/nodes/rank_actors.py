"""Runs ranks as Ray actors, pinned to the bundles of a placement group.

Ray places and starts them, and ends hung ones when the placement group is removed. Steps do not
pass through Ray (an actor call takes 1.6 ms), nor does anything else once a group has started, so a
group continues while Ray's head node is lost.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.cluster.features.nodes.remote_rank import RemoteRankTask, become_rank
from quire.worker.model.hub import fetch_checkpoint


class RankActor:
    """A Ray actor whose process becomes a rank."""

    def fetch(self, model: Path) -> None:
        """Fetches a model of the hub to this node."""
        fetch_checkpoint(model)

    def run(self, task: RemoteRankTask) -> None:
        become_rank(task, host=ray.util.get_node_ip_address())


class ActorStarter:
    """Starts ranks in a placement group with one bundle per node. A rank takes a GPU if its bundle
    has any."""

    def __init__(self, placement_group: PlacementGroup, *, model: Path) -> None:
        self._placement_group = placement_group
        self._model = model
        self._actors: list[Any] = []
        self._calls: list[Any] = []

    def start(self, tasks: Sequence[RemoteRankTask]) -> None:
        bundles = self._placement_group.bundle_specs
        for task in tasks:
            actor_class = ray.remote(RankActor).options(
                num_cpus=0,
                num_gpus=1 if bundles[task.node].get("GPU") else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement_group, placement_group_bundle_index=task.node
                ),
            )
            actor: Any = actor_class.remote()
            self._actors.append(actor)
        # Before waiting for ranks, because a download may take longer than their start timeout.
        ray.get([actor.fetch.remote(self._model) for actor in self._actors])
        self._calls = [
            actor.run.remote(task) for actor, task in zip(self._actors, tasks, strict=True)
        ]

    def why_not(self, rank: int) -> str | None:
        call = self._calls[rank]
        if not ray.wait([call], timeout=0)[0]:
            return None
        try:
            ray.get(call)
        except ray.exceptions.RayError as error:
            return str(error)
        return "its process ended"

    def release(self) -> None:
        """Drops all references to the actors, at which Ray ends them."""
        self._actors.clear()
        self._calls.clear()
