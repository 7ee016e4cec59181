"""Adds the contents of stored blocks to a group's block events, for subscribers that ask for them.

The contents of a batch are split over several messages, so that none is long. In each batch a block
follows its parent. Contents are looked up when they are sent: those of a block that is gone by then
are left out, and its removal follows.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping

from quire.cluster.wire import Described, contents_to_proto, events_to_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.events import BlockContent, BlocksStored, EventBatch
from quire.worker.blocks.hashing import BlockHash

PIECE_BLOCKS = 512
"""Most blocks in a message. The event loop runs other work after as many blocks."""


async def with_contents(
    batch: EventBatch, contents: Mapping[BlockHash, BlockContent]
) -> AsyncGenerator[pb.EventBatch, None]:
    """Yields the messages for ``batch`` and the contents of its blocks. ``contents`` may change at
    any time."""
    blocks = await _described(_stored_by(batch), contents)
    message = events_to_proto(batch)
    next_seq = batch.first_seq + len(batch.events)
    starts = range(0, max(1, len(blocks)), PIECE_BLOCKS)
    for start in starts:
        piece = contents_to_proto(blocks[start : start + PIECE_BLOCKS])
        piece.num_more = (starts[-1] - start) // PIECE_BLOCKS
        piece.num_blocks = len(blocks)
        message.contents.CopyFrom(piece)
        yield message
        message = pb.EventBatch(epoch=batch.epoch, first_seq=next_seq)


def _stored_by(batch: EventBatch) -> Iterable[BlockHash]:
    if batch.snapshot is not None:
        for names in (batch.snapshot, *batch.slower):
            yield from names
    for event in batch.events:
        if isinstance(event, BlocksStored):
            yield from event.hashes


async def _described(
    stored: Iterable[BlockHash], contents: Mapping[BlockHash, BlockContent]
) -> list[Described]:
    """The blocks whose contents are known, each once, parents before children."""
    left = dict.fromkeys(stored)
    found: list[Described] = []
    for number, name in enumerate(list(left)):
        if number % PIECE_BLOCKS == PIECE_BLOCKS - 1:
            await asyncio.sleep(0)
        chain: list[Described] = []
        at: BlockHash | None = name
        while at is not None and at in left:
            del left[at]
            content = contents.get(at)
            if content is None:
                break
            chain.append((at, content))
            at = content.parent
        found += reversed(chain)
    return found
