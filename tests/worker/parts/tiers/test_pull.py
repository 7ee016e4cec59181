"""`Pull` and `Loan`, which pass blocks between engines and fetchers or consumers across threads."""

import threading

import numpy as np

from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import KvFormat
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.pull import Landed, Pull

FORMAT = KvFormat(num_layers=1, num_kv_heads=1, head_bytes=8, block_size=4)
NAMES = BlockHashes.of(BlockHash(bytes([number]) * 32) for number in range(100))
NUM_SLOTS = 3


def pull_of(changed: threading.Event) -> Pull:
    return Pull(
        NAMES,
        format=FORMAT,
        host_blocks_XC=np.zeros((NUM_SLOTS, FORMAT.block_bytes), np.uint8),
        source=None,
        on_change=changed.set,
    )


def loan_of(changed: threading.Event) -> Loan:
    return Loan(
        NAMES,
        [None, *list(NAMES)[:-1]],
        format=FORMAT,
        host_blocks_XC=np.zeros((NUM_SLOTS, FORMAT.block_bytes), np.uint8),
        on_change=changed.set,
    )


def test_any_number_of_blocks_comes_through_few_slots() -> None:
    changed = threading.Event()
    pull = pull_of(changed)

    def fetch() -> None:
        for index in range(len(NAMES)):
            slot = None
            while slot is None:
                slot = pull.next_slot(1)
            pull.host_blocks_XC[slot] = index
            pull.landed(index, slot, bytes([index]))
        pull.end()

    thread = threading.Thread(target=fetch)
    thread.start()
    pull.grant(range(NUM_SLOTS))
    found = []
    is_over = False
    while not is_over:
        changed.wait(1)
        changed.clear()
        is_over = pull.is_over  # Nothing lands after the end.
        for landed in pull.take():
            assert (pull.host_blocks_XC[landed.slot] == landed.index).all()
            found.append(landed.index)
            pull.grant([landed.slot])
    thread.join()
    assert found == list(range(len(NAMES)))


def test_a_cancelled_pull_hands_out_no_slot() -> None:
    pull = pull_of(threading.Event())
    pull.grant([0, 1])
    assert pull.next_slot(0) == 0
    pull.cancel()
    assert pull.next_slot(60) is None
    assert pull.is_cancelled
    assert not pull.is_over
    pull.landed(0, 0, b"sum")  # It was under way.
    pull.end("nobody waits")
    assert pull.take() == [Landed(0, 0, b"sum")]
    assert (pull.is_over, pull.error) == (True, "nobody waits")


def test_a_fetcher_that_waits_hears_of_the_end() -> None:
    pull = pull_of(threading.Event())
    found: list[int | None] = [5]
    thread = threading.Thread(target=lambda: found.append(pull.next_slot(600)))
    thread.start()
    pull.cancel()
    thread.join()
    assert found == [5, None]


def test_a_consumer_that_waits_hears_of_the_end() -> None:
    changed = threading.Event()
    loan = loan_of(changed)
    found: list[Lent | None] = []
    thread = threading.Thread(target=lambda: found.append(loan.next(600)))
    thread.start()
    loan.fail("the lease is over")
    thread.join()
    assert (found, loan.error) == ([None], "the lease is over")
    loan.close()
    assert loan.is_closed
    assert changed.is_set()


def test_what_was_lent_before_a_loan_failed_can_be_read() -> None:
    loan = loan_of(threading.Event())
    lent = Lent(0, 2, checksum_of(loan.host_blocks_XC[2]))
    loan.lend(lent)
    loan.fail("no more")
    assert loan.next(0) == lent
    assert loan.next(0) is None
    loan.give_back(2)
    assert loan.take_returned() == [2]
    assert loan.take_returned() == []
