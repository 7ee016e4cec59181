"""Which running replicas Ray Serve stops first: said to it from within its own controller.

Serve asks a policy how many replicas there should be, and chooses itself who goes
(`DeploymentScheduler._get_replicas_to_stop`); it offers no way to have a say. But it asks the
policy in the process and thread of that scheduler, one round of its loop before the scheduler
chooses. So that one method is wrapped here, by whoever has an order to give.

Always true: as many replicas go as Serve wants; those that do not run yet go first, then those that
are not on the head's node, then those on nodes with the fewest replicas, as Serve has it, so that
nodes get empty. Among equals Serve goes by age, and here the order decides that was given for their
deployment. Serve's own choice stands, with one warning, wherever its inside is not what is
known here or anything goes wrong. Nothing else in Quire depends on Serve's inside.
"""

import functools
import inspect
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from ray.serve._private.common import DeploymentID, ReplicaID

_log = logging.getLogger("ray.serve")

_METHOD = "_get_replicas_to_stop"
_PARAMETERS = [
    "self",
    "deployment_id",
    "max_num_to_stop",
    "gang_id_by_replica",
    "replicas_by_gang_id",
    "gang_size",
]
"""Of the method in Ray 2.60."""

Choose = Callable[..., set[Any]]
Replica = TypeVar("Replica", bound=Hashable)

_orders: dict[Hashable, tuple[Hashable, ...]] = {}
"""By deployment; the latest only. What has gone since is passed over."""

_has_warned = False


def stop_first(deployment_id: "DeploymentID", order: Sequence["ReplicaID"]) -> None:
    """Has Serve stop these running replicas of a deployment in this order, until told another.

    To be called in the process of Serve's controller. Never fails.
    """
    if len(order) > 1 and _is_serve_steered():
        _orders[deployment_id] = tuple(order)


def exchanged(
    chosen: AbstractSet[Replica],
    order: Sequence[Replica],
    *,
    node_of: Mapping[Replica, str],
    num_on_node: Mapping[str, int],
    head: str,
) -> set[Replica]:
    """As many as were chosen. Of those that run, and that an order was given for, others may go.

    ``node_of`` are the replicas that run, ``num_on_node`` those of all deployments.
    """
    ordered = sorted(
        (replica for replica in order if replica in node_of),
        key=lambda replica: (node_of[replica] == head, num_on_node[node_of[replica]]),
    )
    num_ordered = sum(replica in chosen for replica in ordered)
    return set(chosen).difference(ordered).union(ordered[:num_ordered])


@functools.cache
def _is_serve_steered() -> bool:
    try:
        from ray.serve._private.deployment_scheduler import DeploymentScheduler
    except ImportError as error:
        _left_to_serve(repr(error))
        return False
    return steer(DeploymentScheduler)


def steer(scheduler: type) -> bool:
    """Wraps the class's choice, if it is the one known here; else warns and leaves it alone."""
    choose = getattr(scheduler, _METHOD, None)
    try:
        parameters = list(inspect.signature(choose).parameters) if choose is not None else []
    except (TypeError, ValueError):
        parameters = []
    if choose is None or parameters != _PARAMETERS:
        _left_to_serve(f"{_METHOD} takes {parameters}, not {_PARAMETERS}")
        return False
    setattr(scheduler, _METHOD, _steered(choose))
    return True


def _steered(choose: Choose) -> Choose:
    @functools.wraps(choose)
    def choose_in_order(
        self: Any, deployment_id: Hashable, max_num_to_stop: int, *gangs: Any, **named_gangs: Any
    ) -> set[Any]:
        chosen = choose(self, deployment_id, max_num_to_stop, *gangs, **named_gangs)
        order = _orders.get(deployment_id)
        if order is None or any(gang is not None for gang in (*gangs, *named_gangs.values())):
            return chosen
        try:
            running = self._running_replicas
            nodes = Counter(node for replicas in running.values() for node in replicas.values())
            return exchanged(
                chosen,
                order,
                node_of=running[deployment_id],
                num_on_node=nodes,
                head=self._head_node_id,
            )
        except Exception as error:  # Whatever becomes of names that are not ours.
            _left_to_serve(repr(error))
            return chosen

    return choose_in_order


def _left_to_serve(reason: str) -> None:
    """Warns, once in a controller's life."""
    global _has_warned
    if not _has_warned:
        _log.warning("which group goes when there are too many is left to Ray Serve: %s", reason)
    _has_warned = True
