"""Injects faults into blocks on their way between groups, and into the sending group.

A sender's process has a proxy in front of the port from which it sends blocks, so that the receiver
spends no time on faults. The proxy is stopped and killed with the sender.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import count, cycle, repeat

import numpy as np
from bench.kv.groups import in_engine, names_of, peers_of, transfers_of
from tests.flaky_proxy import Fault, FlakyProxy

from quire.cluster.features.kv_exchange.frames import HEADER_BYTES, end_frame
from quire.cluster.group.server import GroupServer
from quire.worker.blocks.hashing import TokenIds
from quire.worker.group_engine import GroupEngine

_MOST_CONNECTIONS = 100
"""Bound of one proxy, which keeps them all open."""


@dataclass
class _Proxy:
    port_behind: int
    proxy: FlakyProxy | None = None
    num_faults: int = 0


_proxies: dict[GroupServer, _Proxy] = {}
_former: list[bytes] = []


async def behave(group: GroupServer, fault: Fault | None) -> None:
    """What the group's next borrowers meet. In the lender's process."""
    listener = peers_of(group)._lender._listener
    here = _proxies.setdefault(group, _Proxy(listener.port))
    if here.proxy is not None and here.num_faults >= _MOST_CONNECTIONS:
        here.proxy.__exit__()
        here.proxy, here.num_faults = None, 0
    if fault is None:
        listener.port = here.port_behind
        return
    if here.proxy is None:
        here.proxy = FlakyProxy(here.port_behind).__enter__()
    here.proxy.fault = fault
    here.num_faults += 1
    listener.port = here.proxy.port


async def flip_kept(group: GroupServer, prompt: TokenIds, number: int) -> bool:
    """Flips a bit of a block of the prompt that the group keeps in host memory and whose checksum
    it knows; whether there was one. ``number`` chooses."""
    transfers, names = transfers_of(group), names_of(group, prompt)

    def flip(engine: GroupEngine) -> bool:
        num_here = len(engine._pool.match(names))
        slots = [
            slot for slot in transfers.match(names[num_here:]) if transfers.host_tier.checksum(slot)
        ]
        if not slots:
            return False
        block_C = transfers.host_blocks_XC[slots[number % len(slots)]]
        block_C[number % len(block_C)] ^= 1 << number % 8
        return True

    return await in_engine(group, flip)


def _swapped(stream: bytes, *, frame_bytes: int) -> bytes:
    first, second = stream[:frame_bytes], stream[frame_bytes : 2 * frame_bytes]
    return second + first + stream[2 * frame_bytes :]


def _short(stream: bytes, *, frame_bytes: int) -> bytes:
    """A byte of the second block is missing, and the next frames follow."""
    return stream[: 2 * frame_bytes - 1] + stream[2 * frame_bytes :]


def _ended(stream: bytes, *, frame_bytes: int) -> bytes:
    return stream[:frame_bytes] + end_frame(1, "the lease is over")


def _too_long(stream: bytes, *, frame_bytes: int) -> bytes:
    header = bytearray(stream[:HEADER_BYTES])
    header[8:16] = (2**40).to_bytes(8, "little")
    return bytes(header) + stream[HEADER_BYTES:]


def _renamed(stream: bytes, *, frame_bytes: int) -> bytes:
    header = bytearray(stream[:HEADER_BYTES])
    header[16:48] = b"x" * 32
    return bytes(header) + stream[HEADER_BYTES:]


def _stale(stream: bytes, *, frame_bytes: int) -> bytes:
    """An earlier loan's stream; that of the first loan is swapped instead."""
    former = _former[0] if _former else _swapped(stream, frame_bytes=frame_bytes)
    _former[:] = [stream]
    return former


EDITS = {
    "frames swapped": _swapped,
    "a byte missing": _short,
    "ended early": _ended,
    "a length of 1 TiB": _too_long,
    "another name": _renamed,
    "stale frames": _stale,
}


def wire_faults(*, block_bytes: int, rng: np.random.Generator) -> dict[str, Iterator[Fault]]:
    """Endless faults by kind, of streams of at least four blocks."""
    frame_bytes = HEADER_BYTES + block_bytes
    edits = {
        kind: repeat(Fault(edit=partial(edit, frame_bytes=frame_bytes)))
        for kind, edit in EDITS.items()
    }
    return {
        "connection cut": (Fault(cut_at=place) for place in cycle(cuts(frame_bytes))),
        "byte flipped on the wire": (
            Fault(flip_at=int(rng.integers(4) * frame_bytes + place))
            for place in _places(frame_bytes, rng)
        ),
        "link stalls": (Fault(stall_at=int(rng.integers(4 * frame_bytes))) for _ in count()),
        "slow link": (Fault(bytes_per_s=float(10 ** rng.uniform(4, 6))) for _ in count()),
        **edits,
    }


def cuts(frame_bytes: int) -> list[int]:
    """Where a connection is cut: at the begin of each of four frames, in its header, behind it, and
    at two places of its block."""
    places = (0, 30, HEADER_BYTES, HEADER_BYTES + 1, frame_bytes - 1)
    return [frame * frame_bytes + place for frame in range(4) for place in places]


def _places(frame_bytes: int, rng: np.random.Generator) -> Iterator[int]:
    """In a frame: every other one in its header."""
    while True:
        yield int(rng.integers(HEADER_BYTES))
        yield int(rng.integers(HEADER_BYTES, frame_bytes))
