"""Makes new groups prefetch blocks from other groups before requests are routed to them.

A new group has an empty cache, so each prompt routed to it would be computed again. It is therefore
asked to fetch the blocks that others find most useful. After `WARM_S` it gets requests in any case.
A group that has blocks of its own answers at once.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc.aio

from quire.cluster.errors import GroupLost
from quire.cluster.links.group_client import GroupClient
from quire.v1 import group_pb2 as pb

_log = logging.getLogger(__name__)

WARM_S = 2.0
MAX_SOURCES = 4
_MAX_BYTES = 4 << 30
"""What a fast link carries in `WARM_S`."""


class Warming:
    """The groups that prefetch blocks now. Belongs to one event loop. ``on_end`` is called when a
    group has finished."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._tasks: dict[GroupClient, asyncio.Task[None]] = {}

    def __contains__(self, client: GroupClient) -> bool:
        """Whether the client's group should get no requests yet, if there are other groups."""
        return client in self._tasks

    def begin(self, client: GroupClient, sources: Sequence[pb.BlockSource]) -> None:
        """Asks the client's group to fetch blocks from ``sources``, if there are any."""
        self.forget(client)
        if sources:
            self._tasks[client] = asyncio.create_task(self._warm(client, sources))

    def forget(self, client: GroupClient) -> None:
        """Stops waiting for a group that is no longer attached."""
        task = self._tasks.pop(client, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for client in tuple(self._tasks):
            self.forget(client)
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _warm(self, client: GroupClient, sources: Sequence[pb.BlockSource]) -> None:
        description = client.description
        format = description.kv_format
        block_bytes = 2 * format.num_layers * format.num_kv_heads * format.head_bytes
        # Half of the cache is left for its own requests.
        max_bytes = min(_MAX_BYTES, description.num_blocks * block_bytes // 2)
        try:
            answer = await client.link.Warm(
                pb.WarmRequest(sources=sources, max_bytes=max_bytes), timeout=WARM_S
            )
            _log.info("group %s has taken %d blocks", description.group_id, answer.num_blocks)
        except grpc.aio.AioRpcError as error:
            _log.info("group %s is not warm: %s", description.group_id, error.details())
        except GroupLost:
            return  # Its client notices this too.
        finally:
            if self._tasks.get(client) is asyncio.current_task():
                del self._tasks[client]
                self._on_end()
