"""Random requests while blocks move to and from a small host memory, to borrowers, and from another
group that is slow, stops early or never ends. Every token must equal that of the prompt alone,
every lent block must have the right bytes, and nothing may be left over."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from tests.examples import examples
from tests.prepared import prepared
from tests.worker.conftest import owner
from tests.worker.engine.test_engine_machine import ADAPTERS, EngineMachine, Generate, MakeEngine

from quire.worker.blocks.events import BlockEvent, BlocksRemoved, BlocksStored
from quire.worker.blocks.hashing import BlockHash, BlockHashes, hash_blocks, root_hash
from quire.worker.blocks.kv_format import Bytes, PeerSource
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.pull import Pull
from quire.worker.request.errors import QueueFull
from quire.worker.step.messages import StepInput

SECONDS = [0.0, 0.001, 0.1, 40.0]


@dataclass(eq=False)
class Peer:
    """Another group's side of a pull."""

    pull: Pull
    num_sent: int = 0
    slots: list[int] = field(default_factory=list)
    """Slots taken and not yet filled."""


class TravelMachine(EngineMachine):
    def __init__(self, make_engine: MakeEngine, generate: Generate) -> None:
        super().__init__(make_engine, generate)
        self.now_s = 0.0
        self.peers: list[Peer] = []
        self.loans: list[tuple[Loan, list[Lent]]] = []
        self.bytes_of: dict[BlockHash, Bytes] = {}
        self.chains: list[BlockHashes] = []
        self.tiers: dict[BlockHash, int] = {}
        self.num_spoiled = 0

    @initialize(
        num_blocks=st.integers(6, 24),
        num_kept=st.sampled_from([0, 4, 20]),
        max_num_seqs=st.integers(1, 8),
        extra_tokens=st.integers(0, 40),
        num_ahead=st.sampled_from([0, 1]),
    )
    def start(
        self, num_blocks: int, num_kept: int, max_num_seqs: int, extra_tokens: int, num_ahead: int
    ) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr("quire.worker.parts.tiers.transfers._WAIT_S", 0.0)
        self.patch.setattr("quire.worker.parts.tiers.transfers.MIN_PULL_TOKENS", 8)
        self.block_size = 4
        self.num_ahead = num_ahead
        block_bytes = 3 * 8 * self.block_size
        self.engine, self.executor = self.make_engine(
            block_size=self.block_size,
            num_blocks=num_blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_tokens,
            num_ahead=num_ahead,
            speculation=False,
            enable_lora=True,
            max_loras=2,
            read_adapter=lambda _: object(),
            host_kv_bytes=1,
            kv_offloading_size=num_kept * block_bytes / 2**30,
            fetch=lambda pull: self.peers.append(Peer(pull)),
            clock=lambda: self.now_s,
        )
        self.max_loras = 2
        for adapter in ADAPTERS:
            self.engine.check_request(prepared("adapter", [2], adapter=adapter, max_tokens=1))
        self.executor.on_execute = self.its_blocks_are_held
        self.max_num_seqs, self.max_num_tokens = max_num_seqs, max_num_seqs + extra_tokens
        self.engine.events.subscribe(self.replay)
        self.will_fetch = True

    @property
    def transfers(self) -> Any:
        return self.engine.transfers

    def source(self) -> PeerSource | None:
        return PeerSource(group_id="other", address="", num_blocks=7) if self.will_fetch else None

    @rule(will_fetch=st.booleans())
    def route(self, will_fetch: bool) -> None:
        self.will_fetch = will_fetch

    @rule(seconds=st.sampled_from(SECONDS))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.peers)
    @rule(choice=st.integers(0, 100), num_blocks=st.integers(1, 8), ends=st.booleans())
    def send(self, choice: int, num_blocks: int, ends: bool) -> None:
        """Another group sends some blocks, and may end before the last."""
        peer = self.peers[choice % len(self.peers)]
        pull = peer.pull
        for _ in range(num_blocks):
            slot = pull.next_slot(0)
            if slot is None or peer.num_sent == len(pull.hashes):
                break
            # A pull may have ended by then; the group still writes to the slot.
            block_C = self.bytes_of[pull.hashes[peer.num_sent]]
            pull.host_blocks_XC[slot] = block_C
            pull.landed(peer.num_sent, slot, checksum_of(block_C))
            peer.num_sent += 1
        if ends or pull.is_cancelled or peer.num_sent == len(pull.hashes):
            self.peers.remove(peer)
            pull.end("" if peer.num_sent == len(pull.hashes) else "it went away")

    @precondition(lambda self: self.chains)
    @rule(choice=st.integers(0, 100), num_blocks=st.integers(1, 12))
    def lend(self, choice: int, num_blocks: int) -> None:
        hashes = self.chains[choice % len(self.chains)][:num_blocks]
        loan = self.engine.lend(hashes, borrower_format=self.executor.kv_format)
        self.take_loan(loan)

    @rule(num_blocks=st.integers(0, 12))
    def lend_most_useful(self, num_blocks: int) -> None:
        num_bytes = num_blocks * self.executor.kv_format.block_bytes
        loan = self.engine.lend_most_useful(num_bytes)
        if not isinstance(loan, str):
            assert len(loan.hashes) <= num_blocks
        self.take_loan(loan)

    def take_loan(self, loan: Loan | str) -> None:
        if isinstance(loan, str):
            assert loan.startswith("busy")
        elif loan.hashes:
            self.loans.append((loan, []))

    @precondition(lambda self: self.loans)
    @rule(choice=st.integers(0, 100), gives_back=st.booleans(), closes=st.booleans())
    def borrow(self, choice: int, gives_back: bool, closes: bool) -> None:
        """A borrower reads lent blocks."""
        number = choice % len(self.loans)
        loan, lent = self.loans[number]
        while (more := loan.next(0)) is not None:
            lent.append(more)
        for each in lent:
            block_C = self.bytes_of[loan.hashes[each.index]]
            assert (loan.host_blocks_XC[each.slot] == block_C).all()
            assert each.checksum == checksum_of(block_C)
        if gives_back:
            while lent:
                loan.give_back(lent.pop().slot)
        if closes:
            loan.close()
            del self.loans[number]

    @precondition(lambda self: self.chains)
    @rule(choice=st.integers(0, 100))
    def take_in(self, choice: int) -> None:
        hashes = self.chains[choice % len(self.chains)]
        source = PeerSource(group_id="other", address="", num_blocks=len(hashes))
        if hashes:
            num_cached = self.engine.stats().num_cached_blocks
            try:
                self.engine.take_in(hashes, [None, *list(hashes)[:-1]], source)
            except QueueFull:
                assert len(self.transfers.pulls._arrivals) >= 64
            assert self.engine.stats().num_cached_blocks >= num_cached

    @rule(choice=st.integers(0, 100))
    def spoil(self, choice: int) -> None:
        """Flips a bit of a kept block that nobody is reading."""
        host_tier = self.transfers.host_tier
        slots = [slot for slot in host_tier._slot_of.values() if not host_tier._pins[slot]]
        if slots:
            self.executor.host_blocks_XC[slots[choice % len(slots)], choice % 96] ^= 1
            self.num_spoiled += 1

    @invariant()
    def counts_add_up(self) -> None:
        stats = self.engine.stats()
        total = stats.num_free_blocks + stats.num_cached_blocks + stats.num_held_blocks
        assert total == stats.num_total_blocks
        assert stats.num_running + stats.num_waiting <= len(self.expected)
        assert self.engine.has_work or not self.expected
        assert 0 <= stats.num_hit_tokens <= stats.num_prompt_tokens
        assert stats.num_corrupt_blocks <= self.num_spoiled

    @invariant()
    def no_slot_has_two_users(self) -> None:
        transfers = self.transfers
        free, kept = list(transfers.host_tier._free), list(transfers.host_tier._slot_of.values())
        granted = [slot for arrival in transfers.pulls._arrivals for slot in arrival.granted]
        landed = [each.slot for arrival in transfers.pulls._arrivals for each in arrival.landed]
        lent = [slot for lending in transfers.loans._lendings for slot in lending.out]
        slots = free + kept + granted + landed + lent
        assert len(set(slots)) == len(slots) <= transfers.host_tier.num_slots

    @invariant()
    def events_replay_to_what_is_stored(self) -> None:
        snapshot = self.engine.events.snapshot()
        stored = dict.fromkeys(snapshot.snapshot or (), 0)
        for tier, hashes in enumerate(snapshot.slower, 1):
            stored |= dict.fromkeys(hashes, tier)
        assert stored == self.tiers

    @invariant()
    def no_chain_is_cut_in_its_middle(self) -> None:
        for block_hash, tier in self.tiers.items():
            parent = self.parents[block_hash]
            # If a tier has a block, it or a faster tier also has the block's ancestors.
            assert parent is None or self.tiers.get(parent, tier + 1) <= tier

    def its_blocks_are_held(self, step: StepInput) -> None:
        if len(step.token_ids_T):
            super().its_blocks_are_held(step)

    def replay(self, _: int, event: BlockEvent) -> None:
        match event:
            case BlocksStored(hashes, tier):
                self.tiers |= dict.fromkeys(hashes, tier)
            case BlocksRemoved(hashes):
                for block_hash in hashes:
                    del self.tiers[block_hash]

    def learn_chain(self, tokens: list[int], salt: str, adapter: str) -> None:
        super().learn_chain(tokens, salt, adapter)
        root = root_hash(
            model_fingerprint="hash-1",
            kv_dtype="float32",
            block_size=self.block_size,
            cache_salt=salt,
            adapter=adapter,
        )
        hashes = hash_blocks(np.array(tokens, np.uint32), block_size=self.block_size, root=root)
        self.chains.append(hashes)
        for index, name in enumerate(hashes):
            positions = range(index * self.block_size, (index + 1) * self.block_size)
            words = [[tokens[each], each, owner(adapter)] for each in positions]
            self.bytes_of[name] = np.array(words, np.int64).reshape(-1).view(np.uint8)

    def run_to_the_end(self) -> None:
        """Runs all requests; other groups stay silent until no request waits for them."""
        for number in range(20_000):
            if not self.expected:
                break
            self.now_s += 0.01
            self.step(1)
            if number > 10_000:
                self.now_s += 1
        assert not self.expected, "a request never ended"
        for peer in self.peers:
            peer.pull.end("gone")
        for loan, _ in self.loans:
            loan.close()
        self.peers.clear()
        for _ in range(100):
            self.step(1)
        transfers, stats = self.transfers, self.engine.stats()
        assert not self.engine.has_work
        assert (stats.num_held_blocks, stats.num_pending_prefill_tokens) == (0, 0)
        assert (
            transfers.host_tier.num_free + transfers.host_tier.num_kept
            == transfers.host_tier.num_slots
        )
        assert not any(transfers.host_tier._pins)
        assert not transfers.host_tier._filling
        assert not transfers.pulls._coming
        assert (transfers.pulls._num_held, transfers.loans._num_held) == (0, 0)
        self.events_replay_to_what_is_stored()
        self.engine.close()


def test_tokens_are_the_same_whatever_travels(
    make_engine: Callable[..., Any], generate: Generate
) -> None:
    run_state_machine_as_test(
        lambda: TravelMachine(make_engine, generate),  # type: ignore[arg-type]
        settings=settings(max_examples=examples(100), stateful_step_count=40, deadline=None),
    )
