"""Ranks as Ray actors, pinned to the bundles of a placement group.

Ray places and starts them, and ends what hangs when the placement group is removed. Steps do not
pass through it (an actor call takes 1.6 ms), nor does anything else once a group has started: it
goes on while Ray's head is lost.
"""

from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.cluster.group.remote_rank import RemoteRankTask, run_rank


class RankActor:
    """Its process becomes the rank."""

    def run(self, task: RemoteRankTask) -> None:
        run_rank(task, host=ray.util.get_node_ip_address())


class ActorLauncher:
    """One bundle for each node; a rank takes a GPU where its bundle has any."""

    def __init__(self, placement_group: PlacementGroup) -> None:
        self._placement_group = placement_group
        self._actors: list[Any] = []
        self._calls: list[Any] = []

    def start(self, tasks: Sequence[RemoteRankTask]) -> None:
        bundles = self._placement_group.bundle_specs
        for task in tasks:
            bundle = task.rank // task.ranks_per_node
            actor_class = ray.remote(RankActor).options(
                num_cpus=0,
                num_gpus=1 if bundles[bundle].get("GPU") else 0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._placement_group, placement_group_bundle_index=bundle
                ),
            )
            actor: Any = actor_class.remote()
            self._actors.append(actor)
            self._calls.append(actor.run.remote(task))

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
        """Ray ends an actor that nobody refers to."""
        self._actors.clear()
        self._calls.clear()
