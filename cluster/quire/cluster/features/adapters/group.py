"""The LoRA adapters that a group can run: those in its node's store that fit the model.

All groups of a node share the store. A group reads an adapter and checks it against the model
before gateways send requests for it.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

from quire.cluster.features.adapters.files import AdapterStore, keep_pieces, pieces_of
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import InvalidRequest

_DIGEST = re.compile(r"[0-9a-f]{64}")

Check = Callable[[str], Awaitable[None]]
"""Reads the adapter of a digest. Raises InvalidRequest: the model cannot run it."""


class GroupAdapters:
    """A group's access to its node's adapter store. Belongs to one event loop."""

    def __init__(self, store: AdapterStore, check: Check) -> None:
        self._store = store
        self._check = check
        self._reading = asyncio.Lock()
        self._writing = asyncio.Lock()

    def has(self, digest: str) -> bool:
        """Whether the node has the adapter's files."""
        return bool(_DIGEST.fullmatch(digest)) and self._store.folder(digest) is not None

    async def hold(self, digest: str) -> pb.HoldAdapterResponse:
        """Reads and checks an adapter of the node. Only one at a time, because a new group is asked
        for all adapters that gateways have requests for."""
        if not self.has(digest):
            return pb.HoldAdapterResponse()
        try:
            async with self._reading:
                await self._check(digest)
        except InvalidRequest as error:
            return pb.HoldAdapterResponse(refusal=str(error))
        return pb.HoldAdapterResponse(is_held=True)

    async def write(self, pieces: AsyncIterator[pb.AdapterPiece]) -> None:
        """Puts the adapter whose files are in ``pieces`` into the store, one at a time. Raises
        AdapterError."""
        async with self._writing:
            await keep_pieces(pieces, self._store)

    def read(self, digest: str) -> AsyncIterator[pb.AdapterPiece] | None:
        """The pieces of an adapter's files; ``None`` if the node does not have them."""
        folder = self._store.folder(digest) if self.has(digest) else None
        return None if folder is None else pieces_of(folder, digest)
