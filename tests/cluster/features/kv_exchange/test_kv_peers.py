"""Transfers of blocks between groups: blocks arrive as lent, or the pull ends."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from tests.cluster.kv_peers import (
    FORMAT,
    FRAME_BYTES,
    BorrowingEngine,
    LendingGroup,
    chain,
    lending_group,
)
from tests.flaky_proxy import Fault, FlakyProxy

from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.cluster.features.kv_exchange.frames import HEADER_BYTES, end_frame
from quire.cluster.features.kv_exchange.warming import Warming
from quire.cluster.tls import own_tls
from quire.cluster.wire import format_to_proto, source_to_proto
from quire.v1 import group_pb2 as pb
from quire.worker.blocks.hashing import BlockHash
from quire.worker.parts.tiers.pull import Pull

pytestmark = pytest.mark.anyio

BLOCKS = chain(6)
NAMES = list(BLOCKS)


@contextlib.asynccontextmanager
async def borrowing(**options: Any) -> AsyncIterator[Borrower]:
    borrower = Borrower(**{"stall_s": 0.3, **options})
    try:
        yield borrower
    finally:
        await borrower.close()
        assert not borrower.num_pulls


async def fetched(
    borrower: Borrower, group: LendingGroup, names: list[BlockHash] = NAMES, **changes: Any
) -> tuple[dict[BlockHash, bytes], str]:
    """Pulls blocks; returns those that arrived, and the error that ended the pull."""
    engine = BorrowingEngine()
    pull = engine.pull(names, replace(group.source, **changes))
    borrower.fetch(pull)
    await engine.over.wait()
    return engine.blocks, pull.error


async def test_blocks_arrive_as_they_are() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        assert await fetched(borrower, group) == (BLOCKS, "")
        await group.settle()


async def test_behind_tls_they_arrive_over_the_groups_own_certificate() -> None:
    tls = own_tls()
    async with lending_group(BLOCKS, tls=tls) as group, borrowing() as borrower:
        assert await fetched(borrower, group) == (BLOCKS, "")
        other = own_tls().certificate
        blocks, error = await fetched(borrower, group, certificate=other)
        assert not blocks
        assert error.startswith(f"peer g7 at {group.source.address}: asking: UNAVAILABLE")


async def test_a_group_that_has_the_first_blocks_lends_those() -> None:
    async with lending_group(chain(4)) as group, borrowing() as borrower:
        group.engine.blocks = {name: BLOCKS[name] for name in NAMES[:4]}
        blocks, error = await fetched(borrower, group)
        assert blocks == {name: BLOCKS[name] for name in NAMES[:4]}
        assert error == f"peer g7 at {group.source.address}: 4 of 6 blocks: it has no more"
        assert (await fetched(borrower, group, NAMES[4:]))[1].endswith("it refused: it has none")


# Every frame boundary, and positions in every header and block.
CUTS = sorted(
    {index * FRAME_BYTES for index in range(6)}
    | {index * FRAME_BYTES + 30 for index in range(6)}
    | {index * FRAME_BYTES + HEADER_BYTES for index in range(2)}
    | {index * FRAME_BYTES + HEADER_BYTES + 100 * index + 1 for index in range(6)}
)


def assert_begins(blocks: dict[BlockHash, bytes], num_blocks: int) -> None:
    assert blocks == {name: BLOCKS[name] for name in NAMES[:num_blocks]}


@contextlib.asynccontextmanager
async def behind_proxy(fault: Fault) -> AsyncIterator[tuple[LendingGroup, FlakyProxy]]:
    async with lending_group(BLOCKS) as group:
        with FlakyProxy(group.lender.port, fault) as proxy:

            def redirect(answer: Any) -> None:
                answer.port = proxy.port

            group.service.spoil = redirect
            yield group, proxy
        await group.settle()


async def test_a_connection_may_be_cut_anywhere() -> None:
    assert len(CUTS) == 20
    async with borrowing(shunned_s=0) as borrower, behind_proxy(Fault()) as (group, proxy):
        for cut_at in CUTS:
            proxy.fault = Fault(cut_at=cut_at)
            blocks, error = await fetched(borrower, group)
            whole = cut_at // FRAME_BYTES
            assert_begins(blocks, whole)
            assert error.startswith(f"peer g7 at {group.source.address}: block {whole} of 6: ")
            assert "connection" in error.lower()


async def test_no_byte_may_be_another() -> None:
    async with borrowing(shunned_s=0) as borrower, behind_proxy(Fault()) as (group, proxy):
        in_header = range(2 * FRAME_BYTES, 2 * FRAME_BYTES + HEADER_BYTES, 3)
        in_block = range(2 * FRAME_BYTES + HEADER_BYTES, 3 * FRAME_BYTES, 97)
        for flip_at in (*in_header, *in_block):
            proxy.fault = Fault(flip_at=flip_at)
            blocks, error = await fetched(borrower, group)
            assert_begins(blocks, 2)
            assert error.startswith(f"peer g7 at {group.source.address}: block 2 of 6: ")


def swapped(stream: bytes) -> bytes:
    first, second = stream[:FRAME_BYTES], stream[FRAME_BYTES : 2 * FRAME_BYTES]
    return second + first + stream[2 * FRAME_BYTES :]


def of_another_name(stream: bytes) -> bytes:
    header = bytearray(stream[FRAME_BYTES : FRAME_BYTES + HEADER_BYTES])
    header[16:48] = b"x" * 32
    return stream[:FRAME_BYTES] + bytes(header) + stream[FRAME_BYTES + HEADER_BYTES :]


def short(stream: bytes) -> bytes:
    """Removes a byte of the second block; later frames follow."""
    return stream[: 2 * FRAME_BYTES - 1] + stream[2 * FRAME_BYTES :]


def ended(stream: bytes) -> bytes:
    return stream[:FRAME_BYTES] + end_frame(1, "the lease is over")


def too_long(stream: bytes) -> bytes:
    header = bytearray(stream[FRAME_BYTES : FRAME_BYTES + HEADER_BYTES])
    header[8:16] = (2**40).to_bytes(8, "little")
    return stream[:FRAME_BYTES] + bytes(header) + stream[FRAME_BYTES + HEADER_BYTES :]


@pytest.mark.parametrize(
    ("edit", "num_blocks", "reason"),
    [
        (swapped, 0, "block 0 of 6: its place is 1, not 0"),
        (of_another_name, 1, "block 1 of 6: its name is " + "78" * 32 + ", not " + "01" * 32),
        (too_long, 1, f"block 1 of 6: its length is {2**40}, not {FORMAT.block_bytes}"),
        (short, 1, "block 1 of 6: its bytes do not have the checksum"),
        (ended, 1, "block 1 of 6: the peer sends no more: the lease is over"),
    ],
)
async def test_what_a_broken_lender_sends_is_refused(
    edit: Any, num_blocks: int, reason: str
) -> None:
    async with borrowing() as borrower, behind_proxy(Fault(edit=edit)) as (group, _):
        blocks, error = await fetched(borrower, group)
        assert_begins(blocks, num_blocks)
        assert error.startswith(f"peer g7 at {group.source.address}: {reason}")


@pytest.mark.parametrize(
    ("fault", "num_blocks", "reason"),
    [
        (Fault(stall_at=0), 0, "block 0 of 6: nothing came for 0.3 s"),
        (Fault(stall_at=3 * FRAME_BYTES + 70), 3, "block 3 of 6: nothing came for 0.3 s"),
    ],
)
async def test_a_peer_that_stops_is_given_up_and_left_alone_for_a_while(
    fault: Fault, num_blocks: int, reason: str
) -> None:
    async with borrowing() as borrower, behind_proxy(fault) as (group, proxy):
        blocks, error = await fetched(borrower, group)
        assert_begins(blocks, num_blocks)
        assert error == f"peer g7 at {group.source.address}: {reason}"
        proxy.fault = Fault()
        assert (await fetched(borrower, group))[1].endswith("it failed a moment ago")


async def test_a_peer_that_does_not_answer_is_given_up() -> None:
    async with lending_group(BLOCKS) as group, borrowing(ask_s=0.2) as borrower:

        async def never(function: Any) -> Any:
            await asyncio.Event().wait()

        group.lender._call = never
        blocks, error = await fetched(borrower, group)
        assert not blocks
        assert "asking: DEADLINE_EXCEEDED" in error


async def cancelled(borrower: Borrower, group: LendingGroup) -> Pull:
    """A pull that is cancelled after a block has arrived."""
    engine = BorrowingEngine(takes=False)
    pull = engine.pull(NAMES, group.source)
    borrower.fetch(pull)
    while not pull.num_bytes:
        await asyncio.sleep(0.01)
    pull.cancel()
    await engine.over.wait()
    return pull


async def test_a_pull_that_nobody_waits_for_ends_at_once() -> None:
    slow = Fault(bytes_per_s=1000)
    async with borrowing(stall_s=60) as borrower, behind_proxy(slow) as (group, _):
        pull = await cancelled(borrower, group)
        assert pull.error.endswith("it is not waited for any longer")


async def test_a_borrower_that_takes_nothing_loses_its_loan() -> None:
    """Its slots are full, so it does not read either."""
    many = chain(200, format=replace(FORMAT, head_bytes=2**14))
    format = replace(FORMAT, head_bytes=2**14)
    async with (
        lending_group(many, format=format, stall_s=0.2) as group,
        borrowing(stall_s=60) as borrower,
    ):
        engine = BorrowingEngine(takes=False)
        pull = engine.pull(list(many), group.source, format=format)
        borrower.fetch(pull)
        await asyncio.sleep(0)
        while not group.engine.loans:
            await asyncio.sleep(0.01)
        await group.settle()
        assert not pull.is_over
        pull.cancel()
        await engine.over.wait()


async def test_a_slow_peer_holds_up_no_other_pull_and_not_the_end() -> None:
    slow = Fault(bytes_per_s=1000)
    async with (
        borrowing(stall_s=60) as borrower,
        behind_proxy(slow) as (group, _),
        lending_group(BLOCKS) as other,
    ):
        engine = BorrowingEngine()
        pull = engine.pull(NAMES, group.source)
        borrower.fetch(pull)
        assert await fetched(borrower, other) == (BLOCKS, "")
        await borrower.close()
        await engine.over.wait()
        assert pull.error.endswith("this group is stopping")
        assert (await fetched(borrower, other))[1].endswith("this group is stopping")


async def test_two_borrowers_get_the_same_blocks_at_once() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as one, borrowing() as two:
        both = await asyncio.gather(fetched(one, group), fetched(two, group))
        assert [*both] == [(BLOCKS, "")] * 2


async def test_the_number_of_loans_has_a_bound() -> None:
    async with lending_group(BLOCKS, claim_s=0.2) as group, borrowing() as borrower:
        answers = [await group.lender.lend(request()) for _ in range(17)]
        assert [each.refusal for each in answers] == [""] * 16 + ["busy: 16 loans are under way"]
        assert (await fetched(borrower, group))[1].endswith(
            "it refused: busy: 16 loans are under way"
        )
        await group.settle()  # Nobody has fetched them.
        assert await fetched(borrower, group) == (BLOCKS, "")


def request() -> pb.BlocksRequest:
    return pb.BlocksRequest(format=format_to_proto(FORMAT), hashes=b"".join(NAMES))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"token": "other"}, "asking: UNAUTHENTICATED"),
        ({"address": "127.0.0.1:1"}, "asking: UNAVAILABLE"),
    ],
)
async def test_a_wrong_token_and_a_dead_peer_are_named(
    changes: dict[str, Any], reason: str
) -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        blocks, error = await fetched(borrower, group, **changes)
        assert not blocks
        assert reason in error


async def test_blocks_of_another_format_are_refused_with_both_values() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        engine = BorrowingEngine()
        other = replace(FORMAT, num_layers=3)
        pull = engine.pull(NAMES, group.source, format=other)
        borrower.fetch(pull)
        await engine.over.wait()
        assert "formats differ: the borrower's blocks have num_layers=3, not 2" in pull.error
        assert not group.lender.num_loans


async def shown(port: int, ticket: bytes) -> bytes:
    """The lender's answer to ``ticket``, up to the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(ticket)
    data = await reader.read()
    writer.close()
    return data


