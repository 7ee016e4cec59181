"""Loans under way: their blocks go from the KV cache, or from where host memory keeps them, to
threads that send them to other groups.

A loan's blocks are held until it ends: closed by its consumer, or because its lease is over. While
sequences decode, copies for loans take a small share of each step.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.worker.api.hashing import BlockHash, BlockHashes
from quire.worker.api.kv_format import Bytes, KvFormat
from quire.worker.cache.blocks import BlockId, BlockPool
from quire.worker.cache.checksum import checksum_of
from quire.worker.cache.copies import Copies, Slot
from quire.worker.cache.loan import Lent, Loan
from quire.worker.cache.shelf import Shelf

MAX_LOANS = 16
LEASE_S = 30.0
_STEP_SHARE = 0.02
"""Part of the steps' time that all loans together may take while sequences decode."""
_POOL_SHARE = 0.5
"""Part of the KV cache that all loans together hold at most."""
_ALL_HELD = "busy: loans hold as much of the KV cache as they may"
_BYTES_PER_S = 4e9
"""About how fast blocks are copied; the share above is small enough for an estimate."""


@dataclass(eq=False)
class _Lending:
    loan: Loan
    until_s: float
    blocks: deque[tuple[int, BlockId | None, Slot | None]]
    """Those that are not lent yet: which, and where in the KV cache or in host memory."""
    holds: list[BlockId]
    pins: set[Slot] = field(default_factory=set)
    """Slots of the shelf that are pinned for it."""
    out: set[Slot] = field(default_factory=set)
    """Slots that it has, of free ones."""
    num_copying: int = 0


