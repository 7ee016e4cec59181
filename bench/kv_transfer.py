"""The speed of fetching blocks from a group on this machine, compared to plain TCP and memcpy.

    python -m bench.kv_transfer [--block-kib N] [--num-blocks N] [--rounds N]

Sender and receiver are processes of their own, without engines: the sender's blocks are ready in
host memory, and the receiver reuses each slot at once. A round measures each method in turn;
figures are medians of rounds. CPU seconds are those of both processes. A pull without checks does
not verify checksums.
"""

import asyncio
import itertools
import resource
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import Any
from unittest import mock

import numpy as np
from bench.provenance import ROOT, commit, cpu
from bench.report import command, markdown
from xxhash import xxh3_128_digest

from quire.cluster.features.kv_exchange import borrowing
from quire.cluster.features.kv_exchange.borrowing import Borrower
from quire.cluster.features.kv_exchange.lending import BYTES_PER_S, Lender
from quire.cluster.group.service import build_group_server
from quire.v1 import group_pb2 as pb
from quire.v1 import group_pb2_grpc
from quire.worker.blocks.hashing import BlockHash, BlockHashes
from quire.worker.blocks.kv_format import Bytes, KvFormat, PeerSource
from quire.worker.parts.tiers.loan import Lent, Loan
from quire.worker.parts.tiers.pull import Pull

STAGING_BYTES = 64 << 20


@dataclass(frozen=True)
class Shape:
    block_bytes: int
    num_blocks: int

    @property
    def format(self) -> KvFormat:
        return KvFormat(
            num_layers=1, num_kv_heads=1, head_bytes=self.block_bytes // 2, block_size=16
        )

    @property
    def num_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    @property
    def names(self) -> list[BlockHash]:
        return [BlockHash(index.to_bytes(32, "little")) for index in range(self.num_blocks)]

    def host_memory(self) -> Bytes:
        num_slots = STAGING_BYTES // self.block_bytes
        rng = np.random.default_rng(0)
        return rng.integers(256, size=(num_slots, self.block_bytes), dtype=np.uint8)


