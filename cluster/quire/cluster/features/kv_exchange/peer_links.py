"""A group's gRPC connections to the groups from which it borrows blocks.

Each connection is opened for the first call, and closed `_KEPT_S` after the last one.
"""

import asyncio
import contextlib
from dataclasses import dataclass, replace

from quire.cluster.links.group_link import GroupContact, GroupLink, grpc_connect
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.kv_format import PeerSource

_KEPT_S = 30.0


@dataclass(slots=True, eq=False)
class _Open:
    link: GroupLink
    stack: contextlib.AsyncExitStack
    num_calls: int = 0
    used_s: float = 0.0


class PeerLinks:
    """The open connections. They are made and used inside one event loop."""

    def __init__(self, *, kept_s: float = _KEPT_S) -> None:
        self._kept_s = kept_s
        self._open: dict[PeerSource, _Open] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._open)

    async def blocks(
        self, source: PeerSource, request: pb.BlocksRequest, *, timeout_s: float
    ) -> pb.BlocksLoan:
        """Asks ``source`` for blocks. Raises AioRpcError."""
        key = replace(source, num_blocks=0)
        opened = self._open.get(key)
        if opened is None:
            stack = contextlib.AsyncExitStack()
            contact = GroupContact(
                address=source.address, token=source.token, certificate=source.certificate
            )
            contacts = {source.address: contact}
            link = await stack.enter_async_context(grpc_connect(source.address, contacts=contacts))
            opened = self._open.setdefault(key, _Open(link, stack))
            if opened.stack is not stack:  # Another call has opened one meanwhile.
                await stack.aclose()
        opened.num_calls += 1
        try:
            return await opened.link.Blocks(request, timeout=timeout_s)
        finally:
            loop = asyncio.get_running_loop()
            opened.num_calls -= 1
            opened.used_s = loop.time()
            loop.call_later(self._kept_s, self._close_unused, key)

    def _close_unused(self, key: PeerSource) -> None:
        opened = self._open.get(key)
        now_s = asyncio.get_running_loop().time()
        if opened and not opened.num_calls and now_s - opened.used_s >= self._kept_s:
            del self._open[key]
            task = asyncio.create_task(opened.stack.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes all connections, which ends every call."""
        while self._open:
            _, opened = self._open.popitem()
            await opened.stack.aclose()
        if self._closing:
            await asyncio.wait(self._closing)