async def test_a_ticket_is_good_once() -> None:
    async with lending_group(BLOCKS) as group:
        answer = await group.lender.lend(request())
        port = group.lender.port
        assert not await shown(port, bytes(32))
        whole = await shown(port, answer.ticket)
        assert len(whole) == 6 * FRAME_BYTES + HEADER_BYTES
        assert not await shown(port, answer.ticket)
        await group.settle()


async def test_visitors_without_a_ticket_are_hung_up_on_and_stop_nobody() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        silent = [socket.create_connection(("127.0.0.1", group.lender.port)) for _ in range(20)]
        assert await fetched(borrower, group) == (BLOCKS, "")
        for each in silent:
            assert await asyncio.to_thread(each.recv, 1) == b""
            each.close()


async def test_a_process_without_threads_to_spare_borrows_and_lends_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with lending_group(BLOCKS, claim_s=0.1) as group, borrowing() as borrower:
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if thread.name == name:
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        name = "quire-kv-pull"
        assert (await fetched(borrower, group))[1].endswith("can't start new thread")
        name = "quire-kv-sender"
        assert (await fetched(borrower, group))[1].endswith("the connection ended")
        await group.settle()


async def test_pulls_one_after_another_have_one_thread() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        for _ in range(5):
            assert await fetched(borrower, group) == (BLOCKS, "")
        assert len(borrower._threads) == 1
        await asyncio.gather(*[fetched(borrower, group) for _ in range(4)])
        assert len(borrower._threads) <= 4