class Loans:
    """Used from the engine's thread."""

    def __init__(
        self,
        pool: BlockPool,
        shelf: Shelf,
        copies: Copies,
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        on_change: Callable[[], None],
        on_corrupt: Callable[[BlockHash], None],
        clock: Callable[[], float],
    ) -> None:
        """``on_corrupt`` is told of a kept block whose bytes are not what they were."""
        self.num_lent_tokens = 0
        self._pool = pool
        self._shelf = shelf
        self._copies = copies
        self._format = format
        self._host_XC = host_blocks_XC
        self._on_change = on_change
        self._on_corrupt = on_corrupt
        self._clock = clock
        self._lendings = deque[_Lending]()
        self._num_held = 0
        self._credit = 0.0  # Bytes that loans may still take.

    @property
    def num_loans(self) -> int:
        return len(self._lendings)

    def lend(self, hashes: BlockHashes) -> Loan | str:
        """The longest beginning of ``hashes`` that the KV cache has, then host memory; or why none
        is lent."""
        if len(self._lendings) >= MAX_LOANS:
            return f"busy: {len(self._lendings)} loans are under way"
        found = self._pool.match(hashes)
        block_ids = found[: self._most_held]
        if found and not block_ids:
            return _ALL_HELD
        slots = self._shelf.match(hashes[len(block_ids) :]) if block_ids == found else []
        names = hashes[: len(block_ids) + len(slots)]
        parents = self._parents(names)
        self._pool.hold(block_ids)
        return self._begin(names, parents, block_ids, slots)

    def lend_most_useful(self, num_bytes: int) -> Loan | str:
        """Blocks of the KV cache that requests find most often, with those before them."""
        if len(self._lendings) >= MAX_LOANS:
            return f"busy: {len(self._lendings)} loans are under way"
        if not self._most_held:
            return _ALL_HELD
        num_blocks = min(num_bytes // self._format.block_bytes, self._most_held)
        block_ids = self._pool.most_useful(num_blocks)
        named = [self._pool.named(block_id) for block_id in block_ids]
        self._pool.hold(block_ids)
        names = BlockHashes.of(name for name, _ in named)
        return self._begin(names, [parent for _, parent in named], block_ids, [])

    def advance(self, *, is_decoding: bool, step_s: float) -> None:
        """Takes back what consumers have read, and has more copied for them, by turns."""
        per_step = _STEP_SHARE * step_s * _BYTES_PER_S
        # What a step leaves adds up to a block, where a block is more than a step's share.
        self._credit = min(self._credit + per_step, max(per_step, self._format.block_bytes))
        if not is_decoding:
            self._credit = float("inf")
        self._lendings.rotate(-1)
        for lending in list(self._lendings):
            loan = lending.loan
            is_closed = loan.is_closed
            for slot in map(Slot, loan.take_returned()):
                self._take_back(lending, slot)
            if is_closed:
                self._end(lending)
            elif self._clock() > lending.until_s:
                self._fail(lending, "the lease is over")
            else:
                self._lend_some(lending)

    def yield_room(self) -> bool:
        """Lets go of all blocks of the KV cache, which ends their loans; whether there were any."""
        had_some = self._num_held > 0
        for lending in self._lendings:
            if lending.holds:
                self._fail(lending, "the lender needs the room of these blocks")
        return had_some

    def close(self) -> None:
        for lending in self._lendings:
            lending.loan.fail("the engine is closed")

    def _begin(
        self,
        names: BlockHashes,
        parents: list[BlockHash | None],
        block_ids: Sequence[BlockId],
        slots: Sequence[Slot],
    ) -> Loan:
        loan = Loan(
            names,
            parents,
            format=self._format,
            host_blocks_XC=self._host_XC,
            on_change=self._on_change,
        )
        blocks = deque[tuple[int, BlockId | None, Slot | None]]()
        blocks += [(index, block_id, None) for index, block_id in enumerate(block_ids)]
        blocks += [(index, None, slot) for index, slot in enumerate(slots, len(block_ids))]
        lending = _Lending(loan, self._clock() + LEASE_S, blocks, list(block_ids), set(slots))
        for slot in slots:
            self._shelf.pin(slot)
        self._num_held += len(block_ids)
        if names:
            self._lendings.append(lending)
        return loan

    @property
    def _most_held(self) -> int:
        """How many blocks one loan more may hold."""
        return max(0, int(_POOL_SHARE * self._pool.num_blocks) - self._num_held)

    def _fail(self, lending: _Lending, reason: str) -> None:
        """Lends no more; slots come back when the consumer has read them."""
        if not lending.loan.error:
            lending.loan.fail(reason)
        lending.blocks.clear()
        self._let_go(lending)

    def _parents(self, names: Sequence[BlockHash]) -> list[BlockHash | None]:
        if not len(names):
            return []
        first = self._pool.find(names[0])
        parent = self._shelf.parent(names[0]) if first is None else self._pool.named(first)[1]
        return [parent, *list(names)[:-1]]

    def _lend_some(self, lending: _Lending) -> None:
        """Has as many blocks copied or lent as the credit and the free slots allow."""
        ready: list[tuple[int, Slot]] = []
        most = max(1, (self._shelf.num_free + len(lending.out)) // (2 * len(self._lendings)))
        while lending.blocks and self._credit >= self._format.block_bytes:
            index, block_id, slot = lending.blocks[0]
            if block_id is None:
                assert slot is not None
                if ready or lending.num_copying:
                    break  # Blocks are lent in their order.
                lending.blocks.popleft()
                self._lend_kept(lending, index, slot)
            elif len(lending.out) < most and (taken := self._shelf.take(1)):
                lending.blocks.popleft()
                lending.out.update(taken)
                self._copies.out(block_id, taken[0])
                ready.append((index, taken[0]))
            else:
                break
            self._credit -= self._format.block_bytes
        if ready:
            lending.num_copying += 1
            self._copies.then(lambda: self._copied(lending, ready))

    def _lend_kept(self, lending: _Lending, index: int, slot: Slot) -> None:
        checksum = checksum_of(self._host_XC[slot])
        if self._shelf.checksum(slot) in (b"", checksum):
            self._lend(lending, Lent(index, slot, checksum))
        else:
            name = lending.loan.hashes[index]
            self._fail(lending, f"block {index} ({name.hex()[:16]}) is corrupt")
            self._on_corrupt(name)

    def _copied(self, lending: _Lending, ready: list[tuple[int, Slot]]) -> None:
        lending.num_copying -= 1
        if lending not in self._lendings or lending.loan.error:
            for _, slot in ready:
                self._take_back(lending, slot)
            return
        for index, slot in ready:
            self._lend(lending, Lent(index, slot))

    def _lend(self, lending: _Lending, lent: Lent) -> None:
        lending.loan.lend(lent)
        self.num_lent_tokens += self._pool.block_size

    def _take_back(self, lending: _Lending, slot: Slot) -> None:
        if slot in lending.out:
            lending.out.discard(slot)
            self._shelf.give_back([slot])
        elif slot in lending.pins:
            lending.pins.discard(slot)
            self._shelf.unpin(slot)

    def _let_go(self, lending: _Lending) -> None:
        """Drops the references to blocks of the KV cache: copies under way are made all the same,
        before any step that writes there."""
        self._pool.release(lending.holds)
        self._num_held -= len(lending.holds)
        lending.holds = []

    def _end(self, lending: _Lending) -> None:
        self._lendings.remove(lending)
        self._let_go(lending)
        if lending.num_copying:  # Their slots come back when the step has run.
            copying = lending
            self._copies.then(lambda: self._take_back_all(copying))
        else:
            self._take_back_all(lending)

    def _take_back_all(self, lending: _Lending) -> None:
        for slot in (*lending.out, *lending.pins):
            self._take_back(lending, slot)