def main() -> None:
    parser = command("bench.kv_transfer", __doc__)
    parser.add_argument("--block-kib", type=int, default=2048, help="2048: 16 tokens of a 8B model")
    parser.add_argument("--num-blocks", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lend", action="store_true", help="be the lender, until told otherwise")
    options = parser.parse_args()
    shape = Shape(options.block_kib << 10, options.num_blocks)
    if options.lend:
        asyncio.run(lend(shape))
        return
    flags = ["--block-kib", str(options.block_kib), "--num-blocks", str(options.num_blocks)]
    lender = subprocess.Popen(
        [sys.executable, "-m", "bench.kv_transfer", "--lend", *flags],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert lender.stdout is not None
        ports = [int(each) for each in lender.stdout.readline().split()]
        rows = asyncio.run(measure(shape, ports, rounds=options.rounds, lender=lender))
    finally:
        lender.terminate()
        lender.wait()
    print(f"{cpu()}, commit {commit()}; {shape.num_blocks} blocks of {options.block_kib} KiB\n")
    print(markdown(["", "GB/s", "of memcpy", "of TCP", "CPU s/GB"], rows))


class ReadyBlocks:
    """The engine's side of a transfer, with every block already in host memory."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._memory = shape.host_memory()
        self._checksums = [xxh3_128_digest(block) for block in self._memory]

    async def call(self, function: Callable[[Any], Any]) -> Any:
        return function(self)

    def lend(self, hashes: BlockHashes, *, borrower_format: KvFormat) -> Loan:
        waiting = iter(range(len(hashes)))

        def lend_next() -> None:
            for slot in loan.take_returned():
                index = next(waiting, None)
                if index is not None:
                    loan.lend(Lent(index, slot, self._checksums[slot]))

        loan = Loan(
            hashes,
            [None] * len(hashes),
            format=self._shape.format,
            host_blocks_XC=self._memory,
            on_change=lend_next,
        )
        for slot, index in zip(range(len(self._memory)), waiting, strict=False):
            loan.lend(Lent(index, slot, self._checksums[slot]))
        return loan


class Service(group_pb2_grpc.ReplicaGroupServicer):
    def __init__(self, lender: Lender) -> None:
        self._lender = lender

    async def Blocks(self, request: pb.BlocksRequest, context: Any) -> pb.BlocksLoan:
        return await self._lender.lend(request)


async def lend(shape: Shape) -> None:
    engine = ReadyBlocks(shape)
    servers, ports = [], []
    for bytes_per_s in (inf, BYTES_PER_S):
        lender = Lender(
            engine.call,
            engine.lend,
            format=shape.format,
            host="127.0.0.1",
            bytes_per_s=bytes_per_s,
        )
        server = build_group_server(Service(lender))  # type: ignore[abstract, arg-type]
        ports.append(server.add_insecure_port("127.0.0.1:0"))
        await server.start()
        servers.append(server)
    plain = socket.create_server(("127.0.0.1", 0))
    ports.append(plain.getsockname()[1])
    threading.Thread(target=send_plainly, args=(plain, shape), daemon=True).start()
    print(*ports, flush=True)
    await asyncio.Event().wait()


def send_plainly(server: socket.socket, shape: Shape) -> None:
    """Sends each client that connects as many bytes as a pull transfers."""
    memory = shape.host_memory()
    while True:
        connection, _ = server.accept()
        with connection:
            for index in range(shape.num_blocks):
                connection.sendall(memory[index % len(memory)])


async def measure(
    shape: Shape, ports: list[int], *, rounds: int, lender: "subprocess.Popen[str]"
) -> list[list[str]]:
    unlimited, limited, plain = ports
    memory, other = shape.host_memory(), shape.host_memory()
    borrower = Borrower()
    said = [xxh3_128_digest(block) for block in memory]

    def pull_unchecked() -> None:
        checksum = partial(Unchecked, itertools.cycle(said))
        with mock.patch.object(borrowing, "Checksum", checksum):
            pull(shape, memory, borrower, unlimited)

    ways: dict[str, Callable[[], None]] = {
        "memcpy": lambda: copy(shape, memory, other),
        "TCP": lambda: receive_plainly(shape, memory, plain),
        "pull": partial(pull, shape, memory, borrower, unlimited),
        "pull without checks": pull_unchecked,
        "pull at the usual limit of 3 GB/s": partial(pull, shape, memory, borrower, limited),
    }
    times_s: dict[str, list[float]] = {name: [] for name in ways}
    cpu_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            begin_s, begin_cpu_s = time.perf_counter(), used_s(lender.pid)
            await asyncio.to_thread(way)
            if number:  # The first one warms up.
                times_s[name].append(time.perf_counter() - begin_s)
                cpu_s[name].append(used_s(lender.pid) - begin_cpu_s)
    await borrower.close()
    gb = shape.num_bytes / 1e9
    rates = {name: gb / statistics.median(times) for name, times in times_s.items()}
    return [
        [
            name,
            f"{rate:.2f}",
            f"{rate / rates['memcpy']:.2f}",
            f"{rate / rates['TCP']:.2f}",
            f"{statistics.median(cpu_s[name]) / gb:.2f}",
        ]
        for name, rate in rates.items()
    ]


def used_s(lender_pid: int) -> float:
    """CPU seconds of this process and the lender's."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    with open(f"/proc/{lender_pid}/stat", encoding="ascii") as file:
        ticks = sum(int(each) for each in file.read().rpartition(")")[2].split()[11:13])
    return own.ru_utime + own.ru_stime + ticks / 100


def copy(shape: Shape, source_XC: Bytes, target_XC: Bytes) -> None:
    for index in range(shape.num_blocks):
        slot = index % len(source_XC)
        np.copyto(target_XC[slot], source_XC[slot])


class Unchecked:
    """In place of a checksum: says of every block what the lender will have said of it."""

    def __init__(self, said: Iterator[bytes]) -> None:
        self._said = said

    def update(self, data: memoryview) -> None:
        pass

    def digest(self) -> bytes:
        return next(self._said)


def receive_plainly(shape: Shape, memory_XC: Bytes, port: int) -> None:
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for index in range(shape.num_blocks):
            view = memoryview(memory_XC[index % len(memory_XC)])
            while view:
                view = view[connection.recv_into(view) :]


def pull(shape: Shape, memory_XC: Bytes, borrower: Borrower, port: int) -> None:
    over = threading.Event()

    def take() -> None:
        pulled.grant([landed.slot for landed in pulled.take()])
        if pulled.is_over:
            over.set()

    source = PeerSource(group_id="lender", address=f"127.0.0.1:{port}", num_blocks=0)
    pulled = Pull(
        BlockHashes.of(shape.names),
        format=shape.format,
        host_blocks_XC=memory_XC,
        source=replace(source, num_blocks=shape.num_blocks),
        on_change=take,
    )
    pulled.grant(range(len(memory_XC)))
    borrower.fetch(pulled)
    over.wait()
    assert not pulled.error, pulled.error


if __name__ == "__main__":
    main()
