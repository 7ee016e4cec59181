"""The protocol for KV blocks between two groups, on a TCP connection per loan.

    borrower to lender   the loan's ticket
    lender to borrower   for each block a header and its bytes; then a last header and a reason

A header is 64 bytes: the kind of what follows, the block's place in the loan, the number of bytes
that follow, the block's name and the XXH3 of the bytes. The borrower knows each block's name and
place before, and can check both.
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
    """Whether a reason follows instead of a block."""
    place: int
    """The block's place in the loan; for the end, the number of blocks that were sent."""
    num_bytes: int
    """Number of bytes that follow."""
    name: bytes
    checksum: bytes
    """XXH3 of the bytes that follow."""


checksum = xxh3_128_digest
"""XXH3 of bytes, 128 bits."""
Checksum = xxh3_128
"""The incremental form of `checksum`."""


def block_header(place: int, *, name: bytes, num_bytes: int, checksum: bytes) -> bytes:
    return _HEADER.pack(_BLOCK, place, num_bytes, name, checksum)


def end_frame(num_sent: int, reason: str) -> bytes:
    """The last header and the reason why no more blocks follow; empty if all were sent."""
    data = reason.encode()[:MAX_REASON_BYTES]
    return _HEADER.pack(_END, num_sent, len(data), b"", checksum(data)) + data


def parse_header(data: bytes | bytearray | memoryview) -> Header:
    """Decodes a header. Raises ValueError: ``data`` is not a header."""
    kind, place, num_bytes, name, said = _HEADER.unpack(data)
    if kind not in (_BLOCK, _END):
        raise ValueError(f"a header begins with {kind.hex()}: not one of a block or an end")
    return Header(kind == _END, place, num_bytes, name, said)
