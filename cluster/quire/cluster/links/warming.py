"""Has new groups take blocks from others before requests are routed to them.

A group that has just started holds nothing, and each prompt that is routed to it would be computed
again. So it is asked to take what others find most useful; `WARM_S` later it gets requests all the
same. A group that has blocks of its own answers at once.
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
"""What a fast link carries in that time."""


class Warming:
    """Belongs to one event loop. ``on_end`` is called when a group need not be waited for any
    longer."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._on_end = on_end
        self._tasks: dict[GroupClient, asyncio.Task[None]] = {}

    def __contains__(self, client: GroupClient) -> bool:
        """Whether its group should get no requests yet, if there are others."""
        return client in self._tasks

    def begin(self, client: GroupClient, sources: Sequence[pb.BlockSource]) -> None:
        """Has its group take blocks from ``sources``, if there are any."""
        self.forget(client)
        if sources:
            self._tasks[client] = asyncio.create_task(self._warm(client, sources))

    def forget(self, client: GroupClient) -> None:
        """It is not attached any longer."""
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
        # Half of its room is for what its own requests will bring.
        max_bytes = min(_MAX_BYTES, description.num_blocks * block_bytes // 2)
        try:
            answer = await client.link.Warm(
                pb.WarmRequest(sources=sources, max_bytes=max_bytes), timeout=WARM_S
            )
            _log.info("group %s has taken %d blocks", description.group_id, answer.num_blocks)
        except grpc.aio.AioRpcError as error:
            _log.info("group %s is not warm: %s", description.group_id, error.details())
        except GroupLost:
            return  # Which its client notices too.
        finally:
            if self._tasks.get(client) is asyncio.current_task():
                del self._tasks[client]
                self._on_end()
