"""The speed of copying KV blocks out of the cache and back, compared to memcpy of as many bytes.

    python -m bench.kv_copies [--shape M] [--blocks 32] [--rounds 30] [--folder DIR]

No model runs, there are only caches of its shape. All methods are measured in turns, on other
blocks each time; it shows the median of all rounds. ``--folder`` is on the disk to measure.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from bench.peers.checkpoints import SHAPES
from bench.report import command, markdown

from quire.kernels.native import library as native
from quire.worker.blocks.hashing import BlockHash
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.parts.tiers.checksum import checksum_of
from quire.worker.parts.tiers.disk import DiskStore
from quire.worker.rank.copies import CACHE, HOST, BlockCopies, CacheLayout
from quire.worker.rank.host_memory import map_host_blocks
from quire.worker.weights.loader import Shard

BLOCK_SIZE = 16
CACHE_BYTES = 1 << 30
HOST_BYTES = 256 << 20

Way = Callable[[], None]


def main() -> None:
    parser = command("bench.kv_copies", __doc__)
    parser.add_argument("--shape", choices=SHAPES, default="M")
    parser.add_argument("--blocks", type=int, default=32, help="copied at a time")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--folder", type=Path, help="a temporary one unless told otherwise")
    arguments = parser.parse_args()
    shape, rng = SHAPES[arguments.shape], np.random.default_rng(0)
    format = KvFormat(
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_bytes=BLOCK_SIZE * shape.head_size * torch.bfloat16.itemsize,
        block_size=BLOCK_SIZE,
    )
    num_slots, num_copied = HOST_BYTES // format.block_bytes, arguments.blocks
    host_XC = map_host_blocks(format, num_slots=num_slots)
    assert host_XC is not None
    host_XC[...] = rng.integers(0, 256, host_XC.shape, np.uint8)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        store = DiskStore(Path(folder), identity="bench", format=format, max_bytes=4 * CACHE_BYTES)
        ways: dict[str, Callable[[], Way]] = {
            "memcpy": _memcpy(host_XC, num_copied, rng),
            **_copies(format, host_XC, num_copied, rng, num_threads=1),
            **_copies(format, host_XC, num_copied, rng, num_threads=2),
            "checksums": lambda: _checksums(host_XC, num_copied, rng),
            **_disk(store, host_XC, num_copied, rng),
        }
        taken_s: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, prepare in ways.items():
                way = prepare()
                begin_s = time.perf_counter()
                way()
                taken_s[name].append(time.perf_counter() - begin_s)
    num_bytes = num_copied * format.block_bytes
    rates = {name: num_bytes / statistics.median(each) for name, each in taken_s.items()}
    print(
        f"{shape.name}: {num_copied} blocks of {format.block_bytes / 1024:.0f} KiB, "
        f"{format.block_bytes / BLOCK_SIZE / 1024:.0f} KiB a token\n"
    )
    rows = [
        (name, f"{rate / 1e9:.2f}", f"{rate / rates['memcpy']:.2f}") for name, rate in rates.items()
    ]
    print(markdown(("way", "GB/s", "of memcpy"), rows))


def _memcpy(host_XC: Bytes, num_copied: int, rng: np.random.Generator) -> Callable[[], Way]:
    """Copies in one piece, on one thread, from memory that is in no CPU cache."""
    from_NC = np.ones((CACHE_BYTES // host_XC.shape[1], host_XC.shape[1]), np.uint8)

    def prepare() -> Way:
        source, target = (
            blocks[(begin := int(rng.integers(len(blocks) - num_copied))) : begin + num_copied]
            for blocks in (from_NC, host_XC)
        )
        return lambda: np.copyto(target, source)

    return prepare


def _copies(
    format: KvFormat, host_XC: Bytes, num_copied: int, rng: np.random.Generator, *, num_threads: int
) -> dict[str, Callable[[], Way]]:
    num_blocks = CACHE_BYTES // format.block_bytes
    heads, width = format.num_kv_heads, format.head_bytes // BLOCK_SIZE
    shape = (num_blocks, BLOCK_SIZE, heads, width // torch.bfloat16.itemsize)
    kv = [(_cache(shape), _cache(shape)) for _ in range(format.num_layers)]
    layout = CacheLayout(format=format, is_head_major=True)
    copies = BlockCopies(kv, layout=layout, shard=Shard(), host_blocks_XC=host_XC)

    def prepare(source: int, target: int) -> Way:
        copies_X22 = np.empty((num_copied, 2, 2), np.int32)
        for end, tier in enumerate((source, target)):
            copies_X22[:, end, 0] = tier
            num_places = num_blocks if tier == CACHE else len(host_XC)
            copies_X22[:, end, 1] = rng.permutation(num_places)[:num_copied]

        torch.set_num_threads(num_threads)
        return lambda: copies.run(copies_X22)

    threads = f"{num_threads} thread" + "s" * (num_threads > 1)
    return {
        f"cache to host, {threads}": lambda: prepare(CACHE, HOST),
        f"host to cache, {threads}": lambda: prepare(HOST, CACHE),
    }


def _cache(shape: tuple[int, ...]) -> torch.Tensor:
    """In huge pages, as the native library asks for them."""
    cache = torch.empty(shape, dtype=torch.bfloat16)
    library = native.library()
    assert library is not None
    library.quire_huge_pages(cache.data_ptr(), cache.nbytes)
    return cache.zero_()


def _checksums(host_XC: Bytes, num_copied: int, rng: np.random.Generator) -> Way:
    slots = rng.permutation(len(host_XC))[:num_copied].tolist()

    def way() -> None:
        for slot in slots:
            checksum_of(host_XC[slot])

    return way


def _disk(
    store: DiskStore, host_XC: Bytes, num_copied: int, rng: np.random.Generator
) -> dict[str, Callable[[], Way]]:
    """A chain is written in each round, and read back from the page cache and from the disk."""
    chain: list[BlockHash] = []

    def write() -> Way:
        slots = rng.permutation(len(host_XC))[:num_copied].tolist()
        checksums = [checksum_of(host_XC[slot]) for slot in slots]
        chain[:] = [BlockHash(rng.bytes(32)) for _ in slots]

        def way() -> None:
            parents = (None, *chain)
            for slot, block, parent, checksum in zip(
                slots, chain, parents, checksums, strict=False
            ):
                assert not store.put(block, parent, host_XC[slot], checksum).error

        return way

    def read() -> Way:
        def way() -> None:
            for slot, block in enumerate(chain):
                store.read(block, host_XC[slot])

        return way

    def read_cold() -> Way:
        os.sync()
        for block, parent in zip(chain, (None, *chain), strict=False):
            file = os.open(store._path(block, parent), os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)
        return read()

    return {
        "to disk (its page cache)": write,
        "from the page cache, checked": read,
        "from the disk, checked": read_cold,
    }


if __name__ == "__main__":
    main()
