"""Open TCP sockets of this process, by file descriptor, such as gRPC's, which it does not expose.

A descriptor may be closed, and reused for another file, at any time. So a socket is identified by
its cookie, a number that the kernel never assigns twice. The system calls here do not block and
hold the GIL: on a busy machine, reacquiring it after each of some hundred calls would take longer
than all of the calls.
"""

import contextlib
import ctypes
import os
import re
import socket
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import byref
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NewType

Cookie = NewType("Cookie", int)

# Linux's numbers on x86 and ARM, which the module `socket` lacks.
_SO_ATTACH_FILTER = 26
_SO_DETACH_FILTER = 27
_SO_COOKIE = 57
_TCP_INFO = struct.Struct("=120xQQ")
"""``struct tcp_info`` up to tcpi_bytes_received, which Linux has since 4.1."""
_ADDRESS_BYTES = 28
_DISCARDED_BYTES = 2**24
_COUNTS_BYTES = 2**14
_AT_ONCE = struct.pack("=ii", 1, 0)

_libc = ctypes.PyDLL(None)


@dataclass(frozen=True, slots=True)
class Connection:
    local_port: int
    host: str
    """The peer's address. An IPv4 address has its own form, even if the socket is IPv6."""
    port: int


def descriptors() -> range:
    """All descriptors that may be open now."""
    status = Path("/proc/self/status").read_text()
    size = re.search(r"^FDSize:\s*(\d+)$", status, re.MULTILINE)
    assert size is not None
    return range(int(size[1]))


def num_accepted() -> int | None:
    """TCP connections that anybody in this network namespace ever accepted; ``None`` if the kernel
    does not say. Takes some 15 us, however many sockets are open."""
    try:
        rows = os.pread(_kernels_counts(), _COUNTS_BYTES, 0).split(b"\nTcp: ", 2)
        names, numbers = (row.partition(b"\n")[0].split() for row in rows[1:])
        return int(numbers[names.index(b"PassiveOpens")])
    except (OSError, ValueError):
        return None


@cache
def _kernels_counts() -> int:
    """A descriptor of the kernel's counters for this process's network namespace."""
    return os.open("/proc/self/net/snmp", os.O_RDONLY | os.O_CLOEXEC)


def cookie_of(fd: int) -> Cookie | None:
    """The cookie of a socket; ``None`` if ``fd`` is not a socket or is closed."""
    cookie, length = ctypes.c_uint64(), ctypes.c_uint32(8)
    failed = _libc.getsockopt(fd, socket.SOL_SOCKET, _SO_COOKIE, byref(cookie), byref(length))
    return None if failed else Cookie(cookie.value)


def acked_and_received(fd: int) -> tuple[int, int]:
    """Bytes that the peer of a TCP connection has acknowledged, and bytes received from it."""
    info = ctypes.create_string_buffer(_TCP_INFO.size)
    length = ctypes.c_uint32(_TCP_INFO.size)
    failed = _libc.getsockopt(fd, socket.IPPROTO_TCP, socket.TCP_INFO, info, byref(length))
    if failed or length.value < _TCP_INFO.size:
        return 0, 0
    acked, received = _TCP_INFO.unpack(info)
    return acked, received


def connection_of(fd: int) -> Connection | None:
    """The TCP connection of ``fd``; ``None`` if it has none or has ended."""
    local, peer = _address(_libc.getsockname, fd), _address(_libc.getpeername, fd)
    return None if local is None or peer is None else Connection(local[1], *peer)


def listening_port(fd: int) -> int | None:
    """The port at which ``fd`` listens; ``None`` if it does not listen."""
    accepts, length = ctypes.c_int(), ctypes.c_uint32(4)
    accept_option = socket.SOL_SOCKET, socket.SO_ACCEPTCONN
    if _libc.getsockopt(fd, *accept_option, byref(accepts), byref(length)) or not accepts.value:
        return None
    local = _address(_libc.getsockname, fd)
    return None if local is None else local[1]


@contextlib.contextmanager
def borrowed(fd: int, cookie: Cookie) -> Iterator[int]:
    """A duplicate descriptor of the same open socket. Raises OSError if ``fd`` is now another
    file."""
    own = _libc.dup(fd)
    try:
        if cookie_of(own) != cookie:
            raise OSError(f"descriptor {fd} was closed meanwhile")
        yield own
    finally:
        _libc.close(own)


