"""One subscriber's stream of the cached blocks of a model's groups, for `SubscribeKvEvents`.

Each group is a data-parallel rank with its own sequence numbers: 1, 2, … without a gap. The stream
begins with a snapshot of the first group that answers; the blocks of all other groups, including
later ones, are sent as stored events. If a group leaves, its blocks are sent as removed: one rank's
AllBlocksCleared would also clear the other ranks at a subscriber that keeps a single index. Load
records come with every batch, and alone at each heartbeat.

If a subscriber reads slowly, the groups' streams wait, and it receives the net difference in the
end. A subscriber that does not read is disconnected.
"""

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import grpc.aio
from smg_grpc_proto.generated import common_pb2 as common

from quire.cluster.errors import GroupLost, Unavailable
from quire.cluster.features.kv_events.format import events_of, load_of
from quire.cluster.features.kv_events.ledger import MAX_BLOCKS, Change, Gap, Keys, Ledger
from quire.cluster.links.group_client import GroupClient
from quire.cluster.links.groups import Groups
from quire.cluster.wire import contents_from_proto, events_from_proto
from quire.router.failure_log import FailureLog
from quire.router.prefix_index.directory import GroupId
from quire.v1 import group_pb2 as pb
from quire.worker.request.errors import QueueFull

_log = logging.getLogger(__name__)

_MAX_BATCHES = 4
"""Most batches that wait for the subscriber."""
_PAUSE_S, _MAX_PAUSE_S = 0.1, 5.0
"""Delay in seconds before a group's events are requested again; it doubles until a digest agrees.
Without it, a group whose digest never agrees would be asked for all its blocks ten times a
second."""


Write = Callable[[common.KvEventBatch], Awaitable[object]]


class Outlet:
    """Writes to a call. gRPC accepts no status during a write, and a write to a client that does
    not read never ends: `settle` waits until a status can be sent."""

    def __init__(self, write: Write) -> None:
        self._write = write
        self._under_way: asyncio.Future[object] | None = None

    async def write(self, message: common.KvEventBatch) -> None:
        """Sends ``message``. If the caller is cancelled, the write continues."""
        self._under_way = asyncio.ensure_future(self._write(message))
        await asyncio.shield(self._under_way)

    async def settle(self) -> None:
        """Returns once the subscriber reads again, or has left."""
        if self._under_way is not None:
            await asyncio.gather(self._under_way, return_exceptions=True)


class SubscriberStalled(QueueFull):
    """A subscriber has not read for too long."""


@dataclass(frozen=True, kw_only=True)
class KvEventsConfig:
    heartbeat_s: float = 0.5
    stall_s: float = 30.0
    """Time in seconds without a read after which a subscriber is disconnected."""
    max_subscribers: int = 8
    """Most subscribers of a gateway: for each, every group sends all its events once more."""


@dataclass
class _Rank:
    number: int
    client: GroupClient
    ledger: Ledger
    reader: asyncio.Task[None] | None = None
    sequence_number: int = 0
    """Number of the last batch that was sent."""


@dataclass
class _Batch:
    """The next changes of a rank to send to the subscriber."""

    rank: _Rank
    changes: Sequence[Change] = ()
    chunk: common.KvSnapshotChunk | None = None


@dataclass
class Ranks:
    """Rank numbers of groups, for all subscribers of a gateway. No number is used twice."""

    _numbers: dict[str, int] = field(default_factory=dict)
    _next: Iterator[int] = field(default_factory=itertools.count)

    def of(self, client: GroupClient, attached: Iterable[GroupClient]) -> int:
        """The rank number of an attached group. Forgets those of groups that are gone."""
        group_id = client.description.group_id
        if group_id not in self._numbers:
            names = {each.description.group_id for each in attached}
            self._numbers = {
                name: number for name, number in self._numbers.items() if name in names
            }
            self._numbers[group_id] = next(self._next)
        return self._numbers[group_id]


