"""Loans of an engine's blocks are bounded in duration and in their share of step time and KV cache,
and never cost a running request its room."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.worker.conftest import owner
from tests.worker.engine_requests import (
    MakeEngine,
    range_prompt,
    request,
    run,
)

from quire.worker.blocks.hashing import BlockHashes
from quire.worker.group_engine import GroupEngine
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.loans import LEASE_S, MAX_LOANS

PROMPT = range_prompt(41)
"""A prompt of 10 blocks of 4 tokens, and a token."""
BLOCK_BYTES = 4 * 3 * 8


class Rig:
    def __init__(self, make_engine: MakeEngine, **options: Any) -> None:
        self.now_s = 0.0
        self.engine, self.executor = make_engine(
            **{"num_blocks": 64, "host_kv_bytes": 1, **options}, clock=lambda: self.now_s
        )
        run(self.engine, request("first", PROMPT, max_tokens=1))

    def lend(self, prompt: list[int] = PROMPT) -> Loan:
        loan = self.engine.lend(
            names_of(self.engine, prompt), borrower_format=self.executor.kv_format
        )
        assert not isinstance(loan, str)
        return loan

    def num_copied(self) -> int:
        """Number of blocks copied by steps since the last call."""
        steps, self.executor.steps = self.executor.steps, []
        return sum(0 if step.copies_X22 is None else len(step.copies_X22) for step in steps)


@pytest.fixture
def rig(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Rig]:
    monkeypatch.setattr("quire.worker.parts.tiers.transfers._WAIT_S", 0.0)
    return lambda **options: Rig(make_engine, **options)


def names_of(engine: GroupEngine, prompt: list[int]) -> BlockHashes:
    return BlockHashes.of(engine._intake.sequence(request("x", prompt), 1).hashes)


def take(loan: Loan) -> list[Lent]:
    """Reads all blocks that are available now, and checks their bytes."""
    taken = []
    while (lent := loan.next(0)) is not None:
        positions = range(lent.index * 4, lent.index * 4 + 4)
        words = [[PROMPT[each], each, owner("")] for each in positions]
        expected = np.array(words, np.int64).reshape(-1).view(np.uint8)
        assert (loan.host_blocks_XC[lent.slot] == expected).all()
        assert lent.checksum == checksum_of(expected)
        taken.append(lent)
    return taken


def test_a_loan_is_the_beginning_that_is_there_in_order(rig: Callable[..., Rig]) -> None:
    group = rig()
    loan = group.lend([*PROMPT[:24], *range_prompt(16, first=9)])
    assert loan.hashes == names_of(group.engine, PROMPT)[:6]
    assert loan.parents == [None, *list(loan.hashes)[:-1]]
    group.engine.step()
    assert [lent.index for lent in take(loan)] == list(range(6))
    loan.close()
    group.engine.step()
    assert group.engine.stats().num_held_blocks == 0
    assert group.engine.stats().num_lent_tokens == 24
    assert not group.engine.has_work


def test_few_slots_are_enough(rig: Callable[..., Rig]) -> None:
    group = rig()
    transfers = group.engine.transfers
    assert transfers is not None
    transfers.host_tier.take(transfers.host_tier.num_free - 1)
    loan = group.lend()
    found = []
    for _ in range(10):
        group.engine.step()
        for lent in take(loan):
            found.append(lent.index)
            loan.give_back(lent.slot)
    assert found == list(range(10))


def test_loans_take_a_small_share_of_steps_that_decode(rig: Callable[..., Rig]) -> None:
    group = rig()
    group.engine.add_request(request("long", [7, 8, 9], max_tokens=50))
    group.engine.step()
    # The loans' share of about six steps' time has room for this many bytes.
    group.engine._counters.step_s = BLOCK_BYTES / 4e9 / 0.02 / 6
    group.num_copied()
    loans = [group.lend() for _ in range(3)]
    per_step = []
    for _ in range(24):
        group.engine.step()
        per_step.append(group.num_copied())
    assert max(per_step) == 1
    assert 2 <= sum(per_step) <= 5
    assert len({len(take(loan)) for loan in loans}) <= 2, "they take turns"


def test_no_more_than_a_few_loans_are_made(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=1_000)
    loans = [group.lend() for _ in range(MAX_LOANS)]
    refusal = group.engine.lend(loans[0].hashes, borrower_format=group.executor.kv_format)
    assert refusal == f"busy: {MAX_LOANS} loans are under way"
    loans[0].close()
    group.engine.step()
    assert group.lend().hashes


def test_a_loan_ends_with_its_lease(rig: Callable[..., Rig]) -> None:
    group = rig()
    loan = group.lend()
    group.now_s = LEASE_S + 1
    group.engine.step()
    assert loan.error == "the lease is over"
    assert loan.next(0) is None
    assert group.engine.stats().num_held_blocks == 0
    loan.close()
    group.engine.step()
    assert not group.engine.has_work


def test_all_loans_together_hold_half_of_the_cache(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=16)
    assert len(group.lend().hashes) == 8
    names = names_of(group.engine, PROMPT)
    refusal = "busy: loans hold as much of the KV cache as they may"
    assert group.engine.lend(names, borrower_format=group.executor.kv_format) == refusal
    assert group.engine.lend_most_useful(1 << 20) == refusal
    assert group.engine.stats().num_held_blocks == 8


def test_a_running_request_ends_a_loan_whose_room_it_needs(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=16)
    loan = group.lend()
    group.engine.add_request(request("long", range_prompt(50, first=20), max_tokens=1))
    ended = [output for _ in range(4) for output in group.engine.step()]
    assert [output.finish_reason for output in ended] == ["length"]
    assert loan.error == "the lender needs the room of these blocks"


def test_kept_blocks_are_lent_from_where_they_are(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=12, kv_offloading_size=30 * BLOCK_BYTES / 2**30)
    run(group.engine, request("next", range_prompt(33, first=25), max_tokens=1))
    num_kept = group.engine.events.snapshot().slower[0]
    assert len(num_kept) >= 5
    loan = group.lend()
    assert len(loan.hashes) >= 6
    for _ in range(3):
        group.engine.step()
    assert [lent.index for lent in take(loan)] == list(range(len(loan.hashes)))


def test_a_damaged_kept_block_is_not_lent(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=12, kv_offloading_size=30 * BLOCK_BYTES / 2**30)
    run(group.engine, request("next", range_prompt(33, first=25), max_tokens=1))
    transfers = group.engine.transfers
    assert transfers is not None
    names = list(names_of(group.engine, PROMPT))
    num_here = len(group.engine._pool.match(names))
    slot = transfers.match(names[num_here:])[1]
    transfers.host_blocks_XC[slot, 5] ^= 1
    loan = group.lend()
    for _ in range(3):
        group.engine.step()
    assert [lent.index for lent in take(loan)] == list(range(num_here + 1))
    assert loan.error.startswith(f"block {num_here + 1} (")
    assert loan.error.endswith("is corrupt")
    group.engine.step()
    assert group.engine.stats().num_corrupt_blocks == 1
    assert names[num_here + 1] not in transfers.host_tier


def test_the_blocks_found_most_are_lent_with_all_before_them(rig: Callable[..., Rig]) -> None:
    group = rig()
    other = range_prompt(21, first=30)
    for number in range(3):
        run(group.engine, request(f"r{number}", other, max_tokens=1))
    loan = group.engine.lend_most_useful(7 * BLOCK_BYTES)
    assert not isinstance(loan, str)
    assert set(loan.hashes) >= set(names_of(group.engine, other)[:5])
    for name, parent in zip(loan.hashes, loan.parents, strict=True):
        assert parent is None or list(loan.hashes).index(parent) < list(loan.hashes).index(name)


def test_an_engine_whose_blocks_stay_lends_none(make_engine: MakeEngine) -> None:
    engine, executor = make_engine()
    refusal = "this group's blocks do not leave its KV cache"
    assert engine.lend(BlockHashes(), borrower_format=executor.kv_format) == refusal
    assert engine.lend_most_useful(1 << 20) == refusal


def kept_chain(group: Rig) -> BlockHashes:
    """The names of a prompt's blocks, all of which host memory keeps and the KV cache does not."""
    for first in (25, 30, 35):
        run(group.engine, request(f"r{first}", range_prompt(41, first=first), max_tokens=1))
    names = names_of(group.engine, PROMPT)
    transfers = group.engine.transfers
    assert transfers is not None
    assert not group.engine._pool.match(names)
    assert len(transfers.match(names)) == 10
    return names


