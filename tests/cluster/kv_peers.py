"""Both sides of a block transfer without engines: one group lends from a dict, one borrows."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.cluster.features.kv_exchange.frames import checksum
from quire.cluster.features.kv_exchange.lending import Lender
from quire.cluster.group.service import build_group_server
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc
from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import KvFormat, PeerSource
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.pull import Pull

FORMAT = KvFormat(num_layers=2, num_kv_heads=2, head_bytes=64, block_size=4)
FRAME_BYTES = 64 + FORMAT.block_bytes
NUM_SLOTS = 3


def chain(num_blocks: int, *, format: KvFormat = FORMAT) -> dict[BlockHash, bytes]:
    """Blocks of one chain by hash; their bytes are random."""
    rng = np.random.default_rng(num_blocks)
    return {
        BlockHash(bytes([index]) * 32): rng.bytes(format.block_bytes) for index in range(num_blocks)
    }


class LendingEngine:
    """Stands for an engine that lends ``blocks`` through a few slots of host memory."""

    def __init__(self, blocks: dict[BlockHash, bytes], *, format: KvFormat = FORMAT) -> None:
        self.blocks = blocks
        self.format = format
        self.loans: list[Loan] = []
        self._lock = threading.Lock()

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    @property
    def num_open(self) -> int:
        return sum(not loan.is_closed for loan in self.loans)

    def lend(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan | str:
        held = list(hashes)
        for index, name in enumerate(hashes):
            if name not in self.blocks:
                del held[index:]
                break
        return self._loan(held) if held else "it has none"

    def lend_kept(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> None:
        """Lends nothing, because no block is in host memory before it is lent."""

    def lend_most_useful(self, num_bytes: int) -> Loan:
        return self._loan(list(self.blocks)[: num_bytes // self.format.block_bytes])

    def _loan(self, names: list[BlockHash]) -> Loan:
        free = list(range(NUM_SLOTS))
        waiting = list(enumerate(names))
        host_blocks_XC = np.zeros((NUM_SLOTS, self.format.block_bytes), dtype=np.uint8)

        def fill() -> None:
            with self._lock:
                free.extend(loan.take_returned())
                while free and waiting and not loan.is_closed:
                    slot, (index, name) = free.pop(), waiting.pop(0)
                    host_blocks_XC[slot] = np.frombuffer(self.blocks[name], dtype=np.uint8)
                    loan.lend(Lent(index, slot, checksum(self.blocks[name])))

        loan = Loan(
            BlockHashes.of(names),
            [None, *names[:-1]],
            format=self.format,
            host_blocks_XC=host_blocks_XC,
            on_change=fill,
        )
        self.loans.append(loan)
        fill()
        return loan


class BorrowingEngine:
    """Stands for an engine that takes landed blocks and grants their slots again, if ``takes``."""

    def __init__(self, *, takes: bool = True) -> None:
        self.blocks: dict[BlockHash, bytes] = {}
        self.fetch: Callable[[Pull], None] | None = None
        self.num_taken_in = 0
        self._takes = takes

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def stats(self) -> Any:
        return SimpleNamespace(num_cached_blocks=len(self.blocks), num_held_blocks=0)

    def take_in(
        self, hashes: BlockHashes, parents: list[BlockHash | None], source: PeerSource
    ) -> None:
        assert self.fetch is not None
        assert len(hashes) == len(parents)
        self.num_taken_in += 1
        self.fetch(self.pull(list(hashes), source))

    def pull(
        self, hashes: list[BlockHash], source: PeerSource, *, format: KvFormat = FORMAT
    ) -> Pull:
        host_blocks_XC = np.zeros((NUM_SLOTS, format.block_bytes), dtype=np.uint8)
        loop, over = asyncio.get_running_loop(), asyncio.Event()

        def take() -> None:
            for landed in pull.take() if self._takes else []:
                data = host_blocks_XC[landed.slot].tobytes()
                assert landed.checksum == checksum(data)
                self.blocks[hashes[landed.index]] = data
                pull.grant([landed.slot])
            if pull.is_over:
                loop.call_soon_threadsafe(over.set)

        pull = Pull(
            BlockHashes.of(hashes),
            format=format,
            host_blocks_XC=host_blocks_XC,
            source=source,
            on_change=take,
        )
        self.over = over
        pull.grant(range(NUM_SLOTS))
        return pull


class _Service(group_pb2_grpc.ReplicaGroupServicer):
    def __init__(self, lender: Lender) -> None:
        self.lender = lender
        self.answers: list[pb.BlocksLoan] = []
        self.spoil: Callable[[pb.BlocksLoan], None] = lambda answer: None

    async def Blocks(self, request: pb.BlocksRequest, context: Any) -> pb.BlocksLoan:
        answer = await self.lender.lend(request)
        self.spoil(answer)
        self.answers.append(answer)
        return answer


@dataclass
class LendingGroup:
    engine: LendingEngine
    lender: Lender
    service: _Service
    source: PeerSource

    async def settle(self) -> None:
        """Returns once no loan is left; pytest's timeout is the limit."""
        while self.lender.num_loans or self.engine.num_open:
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def lending_group(
    blocks: dict[BlockHash, bytes],
    *,
    format: KvFormat = FORMAT,
    tls: Any = None,
    **options: Any,
) -> AsyncIterator[LendingGroup]:
    """A group that only lends."""
    engine = LendingEngine(blocks, format=format)
    lender = Lender(
        engine.call,
        engine.lend_kept,
        format=format,
        host="127.0.0.1",
        tls=tls.context if tls else None,
        **options,
    )
    service = _Service(lender)  # type: ignore[abstract]
    server = build_group_server(service, token="secret")  # type: ignore[arg-type]
    if tls is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", tls.grpc_credentials)
    await server.start()
    source = PeerSource(
        group_id="g7",
        address=f"127.0.0.1:{port}",
        token="secret",
        certificate=tls.certificate if tls else "",
        num_blocks=len(blocks),
    )
    try:
        yield LendingGroup(engine, lender, service, source)
    finally:
        await server.stop(None)
        await asyncio.to_thread(lender.close)
        assert not engine.num_open
