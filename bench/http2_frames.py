"""Builds HTTP/2 frames as a client sends them, valid or not."""

import struct

DATA, HEADERS, PRIORITY, RST, SETTINGS, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 8, 9
END_HEADERS = 4


def frame(kind: int, stream: int, data: bytes = b"", *, flags: int = 0) -> bytes:
    return struct.pack(">I", len(data))[1:] + struct.pack(">BBI", kind, flags, stream) + data


def header(name: str, value: str) -> bytes:
    """Encodes a header as an HPACK literal that refers to no table."""
    return b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


HEAD = b"".join(
    header(*each)
    for each in (
        (":method", "POST"),
        (":scheme", "http"),
        (":path", "/quire.v1.Inference/Generate"),
        (":authority", "here"),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    )
)
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0)
