"""Connects Ray Serve's request router with the gateway of the same process.

Serve creates the request router itself, from a class that it pickles by value together with its
module. So neither a constructor nor that module can share an object with the gateway. This module
is imported instead, once per process: the router publishes the running groups here, and the gateway
subscribes to them and attaches its routing table.

Serve runs request routers on an event loop and thread of their own, unless it is set to share the
gateway's. So every method is thread-safe, and each subscriber is called on its own event loop.

Members are kept by *pool*, a name that the deployment's ``request_router_kwargs`` and its gateway
agree on. Routers of two handles in one process publish the same members; the last call wins.
"""

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.router.prefix_index.directory import GroupId
from quire.router.table import RoutingTable
from quire.worker.blocks.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class Member:
    """A running replica group, as Serve reports it."""

    group: GroupId
    metadata: Mapping[str, object] = field(repr=False)
    """The result of the replica's ``record_replica_metadata`` when it became ready. Keep it out of
    logs, since it contains the group's token."""


HashPrompt = Callable[[Sequence[int], str], Sequence[BlockHash]]
"""Takes a prompt's token ids and the cache salt; returns the hashes of its full blocks."""

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
        """Sets the running groups of the pool, and calls its subscribers if they changed."""
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
        """Calls ``on_change`` on the running loop: first with the current members, then after each
        change, in order. Returns a function that unsubscribes."""
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
        """Makes the pool's request router route by ``table``; returns a function that ends it."""
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
    # A gateway whose loop closed without unsubscribing must not break the router for others.
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(on_change, members)


REGISTRY = Registry()
"""This process's registry."""
