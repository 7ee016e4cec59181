"""Pulls under way: their blocks go from host memory into the KV cache as they land.

An *arrival* is a pull and what it has brought. Its blocks are held, with all before them in their
chain, until nobody waits for it any more; then they are cached as others are. Always true: a slot
of host memory is granted to a pull, or being copied, or given back.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.worker.api.errors import QueueFull
from quire.worker.api.hashing import BlockHash, BlockHashes
from quire.worker.api.kv_format import Bytes, KvFormat, PeerSource
from quire.worker.cache.blocks import BlockId, BlockPool
from quire.worker.cache.copies import Copies, Slot
from quire.worker.cache.pull import Fetch, Landed, Pull
from quire.worker.cache.shelf import Shelf

_MAX_ARRIVALS = 64
_MAX_GRANTED = 16
"""Arrivals from one source that have slots at a time, the oldest ones: as many loans as a group
gives."""
_SLOT_SHARE = 0.75
"""Part of the free slots that all arrivals together have."""
_MOST_SLOTS = 0.25
"""Part of those that one of them has."""
_POOL_SHARE = 0.5
"""Part of the KV cache that all arrivals together hold at most."""
_ROOM_SHARE = 1 / 32
"""Part of it that they leave to running sequences."""


@dataclass(eq=False)
class Arrival:
    pull: Pull
    parents: Sequence[BlockHash | None]
    """The name of the block before each."""
    began_s: float
    is_chain: bool
    """Whether somebody waits for the chain; else blocks are let go as they come."""
    holds: list[BlockId] = field(default_factory=list)
    granted: set[Slot] = field(default_factory=set)
    landed: deque[Landed] = field(default_factory=deque)
    """Blocks that lie in host memory and have no room in the KV cache yet."""
    num_here: int = 0
    """Blocks that the KV cache has."""
    num_users: int = 0
    is_over: bool = False
    """Nothing more comes."""

    @property
    def from_group(self) -> str | None:
        """The id of the group that it comes from; ``None`` is the disk."""
        return None if self.pull.source is None else self.pull.source.group_id

    @property
    def num_lying(self) -> int:
        """Slots that it has."""
        return len(self.granted) + len(self.landed)


class Pulls:
    """Used from the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        shelf: Shelf,
        copies: Copies,
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        fetch: Fetch | None,
        fetch_from_disk: Fetch | None,
        on_change: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self.num_disk_tokens = self.num_peer_tokens = self.num_failed = 0
        self.disk_s = self.peer_s = 0.0
        self.num_arrived = Counter[str | None]()
        """Blocks of chains that came from each group; ``None`` is the disk."""
        self._pool = pool
        self._shelf = shelf
        self._copies = copies
        self._format = format
        self._host_XC = host_blocks_XC
        self._fetch = fetch
        self._fetch_from_disk = fetch_from_disk
        self._on_change = on_change
        self._clock = clock
        self._arrivals: list[Arrival] = []
        self._coming: dict[BlockHash, Arrival] = {}
        self._num_held = 0
        self._distrusted: set[str] = set()

    @property
    def num_arrivals(self) -> int:
        return len(self._arrivals)

    def coming(self, block_hash: BlockHash) -> Arrival | None:
        """What brings a block, if anything does."""
        return self._coming.get(block_hash)

    def has_room_for(self, num_blocks: int) -> bool:
        """Whether arrivals may hold so many more blocks."""
        pool = self._pool
        room = pool.num_available - pool.num_blocks * _ROOM_SHARE
        return num_blocks < min(room, pool.num_blocks * _POOL_SHARE - self._num_held)

    def begin(
        self,
        names: BlockHashes,
        *,
        after: BlockHash | None,
        source: PeerSource | None,
        holds: list[BlockId],
    ) -> Arrival | None:
        """Brings blocks of a chain. ``holds`` are all before them, ``after`` the last one's name;
        they are held for the arrival from now on. ``None`` where too much is under way, or nobody
        can bring it."""
        parents = [after, *list(names)[:-1]]
        return self._begin(names, parents, source, holds=holds, is_chain=True)

    def take_in(
        self, hashes: BlockHashes, parents: Sequence[BlockHash | None], source: PeerSource
    ) -> None:
        """Brings blocks of any chains, parents before children, for nobody in particular. Raises
        QueueFull: too much is under way."""
        if self._begin(hashes, parents, source, holds=[], is_chain=False) is None:
            raise QueueFull(f"{len(self._arrivals)} pulls are under way")

    def distrust(self, group_id: str) -> None:
        """Fetches nothing from that group any more."""
        self._distrusted.add(group_id)

    def let_go(self, arrival: Arrival) -> None:
        """One that waited for it does not any more."""
        arrival.num_users -= 1
        if not arrival.num_users:
            if not arrival.is_over:
                arrival.pull.cancel()
            self._forget_coming(arrival)
            self._release(arrival)

    def yield_room(self) -> bool:
        """Lets go of all blocks, which are cached then; whether there were any. What is on its way
        ends with what has come."""
        had_some = self._num_held > 0
        for arrival in self._arrivals:
            if arrival.is_chain:
                arrival.pull.cancel()
                self._forget_coming(arrival)
                self._release(arrival)
        return had_some

    def advance(self) -> None:
        """Has what landed copied into the KV cache, as far as there is room."""
        for arrival in list(self._arrivals):
            is_over = arrival.pull.is_over  # Before `take`: nothing lands behind it.
            for landed in arrival.pull.take():
                arrival.granted.discard(Slot(landed.slot))
                arrival.landed.append(landed)
            self._land(arrival)
            if is_over and not arrival.landed:
                self._end(arrival)
        self._grant()

    def close(self) -> None:
        for arrival in self._arrivals:
            arrival.pull.cancel()

    def _begin(
        self,
        names: BlockHashes,
        parents: Sequence[BlockHash | None],
        source: PeerSource | None,
        *,
        holds: list[BlockId],
        is_chain: bool,
    ) -> Arrival | None:
        fetch = self._fetch if source is not None else self._fetch_from_disk
        if fetch is None or len(self._arrivals) >= _MAX_ARRIVALS:
            return None
        if source is not None and source.group_id in self._distrusted:
            return None
        pull = Pull(
            names,
            format=self._format,
            host_blocks_XC=self._host_XC,
            source=source,
            on_change=self._on_change,
        )
        arrival = Arrival(pull, parents, self._clock(), is_chain, holds)
        self._num_held += len(holds)
        self._arrivals.append(arrival)
        if is_chain:
            self._coming.update(dict.fromkeys(names, arrival))
        self._grant()
        fetch(pull)
        return arrival

    def _grant(self) -> None:
        """Lets fetchers fill some more slots, the oldest arrivals' first: a step that computes a
        prompt takes long, and each that is whole by then need not be computed."""
        num_lying = sum([each.num_lying for each in self._arrivals])
        num_slots = int(_SLOT_SHARE * (self._shelf.num_free + num_lying))
        num_left = num_slots - num_lying
        most = max(1, int(_MOST_SLOTS * num_slots))
        num = Counter[str | None]()
        for arrival in self._arrivals:
            pull = arrival.pull
            if pull.is_over or pull.is_cancelled or num[arrival.from_group] >= _MAX_GRANTED:
                continue
            num[arrival.from_group] += 1
            num_wanted = len(pull.hashes) - arrival.num_here
            num_more = min(num_wanted, most) - arrival.num_lying
            # Each has one, so that none waits for another.
            num_more = max(min(num_more, num_left), int(not arrival.num_lying))
            slots = self._shelf.take(max(0, num_more))
            if slots:
                num_left -= len(slots)
                arrival.granted.update(slots)
                pull.grant(slots)

    def _land(self, arrival: Arrival) -> None:
        pool = self._pool
        is_wanted = not arrival.pull.is_cancelled
        while arrival.landed:
            landed = arrival.landed[0]
            slot, name = Slot(landed.slot), arrival.pull.hashes[landed.index]
            parent_name = arrival.parents[landed.index]
            parent = None if parent_name is None else pool.find(parent_name)
            here = pool.find(name)
            is_lost = parent_name is not None and parent is None
            if here is not None or is_lost or not is_wanted:
                arrival.landed.popleft()
                self._shelf.give_back([slot])
                if here is not None:
                    self._arrived(arrival)
                    self._keep(arrival, here)
                elif is_lost:
                    arrival.pull.cancel()  # What follows could not be found.
                continue
            if not arrival.is_chain and pool.num_free <= pool.num_blocks * _ROOM_SHARE:
                arrival.pull.cancel()  # Nothing is evicted for blocks that nobody waits for.
                is_wanted = False
                continue
            if not self.has_room_for(1):
                return
            arrival.landed.popleft()
            if parent is not None:
                pool.hold([parent])
            (block_id,) = pool.allocate(1)
            self._copies.into(slot, block_id)
            pool.register([block_id], [name], parent=parent)
            if parent is not None:
                pool.release([parent])
            self._copies.then(lambda slot=slot: self._shelf.give_back([slot]))  # type: ignore[misc]
            self._arrived(arrival)
            self._count(arrival)
            if arrival.is_chain:
                arrival.holds.append(block_id)
                self._num_held += 1
            else:
                pool.release([block_id])
            self._coming.pop(name, None)

    def _arrived(self, arrival: Arrival) -> None:
        arrival.num_here += 1
        if arrival.is_chain:
            self.num_arrived[arrival.from_group] += 1

    def _keep(self, arrival: Arrival, block_id: BlockId) -> None:
        """Somebody else has computed the block meanwhile."""
        if arrival.is_chain and not arrival.pull.is_cancelled:
            self._pool.hold([block_id])
            arrival.holds.append(block_id)
            self._num_held += 1

    def _count(self, arrival: Arrival) -> None:
        if arrival.pull.source is None:
            self.num_disk_tokens += self._pool.block_size
        else:
            self.num_peer_tokens += self._pool.block_size

    def _end(self, arrival: Arrival) -> None:
        arrival.is_over = True
        self._arrivals.remove(arrival)
        seconds = self._clock() - arrival.began_s
        if arrival.pull.source is None:
            self.disk_s += seconds
        else:
            self.peer_s += seconds
        self._shelf.give_back(arrival.granted)
        arrival.granted.clear()
        self._forget_coming(arrival)
        self.num_failed += bool(arrival.pull.error)

    def _forget_coming(self, arrival: Arrival) -> None:
        for name in arrival.pull.hashes:
            if self._coming.get(name) is arrival:
                del self._coming[name]

    def _release(self, arrival: Arrival) -> None:
        self._pool.release(arrival.holds)
        self._num_held -= len(arrival.holds)
        arrival.holds.clear()
