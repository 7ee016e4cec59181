"""The request router that Ray Serve calls to choose a replica group.

It does two things. It publishes the running groups to this process's registry, from which a gateway
learns of them. And it routes calls through a deployment handle: by the gateway's routing table if
one is attached and the request carries token ids, else by the shorter of two random queues, as
Serve does by default.

Serve pickles this module by value, with every object that its functions name. So the registry is
accessed as an attribute of its module, ``registry.REGISTRY``: named directly, it would be pickled,
and its lock cannot be.
"""

import logging
import random
from collections.abc import Mapping, Sequence
from typing import Any

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from quire.router import registry
from quire.router.errors import NoGroupAvailable
from quire.router.failure_log import FailureLog
from quire.router.prefix_index.directory import GroupId

_log = logging.getLogger(__name__)


class PrefixAwareRouter(RequestRouter):
    """Routes by cached prefix and load, and publishes the running groups.

    Its ``request_router_kwargs`` are the arguments of `initialize_state`.
    """

    _pool: str
    _failures: FailureLog

    def initialize_state(self, *, pool: str) -> None:  # type: ignore[override]
        """``pool`` is the name under which the registry keeps this deployment's members."""
        self._pool = pool
        self._failures = FailureLog(_log)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self._publish()

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Ranks the replicas: the table's choice, then two random others, of which Serve takes the
        one with the shorter queue.

        Serve never reports a call as completed that was cancelled before it was sent; its
        reservation expires.
        """
        if pending_request is None:
            return [_two_of(candidate_replicas)]
        # Without this, Serve would retry in a busy loop while all replicas are full.
        pending_request.routing_context.should_backoff = True
        first = self._by_prefix(candidate_replicas, pending_request)
        others = [replica for replica in candidate_replicas if replica not in first]
        return [first, _two_of(others)]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        routing = registry.REGISTRY.routing(self._pool)
        if routing is not None:
            table, _ = routing
            # This may not be the table's choice, if that replica's queue was full.
            served_by = _group_of_id(replica_id)
            table.completed(_request_key(internal_request_id), outcome=f"ended on {served_by}")

    def _by_prefix(
        self, candidates: Sequence[RunningReplica], pending_request: PendingRequest
    ) -> list[RunningReplica]:
        routing = registry.REGISTRY.routing(self._pool)
        prompt = _prompt_of(pending_request)
        if routing is None or prompt is None:
            return []
        table, hash_prompt = routing
        token_ids, cache_salt = prompt
        by_group = {_group_of(replica): replica for replica in candidates}
        known = {state.group for state in table.states()}
        try:
            decision = table.route(
                _request_key(pending_request.metadata.internal_request_id),
                hashes=hash_prompt(token_ids, cache_salt),
                num_prompt_tokens=len(token_ids),
                exclude=frozenset(known - by_group.keys()),
                client_id=pending_request.metadata.request_id,
                moved_because="Serve asks again",
                is_submitted=False,
            )
        except NoGroupAvailable:
            return []
        except Exception as error:
            # The token ids may be malformed, for example; the replica refuses those. Serve only
            # logs an exception raised here, and the call would wait forever.
            self._failures.report(error, "routing a call by its prefix")
            return []
        return [by_group[decision.group]] if decision.group in by_group else []

    def _publish(self) -> None:
        registry.REGISTRY.publish(
            self._pool,
            [
                registry.Member(_group_of(replica), replica.replica_metadata)
                for replica in self.curr_replicas.values()
            ],
        )


def _group_of(replica: RunningReplica) -> GroupId:
    return _group_of_id(replica.replica_id)


def _group_of_id(replica_id: ReplicaID) -> GroupId:
    """Serve gives each start of a replica a new id, so a group's id is never reused."""
    return GroupId(replica_id.unique_id)


def _request_key(internal_request_id: str) -> str:
    """A key that differs from the ids that the gateway gives to the requests it routes itself."""
    return f"serve:{internal_request_id}"


def _prompt_of(pending_request: PendingRequest) -> tuple[Sequence[int], str] | None:
    """The token ids and cache salt of a call, from its keywords or its first argument's fields;
    None if it has no token ids."""
    first = pending_request.args[0] if pending_request.args else None
    for holder in (pending_request.kwargs, first):
        token_ids = _field(holder, "token_ids")
        if token_ids is not None:
            return token_ids, str(_field(holder, "cache_salt") or "")
    return None


def _field(holder: object, name: str) -> Any:
    if isinstance(holder, Mapping):
        return holder.get(name)
    return getattr(holder, name, None)


def _two_of(replicas: Sequence[RunningReplica]) -> list[RunningReplica]:
    return random.sample(replicas, k=min(2, len(replicas)))
