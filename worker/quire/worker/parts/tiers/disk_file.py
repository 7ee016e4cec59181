"""The file format of a block on disk: a header with its name, format and checksum, then its bytes.

A read checks every byte: the header is compared, and the rest has a checksum. So files need not be
flushed: damage after a crash is detected.
"""

import os
import struct
from pathlib import Path

from quire.worker.blocks.hashing import HASH_BYTES, BlockHash
from quire.worker.blocks.kv_format import Bytes, KvFormat
from quire.worker.parts.tiers.checksum import checksum_of

# C bytes of a block

MAGIC = b"QuireKV\0"
VERSION = 1
CHECKSUM_BYTES = 16

_FIELDS = struct.Struct(f"<8sIIIIIQ{HASH_BYTES}s{HASH_BYTES}s{CHECKSUM_BYTES}s8x")
HEADER_BYTES = _FIELDS.size
_ROOT = b"\0" * HASH_BYTES
_NAMES = (
    *("magic", "version", "num_layers", "num_kv_heads", "head_bytes", "block_size"),
    *("number of bytes", "block", "parent"),
)


class BadFile(Exception):
    """A file is not a valid block file; the message says why."""


def write_file(
    path: Path,
    bytes_C: Bytes,
    *,
    format: KvFormat,
    block: BlockHash,
    parent: BlockHash | None,
    checksum: bytes,
) -> None:
    """Writes a new file.

    Raises:
        OSError: The file exists or cannot be written. A partly written file is not removed.
    """
    header = _FIELDS.pack(*_expected(format, block, parent), checksum)
    left = [memoryview(header), bytes_C.data]
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while left:
            written = os.writev(file, left)
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if left:
                left[0] = left[0][written:]
    finally:
        os.close(file)


def read_file(
    path: Path,
    into_C: Bytes,
    *,
    format: KvFormat,
    block: BlockHash,
    parent: BlockHash | None,
) -> bytes:
    """Fills ``into_C`` with the block's bytes and returns their checksum.

    Raises:
        BadFile: It is not this block's file, or the checksum differs. ``into_C`` is undefined.
        OSError: The file cannot be read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        if size != HEADER_BYTES + format.block_bytes:
            raise BadFile(f"it has {size} bytes, not {HEADER_BYTES + format.block_bytes}")
        header = bytearray(HEADER_BYTES)
        num_read = os.readv(file, [header, into_C.data])
        more = num_read
        while more and HEADER_BYTES <= num_read < size:
            more = os.preadv(file, [into_C.data[num_read - HEADER_BYTES :]], num_read)
            num_read += more
    finally:
        os.close(file)
    if num_read != size:
        raise BadFile(f"it became shorter than {size} bytes while it was read")
    *found, checksum = _FIELDS.unpack(header)
    for name, value, expected in zip(_NAMES, found, _expected(format, block, parent), strict=True):
        if value != expected:
            raise BadFile(f"its {name} is {_readable(value)}, not {_readable(expected)}")
    if header != _FIELDS.pack(*found, checksum):
        raise BadFile("its header does not end in zeros")
    own: bytes = checksum
    if checksum_of(into_C) != own:
        raise BadFile("its bytes do not have the checksum that they were written with")
    return own


def _expected(format: KvFormat, block: BlockHash, parent: BlockHash | None) -> tuple[object, ...]:
    shape = (format.num_layers, format.num_kv_heads, format.head_bytes, format.block_size)
    return (MAGIC, VERSION, *shape, format.block_bytes, block, parent or _ROOT)


def _readable(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)
