"""Fills a new group's cache with the most useful blocks of other groups, before requests arrive.

This happens once, when the first gateway asks, and not at all if the group has blocks of its own.
"""

import asyncio
import logging
from collections.abc import Sequence

import grpc.aio

from quire.cluster.features.kv_exchange.borrowing import Borrower, Outcome
from quire.cluster.features.kv_exchange.lending import Call
from quire.cluster.wire import source_from_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.hashing import HASH_BYTES, BlockHash, BlockHashes
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.request.errors import QuireError

_log = logging.getLogger(__name__)

_MAX_SOURCES = 8
_SOURCE_S = 30.0
"""Timeout for one source, longer than a lease."""
_NO_PARENT = bytes(HASH_BYTES)


class Warming:
    """Answers `Warm` calls. Belongs to one event loop. ``call`` runs functions in the thread of the
    engine whose pulls ``borrower`` serves."""

    def __init__(self, borrower: Borrower, call: Call, *, format: KvFormat) -> None:
        self._borrower = borrower
        self._call = call
        self._format = format
        self._task: asyncio.Task[pb.WarmResponse] | None = None

    async def warm(self, request: pb.WarmRequest) -> pb.WarmResponse:
        """Fetches blocks on the first call; all calls return its result once it is done."""
        if self._task is None:
            sources = [source_from_proto(each) for each in request.sources[:_MAX_SOURCES]]
            self._task = asyncio.create_task(self._warm(sources, request.max_bytes))
        return await asyncio.shield(self._task)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _warm(self, sources: Sequence[PeerSource], max_bytes: int) -> pb.WarmResponse:
        stats = await self._call(lambda engine: engine.stats())
        if stats.num_cached_blocks or stats.num_held_blocks:
            return pb.WarmResponse()
        num_blocks, errors = 0, list[str]()
        for source in sources:
            rest_bytes = max_bytes - num_blocks * self._format.block_bytes
            if rest_bytes < self._format.block_bytes:
                break
            try:
                async with asyncio.timeout(_SOURCE_S):
                    came, error = await self._take_from(source, rest_bytes)
            except grpc.aio.AioRpcError as raised:
                came, error = 0, f"{raised.code().name}: {raised.details()}"
            except (QuireError, TimeoutError, ValueError) as raised:
                came, error = 0, repr(raised)
            num_blocks += came
            if error:
                errors.append(f"{source.group_id} at {source.address}: {error}")
        _log.info("warmed by %d blocks of %d groups %s", num_blocks, len(sources), errors or "")
        return pb.WarmResponse(num_blocks=num_blocks, error="\n".join(errors))

    async def _take_from(self, source: PeerSource, max_bytes: int) -> Outcome:
        """Fetches up to ``max_bytes`` from one source; returns the number of blocks, and why there
        are not more."""
        loan = await self._borrower.most_useful(source, max_bytes, format=self._format)
        if loan.refusal:
            return Outcome(0, loan.refusal)
        hashes = BlockHashes(loan.hashes)
        parents = [
            None if parent == _NO_PARENT else BlockHash(parent)
            for parent in BlockHashes(loan.parents)
        ]
        if not len(hashes) == len(parents) == loan.num_blocks:
            return Outcome(0, "its answer is broken")
        outcome = self._borrower.expect(source, loan)
        try:
            await self._call(lambda engine: engine.take_in(hashes, parents, source))
            return await outcome
        finally:
            outcome.cancel()
