"""Connects Ray Serve's request router with the gateway of the same process.

Serve creates the request router itself, from a class that it pickled by value together with its
module, so neither a constructor nor that module can carry anything between the two. This module is
imported instead, once per process: the router publishes the running groups, the gateway subscribes
to them and attaches its routing table.

Serve runs request routers on an event loop and thread of their own (unless it is set to share the
gateway's): every method may be called from any thread, and subscribers are called on theirs.

Members are kept by *pool*, a name that the deployment's ``request_router_kwargs`` and its gateway
agree on. Routers of two handles in one process publish the same membership; the last one counts.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.api.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class Member:
    """A running replica group, as Serve knows it."""

    group: GroupId
    metadata: Mapping[str, object] = field(repr=False)
    """The result of the replica's ``record_replica_metadata`` when it became ready; not for logs,
    since a group's token is in it."""


HashPrompt = Callable[[Sequence[int], str], Sequence[BlockHash]]
"""Hashes the full blocks of a prompt's token ids, with the cache salt."""

OnChange = Callable[[tuple[Member, ...]], None]


@dataclass(slots=True)
class _Pool:
    members: tuple[Member, ...] = ()
    subscribers: list[tuple[asyncio.AbstractEventLoop, OnChange]] = field(default_factory=list)
    routing: tuple[RoutingTable, HashPrompt] | None = None


class Registry:
    """Members, subscribers and the routing table of each pool in this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[str, _Pool] = {}

    def publish(self, pool: str, members: Iterable[Member]) -> None:
        """Says who runs now, and tells subscribers if that differs from before."""
        now = tuple(sorted(members, key=lambda member: member.group))
        with self._lock:
            state = self._pool(pool)
            if state.members == now:
                return
            state.members = now
            for loop, on_change in state.subscribers:
                _call(loop, on_change, now)

    def members(self, pool: str) -> tuple[Member, ...]:
        with self._lock:
            return self._pool(pool).members

    def subscribe(self, pool: str, on_change: OnChange) -> Callable[[], None]:
        """Calls ``on_change`` on the running loop, soon with the members of now and then with
        those of each change, in order; returns how to stop that."""
        entry = (asyncio.get_running_loop(), on_change)
        with self._lock:
            state = self._pool(pool)
            state.subscribers.append(entry)
            _call(*entry, state.members)

        def unsubscribe() -> None:
            with self._lock:
                state.subscribers.remove(entry)

        return unsubscribe

    def attach(
        self, pool: str, table: RoutingTable, *, hash_prompt: HashPrompt
    ) -> Callable[[], None]:
        """Lets the pool's request router route by ``table``; returns how to stop that."""
        routing = (table, hash_prompt)
        with self._lock:
            self._pool(pool).routing = routing

        def detach() -> None:
            with self._lock:
                state = self._pool(pool)
                if state.routing is routing:
                    state.routing = None

        return detach

    def routing(self, pool: str) -> tuple[RoutingTable, HashPrompt] | None:
        with self._lock:
            return self._pool(pool).routing

    def _pool(self, pool: str) -> _Pool:
        return self._pools.setdefault(pool, _Pool())


def _call(
    loop: asyncio.AbstractEventLoop, on_change: OnChange, members: tuple[Member, ...]
) -> None:
    # A gateway whose loop ended without unsubscribing must not stop the router for the others.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(on_change, members)


REGISTRY = Registry()
"""This process's registry."""
