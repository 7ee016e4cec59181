"""Makes any process, on the executor's node or on another one, a tensor-parallel rank."""

import fcntl
import os
import socket
import struct
from dataclasses import dataclass, field
from typing import NoReturn

from quire.cluster.features.nodes.rank_socket import Hello, connect, listen
from quire.worker.rank.rank import run_rank

_SIOCGIFADDR = 0x8915  # linux/sockios.h


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteRankTask:
    """Everything that a process needs to become a rank."""

    rank: int
    node: int
    executor: tuple[str, int]
    key: bytes = field(repr=False)


def become_rank(task: RemoteRankTask, *, host: str) -> NoReturn:
    """Runs rank ``task.rank`` until its executor disconnects, then ends the process. ``host`` is
    the address of this node."""
    # Listens on one address only; torch's own store would listen on all.
    listener = listen(host) if task.rank == 0 else None
    hello = Hello(
        rank=task.rank,
        pid=os.getpid(),
        host=host,
        store_port=listener.getsockname()[1] if listener else None,
    )
    connection = connect(task.executor, task.key, hello)
    interface = _interface_of(host)
    if interface is not None:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, interface)
    run_rank(connection, listener=listener)


def _interface_of(address: str) -> str | None:
    """The name of the network interface with an IPv4 address, for libraries that need the name."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # The interface has no IPv4 address.
                continue
            if socket.inet_ntoa(reply[20:24]) == address:
                return name
    return None
