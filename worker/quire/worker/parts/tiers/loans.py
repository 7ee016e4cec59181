"""The loans under way: passes blocks from the KV cache and host memory to threads that send them to
other groups.

A loan's blocks are held until it ends: its consumer closes it, or its lease expires. While
sequences decode, copies for loans take a small share of each step. Blocks in host memory are lent
in place. If host memory has a whole chain, `lend_kept` lends it without waiting for a step. While
sequences decode, blocks in host memory are read at the rate of copies: on a CPU, the decodes need
the memory bandwidth.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.cache.block_pool import BlockId, BlockPool
from quire.worker.engine.part import Slot
from quire.worker.parts.tiers.checker import OnCorrupt
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.copies import Copies
from quire.worker.parts.tiers.host_tier import HostTier
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.pace import Pace

MAX_LOANS = 16
LEASE_S = 30.0
_STEP_SHARE = 0.02
"""Most of the steps' time that all loans together may take while sequences decode."""
_POOL_SHARE = 0.5
"""Most of the KV cache that all loans together may hold."""
_ALL_HELD = "busy: loans hold as much of the KV cache as they may"
_BYTES_PER_S = 4e9
"""Estimated copy rate. `_STEP_SHARE` is so small that an estimate is enough."""


@dataclass(eq=False)
class _Lending:
    loan: Loan
    until_s: float
    blocks: deque[tuple[int, BlockId | None, Slot | None]]
    """Blocks that are not lent yet: index in the loan, and place in the KV cache or host memory."""
    holds: list[BlockId]
    pins: set[Slot] = field(default_factory=set)
    """Slots with kept blocks that are pinned for the loan."""
    out: set[Slot] = field(default_factory=set)
    """Free slots that were taken for copies of the loan's blocks."""
    num_copying: int = 0


