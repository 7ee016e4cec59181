"""The pulls under way: copies their blocks from host memory into the KV cache as they land.

An *arrival* is a pull and the blocks that it has delivered. These blocks, and all before them in
their chain, are held until no request waits for the arrival; then they are cached like others.
Always true: a slot of host memory is granted to a pull, or being copied, or given back.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import Bytes, KvFormat, PeerSource
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.engine.part import Slot
from quire.worker.parts.tiers.checker import Checker, OnCorrupt
from quire.worker.parts.tiers.copies import Copies
from quire.worker.parts.tiers.host_tier import HostTier
from quire.worker.parts.tiers.pull import Fetch, Landed, Pull, Source
from quire.worker.request.errors import QueueFull

_MAX_ARRIVALS = 64
_MAX_ORIGINS = 256
_MAX_GRANTED = 16
"""Most arrivals from one source that have slots at the same time, the oldest ones: as many as the
loans that a group gives."""
_SLOT_SHARE = 0.75
"""Most of the free slots that all arrivals together may have."""
_MOST_SLOTS = 0.25
"""Most of the arrivals' slots that one arrival may have."""
_POOL_SHARE = 0.5
"""Most of the KV cache that all arrivals together may hold."""
_ROOM_SHARE = 1 / 32
"""Share of the KV cache that arrivals leave to running sequences."""


@dataclass(eq=False)
class Origin:
    """A source of blocks (the disk or a group), and its response times."""

    num_landed: int = 0
    """Blocks received from this source."""
    first_s: float = 0.0
    """Estimated seconds until a pull's first block lands."""
    num_declined: int = 0
    """Pulls that were not made, because they would take too long, since the last that was."""

    def answered(self, first_s: float) -> None:
        """Records that a pull's first block landed after ``first_s``."""
        self.first_s = (self.first_s + first_s) / 2 if self.first_s else first_s
        self.num_declined = 0

    def was_silent(self, for_s: float) -> None:
        """Records that a pull was given up after ``for_s`` seconds before any block had landed."""
        self.first_s = max(self.first_s, for_s)
        self.num_declined = 0


@dataclass(eq=False)
class Arrival:
    pull: Pull
    origin: Origin
    parents: Sequence[BlockHash | None]
    """The name of each block's parent."""
    is_chain: bool
    """Whether requests wait for the chain; if not, blocks are released as they land."""
    holds: list[BlockId] = field(default_factory=list)
    granted: set[Slot] = field(default_factory=set)
    landed: deque[Landed] = field(default_factory=deque)
    """Blocks in host memory for which the KV cache has no room yet."""
    num_here: int = 0
    """Blocks of the pull that are in the KV cache."""
    num_users: int = 0
    is_over: bool = False
    """Whether no more blocks will land."""

    @property
    def num_lying(self) -> int:
        """Number of slots that the arrival uses."""
        return len(self.granted) + len(self.landed)