class Subscription:
    """Serves one subscriber until it leaves or `run` raises."""

    def __init__(
        self,
        groups: Groups,
        ranks: Ranks,
        *,
        config: KvEventsConfig,
        adapter_names: Callable[[], Mapping[str, str]],
        loads_at_once: bool,
    ) -> None:
        """``adapter_names``: clients' names of adapters, by digest. ``loads_at_once``: whether load
        records are sent before a rank's first batch, too."""
        self._groups = groups
        self._numbers = ranks
        self._config = config
        self._adapter_names = adapter_names
        self._loads_at_once = loads_at_once
        self._keys = Keys()
        self._ranks: dict[GroupClient, _Rank] = {}
        self._batches: asyncio.Queue[_Batch] = asyncio.Queue(_MAX_BATCHES)
        self._first: _Rank | None = None
        """The rank whose snapshot begins the stream."""
        self._has_begun = asyncio.Event()
        """Set once the first snapshot was sent."""
        self._num_chunks = 0
        self._event_ids = itertools.count(1)
        self._samples = itertools.count(1)

    async def run(self, write: Write, is_over: Callable[[], bool]) -> None:
        """Sends batches with ``write``, which waits for the subscriber, until ``is_over``.

        Raises:
            SubscriberStalled: The subscriber does not read.
            Unavailable: ``is_over`` is true, or the first snapshot could not be completed.
        """
        keeper = asyncio.create_task(self._keep_ranks(is_over))
        writer = asyncio.create_task(self._write_all(write))
        try:
            await asyncio.wait([keeper, writer], return_when=asyncio.FIRST_COMPLETED)
        finally:
            tasks = [keeper, writer, *(each.reader for each in self._ranks.values() if each.reader)]
            for task in tasks:
                task.cancel()
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, Exception):
                raise outcome
        raise Unavailable(
            "the gateway stops, the model's groups were replaced, or the API key is no longer an "
            "operator's"
        )

    async def _keep_ranks(self, is_over: Callable[[], bool]) -> None:
        """Keeps one reader for each group that takes requests."""
        while not is_over():
            groups = self._groups
            clients = [each for each in groups.clients if groups.is_routed_to(each)]
            for client in [each for each in self._ranks if each not in clients]:
                await self._remove(client)
            for client in clients:
                if client not in self._ranks and client.description.kv_events:
                    attached = [each for each in groups.clients if each.is_attached]
                    number = self._numbers.of(client, attached)
                    rank = self._ranks[client] = _Rank(number, client, Ledger(self._keys))
                    rank.reader = asyncio.create_task(self._follow(rank))
            for rank in self._ranks.values():
                if rank.reader is not None and rank.reader.done():
                    rank.reader.result()
            await groups.wait_for_change(timeout_s=self._config.heartbeat_s)

    async def _remove(self, client: GroupClient) -> None:
        rank = self._ranks.pop(client)
        assert rank.reader is not None
        rank.reader.cancel()
        await asyncio.gather(rank.reader, return_exceptions=True)
        if rank is self._first and not self._has_begun.is_set():
            raise Unavailable("the group whose blocks the stream began with is gone: begin again")
        for changes in rank.ledger.clear():
            await self._tell(rank, changes)

    async def _follow(self, rank: _Rank) -> None:
        """Sends a group's blocks as long as it takes requests."""
        doing = f"reading the contents of the blocks of the group at {rank.client.address}"
        failures, pause_s = FailureLog(_log), _PAUSE_S
        while True:
            position = rank.ledger.position
            request = pb.EventsRequest(
                epoch=position.epoch, next_seq=position.next_seq, with_tokens=True
            )
            try:
                async for message in rank.client.link.Events(request):
                    await self._take(rank, message)
                    if message.HasField("digest"):
                        pause_s = _PAUSE_S
            except (grpc.aio.AioRpcError, GroupLost, ValueError, Gap) as error:
                failures.report(error, doing, with_stack=False)
            if rank is self._first and not self._has_begun.is_set():
                raise Unavailable("the stream's first snapshot broke off: begin again")
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def _take(self, rank: _Rank, message: pb.EventBatch) -> None:
        if self._first is None:
            self._first = rank
        is_beginning = rank is self._first and not self._has_begun.is_set()
        if not is_beginning:
            await self._has_begun.wait()
        batch, contents = events_from_proto(message), message.contents
        blocks = contents_from_proto(contents, block_size=rank.client.description.block_size)
        chunk = None
        if is_beginning:
            self._num_chunks = self._num_chunks or contents.num_more + 1
            chunk = common.KvSnapshotChunk(
                index=self._num_chunks - 1 - contents.num_more,
                count=self._num_chunks,
                blocks=contents.num_blocks,
            )
        changes: list[Change] = []
        try:
            for more in rank.ledger.apply(batch, blocks, num_more=contents.num_more):
                changes += more
                if chunk is None and sum(each.num_blocks for each in changes) >= MAX_BLOCKS:
                    await self._tell(rank, changes)
                    changes = []
                await asyncio.sleep(0)
        except Gap:
            if chunk is None:  # The ledger has these; the repair follows.
                await self._tell(rank, changes)
            raise
        await self._tell(rank, changes, chunk)
        if is_beginning and not contents.num_more:
            self._has_begun.set()

    async def _tell(
        self,
        rank: _Rank,
        changes: Sequence[Change],
        chunk: common.KvSnapshotChunk | None = None,
    ) -> None:
        if changes or chunk is not None:
            await self._batches.put(_Batch(rank, changes, chunk))

    async def _write_all(self, write: Write) -> None:
        loop = asyncio.get_running_loop()
        beat_s = loop.time()
        while True:
            if loop.time() >= beat_s:
                beat_s = loop.time() + self._config.heartbeat_s
                for rank in list(self._ranks.values()):
                    if rank.sequence_number or self._loads_at_once:
                        await self._write(write, self._load_alone(rank))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(beat_s):
                    batch = await self._batches.get()
                await self._write(write, self._message(batch))

    async def _write(self, write: Write, message: common.KvEventBatch | None) -> None:
        if message is None:
            return
        try:
            async with asyncio.timeout(self._config.stall_s):
                await write(message)
        except TimeoutError:
            raise SubscriberStalled(
                f"the subscriber has read nothing for {self._config.stall_s:g} s: read faster, and "
                "subscribe from 0 again"
            ) from None

    def _message(self, batch: _Batch) -> common.KvEventBatch:
        rank = batch.rank
        rank.sequence_number += 1
        message = common.KvEventBatch(
            sequence_number=rank.sequence_number,
            timestamp=time.time(),
            dp_rank=rank.number,
            snapshot=batch.chunk,
            load=self._load(rank, is_alone=False),
        )
        if batch.chunk is not None and batch.chunk.index == 0:
            message.events.add(cleared=common.KvCacheCleared())
        for event in events_of(batch.changes, adapter_names=self._adapter_names()):
            if batch.chunk is None:
                event.event_id = next(self._event_ids)
            message.events.append(event)
        return message

    def _load_alone(self, rank: _Rank) -> common.KvEventBatch | None:
        load = self._load(rank, is_alone=True)
        return load and common.KvEventBatch(
            sequence_number=rank.sequence_number,
            timestamp=time.time(),
            dp_rank=rank.number,
            load=load,
        )

    def _load(self, rank: _Rank, *, is_alone: bool) -> common.EngineLoad | None:
        """The group's load; ``None`` if it is unknown: the group left or has not reported any."""
        if not rank.client.is_attached:
            return None
        group = rank.client.description
        load = self._groups.loads.get(GroupId(group.group_id))
        if load is None:
            return None
        return load_of(group, load, sample=next(self._samples), is_alone=is_alone)