class Loans:
    """Used from the engine's thread, except `lend_kept`."""

    def __init__(
        self,
        pool: BlockPool,
        host_tier: HostTier,
        copies: Copies,
        *,
        format: KvFormat,
        host_blocks_XC: Bytes,
        on_change: Callable[[], None],
        on_corrupt: OnCorrupt,
        clock: Callable[[], float],
    ) -> None:
        self.num_lent_tokens = 0
        self._pool = pool
        self._host_tier = host_tier
        self._copies = copies
        self._format = format
        self._host_XC = host_blocks_XC
        self._on_change = on_change
        self._on_corrupt = on_corrupt
        self._clock = clock
        self._lendings = deque[_Lending]()
        self._begun = deque[_Lending]()  # New loans from other threads.
        self._num_held = 0
        self._credit = 0.0  # Bytes that may still be copied for loans.
        self._pace = Pace(_STEP_SHARE * _BYTES_PER_S)
        self._is_decoding = False

    @property
    def num_loans(self) -> int:
        return len(self._lendings) + len(self._begun)

    def lend(self, hashes: BlockHashes) -> Loan | str:
        """Lends the longest prefix of ``hashes`` that is in the KV cache and then in host memory.
        Returns a reason if none is lent."""
        if self.num_loans >= MAX_LOANS:
            return f"busy: {self.num_loans} loans are under way"
        found = self._pool.match(hashes)
        block_ids = found[: self._most_held]
        if found and not block_ids:
            return _ALL_HELD
        slots = self._host_tier.match(hashes[len(block_ids) :]) if block_ids == found else []
        names = hashes[: len(block_ids) + len(slots)]
        parents = self._parents(names)
        self._pool.hold(block_ids)
        return self._begin(names, parents, block_ids, slots)

    def lend_kept(self, hashes: BlockHashes) -> Loan | None:
        """Lends ``hashes`` if host memory has them all. Can be called from any thread."""
        if self.num_loans >= MAX_LOANS or not hashes:
            return None
        pinned = self._host_tier.pin_all(hashes)
        if pinned is None:
            return None
        parent, kept = pinned
        loan = self._loan(hashes, [parent, *list(hashes)[:-1]])
        for index, (slot, checksum) in enumerate(kept):
            loan.lend(Lent(index, slot, checksum, is_kept=True))
        pins = {slot for slot, _ in kept}
        until_s = self._clock() + LEASE_S
        self._begun.append(_Lending(loan, until_s, deque(), holds=[], pins=pins))
        return loan

    def lend_most_useful(self, num_bytes: int) -> Loan | str:
        """Lends up to ``num_bytes`` of the most requested blocks of the KV cache, each with all
        blocks before it in its chain. Returns a reason if none is lent."""
        if self.num_loans >= MAX_LOANS:
            return f"busy: {self.num_loans} loans are under way"
        if not self._most_held:
            return _ALL_HELD
        num_blocks = min(num_bytes // self._format.block_bytes, self._most_held)
        block_ids = self._pool.most_useful(num_blocks)
        named = [self._pool.named(block_id) for block_id in block_ids]
        self._pool.hold(block_ids)
        names = BlockHashes.of(name for name, _ in named)
        return self._begin(names, [parent for _, parent in named], block_ids, [])

    def advance(self, *, is_decoding: bool, step_s: float) -> None:
        """Takes back slots that consumers have read, and schedules copies of more blocks. Loans
        take turns."""
        self._is_decoding = is_decoding
        per_step = _STEP_SHARE * step_s * _BYTES_PER_S
        # Unused bytes accumulate up to one block, since a block may exceed a step's share.
        self._credit = min(self._credit + per_step, max(per_step, self._format.block_bytes))
        if not is_decoding:
            self._credit = float("inf")
        self._lendings.rotate(-1)
        while self._begun:
            self.num_lent_tokens += len(self._begun[0].pins) * self._pool.block_size
            self._lendings.append(self._begun.popleft())
        for lending in list(self._lendings):
            loan = lending.loan
            is_closed = loan.is_closed
            for lent in loan.take_corrupt():
                self._fail(lending, loan.error)
                self._on_corrupt(loan.hashes[lent.index], Slot(lent.slot), lent.is_kept)
            for slot in map(Slot, loan.take_returned()):
                self._take_back(lending, slot)
            if is_closed:
                self._end(lending)
            elif self._clock() > lending.until_s:
                self._fail(lending, "the lease is over")
            else:
                self._lend_some(lending)

    def yield_room(self) -> bool:
        """Releases all blocks of the KV cache, and so ends their loans. Returns whether there were
        any."""
        had_some = self._num_held > 0
        for lending in self._lendings:
            if lending.holds:
                self._fail(lending, "the lender needs the room of these blocks")
        return had_some

    def close(self) -> None:
        for lending in (*self._lendings, *self._begun):
            lending.loan.fail("the engine is closed")

    def _begin(
        self,
        names: BlockHashes,
        parents: list[BlockHash | None],
        block_ids: Sequence[BlockId],
        slots: Sequence[Slot],
    ) -> Loan:
        loan = self._loan(names, parents)
        blocks = deque[tuple[int, BlockId | None, Slot | None]]()
        blocks += [(index, block_id, None) for index, block_id in enumerate(block_ids)]
        blocks += [(index, None, slot) for index, slot in enumerate(slots, len(block_ids))]
        lending = _Lending(loan, self._clock() + LEASE_S, blocks, list(block_ids), set(slots))
        for slot in slots:
            self._host_tier.pin(slot)
        self._num_held += len(block_ids)
        if names:
            self._lendings.append(lending)
        return loan

    def _loan(self, names: BlockHashes, parents: list[BlockHash | None]) -> Loan:
        return Loan(
            names,
            parents,
            format=self._format,
            host_blocks_XC=self._host_XC,
            on_change=self._on_change,
            pause_s=lambda num: self._pace.delay_s(num) if self._is_decoding else 0.0,
        )

    @property
    def _most_held(self) -> int:
        """Most blocks that a new loan may hold."""
        return max(0, int(_POOL_SHARE * self._pool.num_blocks) - self._num_held)

    def _fail(self, lending: _Lending, reason: str) -> None:
        """Ends a loan. Its slots are taken back when the consumer has read them."""
        if not lending.loan.error:
            lending.loan.fail(reason)
        lending.blocks.clear()
        self._let_go(lending)

    def _parents(self, names: Sequence[BlockHash]) -> list[BlockHash | None]:
        if not len(names):
            return []
        first = self._pool.find(names[0])
        parent = self._host_tier.parent(names[0]) if first is None else self._pool.named(first)[1]
        return [parent, *list(names)[:-1]]

    def _lend_some(self, lending: _Lending) -> None:
        """Copies or lends as many blocks as the credit and the free slots allow."""
        ready: list[tuple[int, Slot]] = []
        most = max(1, (self._host_tier.num_free + len(lending.out)) // (2 * len(self._lendings)))
        while lending.blocks:
            index, block_id, slot = lending.blocks[0]
            if block_id is None:
                assert slot is not None
                if ready or lending.num_copying:
                    break  # Blocks are lent in order.
                self._lend(lending, Lent(index, slot, self._host_tier.checksum(slot), is_kept=True))
            elif (
                self._credit >= self._format.block_bytes
                and len(lending.out) < most
                and (taken := self._host_tier.take(1))
            ):
                self._credit -= self._format.block_bytes
                lending.out.update(taken)
                self._copies.out(block_id, taken[0])
                ready.append((index, taken[0]))
            else:
                break
            lending.blocks.popleft()
        if ready:
            lending.num_copying += 1
            self._copies.then(lambda: self._copied(lending, ready))

    def _copied(self, lending: _Lending, ready: list[tuple[int, Slot]]) -> None:
        lending.num_copying -= 1
        if lending not in self._lendings or lending.loan.error:
            for _, slot in ready:
                self._take_back(lending, slot)
            return
        for index, slot in ready:
            self._lend(lending, Lent(index, slot, checksum_of(self._host_XC[slot])))

    def _lend(self, lending: _Lending, lent: Lent) -> None:
        lending.loan.lend(lent)
        self.num_lent_tokens += self._pool.block_size

    def _take_back(self, lending: _Lending, slot: Slot) -> None:
        if slot in lending.out:
            lending.out.discard(slot)
            self._host_tier.give_back([slot])
        elif slot in lending.pins:
            lending.pins.discard(slot)
            self._host_tier.unpin(slot)

    def _let_go(self, lending: _Lending) -> None:
        """Drops the references to blocks of the KV cache. Copies under way are still made, before
        any step that writes to these blocks."""
        self._pool.release(lending.holds)
        self._num_held -= len(lending.holds)
        lending.holds = []

    def _end(self, lending: _Lending) -> None:
        self._lendings.remove(lending)
        self._let_go(lending)
        if lending.num_copying:  # The slots of these copies are free when the step has run.
            copying = lending
            self._copies.then(lambda: self._take_back_all(copying))
        else:
            self._take_back_all(lending)

    def _take_back_all(self, lending: _Lending) -> None:
        for slot in (*lending.out, *lending.pins):
            self._take_back(lending, slot)