class Pulls:
    """The arrivals under way. Used from the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        host_tier: HostTier,
        copies: Copies,
        checker: Checker,
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        fetch: Fetch | None,
        fetch_from_disk: Fetch | None,
        on_change: Callable[[], None],
        on_corrupt: OnCorrupt,
        clock: Callable[[], float],
    ) -> None:
        self.num_disk_tokens = self.num_peer_tokens = self.num_failed = 0
        self.disk_s = self.peer_s = 0.0
        self._pool = pool
        self._host_tier = host_tier
        self._copies = copies
        self._checker = checker
        self._format = format
        self._host_XC = host_blocks_XC
        self._fetch = fetch
        self._fetch_from_disk = fetch_from_disk
        self._on_change = on_change
        self._on_corrupt = on_corrupt
        self._clock = clock
        self._arrivals: list[Arrival] = []
        self._origins: dict[str | None, Origin] = {}
        self._coming: dict[BlockHash, Arrival] = {}
        self._num_held = 0
        self._distrusted: set[str] = set()

    @property
    def num_arrivals(self) -> int:
        return len(self._arrivals)

    def coming(self, block_hash: BlockHash) -> Arrival | None:
        """The arrival that a block will come with, if any."""
        return self._coming.get(block_hash)

    def origin(self, source: Source) -> Origin:
        """The record of a source."""
        group_id = None if source is None else source.group_id
        # Moved to the end: the least recently used are forgotten, since their groups may be gone.
        origin = self._origins.pop(group_id, None) or Origin()
        self._origins[group_id] = origin
        if len(self._origins) > _MAX_ORIGINS:
            del self._origins[next(iter(self._origins))]
        return origin

    def has_room_for(self, num_blocks: int) -> bool:
        """Whether arrivals may hold ``num_blocks`` more blocks."""
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
        """Starts a pull of blocks of a chain. ``holds`` are all blocks before them, and ``after``
        is the last one's name; the arrival takes over their references. Returns ``None`` if too
        many pulls are under way, or the source cannot be used."""
        parents = [after, *list(names)[:-1]]
        return self._begin(names, parents, source, holds=holds, is_chain=True)

    def take_in(
        self, hashes: BlockHashes, parents: Sequence[BlockHash | None], source: PeerSource
    ) -> None:
        """Starts a pull of blocks of any chains, parents before children, that no request waits
        for. Raises QueueFull: too many pulls are under way."""
        if self._begin(hashes, parents, source, holds=[], is_chain=False) is None:
            raise QueueFull(f"{len(self._arrivals)} pulls are under way")

    def distrust(self, group_id: str) -> None:
        """Starts no more pulls from that group."""
        self._distrusted.add(group_id)

    def let_go(self, arrival: Arrival) -> None:
        """Called when a request stops waiting for the arrival. After the last one, releases it."""
        arrival.num_users -= 1
        if not arrival.num_users:
            if not arrival.is_over:
                arrival.pull.cancel()
            self._forget_coming(arrival)
            self._release(arrival)

    def yield_room(self) -> bool:
        """Releases the blocks of all arrivals, which stay cached, and cancels their pulls. Returns
        whether any blocks were held."""
        had_some = self._num_held > 0
        for arrival in self._arrivals:
            if arrival.is_chain:
                arrival.pull.cancel()
                self._forget_coming(arrival)
                self._release(arrival)
        return had_some

    def advance(self) -> None:
        """Schedules copies of landed blocks into the KV cache, as far as there is room."""
        for arrival in list(self._arrivals):
            is_over = arrival.pull.is_over  # Read before `take`, so that no block is missed.
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
            clock=self._clock,
        )
        arrival = Arrival(pull, self.origin(source), parents, is_chain, holds)
        self._num_held += len(holds)
        self._arrivals.append(arrival)
        if is_chain:
            self._coming.update(dict.fromkeys(names, arrival))
        self._grant()
        fetch(pull)
        return arrival

    def _grant(self) -> None:
        """Grants slots to fetchers, the oldest arrivals' first: prefill steps take long, and an
        arrival that completes meanwhile saves its computation."""
        num_lying = sum([each.num_lying for each in self._arrivals])
        num_slots = int(_SLOT_SHARE * (self._host_tier.num_free + num_lying))
        num_left = num_slots - num_lying
        most = max(1, int(_MOST_SLOTS * num_slots))
        num = Counter[str | None]()
        for arrival in self._arrivals:
            pull = arrival.pull
            group = None if pull.source is None else pull.source.group_id
            if pull.is_over or pull.is_cancelled or num[group] >= _MAX_GRANTED:
                continue
            num[group] += 1
            num_wanted = len(pull.hashes) - arrival.num_here
            num_more = min(num_wanted, most) - arrival.num_lying
            # Each gets at least one, so that no arrival waits for another.
            num_more = max(min(num_more, num_left), int(not arrival.num_lying))
            slots = self._host_tier.take(max(0, num_more))
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
                self._host_tier.give_back([slot])
                if here is not None:
                    arrival.num_here += 1
                    self._keep(arrival, here)
                elif is_lost:
                    arrival.pull.cancel()  # Blocks behind a lost parent cannot be used.
                continue
            if not arrival.is_chain and pool.num_free <= pool.num_blocks * _ROOM_SHARE:
                arrival.pull.cancel()  # No block is evicted for blocks that no request waits for.
                is_wanted = False
                continue
            if not self.has_room_for(1):
                return
            is_whole = self._checker.has(slot, landed.checksum)
            if is_whole is None:
                for each in islice(arrival.landed, 1, None):  # They are compared meanwhile.
                    self._checker.ask(Slot(each.slot), each.checksum)
                return
            if not is_whole:
                self._on_corrupt(name, slot, False)
                arrival.pull.cancel()
                is_wanted = False
                continue
            arrival.landed.popleft()
            if parent is not None:
                pool.hold([parent])
            (block_id,) = pool.allocate(1)
            self._copies.into(slot, block_id)
            pool.register([block_id], [name], parent=parent)
            if parent is not None:
                pool.release([parent])
            self._copies.then(lambda slot=slot: self._host_tier.give_back([slot]))  # type: ignore[misc]
            arrival.num_here += 1
            self._count(arrival)
            if arrival.is_chain:
                arrival.holds.append(block_id)
                self._num_held += 1
            else:
                pool.release([block_id])
            self._coming.pop(name, None)

    def _keep(self, arrival: Arrival, block_id: BlockId) -> None:
        """Holds a landed block that is in the KV cache already, since a request computed it."""
        if arrival.is_chain and not arrival.pull.is_cancelled:
            self._pool.hold([block_id])
            arrival.holds.append(block_id)
            self._num_held += 1

    def _count(self, arrival: Arrival) -> None:
        arrival.origin.num_landed += 1
        if arrival.pull.source is None:
            self.num_disk_tokens += self._pool.block_size
        else:
            self.num_peer_tokens += self._pool.block_size

    def _end(self, arrival: Arrival) -> None:
        arrival.is_over = True
        self._arrivals.remove(arrival)
        seconds = self._clock() - arrival.pull.began_s
        if arrival.pull.source is None:
            self.disk_s += seconds
        else:
            self.peer_s += seconds
        self._host_tier.give_back(arrival.granted)
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
