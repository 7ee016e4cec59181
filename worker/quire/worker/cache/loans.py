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
"""Part of a step's time that copies for loans may take while sequences decode."""
_COPY_BYTES_PER_S = 8e9
"""About what memory copies; the share above is small enough for an estimate."""


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
        clock: Callable[[], float],
    ) -> None:
        self.num_lent_tokens = 0
        self._pool = pool
        self._shelf = shelf
        self._copies = copies
        self._format = format
        self._host_XC = host_blocks_XC
        self._on_change = on_change
        self._clock = clock
        self._lendings: list[_Lending] = []

    @property
    def num_loans(self) -> int:
        return len(self._lendings)

    def lend(self, hashes: BlockHashes) -> Loan | str:
        """The longest beginning of ``hashes`` that the KV cache has, then host memory; or why none
        is lent."""
        if len(self._lendings) >= MAX_LOANS:
            return f"busy: {len(self._lendings)} loans are under way"
        block_ids = self._pool.match(hashes)
        slots = self._shelf.match(hashes[len(block_ids) :])
        names = hashes[: len(block_ids) + len(slots)]
        parents = self._parents(names)
        self._pool.hold(block_ids)
        return self._begin(names, parents, block_ids, slots)

    def lend_most_useful(self, num_bytes: int) -> Loan | str:
        """Blocks of the KV cache that requests find most often, with those before them."""
        if len(self._lendings) >= MAX_LOANS:
            return f"busy: {len(self._lendings)} loans are under way"
        block_ids = self._pool.most_useful(num_bytes // self._format.block_bytes)
        named = [self._pool.named(block_id) for block_id in block_ids]
        self._pool.hold(block_ids)
        names = BlockHashes.of(name for name, _ in named)
        return self._begin(names, [parent for _, parent in named], block_ids, [])

    def advance(self, *, is_decoding: bool, step_s: float) -> None:
        """Takes back what consumers have read, and has more copied for them."""
        budget = _STEP_SHARE * step_s * _COPY_BYTES_PER_S if is_decoding else float("inf")
        for lending in list(self._lendings):
            loan = lending.loan
            is_closed = loan.is_closed
            for slot in map(Slot, loan.take_returned()):
                self._take_back(lending, slot)
            if is_closed:
                self._end(lending)
            elif self._clock() > lending.until_s:
                loan.fail("the lease is over")
                lending.blocks.clear()
                self._let_go(lending)
            else:
                budget -= self._lend_some(lending, budget)

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
        if names:
            self._lendings.append(lending)
        return loan

    def _parents(self, names: Sequence[BlockHash]) -> list[BlockHash | None]:
        if not len(names):
            return []
        first = self._pool.find(names[0])
        parent = self._shelf.parent(names[0]) if first is None else self._pool.named(first)[1]
        return [parent, *list(names)[:-1]]

    def _lend_some(self, lending: _Lending, budget: float) -> int:
        """Returns the bytes that the next step copies for it."""
        num_bytes = 0
        ready: list[tuple[int, Slot]] = []
        most = max(1, (self._shelf.num_free + len(lending.out)) // (2 * len(self._lendings)))
        while lending.blocks and num_bytes + self._format.block_bytes <= max(
            budget, self._format.block_bytes
        ):
            index, block_id, slot = lending.blocks[0]
            if block_id is None:
                assert slot is not None
                if ready or lending.num_copying:
                    break  # Blocks are lent in their order.
                lending.blocks.popleft()
                self._lend(lending, index, slot, self._shelf.checksum(slot))
                continue
            if len(lending.out) >= most or not (taken := self._shelf.take(1)):
                break
            lending.blocks.popleft()
            lending.out.update(taken)
            self._copies.out(block_id, taken[0])
            ready.append((index, taken[0]))
            num_bytes += self._format.block_bytes
        if ready:
            lending.num_copying += 1
            self._copies.then(lambda: self._copied(lending, ready))
        return num_bytes

    def _copied(self, lending: _Lending, ready: list[tuple[int, Slot]]) -> None:
        lending.num_copying -= 1
        if lending not in self._lendings or lending.loan.error:
            for _, slot in ready:
                self._take_back(lending, slot)
            return
        for index, slot in ready:
            self._lend(lending, index, slot, b"")

    def _lend(self, lending: _Lending, index: int, slot: Slot, checksum: bytes) -> None:
        lent = Lent(index, slot, checksum or checksum_of(self._host_XC[slot]))
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