def end(fd: int) -> None:
    """Ends a connection, and discards received bytes that were not read. Its owner sees its end.

    The peer sees it when the owner closes the socket: the connection is reset. Otherwise a peer
    whose last bytes found no room would wait for a minute.
    """
    _libc.setsockopt(fd, socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE, len(_AT_ONCE))
    _libc.shutdown(fd, socket.SHUT_RDWR)
    flags = socket.MSG_DONTWAIT | socket.MSG_TRUNC
    while _libc.recv(fd, None, ctypes.c_size_t(_DISCARDED_BYTES), flags) > 0:
        pass


# Instructions of classic BPF, which needs no privilege: operation, jump if true, if false, operand.
_LOAD_BYTE, _LOAD_WORD, _AND, _RETURN = 0x30, 0x20, 0x54, 0x06
_JUMP, _JUMP_EQUAL, _JUMP_SET = 0x05, 0x15, 0x45
_PASS = (_RETURN, 0, 0, 0xFFFFFFFF)
_DROP = (_RETURN, 0, 0, 0)
_IP_HEADER = 0xFFF00000  # Offsets from here count from the IP header, others from the TCP header.
_FLAGS, _SYN, _ACK = 13, 0x02, 0x10


def shut_out(listener: int, hosts: Iterable[str]) -> None:
    """Makes the kernel drop a listener's new connections from ``hosts``, and from no others.

    An IPv6 host stands for its 64-bit network. Raises OSError.
    """
    addresses = {ip_address(host) for host in hosts}
    if not addresses:
        # Fails if there is no filter.
        _libc.setsockopt(listener, socket.SOL_SOCKET, _SO_DETACH_FILTER, byref(ctypes.c_int()), 4)
        return
    drops = [
        [(_LOAD_WORD, 0, 0, _IP_HEADER + 12), (_JUMP_EQUAL, 0, 1, int(each)), _DROP]
        for each in addresses
        if isinstance(each, IPv4Address)
    ]
    drops6 = [
        [
            *((_LOAD_WORD, 0, 0, _IP_HEADER + 8), (_JUMP_EQUAL, 0, 3, network >> 32)),
            *((_LOAD_WORD, 0, 0, _IP_HEADER + 12), (_JUMP_EQUAL, 0, 1, network & 0xFFFFFFFF)),
            _DROP,
        ]
        for network in {int(each) >> 64 for each in addresses if each.version == 6}
    ]
    program = [
        # Connections inherit the filter. Their packets all have the ACK flag and pass.
        *((_LOAD_BYTE, 0, 0, _FLAGS), (_JUMP_SET, 0, 1, _ACK), _PASS),
        *((_LOAD_BYTE, 0, 0, _IP_HEADER), (_AND, 0, 0, 0xF0), (_JUMP_EQUAL, 0, 1, 0x60)),
        (_JUMP, 0, 0, 3 * len(drops) + 1),
        *(step for drop in drops for step in drop),
        _PASS,
        *(step for drop in drops6 for step in drop),
        _PASS,
    ]
    _attach(listener, program)


def drop_new_connections(listener: int) -> None:
    """Makes the kernel drop all new connections. Those whose first packet has arrived go on. Raises
    OSError."""
    opens = [(_LOAD_BYTE, 0, 0, _FLAGS), (_AND, 0, 0, _SYN | _ACK), (_JUMP_EQUAL, 0, 1, _SYN)]
    _attach(listener, [*opens, _DROP, _PASS])


def _attach(listener: int, program: Sequence[tuple[int, int, int, int]]) -> None:
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *step) for step in program))
    pointer = struct.pack("@HP", len(program), ctypes.addressof(code))
    if _libc.setsockopt(listener, socket.SOL_SOCKET, _SO_ATTACH_FILTER, pointer, len(pointer)):
        raise OSError("the kernel takes no filter for new connections")


def _address(call: Callable[..., int], fd: int) -> tuple[str, int] | None:
    address, length = ctypes.create_string_buffer(_ADDRESS_BYTES), ctypes.c_uint32(_ADDRESS_BYTES)
    if call(fd, address, byref(length)):
        return None
    given = address.raw
    family, port = struct.unpack_from("=H", given)[0], struct.unpack_from("!H", given, 2)[0]
    if family == socket.AF_INET:
        return str(IPv4Address(given[4:8])), port
    if family == socket.AF_INET6:
        host = IPv6Address(given[8:24])
        return str(host.ipv4_mapped or host), port
    return None