def test_a_chain_in_host_memory_is_lent_without_a_step(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=12, kv_offloading_size=60 * BLOCK_BYTES / 2**30)
    names = kept_chain(group)
    loan = group.engine.lend_kept(names, borrower_format=group.executor.kv_format)
    assert loan is not None
    assert loan.parents == [None, *list(names)[:-1]]
    lent = take(loan)
    assert [each.index for each in lent] == list(range(10))
    transfers = group.engine.transfers
    assert transfers is not None
    assert sum(transfers.host_tier._pins) == 10
    for each in lent:
        loan.give_back(each.slot)
    loan.close()
    assert group.engine.has_work
    group.engine.step()
    assert not any(transfers.host_tier._pins)
    assert group.engine.stats().num_lent_tokens == 40
    assert not group.engine.has_work


def test_without_a_step_nothing_is_lent_in_part_or_in_another_format(
    rig: Callable[..., Rig],
) -> None:
    group = rig(num_blocks=12, kv_offloading_size=60 * BLOCK_BYTES / 2**30)
    names, format = kept_chain(group), group.executor.kv_format
    more = names_of(group.engine, [*PROMPT[:40], *range_prompt(9, first=3)])
    assert group.engine.lend_kept(more, borrower_format=format) is None
    other = replace(format, head_bytes=format.head_bytes * 2)
    assert group.engine.lend_kept(names, borrower_format=other) is None
    assert group.engine.lend_kept(BlockHashes(), borrower_format=format) is None
    assert not group.engine.has_work


