"""How blocks of KV travel from one group to another, over a TCP connection of their own.

    borrower to lender   the loan's ticket
    lender to borrower   for each block a header and its bytes; then a last header and a reason

A header is 64 bytes: what follows, which of the loan's blocks it is, how many bytes follow, the
block's name and the XXH3 of the bytes. The name and its place are known to the borrower before, so
that nothing which arrives is taken on trust.
"""

import struct
from typing import NamedTuple

from xxhash import xxh3_128, xxh3_128_digest

TICKET_BYTES = 32
MAX_REASON_BYTES = 1000

_BLOCK, _END = b"QKVb", b"QKVe"
_HEADER = struct.Struct("<4sIQ32s16s")
HEADER_BYTES = _HEADER.size


class Header(NamedTuple):
    is_end: bool
    """A reason follows, not a block."""
    place: int
    """Which of the loan's blocks it is; with the end, how many blocks were sent."""
    num_bytes: int
    """What follows."""
    name: bytes
    checksum: bytes
    """XXH3 of the bytes that follow."""


checksum = xxh3_128_digest
"""XXH3 of some bytes, 128 bits."""
Checksum = xxh3_128
"""The same of bytes that come in parts."""


def block_header(place: int, *, name: bytes, num_bytes: int, checksum: bytes) -> bytes:
    return _HEADER.pack(_BLOCK, place, num_bytes, name, checksum)


def end_frame(num_sent: int, reason: str) -> bytes:
    """The last header, and why no more blocks come; empty where all came while the lease lived."""
    data = reason.encode()[:MAX_REASON_BYTES]
    return _HEADER.pack(_END, num_sent, len(data), b"", checksum(data)) + data


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Raises ValueError: these are no header."""
    kind, place, num_bytes, name, said = _HEADER.unpack(data)
    if kind not in (_BLOCK, _END):
        raise ValueError(f"a header begins with {kind.hex()}: not one of a block or an end")
    return Header(kind == _END, place, num_bytes, name, said)