async def test_a_lender_that_closes_ends_its_loans() -> None:
    async with (
        lending_group(BLOCKS, bytes_per_s=FRAME_BYTES * 4.0) as group,
        borrowing() as borrower,
    ):
        task = asyncio.create_task(fetched(borrower, group))
        while not group.lender.num_loans:
            await asyncio.sleep(0.01)
        await asyncio.to_thread(group.lender.close)
        blocks, error = await task
        assert len(blocks) < 6
        assert error
        assert not group.engine.num_open


async def test_connections_to_peers_are_closed_when_unused() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        borrower._links._kept_s = 0.1
        await fetched(borrower, group)
        assert len(borrower._links) == 1
        while len(borrower._links):
            await asyncio.sleep(0.02)


def source_of(group: LendingGroup) -> pb.BlockSource:
    return source_to_proto(replace(group.source, num_blocks=0))


async def test_a_new_group_takes_the_most_useful_blocks_of_others_once() -> None:
    other = {BlockHash(b"other" + bytes([index]) * 27): BLOCKS[NAMES[index]] for index in range(3)}
    async with lending_group(chain(6)) as one, lending_group(other) as two, borrowing() as borrower:
        one.engine.blocks = {name: BLOCKS[name] for name in NAMES[:2]}
        engine = BorrowingEngine()
        engine.fetch = borrower.fetch
        warming = Warming(borrower, engine.call, format=FORMAT)
        request = pb.WarmRequest(
            sources=[source_of(one), source_of(two)], max_bytes=4 * FORMAT.block_bytes
        )
        answers = await asyncio.gather(warming.warm(request), warming.warm(request))
        assert all(answer == pb.WarmResponse(num_blocks=4) for answer in answers)
        assert engine.blocks == {**one.engine.blocks, **dict(list(other.items())[:2])}
        assert len(one.service.answers) == len(two.service.answers) == 1  # As expected.


async def test_a_group_that_has_blocks_takes_no_others() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        engine = BorrowingEngine()
        engine.blocks = {NAMES[0]: BLOCKS[NAMES[0]]}
        request = pb.WarmRequest(sources=[source_of(group)], max_bytes=10**6)
        warming = Warming(borrower, engine.call, format=FORMAT)
        assert await warming.warm(request) == pb.WarmResponse()
        assert not engine.num_taken_in


async def test_a_source_that_fails_is_named_and_the_next_one_asked() -> None:
    async with lending_group(BLOCKS) as group, borrowing() as borrower:
        engine = BorrowingEngine()
        engine.fetch = borrower.fetch
        dead = pb.BlockSource(group_id="dead", address="127.0.0.1:1")
        request = pb.WarmRequest(sources=[dead, source_of(group)], max_bytes=10**6)
        answer = await Warming(borrower, engine.call, format=FORMAT).warm(request)
        assert answer.num_blocks == 6
        assert answer.error.startswith("dead at 127.0.0.1:1: UNAVAILABLE")
        assert engine.blocks == BLOCKS