def test_a_damaged_chain_in_host_memory_ends_there(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=12, kv_offloading_size=60 * BLOCK_BYTES / 2**30)
    names = kept_chain(group)
    transfers = group.engine.transfers
    assert transfers is not None
    transfers.host_blocks_XC[transfers.match(names)[4], 5] ^= 1
    loan = group.engine.lend_kept(names, borrower_format=group.executor.kv_format)
    assert loan is not None
    assert len(take(loan)) == 4
    assert loan.error.startswith("block 4 (")
    loan.close()
    group.engine.step()
    assert group.engine.stats().num_corrupt_blocks == 1
    assert len(transfers.match(names)) == 4
    assert not any(transfers.host_tier._pins)


def test_chains_are_lent_by_threads_while_the_engine_evicts_others(rig: Callable[..., Rig]) -> None:
    group = rig(num_blocks=12, kv_offloading_size=24 * BLOCK_BYTES / 2**30)
    names, format = names_of(group.engine, PROMPT), group.executor.kv_format
    is_over = threading.Event()
    lent: list[int] = []

    def lend() -> None:
        while not is_over.is_set():
            loan = group.engine.lend_kept(names, borrower_format=format)
            if loan is not None:
                lent.append(len(take(loan)))  # `take` checks the bytes.
                loan.close()

    with ThreadPoolExecutor() as threads:
        running = [threads.submit(lend) for _ in range(2)]
        try:
            for number in range(60):
                prompt = PROMPT if number % 3 == 0 else range_prompt(41, first=number % 7 + 20)
                group.engine.add_request(request(f"r{number}", prompt, max_tokens=1))
                while not group.engine.step():  # Not until no loans are left.
                    pass
        finally:
            is_over.set()
        for each in running:
            each.result()
    while group.engine.has_work:
        group.engine.step()
    assert lent
    assert set(lent) == {10}
    transfers = group.engine.transfers
    assert transfers is not None
    assert not any(transfers.host_tier._pins)
