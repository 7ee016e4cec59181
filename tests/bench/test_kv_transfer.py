"""A lender in a separate process, which is stopped and killed while it lends."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from bench.kv_transfer import Shape
from bench.provenance import ROOT

from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.worker.blocks.hashing import BlockHashes
from quire.worker.blocks.kv_format import PeerSource
from quire.worker.parts.tiers.pull import Pull

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SHAPE = Shape(block_bytes=64 << 10, num_blocks=20_000)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@contextmanager
def lender() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Yields the lender's process and port."""
    flags = ["--block-kib", str(SHAPE.block_bytes >> 10), "--num-blocks", str(SHAPE.num_blocks)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.kv_transfer", "--lend", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            assert process.stdout is not None
            yield process, int(process.stdout.readline().split()[0])
        finally:
            process.kill()


async def fetched(
    borrower: Borrower, source: PeerSource, *, on_block: Callable[[int], object] = lambda _: None
) -> tuple[list[int], str]:
    """Indices of the received blocks, and the error that ended the pull."""
    memory_XC = SHAPE.host_memory()
    over = threading.Event()
    landed: list[int] = []

    def take() -> None:
        for each in pull.take():
            landed.append(each.index)
            on_block(each.index)
            pull.grant([each.slot])
        if pull.is_over:
            over.set()

    pull = Pull(
        BlockHashes.of(SHAPE.names),
        format=SHAPE.format,
        host_blocks_XC=memory_XC,
        source=source,
        on_change=take,
    )
    pull.grant(range(len(memory_XC)))
    borrower.fetch(pull)
    await asyncio.to_thread(over.wait)
    return landed, pull.error


@pytest.mark.parametrize(
    ("number", "reason", "later"),
    [
        (signal.SIGSTOP, "nothing came for 0.5 s", "asking: DEADLINE_EXCEEDED"),
        (signal.SIGKILL, "", "asking: UNAVAILABLE"),
    ],
)
async def test_a_lender_that_is_stopped_or_killed_in_the_middle_is_named(
    number: signal.Signals, reason: str, later: str
) -> None:
    with lender() as (process, port):
        borrower = Borrower(ask_s=0.5, stall_s=0.5, shunned_s=0)
        address = f"127.0.0.1:{port}"
        source = PeerSource(group_id="g7", address=address, num_blocks=SHAPE.num_blocks)

        def harm(index: int) -> None:
            if index == 100:
                process.send_signal(number)

        landed, error = await fetched(borrower, source, on_block=harm)
        assert landed == list(range(len(landed)))
        assert 100 < len(landed) < SHAPE.num_blocks
        assert error.startswith(f"peer g7 at {address}: block {len(landed)} of 20000: ")
        assert reason in error
        landed, error = await fetched(borrower, source)
        assert not landed
        assert later in error
        await borrower.close()
